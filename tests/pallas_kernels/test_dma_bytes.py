"""What the attention kernel says that it reads is what the DMAs that the interpreter executes copy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.dma_count import counting_dmas
from pallas_kernels.batch import lanes
from pallas_kernels.ragged_paged_attention import tpu
from pallas_kernels.ragged_paged_attention.random_batch import Shape, random_case
from pallas_kernels.ragged_paged_attention.tpu_blocks import Blocks, Sizes, full_batch, kv_bytes_read

SMALL = [
    (Shape(3, 3, 2, 4, 64), Blocks(1, 8, 3, 2, 3, 1)),
    (Shape(40, 2, 1, 2, 128, page_size=8), Blocks(16, 2, 1, 3, 2, 2)),
]


def sizes_of(shape: Shape) -> Sizes:
    return Sizes(
        shape.tokens, shape.rows, shape.table, shape.kv_slots, shape.group, shape.head_dim, shape.page_size,
        lanes(shape.head_dim), jnp.dtype(shape.kv_dtype or shape.dtype).itemsize, jnp.dtype(shape.dtype).itemsize,
    )  # fmt: skip


def counted(shape: Shape, blocks: Blocks, lengths: list[int], contexts: list[int], window: int | None) -> int:
    case = random_case(shape, lengths, contexts, seed=0)
    with counting_dmas() as dmas:
        tpu.ragged_paged_attention(
            case.q_THD, case.pages_LPKSW, case.layer, case.batch,
            scale=1.0, sliding_window=window, soft_cap=None, sinks_H=None, interpret=True, blocks=blocks,
        ).block_until_ready()  # fmt: skip
    return dmas.num_bytes


@pytest.mark.parametrize(("shape", "blocks"), SMALL, ids=["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 20])
def test_only_live_pages_are_read_as_often_as_the_formula_says(
    shape: Shape, blocks: Blocks, window: int | None
) -> None:
    lengths, contexts = ([1, 1], [50, 17]) if shape.tokens == shape.rows else ([20, 7], [50, 7])
    expected = kv_bytes_read(sizes_of(shape), blocks, np.array(lengths), np.array(contexts), window)
    assert counted(shape, blocks, lengths, contexts, window) == expected > 0


@pytest.mark.parametrize(("shape", "blocks"), SMALL, ids=["decode", "prefill"])
def test_the_cost_estimate_is_that_of_the_largest_batch(shape: Shape, blocks: Blocks) -> None:
    sizes = sizes_of(shape)
    lengths, contexts = full_batch(sizes)
    read = counted(shape, blocks, lengths.tolist(), contexts.tolist(), None)
    items = int((-(-lengths // blocks.query_tokens)).sum())
    item_bytes = sizes.K * blocks.rows * (sizes.key_lanes + sizes.value_lanes) * sizes.query_bytes
    assert tpu.cost_estimate(sizes, blocks, None).bytes_accessed == read + items * item_bytes
