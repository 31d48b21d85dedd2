"""Cuts a batch into the work items of the Mosaic GPU kernels, in XLA, before the kernels run.

An item is what one CUDA block does for one KV slot. A decode item is a run of blocks of one row's context; the items
are about equally large, however unequal the rows, so that a long row among short ones is shared by many CUDA blocks. A
prefill item is up to Q query tokens of one row with all the context that any of them sees.

Dimension key: that of `pallas_kernels.batch`, and I items, X tokens in a block, R tokens in one copy (a page, or as
much of it as fits a block).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Items(NamedTuple):
    """int32 arrays [I]; an item with no blocks is not there."""

    row: jax.Array
    start: jax.Array  # position of the first token of its first block, at a page or a multiple of R in one
    blocks: jax.Array  # blocks of X tokens
    token: jax.Array  # prefill: first flat query token. Decode: the row's
    first: jax.Array  # position of its first query token
    tokens: jax.Array  # query tokens
    context: jax.Array  # of its row

    def packed(self) -> jax.Array:
        """[I, 8], what the kernels read, field by field in this order."""
        return jnp.stack([*self, jnp.zeros_like(self.row)], axis=1)


def _own(ends_B: jax.Array, items: int) -> tuple[jax.Array, jax.Array]:
    """(row, live) [I] of each item, given the items up to and with each row."""
    item_I = jnp.arange(items, dtype=jnp.int32)
    row_I = jnp.sum(ends_B <= item_I[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(row_I, ends_B.shape[0] - 1), item_I < ends_B[-1]


def decode_items(
    context_B: jax.Array, window: int | None, *, items: int, block: int, copy: int, least_blocks: int
) -> Items:
    """At most `items` items, which must be more than the rows; those of one row are equally large, but for the last."""
    B = context_B.shape[0]
    begin_B = jnp.zeros_like(context_B)
    if window is not None:
        begin_B = jnp.maximum(context_B - window, 0)
    start_B = begin_B // copy * copy
    blocks_B = (context_B - start_B + block - 1) // block
    # Rounding up costs less than one item a row.
    most = jnp.maximum((jnp.sum(blocks_B) + items - B - 1) // (items - B), least_blocks)
    items_B = (blocks_B + most - 1) // most
    ends_B = jnp.cumsum(items_B, dtype=jnp.int32)
    row_I, live_I = _own(ends_B, items)
    share_I = ((blocks_B + items_B - 1) // jnp.maximum(items_B, 1))[row_I]
    before_I = (jnp.arange(items, dtype=jnp.int32) - (ends_B - items_B)[row_I]) * share_I  # the row's blocks before it
    blocks_I = jnp.where(live_I, jnp.clip(blocks_B[row_I] - before_I, 0, share_I), 0)
    context_I = context_B[row_I]
    return Items(
        row_I, jnp.where(live_I, start_B[row_I] + before_I * block, 0), blocks_I, row_I, context_I - 1,
        jnp.where(live_I, 1, 0), context_I,
    )  # fmt: skip


def prefill_items(
    starts: jax.Array, context_B: jax.Array, window: int | None, *, items: int, tokens: int, block: int, copy: int
) -> Items:
    """At most `items` items, which must be T // tokens + B."""
    length_B = starts[1:] - starts[:-1]
    items_B = (length_B + tokens - 1) // tokens
    ends_B = jnp.cumsum(items_B, dtype=jnp.int32)
    row_I, live_I = _own(ends_B, items)
    done_I = (jnp.arange(items, dtype=jnp.int32) - (ends_B - items_B)[row_I]) * tokens
    tokens_I = jnp.where(live_I, jnp.minimum(length_B[row_I] - done_I, tokens), 0)
    context_I = context_B[row_I]
    first_I = context_I - length_B[row_I] + done_I
    begin_I = jnp.zeros_like(first_I)
    if window is not None:
        begin_I = jnp.maximum(first_I - window + 1, 0)
    start_I = begin_I // copy * copy
    blocks_I = jnp.where(live_I, (first_I + tokens_I - start_I + block - 1) // block, 0)
    return Items(row_I, start_I, blocks_I, starts[row_I] + done_I, first_I, tokens_I, context_I)
