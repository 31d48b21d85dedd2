"""The memory plan: what is derived, and errors whose proposed values really fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxpd.config import EngineConfig
from jaxpd.errors import FailedPrecondition, InvalidArgument
from jaxpd.limits import MIB, Limits, Memory, make_limits
from jaxpd.models.config import ModelConfig, from_hf
from meshes.spec import MeshSpec, parse_mesh_specs

SMOL = from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
)
HOST = Memory(platform="cpu", device_bytes=None, host_bytes=16 << 30)


def plan(prefill: str, decode: str, memory: Memory = HOST, model: ModelConfig = SMOL, **asked: Any) -> Limits:
    config = EngineConfig(**asked)
    return make_limits("m", model, config, parse_mesh_specs(prefill), parse_mesh_specs(decode), memory)


def test_defaults_on_cpu_are_derived_and_shown() -> None:
    limits = plan("1x1", "1x1")
    assert (limits.dtype, limits.max_model_len) == ("float32", 8192)
    pool = limits.decode[0]
    assert pool.page_bytes == 30 * 3 * 16 * 128 * 4
    assert 1000 * MIB < pool.kv_bytes <= 1024 * MIB
    assert pool.weight_bytes == SMOL.num_parameters() * 4
    text = "\n".join(limits.plan_lines())
    for shown in ("prefill", "decode", "513 MiB", "8,192", "float32", f"{pool.num_pages} pages"):
        assert shown in text


def test_the_longest_sequence_shrinks_to_what_every_replica_can_hold() -> None:
    limits = plan("1x1", "1x8")
    assert limits.max_model_len < 8192 and limits.max_model_len % 128 == 0
    assert limits.decode[0].num_pages * 16 >= limits.max_model_len
    assert "2,8" in limits.plan_lines()[-1]


@pytest.mark.parametrize("memory", ["40MiB", "8MiB"])
def test_the_cure_of_a_pool_that_is_too_small_fits(memory: str) -> None:
    asked: dict[str, Any] = {"max_model_len": 4096, "kv_memory": int(memory.removesuffix("MiB")) * MIB}
    with pytest.raises(FailedPrecondition, match="--max-model-len 4096") as caught:
        plan("1x1", "1x1", **asked)
    larger = int(re.search(r"--kv-memory (\d+)MiB", caught.value.message).group(1))  # type: ignore[union-attr]
    shorter = int(re.search(r"or --max-model-len (\d+)", caught.value.message).group(1))  # type: ignore[union-attr]
    assert plan("1x1", "1x1", **{**asked, "kv_memory": larger * MIB}).max_model_len == 4096
    assert plan("1x1", "1x1", **{**asked, "max_model_len": shorter}).max_model_len == shorter


def test_a_host_that_is_too_small_is_told_before_loading() -> None:
    small = Memory(platform="cpu", device_bytes=None, host_bytes=3 << 30)
    with pytest.raises(FailedPrecondition) as caught:
        plan("1x1", "1x1", small)
    cure = int(re.search(r"--kv-memory (\d+)MiB", caught.value.message).group(1))  # type: ignore[union-attr]
    assert plan("1x1", "1x1", small, kv_memory=cure * MIB)
    with pytest.raises(FailedPrecondition, match="fewer data replicas"):
        plan("1x1", "1x8", Memory(platform="cpu", device_bytes=None, host_bytes=1300 * MIB))


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="8193.*8192"):
        plan("1x1", "1x1", max_model_len=8193)


def test_an_accelerator_uses_what_the_weights_leave() -> None:
    chip = Memory(platform="tpu", device_bytes=16 << 30, host_bytes=1 << 40)
    limits = plan("4x1", "1x4", chip)
    assert limits.dtype == "bfloat16"
    decode = limits.decode[0]
    assert decode.weight_bytes + decode.kv_bytes <= 16 << 30
    with pytest.raises(FailedPrecondition, match="8x1"):
        plan(
            "4x1",
            "1x1",
            Memory(platform="tpu", device_bytes=64 * MIB, host_bytes=1 << 40),
            kv_memory=40 * MIB,
            max_model_len=256,
        )


def test_buckets_cover_every_step() -> None:
    limits = plan("2x1", "1x2", max_num_seqs=12, max_num_batched_tokens=300)
    prompts = [s.tokens for s in limits.prefill[0].shapes]
    assert prompts == [16, 64, 128, 256, 300]
    assert all(s.rows < s.tokens for s in limits.prefill[0].shapes)
    decode = limits.decode[0].shapes
    assert [s.rows for s in decode if s.rows == s.tokens] == [1, 8, 12]
    assert [s.tokens for s in decode if s.rows != s.tokens] == [64, 300]
    assert limits.decode[0].spec == MeshSpec(1, 2)
