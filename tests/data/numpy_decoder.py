"""A decoder of the Llama shape in float64 NumPy: the oracle that shares no code with what it checks.

It is driven by `ModelConfig` and weights with Hugging Face's names, so it also shows that `ModelConfig` carries enough.
Slow and plain on purpose: no cache, no batch, whole masks.

    config, weights = load(folder)
    logits = forward(config, weights, token_ids)          # [T, V] float64
    ids, gaps = greedy(config, weights, token_ids, steps)

Shape key: T tokens, E hidden size, H query heads, K KV heads, D head size, F FFN size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxpd.models.config import ModelConfig, RopeConfig, from_hf

Weights = Mapping[str, np.ndarray]


def load(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """ModelConfig and float64 weights of a Hugging Face folder, from one file or several."""
    weights: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= read_safetensors(path)
    return from_hf(json.loads((folder / "config.json").read_text())), weights


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of one file as float64. A file is: header length (u64), JSON header, tensors at `data_offsets`."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header, data = json.loads(blob[8 : 8 + size]), blob[8 + size :]
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "BF16":  # the upper half of a float32
            flat = (np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(data[begin:end], {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        out[name] = flat.reshape(entry["shape"]).astype(np.float64)
    return out


def forward(config: ModelConfig, weights: Weights, token_ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] after each token, from position 0 on."""
    x_TE = weights["model.embed_tokens.weight"][np.asarray(token_ids)] * config.embed_scale
    for layer in range(config.num_layers):
        w = {k.split(".", 3)[3]: v for k, v in weights.items() if k.startswith(f"model.layers.{layer}.")}
        a_TE = attention(config, w, norm(config, x_TE, w["input_layernorm.weight"]), config.local_layers[layer])
        if config.sandwich_norms:
            x_TE = x_TE + norm(config, a_TE, w["post_attention_layernorm.weight"])
            f_TE = mlp(config, w, norm(config, x_TE, w["pre_feedforward_layernorm.weight"]))
            x_TE = x_TE + norm(config, f_TE, w["post_feedforward_layernorm.weight"])
        else:
            x_TE = x_TE + a_TE
            x_TE = x_TE + mlp(config, w, norm(config, x_TE, w["post_attention_layernorm.weight"]))
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return cap(norm(config, x_TE, weights["model.norm.weight"]) @ weights[head].T, config.final_softcap)


def greedy(
    config: ModelConfig, weights: Weights, token_ids: Sequence[int], steps: int
) -> tuple[list[int], list[float]]:
    """The next `steps` ids of highest logit, and the gap between the best two at each step."""
    ids, gaps = list(token_ids), []
    for _ in range(steps):
        logits_V = forward(config, weights, ids)[-1]
        second, first = np.sort(logits_V)[-2:]
        gaps.append(float(first - second))
        ids.append(int(logits_V.argmax()))
    return ids[len(token_ids) :], gaps


def attention(config: ModelConfig, w: Weights, x_TE: np.ndarray, local: bool) -> np.ndarray:
    """Causal attention of one layer; a local layer sees the last `sliding_window` tokens, itself among them."""
    tokens, size = len(x_TE), config.head_dim
    q_THD = linear(w, "self_attn.q_proj", x_TE, config.qkv_bias).reshape(tokens, config.num_heads, size)
    k_TKD = linear(w, "self_attn.k_proj", x_TE, config.qkv_bias).reshape(tokens, config.num_kv_heads, size)
    v_TKD = linear(w, "self_attn.v_proj", x_TE, config.qkv_bias).reshape(tokens, config.num_kv_heads, size)
    if config.qk_norm:
        q_THD = norm(config, q_THD, w["self_attn.q_norm.weight"])
        k_TKD = norm(config, k_TKD, w["self_attn.k_norm.weight"])
    rope = config.local_rope if local and config.local_rope is not None else config.rope
    q_THD, k_TKD = rotate(rope, q_THD), rotate(rope, k_TKD)
    k_THD, v_THD = (np.repeat(a, config.group_size, axis=1) for a in (k_TKD, v_TKD))
    scores_HTT = cap(np.einsum("qhd,khd->hqk", q_THD, k_THD) * config.query_scale, config.attn_softcap)
    distance_TT = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    seen_TT = distance_TT >= 0
    if local:
        assert config.sliding_window is not None
        seen_TT &= distance_TT < config.sliding_window
    p_HTT = np.exp(scores_HTT - scores_HTT.max(axis=-1, keepdims=True)) * seen_TT
    p_HTT /= p_HTT.sum(axis=-1, keepdims=True)
    o_TE = np.einsum("hqk,khd->qhd", p_HTT, v_THD).reshape(tokens, config.num_heads * size)
    return linear(w, "self_attn.o_proj", o_TE, config.o_bias)


def mlp(config: ModelConfig, w: Weights, x_TE: np.ndarray) -> np.ndarray:
    gate_TF = linear(w, "mlp.gate_proj", x_TE, config.mlp_bias)
    if config.activation == "silu":
        gate_TF = gate_TF / (1 + np.exp(-gate_TF))
    else:
        gate_TF = 0.5 * gate_TF * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate_TF + 0.044715 * gate_TF**3)))
    return linear(w, "mlp.down_proj", gate_TF * linear(w, "mlp.up_proj", x_TE, config.mlp_bias), config.mlp_bias)


def linear(w: Weights, name: str, x: np.ndarray, bias: bool) -> np.ndarray:
    y = x @ w[name + ".weight"].T
    return y + w[name + ".bias"] if bias else y


def norm(config: ModelConfig, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_eps) * (w + config.norm_plus_one)


def cap(x: np.ndarray, limit: float | None) -> np.ndarray:
    return x if limit is None else np.tanh(x / limit) * limit


def rotate(rope: RopeConfig, x_TND: np.ndarray) -> np.ndarray:
    """Rotates the pairs (i, i + D/2) of each head by position x frequency i; rows are positions 0, 1, ..."""
    half = x_TND.shape[-1] // 2
    angle = np.arange(len(x_TND))[:, None, None] * frequencies(rope, half)
    a, b = x_TND[..., :half], x_TND[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def frequencies(rope: RopeConfig, half: int) -> np.ndarray:
    """Radians per position of each pair [D/2]; see RopeConfig for the llama3 blend."""
    freq = rope.theta ** (-np.arange(half) / half)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * freq / (2 * np.pi)  # within the context it was first trained on
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        return freq * (keep + (1 - keep) / rope.factor)
    return freq
