"""The TPU attention kernel, interpreted with simulated memory, against the float64 oracle.

Every run records races, raises on reads out of bounds and holds NaN in unwritten memory. Blocks are made small, so that
few tokens already make several, and go round the ring of buffers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import Call
from pallas_kernels.ragged_paged_attention import ragged_paged_attention, tpu
from pallas_kernels.ragged_paged_attention.random_batch import Shape, random_case, relative_error
from pallas_kernels.ragged_paged_attention.tpu_blocks import (
    Blocks,
    Sizes,
    choose_blocks,
    full_batch,
    kv_bytes_read,
    vmem_budget,
    vmem_bytes,
)
from pallas_kernels.tpu_params import races_found

Options = dict[str, Any]
DECODE: list[tuple[Shape, Blocks, Options]] = [
    (Shape(3, 3, 3, 3, 64), Blocks(1, 8, 3, 2, 3, 1), {}),
    (Shape(5, 5, 1, 1, 80, page_size=8), Blocks(1, 8, 2, 2, 2, 2), {"sliding_window": 20}),
    (Shape(3, 3, 2, 7, 96, page_size=32, table=3, dtype="bfloat16"), Blocks(1, 16, 3, 1, 2, 1), {"soft_cap": 5.0}),
    (Shape(3, 3, 1, 4, 128, page_size=8), Blocks(1, 8, 1, 3, 2, 1), {"sliding_window": 1, "sinks": True}),
    (Shape(2, 2, 1, 2, 256, page_size=128, table=2, pages=6, dtype="bfloat16"), Blocks(1, 16, 2, 1, 2, 1), {}),
    (Shape(3, 3, 2, 4, 64, dtype="bfloat16", kv_dtype="int8"), Blocks(1, 16, 3, 2, 2, 1), {"sinks": True}),
    (Shape(3, 3, 1, 4, 128, page_size=32, table=3, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
     Blocks(1, 16, 3, 1, 2, 1), {}),
]  # fmt: skip
PREFILL: list[tuple[Shape, Blocks, Options]] = [
    (Shape(40, 4, 3, 3, 64), Blocks(8, 3, 1, 2, 3, 1), {}),
    (Shape(40, 3, 1, 7, 80, page_size=8), Blocks(8, 7, 1, 2, 2, 2), {"sliding_window": 20, "sinks": True}),
    (Shape(32, 2, 2, 1, 96, page_size=32, table=3), Blocks(16, 1, 1, 1, 2, 1), {"sliding_window": 1}),
    (Shape(32, 2, 1, 4, 128, dtype="bfloat16"), Blocks(16, 4, 1, 3, 2, 1), {"soft_cap": 5.0}),
    (Shape(20, 2, 1, 2, 256, page_size=64, table=3), Blocks(32, 2, 1, 1, 2, 1), {}),
    (Shape(32, 3, 2, 2, 64, dtype="bfloat16", kv_dtype="int8"), Blocks(16, 2, 1, 2, 2, 1), {"sliding_window": 30}),
]


@functools.cache
def program(
    shape: Shape, blocks: Blocks | None, sinks: bool, options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The public function with the kernel's blocks made small."""
    small = functools.partial(tpu.ragged_paged_attention, interpret=True, blocks=blocks)

    def run(q_THD, pages_LPKSW, layer, batch, sinks_H, kv_scales_2K):  # type: ignore[no-untyped-def]
        with pytest.MonkeyPatch.context() as patch:
            chosen = type("Chosen", (), {"run": staticmethod(small)})
            patch.setattr("pallas_kernels.ragged_paged_attention.choose", lambda *_, **__: chosen)
            return ragged_paged_attention(
                q_THD, pages_LPKSW, layer, batch, scale=shape.head_dim**-0.5,
                sinks_H=sinks_H if sinks else None, kv_scales_2K=kv_scales_2K, **dict(options),
            )  # fmt: skip

    return jax.jit(run)


def compare(
    shape: Shape, blocks: Blocks, options: Options, lengths: Sequence[int], contexts: Sequence[int], seed: int
) -> None:
    case = random_case(shape, lengths, contexts, seed)
    sinks = bool(options.get("sinks"))
    options = {name: options.get(name) for name in ("sliding_window", "soft_cap")}
    got = program(shape, blocks, sinks, tuple(options.items()))(
        case.q_THD, case.pages_LPKSW, jnp.int32(case.layer), case.batch, case.sinks_H, case.kv_scales_2K
    )
    expected = case.expected(scale=shape.head_dim**-0.5, sinks=sinks, **options)
    assert relative_error(got, expected) <= (1e-5 if shape.dtype == "float32" else 1e-2)
    assert not np.asarray(got[sum(lengths) :]).any(), "padding is not zero"
    assert not races_found()


def context_lengths(shape: Shape) -> st.SearchStrategy[int]:
    page, longest = shape.page_size, shape.page_size * shape.table
    return st.sampled_from(sorted({1, page - 1, page, page + 1, longest})) | st.integers(1, longest)


@pytest.mark.parametrize(("shape", "blocks", "options"), DECODE, ids=str)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_decode_matches_the_oracle(shape: Shape, blocks: Blocks, options: Options, data: st.DataObject) -> None:
    contexts = [data.draw(context_lengths(shape)) for _ in range(data.draw(st.integers(0, shape.rows)))]
    compare(shape, blocks, options, [1] * len(contexts), contexts, data.draw(st.integers(0, 99)))


@pytest.mark.parametrize(("shape", "blocks", "options"), PREFILL, ids=str)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_prefill_matches_the_oracle(shape: Shape, blocks: Blocks, options: Options, data: st.DataObject) -> None:
    lengths: list[int] = []
    contexts: list[int] = []
    for _ in range(data.draw(st.integers(0, shape.rows))):
        context = data.draw(context_lengths(shape))
        most = min(context, shape.tokens - sum(lengths))
        length = data.draw(st.sampled_from([most, min(1, most)]) | st.integers(0, most))
        lengths.append(length)
        contexts.append(context if length else 0)
    compare(shape, blocks, options, lengths, contexts, data.draw(st.integers(0, 99)))


def test_rows_of_all_lengths_go_round_the_ring() -> None:
    shape, blocks, options = DECODE[0]
    compare(shape, blocks, options, [1, 1, 1], [128, 1, 100], seed=1)
    shape, blocks, options = PREFILL[0]
    compare(shape, blocks, options, [1, 30, 0, 9], [128, 128, 0, 9], seed=1)


def test_blocks_that_the_function_chooses() -> None:
    """The sizes that are used on the chip, interpreted once."""
    shape = Shape(16, 2, 2, 3, 64)
    case = random_case(shape, [9, 4], [60, 4], seed=5)
    got = ragged_paged_attention(
        case.q_THD, case.pages_LPKSW, case.layer, case.batch, scale=0.125, implementation="pallas_tpu_interpret"
    )
    assert relative_error(got, case.expected(scale=0.125)) <= 1e-5


def sizes(**changes: int) -> Sizes:
    usual = dict(T=512, B=8, N=64, K=8, G=4, D=128, S=64, W=256, pool_bytes=2, query_bytes=2)
    return Sizes(**(usual | changes))


@pytest.mark.parametrize("chip", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_blocks_fit_the_chip_and_the_tiles(chip: str) -> None:
    for changes in ({}, {"T": 8}, {"T": 256, "B": 256}, {"K": 32, "G": 1}, {"K": 4, "D": 256, "W": 512}, {"S": 8}):
        given_sizes = sizes(**changes)
        blocks = choose_blocks(given_sizes, chip)
        assert blocks is not None
        assert vmem_bytes(given_sizes, blocks) <= vmem_budget(chip)
        assert blocks.query_tokens & (blocks.query_tokens - 1) == 0
        assert blocks.rows % 16 == 0
        assert blocks.buffers >= 2


def call(**changes: Any) -> Call:
    shapes = {"T": 64, "B": 64, "N": 64, "H": 32, "K": 8, "D": 128, "S": 64, "W": 256}
    dtype, operand = (changes.pop(name, "bfloat16") for name in ("dtype", "operand"))
    return Call("tpu", "TPU v5 lite", dtype, operand, tuple((shapes | changes).items()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"operand": "float16", "dtype": "float16"}, "q_THD has dtype float16, need float32 or bfloat16"),
        ({"dtype": "float32"}, "pages_LPKSW has dtype float32, need that of q_THD, bfloat16"),
        ({"S": 12}, "page size 12, need a power of two from 8"),
        ({"S": 4}, "page size 4, need"),
        ({"N": 8192}, r"64 rows x 8192 pages take 2,09\d,\d+ bytes of SMEM, at most 983,040: use larger pages"),
        ({"K": 512, "H": 512}, "512 KV slots of 256 lanes do not fit the VMEM of TPU v5 lite"),
    ],
)
def test_refusals_name_the_value_and_the_limit(changes: dict[str, Any], reason: str) -> None:
    assert tpu.refuse(call()) is None
    refusal = tpu.refuse(call(**changes))
    assert refusal is not None
    assert re.search(reason, refusal), refusal


def test_cost_of_a_full_batch() -> None:
    """64 rows of 4096 tokens: every page once, four operations a pair, head and dimension."""
    decode = sizes(T=64, B=64)
    blocks = choose_blocks(decode, "TPU v5 lite")
    assert blocks is not None
    cost = tpu.cost_estimate(decode, blocks, None)
    kv_bytes = 64 * 4096 * 8 * 2 * 128 * 2
    assert kv_bytes <= cost.bytes_accessed <= kv_bytes * 1.05
    assert cost.flops == 4 * 64 * 4096 * 32 * 128
    assert cost.transcendentals == 64 * 4096 * 32
    windowed = tpu.cost_estimate(decode, blocks, 1024)
    assert windowed.flops * 4 == cost.flops
    assert kv_bytes / 4 <= windowed.bytes_accessed <= kv_bytes / 4 * 1.1
    lengths, contexts = full_batch(sizes())
    assert (int(lengths.sum()), set(contexts)) == (512, {4096})
    assert kv_bytes_read(sizes(), Blocks(32, 4, 1, 8, 2, 1), np.array([40]), np.array([100]), None) == (2 + 2) * 262144
