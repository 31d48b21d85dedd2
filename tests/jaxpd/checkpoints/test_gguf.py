"""GGUF files: the same weights and config as the Hugging Face folder they were converted from."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from jaxpd.checkpoints import open_path
from jaxpd.checkpoints.gguf import llama3_scaling
from jaxpd.errors import InvalidArgument, JaxpdError, NotFound
from jaxpd.models.config import from_hf

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "attention_bias": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": False},
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 16,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 7,
    },
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_is_the_model_that_was_converted(tiny: Any, tmp_path: Path, arch: str) -> None:
    config = tiny.config(**ARCHITECTURES[arch])
    weights = tiny.weights(config)
    window = {"gemma3.attention.sliding_window": 16} if arch == "gemma3" else {}
    checkpoint = open_path(tiny.write_gguf(tmp_path / "m.gguf", config, weights, arch=arch, metadata=window))
    assert checkpoint.config == from_hf(config)
    assert set(checkpoint.source.names()) == set(weights)
    for name, values in weights.items():
        assert checkpoint.source.shape(name) == values.shape
        np.testing.assert_allclose(checkpoint.source.read(name), values, atol=2e-7, err_msg=name)


def test_gemma3_gets_its_local_layers_and_rope_base(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config(**ARCHITECTURES["gemma3"], rope_theta=1e6)
    path = tiny.write_gguf(
        tmp_path / "m.gguf",
        config,
        tiny.weights(config),
        arch="gemma3",
        metadata={
            "gemma3.attention.sliding_window": 16,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    )
    read = open_path(path).config
    assert read.local_layers == (True,) * 5 + (False, True)
    assert read.local_rope is not None and read.local_rope.theta == 1e4
    assert (read.rope.theta, read.rope.kind, read.rope.factor) == (1e6, "linear", 8.0)


def test_a_window_in_a_llama_file_makes_it_mistral(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config()
    path = tiny.write_gguf(
        tmp_path / "m.gguf", config, tiny.weights(config), metadata={"llama.attention.sliding_window": 32}
    )
    read = open_path(path).config
    assert (read.architecture, read.sliding_window, read.local_layers) == ("mistral", 32, (True, True))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_stored_types(tiny: Any, tmp_path: Path, kind: Kind) -> None:
    config = tiny.config()
    weights = tiny.weights(config)
    name = "model.layers.0.mlp.down_proj.weight"
    source = open_path(tiny.write_gguf(tmp_path / "m.gguf", config, weights, kinds={name: kind})).source
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name], kind), kind)
    np.testing.assert_array_equal(source.read(name).astype(np.float32), expected)
    assert np.abs(expected - weights[name]).max() < 0.25


def test_a_separate_head_unties(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config(tie_word_embeddings=False)
    weights = tiny.weights(config)
    checkpoint = open_path(tiny.write_gguf(tmp_path / "m.gguf", config, weights))
    assert not checkpoint.config.tie_embeddings
    np.testing.assert_array_equal(checkpoint.source.read("lm_head.weight"), weights["lm_head.weight"])


def llama3_divisors(head_dim: int, theta: float, factor: float, low: float, high: float, original: float) -> np.ndarray:
    """As Llama 3's own code scales frequencies, one at a time."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    ("head_dim", "factor", "high", "original"), [(128, 8.0, 4.0, 8192), (64, 32.0, 4.0, 8192), (128, 16.0, 6.0, 4096)]
)
def test_llama3_scaling_is_found_from_its_divisors(head_dim: int, factor: float, high: float, original: int) -> None:
    divisors = llama3_divisors(head_dim, 5e5, factor, 1.0, high, original)
    assert llama3_scaling(divisors.astype(np.float64), 5e5, "file") == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def test_llama3_scaling_of_a_file(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config(rope_theta=5e5, head_dim=64, hidden_size=64)
    divisors = llama3_divisors(64, 5e5, 8.0, 1.0, 4.0, 8192)
    weights = tiny.weights(config)
    path = tiny.write_gguf(tmp_path / "m.gguf", config, weights, extra={"rope_freqs.weight": divisors})
    rope = open_path(path).config.rope
    assert (rope.kind, rope.factor, rope.high_freq_factor, rope.original_max_position) == ("llama3", 8.0, 4.0, 8192)
    odd = {"rope_freqs.weight": np.linspace(1, 5, 32).astype(np.float32)}
    with pytest.raises(InvalidArgument, match="do not follow Llama 3's rule"):
        open_path(tiny.write_gguf(tmp_path / "odd.gguf", config, weights, extra=odd))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "unsupported architecture: mamba"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "yarn"),
        ({"llama.rope.dimension_count": 4}, "differs from the head size"),
        ({"llama.block_count": 2_000_000_000}, "it is incomplete"),
        ({"llama.block_count": 3}, r"lacks model\.layers\.2"),
        ({"llama.feed_forward_length": 96}, r"has shape \(64, 32\), and the config says \(96, 32\)"),
    ],
)
def test_files_that_are_refused(tiny: Any, tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    config = tiny.config()
    path = tmp_path / "m.gguf"
    if arch := metadata.get("general.architecture"):
        tiny.write_gguf(path, config, tiny.weights(config), arch=arch)
    else:
        tiny.write_gguf(path, config, tiny.weights(config), metadata=metadata)
    with pytest.raises(InvalidArgument, match=message):
        open_path(path)


def test_unknown_tensors_are_refused(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config()
    sinks = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(InvalidArgument, match=r"holds blk\.0\.attn_sinks\.weight"):
        open_path(tiny.write_gguf(tmp_path / "m.gguf", config, tiny.weights(config), extra=sinks))


def test_a_file_cut_anywhere_is_refused(tiny: Any, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.config(), tiny.weights(tiny.config()))
    whole = path.read_bytes()
    for length in [0, 3, 4, 10, 23, 24, *range(30, len(whole) - 64, len(whole) // 60), len(whole) - 64]:
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidArgument, match="corrupt or truncated|not a GGUF file"):
            open_path(path)


def test_a_damaged_header_never_escapes_as_another_error(tiny: Any, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.config(), tiny.weights(tiny.config()))
    whole = path.read_bytes()
    rng = random.Random(3)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.randrange(8000)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            open_path(path).tokenizer()
        except JaxpdError:
            refused += 1
    assert refused > 100


def test_versions_and_other_files(tiny: Any, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.config(), tiny.weights(tiny.config()))
    whole = path.read_bytes()
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + whole[8:])
    with pytest.raises(InvalidArgument, match="version 1"):
        open_path(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + whole[8:])
    with pytest.raises(InvalidArgument, match="big-endian"):
        open_path(path)
    path.write_bytes(b"PK" + whole)
    with pytest.raises(InvalidArgument, match="not a GGUF file"):
        open_path(path)


def test_the_tokenizer_comes_from_the_metadata(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config()
    path = tiny.write_gguf(tmp_path / "m.gguf", config, tiny.weights(config))
    tokenizer = open_path(path).tokenizer()
    assert tokenizer.encode("aé<s>abb") == [97, 195, 169, 256, 259, 98]
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == [258, 97]
    bare = tiny.write_gguf(tmp_path / "bare.gguf", config, tiny.weights(config), tokenizer=False)
    with pytest.raises(NotFound, match="no tokenizer"):
        open_path(bare).tokenizer()
    odd = tiny.write_gguf(
        tmp_path / "odd.gguf", config, tiny.weights(config), metadata={"tokenizer.ggml.pre": "poro-chat"}
    )
    with pytest.raises(InvalidArgument, match="unsupported pre-tokenizer 'poro-chat'"):
        open_path(odd).tokenizer()
