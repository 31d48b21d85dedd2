"""from_hf reads each tiny checkpoint's config.json so that a NumPy decoder driven by it gives transformers' logits."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.models.config import ModelConfig, RopeConfig, from_hf

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny"
FOLDERS = sorted(json.loads((TINY / "index.json").read_text())["folders"])


def _oracle() -> Any:
    spec = importlib.util.spec_from_file_location("numpy_decoder", DATA / "numpy_decoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = _oracle()


@functools.cache
def loaded(name: str) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    return oracle.load(TINY / name)


def expected(name: str) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    with np.load(TINY / name / "expected.npz") as arrays:
        return json.loads((TINY / name / "expected.json").read_text())["prompts"], dict(arrays)


def hf(name: str, **changes: Any) -> dict[str, Any]:
    """A folder's config.json with fields set, or left out where the value is `...`."""
    config = {**json.loads((TINY / name / "config.json").read_text()), **changes}
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("name", FOLDERS)
def test_numpy_decoder_gives_transformers_logits_and_greedy_ids(name: str) -> None:
    config, weights = loaded(name)
    prompts, logits = expected(name)
    for prompt in prompts:
        # One pass over prompt and answer: causal, so each position's logits are those of its own step.
        got = oracle.forward(config, weights, prompt["prompt_ids"] + prompt["greedy_ids"][:-1])
        last = len(prompt["prompt_ids"]) - 1
        np.testing.assert_allclose(
            got[0 if prompt["logits"] == "all" else last : last + 1], logits[prompt["name"]], rtol=0, atol=5e-5
        )
        np.testing.assert_allclose(got[-1], logits[prompt["name"] + ".final"], rtol=0, atol=5e-5)
        assert got[last:].argmax(axis=-1).tolist() == prompt["greedy_ids"]
        best = np.sort(got[last:], axis=-1)
        np.testing.assert_allclose(best[:, -1] - best[:, -2], prompt["top1_minus_top2"], rtol=0, atol=1e-4)
        assert min(prompt["top1_minus_top2"]) > 1e-2


def test_greedy_of_the_oracle_runs_on_its_own_tokens() -> None:
    config, weights = loaded("qwen3")
    prompt = expected("qwen3")[0][1]
    ids, gaps = oracle.greedy(config, weights, prompt["prompt_ids"], 4)
    assert ids == prompt["greedy_ids"][:4]
    np.testing.assert_allclose(gaps, prompt["top1_minus_top2"][:4], rtol=0, atol=1e-4)


PLAIN = RopeConfig(theta=1e4)
ABLATIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama2", {"rope": RopeConfig(theta=1.1e4)}),
    ("llama2", {"rms_eps": 1e-2}),
    ("llama3", {"rope": RopeConfig(theta=5e5)}),
    ("llama3", {"rope": RopeConfig(theta=5e5, kind="linear", factor=8.0)}),
    ("llama-bias", {"qkv_bias": False}),
    ("llama-bias", {"o_bias": False}),
    ("llama-bias", {"mlp_bias": False}),
    ("mistral", {"local_layers": (False, False), "sliding_window": None}),
    ("mistral", {"sliding_window": 23}),
    ("qwen2", {"qkv_bias": False}),
    ("qwen3", {"qk_norm": False}),
    ("gemma3", {"local_rope": None}),
    ("gemma3", {"local_layers": (True, True, True)}),
    ("gemma3", {"sliding_window": 17}),
    ("gemma3", {"norm_plus_one": False}),
    ("gemma3", {"embed_scale": 1.0}),
    ("gemma3", {"activation": "silu"}),
    ("gemma3-softcap", {"attn_softcap": None}),
    ("gemma3-softcap", {"final_softcap": None}),
    ("gemma3-softcap", {"query_scale": 64**-0.5}),
    ("gemma3-softcap", {"rope": RopeConfig(theta=1e6)}),
]


@pytest.mark.parametrize(("name", "change"), ABLATIONS)
def test_each_feature_shows_in_the_logits(name: str, change: dict[str, Any]) -> None:
    """A decoder that leaves the feature out cannot pass at 1e-4: it is off a hundred times more."""
    config, weights = loaded(name)
    prompts, logits = expected(name)
    off = 0.0
    for prompt in prompts:
        got = oracle.forward(dataclasses.replace(config, **change), weights, prompt["prompt_ids"])[-1]
        off = max(off, float(np.abs(got - logits[prompt["name"]][-1]).max()))
    assert off > 1e-2


@pytest.mark.parametrize("name", FOLDERS)
def test_parameter_count_is_that_of_the_files(name: str) -> None:
    config, weights = loaded(name)
    assert config.num_parameters() == sum(w.size for w in weights.values())


def test_sizes_and_features_are_read() -> None:
    config = from_hf(hf("smollm2"))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.group_size) == (9, 3, 64, 3)
    assert config.tie_embeddings and config.eos_token_ids == (283,) and config.bos_token_id == 280
    assert config.kv_bytes_per_token(4) == 2 * 2 * 3 * 64 * 4
    config = from_hf(hf("llama3"))
    assert config.eos_token_ids == (281, 283) and not config.tie_embeddings and config.max_position == 256
    assert config.rope == RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
    )
    config = from_hf(hf("mistral"))
    assert config.sliding_window == 24 and config.local_layers == (True, True) and config.local_rope is None
    config = from_hf(hf("gemma3-softcap"))
    assert config.local_layers == (True,) * 5 + (False,) and config.query_scale == 24**-0.5
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=4.0) and config.local_rope == PLAIN
    assert (config.attn_softcap, config.final_softcap, config.embed_scale) == (2.0, 8.0, 4.0)


def test_head_size_left_out_is_hidden_over_heads() -> None:
    assert from_hf(hf("llama2", head_dim=...)).head_dim == 8
    assert from_hf(hf("llama2", num_key_value_heads=...)).num_kv_heads == 3


def test_fields_left_out_take_the_defaults_of_transformers() -> None:
    assert from_hf(hf("qwen3", head_dim=...)) == from_hf(hf("qwen3", head_dim=128))
    left_out = dict.fromkeys(("head_dim", "query_pre_attn_scalar", "hidden_activation"), ...)
    assert from_hf(hf("gemma3", **left_out)) == from_hf(hf("gemma3"))


def test_biases_that_the_architecture_fixes_are_not_the_configs_to_change() -> None:
    assert from_hf(hf("qwen2", attention_bias=False)) == from_hf(hf("qwen2"))
    assert from_hf(hf("mistral", attention_bias=True)) == from_hf(hf("mistral"))
    biased = from_hf(hf("qwen3", attention_bias=True))
    assert biased.qkv_bias and biased.o_bias


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_transformers_4_and_5_styles_mean_the_same(name: str) -> None:
    """These two folders are in the older style; the newer one is built here."""
    old = hf(name)
    if name == "llama3":
        rope: dict[str, Any] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
        new = hf(name, rope_theta=..., rope_scaling=..., rope_parameters=rope)
    else:
        rope = {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        types = ["sliding_attention", "sliding_attention", "full_attention"]
        dropped = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"), ...)
        new = hf(name, **dropped, rope_parameters=rope, layer_types=types)
    assert from_hf(new) == from_hf(old)


def test_gemma_without_a_pattern_has_five_local_layers_to_one_global() -> None:
    config = from_hf(hf("gemma3", sliding_window_pattern=..., num_hidden_layers=7))
    assert config.local_layers == (True, True, True, True, True, False, True)


def test_qwen_windows_only_where_the_config_turns_them_on() -> None:
    off = from_hf(hf("qwen2", layer_types=..., use_sliding_window=False, sliding_window=24))
    assert off.sliding_window is None and off.local_layers == (False, False)
    on = from_hf(hf("qwen2", layer_types=..., use_sliding_window=True, sliding_window=24, max_window_layers=1))
    assert on.sliding_window == 24 and on.local_layers == (False, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"layer_types": ["full_attention"]}, "1 layer types for 2 layers"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window is not set"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"hidden_size": "wide"}, "wide"),
        ({"num_attention_heads": 0, "head_dim": ...}, "config.json"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        from_hf(hf("llama3", **changes))
