"""GGUF files as checkpoints: ggml's names, conventions and metadata turned into Hugging Face's.

What llama.cpp's converter did to the weights is undone here: the rows of Q and K of architecture `llama` are permuted
for interleaved rotary embedding, and Gemma's norms are stored as 1 + w.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpd.checkpoints.gguf_file import GGUFFile, GGUFTensor, dequantize, read_gguf
from jaxpd.checkpoints.layout import check_weights
from jaxpd.checkpoints.mapped import give_back_pages
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.errors import InvalidArgument
from jaxpd.models.config import ModelConfig, from_hf

if TYPE_CHECKING:
    from jaxpd.tokenizer import Tokenizer

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Llama 3's rotary scaling travels as a tensor of divisors instead of as metadata.
_ROPE_FREQS = "rope_freqs.weight"
_GEMMA3_27B_LAYERS = 62


def open_gguf(path: Path, *, name: str | None = None) -> Checkpoint:
    """The checkpoint in a GGUF file.

    Raises InvalidArgument for a file that is corrupt or truncated, an architecture, rope scaling or tensor type that is
    not supported, and for weights that are missing or have the wrong shape.
    """
    file = read_gguf(path)
    try:
        config = from_hf(hf_config(file))
    except InvalidArgument as error:
        where = "" if str(path) in error.message else f"{path}: "
        raise InvalidArgument(f"{where}{error.message}", field=error.field) from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidArgument(f"{path} holds metadata that makes no sense: {error}; fetch it again") from error
    source = GGUFSource(file, config)
    check_weights(config, source, str(path))

    def load_tokenizer() -> Tokenizer:
        # Late, since the `gguf_tokenizer` builds on this file.
        from jaxpd.checkpoints.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(file.metadata, where=str(path))

    return Checkpoint(name or path.stem, path, config, source, load_tokenizer)


class GGUFSource:
    """WeightSource of a GGUF file; every `read` dequantises one tensor (float32, or float16 where stored so)."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._config = config
        self._permuted = file.metadata["general.architecture"] == "llama"
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            if tensor.name != _ROPE_FREQS:
                self._tensors[_hf_name(tensor.name, config.architecture)] = tensor

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def read(self, name: str) -> np.ndarray:
        values = dequantize(self._find(name))
        if self._permuted and ".q_proj." in name:
            return _unpermute(values, self._config.num_heads, self._config.head_dim)
        if self._permuted and ".k_proj." in name:
            return _unpermute(values, self._config.num_kv_heads, self._config.head_dim)
        if self._config.norm_plus_one and name.endswith("norm.weight"):
            return values.astype(np.float32) - np.float32(1.0)
        return values

    def release(self) -> None:
        give_back_pages(tensor.data for tensor in self._tensors.values())

    def _find(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise InvalidArgument(f"the checkpoint has no weight {name!r}")
        return self._tensors[name]


def _hf_name(name: str, architecture: str) -> str:
    """Hugging Face's name of a tensor; an unknown one keeps its own, so that it is reported as not used."""
    if name in _TOP:
        return _TOP[name]
    layers = _GEMMA_LAYER if architecture == "gemma3" else _LAYER
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in layers:
        return name
    return f"model.layers.{match[1]}.{layers[match[2]]}.{match[3]}"


def _unpermute(values: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """Rows of each head from (pair, half) order to (half, pair) order; `values` is [heads * head_dim, ...]."""
    split = values.reshape(heads, head_dim // 2, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that a GGUF file's metadata stands for. Raises InvalidArgument naming what is not supported."""
    data = file.metadata
    arch = data.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise InvalidArgument(
            f"{file.path}: unsupported architecture: {arch or 'none named'}; "
            f"supported in GGUF files are {', '.join(_ARCHITECTURES)}"
        )

    def get(key: str, default: Any = None) -> Any:
        return data.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        if (value := get(key)) is None:
            raise InvalidArgument(f"{file.path}: its metadata lacks {arch}.{key}; convert the model again")
        return value

    if get("expert_count", 0):
        raise InvalidArgument(
            f"{file.path}: unsupported architecture: {arch} with {get('expert_count')} experts; only dense models are"
        )
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise InvalidArgument(f"{file.path} lacks token_embd.weight; the file is incomplete or no language model")
    heads, layers, hidden = int(need("attention.head_count")), int(need("block_count")), int(need("embedding_length"))
    if layers > len(file.tensors):
        raise InvalidArgument(f"{file.path} has {len(file.tensors)} tensors for {layers} layers; it is incomplete")
    head_dim = int(get("attention.key_length") or get("rope.dimension_count") or hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise InvalidArgument(f"{file.path}: {arch}.{key}={get(key)} differs from the head size {head_dim}")
    gemma = arch == "gemma3"
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "vocab_size": embed.shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base", 1e6 if gemma else 1e4)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": data.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(data),
    }
    if scaling := _rope_scaling(file, get, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    if window := get("attention.sliding_window"):
        config["sliding_window"] = int(window)
        if arch == "llama":  # Mistral's files carry the architecture of Llama
            config["architectures"] = ["MistralForCausalLM"]
    if gemma:
        config |= _gemma3(get, layers, heads, hidden, head_dim)
    return config


def eos_token_ids(metadata: dict[str, Any]) -> list[int]:
    """End of text, of turn and of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(metadata[key]) for key in keys if key in metadata))


def _gemma3(get: Any, layers: int, heads: int, hidden: int, head_dim: int) -> dict[str, Any]:
    """What belongs to the architecture and is missing in the metadata: local RoPE base, layer pattern, query scale."""
    config: dict[str, Any] = {
        "rope_local_base_freq": _shortest(get("rope.freq_base_swa", 1e4)),
        # The 27B model alone scales queries by hidden size / heads; its metadata does not say so.
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "sliding_window_pattern": 6,
    }
    pattern = get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = int(pattern)
    return config


def _rope_scaling(file: GGUFFile, get: Any, head_dim: int, theta: float) -> dict[str, Any] | None:
    if _ROPE_FREQS in file.tensors:
        factors = dequantize(file.tensors[_ROPE_FREQS]).astype(np.float64)
        if factors.size != head_dim // 2:
            raise InvalidArgument(f"{file.path}: {_ROPE_FREQS} has {factors.size} values for a head size of {head_dim}")
        return llama3_scaling(factors, theta, str(file.path))
    kind = get("rope.scaling.type", "linear" if get("rope.scale_linear") else "none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": float(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))}


def llama3_scaling(factors: np.ndarray, theta: float, where: str) -> dict[str, Any] | None:
    """The Llama 3 parameters behind per-frequency divisors (float64, [head_dim / 2]); None where all are 1.

    Between the two wavelengths 1/divisor is linear in 1/wavelength: 1/d = (1 - s)/factor + s with
    s = (original/wavelength - low)/(high - low). Only the ratios of original, low and high count, so low is set to 1
    and the line gives the others (Llama 3.1 model card, "RoPE scaling"; llama.cpp's converter writes the divisors).
    Raises InvalidArgument when the divisors do not follow this rule.
    """
    if np.allclose(factors, 1.0):
        return None
    factor = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(factors.size) / factors.size)
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-6) & (smooth < 1 - 1e-6)
    if between.sum() < 2:  # too few to draw the line: the values that all Llama 3 models use
        low, high, original = 1.0, 4.0, 8192.0
    else:
        slope, offset = np.polyfit(1 / wavelengths[between], smooth[between], 1)
        low, high = 1.0, round(1 - 1 / float(offset), 3)
        original = float(round(float(slope) * (high - 1)))
    expected = 1 / ((1 - (s := np.clip((original / wavelengths - low) / (high - low), 0, 1))) / factor + s)
    if not np.allclose(expected, factors, rtol=1e-4):
        raise InvalidArgument(
            f"{where}: unsupported rope scaling: the divisors in {_ROPE_FREQS} do not follow Llama 3's rule"
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 5),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


def _shortest(value: float) -> float:
    """The decimal number that was meant by a float32: 1e-05 rather than 9.99999975e-06."""
    return float(str(np.float32(value)))
