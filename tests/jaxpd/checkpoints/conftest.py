"""Tiny checkpoints, written by the tests in every format: the same weights under Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jaxpd.checkpoints.layout import weight_shapes
from jaxpd.models.config import from_hf
from jaxpd.tokenizer import Tokenizer, byte_alphabet

Config = dict[str, Any]
Weights = dict[str, np.ndarray]

CHAT_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def tiny_config(architecture: str = "LlamaForCausalLM", **more: Any) -> Config:
    """A config of two layers, hidden 32, 4 query and 2 KV heads of 8; `more` overrides."""
    return {
        "architectures": [architecture],
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
    } | more


def random_weights(config: Config) -> Weights:
    """Float32 values, in the HF layout, for every weight of `config`."""
    rng = np.random.default_rng(7)
    shapes = weight_shapes(from_hf(config))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token (ids 0 to 255), then <s>, </s> and two chat roles."""
    vocab = {char: byte for char, byte in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    return Tokenizer(backend, chat_template=CHAT_TEMPLATE, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def write_hf(folder: Path, config: Config, weights: Mapping[str, np.ndarray], *, tokenizer: bool = True) -> Path:
    """A Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    if tokenizer:
        byte_tokenizer().save(folder)
    return folder


_GGML = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}


def _ggml_name(name: str, gemma: bool) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, suffix = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    norms = {"post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm"}
    norms |= {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    return f"blk.{layer}.{(_GGML | norms)[part]}.{suffix}"


def write_gguf(
    path: Path,
    config: Config,
    weights: Mapping[str, np.ndarray],
    *,
    arch: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    tokenizer: bool = True,
) -> Path:
    """What llama.cpp's converter would write: Q and K of `llama` permuted, Gemma's norms plus one.

    `metadata` adds or overrides entries by full key, `kinds` gives the type of weights by HF name (float32 otherwise),
    `extra` adds tensors under ggml's names.
    """
    writer = gguf.GGUFWriter(path, arch)
    numbers: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
    }
    entries: dict[str, Any] = {f"{arch}.{key}": value for key, value in numbers.items()}
    entries |= {
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
    }
    if tokenizer:
        by_byte = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
        entries |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": [*by_byte, "<s>", "</s>", "<|user|>", "ab"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 1],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": 257,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        }
    for key, value in (entries | dict(metadata or {})).items():
        _add(writer, key, value)
    for name, values in weights.items():
        values = _as_converted(name, values, config, arch)
        kind = (kinds or {}).get(name, Kind.F32)
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(_ggml_name(name, arch == "gemma3"), data, raw_dtype=None if kind == Kind.F32 else kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _as_converted(name: str, values: np.ndarray, config: Config, arch: str) -> np.ndarray:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        if arch == "llama" and part in name:
            half = values.shape[0] // count // 2
            return values.reshape(count, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape).copy()
    return values + 1 if arch == "gemma3" and "norm" in name else values


class Recorder:
    """A Progress that remembers its stages (name, total, what was advanced) and notes."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float | None, list[float]]] = []
        self.notes: list[str] = []

    def stage(self, name: str, *, total: float | None = None, unit: str = "") -> Any:
        import contextlib

        amounts: list[float] = []
        self.stages.append((name, total, amounts))

        class Stage:
            def advance(self, amount: float = 1.0, detail: str = "") -> None:
                amounts.append(amount)

        return contextlib.nullcontext(Stage())

    def note(self, text: str) -> None:
        self.notes.append(text)


class Tiny:
    """The functions above, for tests (which cannot import this file)."""

    config = staticmethod(tiny_config)
    weights = staticmethod(random_weights)
    tokenizer = staticmethod(byte_tokenizer)
    write_hf = staticmethod(write_hf)
    write_gguf = staticmethod(write_gguf)
    recorder: Callable[[], Recorder] = Recorder


@pytest.fixture
def tiny() -> type[Tiny]:
    """Writers of tiny checkpoints."""
    return Tiny
