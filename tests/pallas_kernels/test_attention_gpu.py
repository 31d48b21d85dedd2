"""The Hopper attention kernels, interpreted with simulated memory, against the float64 oracle.

Every run looks for races (which raise), and holds NaN in shared memory that nobody wrote and in slots that nobody may
see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Call
from pallas_kernels.gpu_pages import MIN_JAX
from pallas_kernels.names import GPU_INTERPRET
from pallas_kernels.ragged_paged_attention import gpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.gpu_items import decode_items, prefill_items
from pallas_kernels.ragged_paged_attention.gpu_kernel import SMEM_PER_BLOCK
from pallas_kernels.ragged_paged_attention.random_batch import Shape, random_case, relative_error

interpreted = pytest.mark.skipif(
    jax.__version_info__[:2] < MIN_JAX,
    reason=f"jax {jax.__version__} does not interpret Mosaic GPU kernels, 0.12 does (Python 3.12 or newer)",
)
bf16 = functools.partial(Shape, dtype="bfloat16")
Options = dict[str, Any]
Rows = list[tuple[int, int]]  # (query length, context) of each row; those that are missing are unused


def contexts(*of: int) -> Rows:
    return [(1 if context else 0, context) for context in of]


# Blocks of keys are 64 tokens in decode (32 with heads of 256), 128 in prefill (64).
DECODE: list[tuple[Shape, Options, list[Rows]]] = [
    (bf16(5, 5, 1, 3, 64, table=20), {}, [contexts(1, 15, 16, 17, 320), contexts(300, 64, 65), []]),
    (bf16(4, 4, 2, 4, 128, page_size=128, table=3), {"soft_cap": 5.0, "sinks": True}, [contexts(127, 128, 129)]),
    (bf16(4, 4, 1, 7, 128, page_size=8, table=40), {"sliding_window": 100}, [contexts(7, 9, 320, 101)]),
    (bf16(3, 3, 1, 1, 80, table=8), {"sliding_window": 1}, [contexts(1, 128, 77)]),
    (bf16(2, 2, 1, 4, 256, page_size=64, table=2), {}, [contexts(65, 128)]),
    (Shape(2, 2, 1, 2, 96, dtype="float16"), {"sinks": True}, [contexts(33, 100)]),
]
PREFILL: list[tuple[Shape, Options, list[Rows]]] = [
    (bf16(60, 4, 1, 3, 64, table=20), {}, [[(43, 43), (1, 17), (0, 0), (15, 320)], []]),
    (bf16(40, 2, 2, 4, 128, page_size=128, table=3), {"soft_cap": 5.0, "sinks": True}, [[(33, 257), (1, 128)]]),
    (bf16(40, 2, 1, 7, 128, page_size=8, table=40), {"sliding_window": 100}, [[(20, 320), (15, 15)]]),
    (bf16(70, 2, 1, 1, 80, table=10), {"sliding_window": 1}, [[(60, 150), (9, 16)]]),
    (bf16(40, 2, 1, 4, 256, page_size=256, table=1), {}, [[(33, 250), (7, 7)]]),
    (Shape(40, 2, 1, 4, 96, dtype="float16"), {"sliding_window": 20, "sinks": True}, [[(33, 100), (7, 8)]]),
]


@functools.cache
def program(shape: Shape, sinks: bool, options: tuple[tuple[str, Any], ...]) -> Callable[..., jax.Array]:
    def run(q_THD, pages_LPKSW, layer, batch, sinks_H):  # type: ignore[no-untyped-def]
        return ragged_paged_attention(
            q_THD, pages_LPKSW, layer, batch, scale=shape.head_dim**-0.5, sinks_H=sinks_H if sinks else None,
            implementation=GPU_INTERPRET, **dict(options),
        )  # fmt: skip

    return jax.jit(run)


def compare(shape: Shape, rows: Rows, seed: int, *, sinks: bool = False, **options: Any) -> None:
    case = random_case(shape, [length for length, _ in rows], [context for _, context in rows], seed)
    run = program(shape, sinks, tuple(sorted(options.items())))
    out_THD = run(case.q_THD, case.pages_LPKSW, jnp.int32(case.layer), case.batch, case.sinks_H)
    expected_THD = case.expected(sinks=sinks, scale=shape.head_dim**-0.5, **options)
    assert out_THD.dtype == case.q_THD.dtype
    assert relative_error(out_THD, expected_THD) < 1e-2
    assert not np.asarray(out_THD.astype(jnp.float32))[int(case.batch.query_starts[-1]) :].any(), "padding is not zero"


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # NaN, which NumPy remarks on
@pytest.mark.parametrize(("shape", "options", "batches"), DECODE + PREFILL, ids=str)
def test_matches_the_oracle(shape: Shape, options: Options, batches: list[Rows]) -> None:
    for seed, rows in enumerate(batches):
        compare(shape, rows, seed, **options)


def call(chip: str = "NVIDIA H200", dtype: str = "bfloat16", operand: str | None = None, **shapes: int) -> Call:
    sizes = {"T": 8, "B": 8, "N": 4, "H": 32, "K": 8, "D": 128, "S": 16, "W": 256} | shapes
    return Call("gpu", chip, dtype, operand or dtype, tuple(sizes.items()))


@interpreted
def test_takes_every_hopper() -> None:
    for chip in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H800", "NVIDIA H20-3e"):
        for dtype in ("bfloat16", "float16"):
            assert gpu.refuse(call(chip, dtype)) is None


@interpreted
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"chip": "Tesla T4"}, "only Hopper"),
        ({"chip": "NVIDIA A100-SXM4-40GB"}, "only Hopper"),
        ({"chip": "NVIDIA B200"}, "tcgen05"),
        ({"chip": "NVIDIA GB200"}, "tcgen05"),
        ({"dtype": "float32"}, "tf32"),
        ({"dtype": "int8", "operand": "bfloat16"}, "pages of int8"),
        ({"operand": "float16"}, "float16 queries with bfloat16 pages"),
        ({"S": 4}, "page size 4"),
        ({"D": 112}, "head size 112"),
        ({"H": 71, "K": 1}, "71 query slots"),
    ],
)
def test_refuses_with_the_reason(wrong: dict[str, Any], reason: str) -> None:
    assert reason in (gpu.refuse(call(**wrong)) or "")


def test_an_older_jax_is_named() -> None:
    if jax.__version_info__[:2] < MIN_JAX:
        assert "needs jax 0.12" in (gpu.refuse(call()) or "")


def test_every_shape_fits_the_shared_memory() -> None:
    for prefill in (False, True):
        for head_dim in gpu.HEAD_SIZES:
            for page_size in gpu.PAGE_SIZES:
                for group in (1, 7, 64):
                    found = gpu.resources(prefill=prefill, head_dim=head_dim, page_size=page_size, group=group)
                    assert found["stages"] >= 2
                    assert found["smem_bytes"] <= SMEM_PER_BLOCK


def ranges(items: Any, row: int, block: int) -> list[tuple[int, int]]:
    mine = [(int(s), int(b)) for r, s, b in zip(items.row, items.start, items.blocks, strict=True) if r == row and b]
    return [(start, start + blocks * block) for start, blocks in mine]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows", [[5, 0, 7000, 64, 65], [0, 0, 0], [1] * 9, [8192, 8192]])
def test_decode_items_cover_each_context_once_and_evenly(rows: Sequence[int], window: int | None) -> None:
    cut = functools.partial(decode_items, window=window, items=len(rows) + 20, block=64, copy=16, least_blocks=2)
    items = jax.tree.map(np.asarray, jax.jit(cut)(jnp.array(rows, jnp.int32)))
    for row, context in enumerate(rows):
        begin = max(0, context - window) if window else 0
        found = ranges(items, row, 64)
        if not context:
            assert not found
            continue
        assert found[0][0] == begin // 16 * 16
        assert all(end == start for (_, end), (start, _) in zip(found, found[1:], strict=False))
        assert found[-1][1] - 64 < context <= found[-1][1]
    assert int(items.blocks.max()) <= max(2, -(-(sum(rows) // 64 + len(rows)) // 20) + 1)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [[64, 1, 0, 70], [0], [200]])
def test_prefill_items_cover_each_token_once(lengths: Sequence[int], window: int | None) -> None:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    rows = np.array([length and length + 300 for length in lengths], np.int32)
    most = sum(lengths) // 32 + len(lengths)
    cut = functools.partial(prefill_items, window=window, items=most, tokens=32, block=128, copy=16)
    items = jax.tree.map(np.asarray, jax.jit(cut)(starts, rows))
    covered = [int(t) + i for t, n in zip(items.token, items.tokens, strict=True) for i in range(int(n))]
    assert covered == list(range(sum(lengths)))
    for start, blocks, first, tokens in zip(items.start, items.blocks, items.first, items.tokens, strict=True):
        if tokens:
            assert start == (max(0, int(first) - window + 1) if window else 0) // 16 * 16
            assert start + (blocks - 1) * 128 < first + tokens <= start + blocks * 128
