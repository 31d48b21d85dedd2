"""The ragged batch that every kernel takes: flat tokens plus, per sequence, its length, cached length and page table.

Dimension key: T tokens, B sequences (rows), N pages per table, S slots in a page, P pages, L layers, K KV slots,
H query slots, D head size, W lanes (K and V packed side by side, 2 x D rounded up to 128).

Rows are filled from the front; an unused row has query length 0 and context length 0. Tokens beyond
`query_starts[B]` are padding: their `token_page` is P, which no page has, so that they never write.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RaggedBatch(NamedTuple):
    """int32 arrays describing one replica's step; `ragged_batch` derives the per-token ones."""

    query_starts: jax.Array  # [B + 1] first flat token of each row; the last entry is the number of live tokens
    context_lens: jax.Array  # [B] tokens in the cache once this step has written, 0 for an unused row
    page_table: jax.Array  # [B, N] page ids, only the first ceil(context / S) of a row are read
    token_row: jax.Array  # [T] row of each token
    token_pos: jax.Array  # [T] position of each token in its sequence
    token_page: jax.Array  # [T] page each token writes to; P for padding
    token_slot: jax.Array  # [T] slot within that page


def lanes(head_dim: int) -> int:
    """W: lanes of one token and head in the pool, K and V side by side, rounded up to 128."""
    return -(-2 * head_dim // 128) * 128


def ragged_batch(
    query_starts: jax.Array,
    context_lens: jax.Array,
    page_table: jax.Array,
    *,
    num_tokens: int,
    page_size: int,
    num_pages: int,
) -> RaggedBatch:
    """Derives the per-token arrays once a step, so that layers share them. Shapes as in `RaggedBatch`."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = context_lens.shape[0]
    if num_tokens == rows:  # one token a row: a decode step, row i is token i
        row = token
    else:
        row = jnp.minimum(jnp.searchsorted(query_starts[1:], token, side="right"), rows - 1).astype(jnp.int32)
    live = token < query_starts[-1]
    query_len = query_starts[row + 1] - query_starts[row]
    pos = jnp.where(live, context_lens[row] - query_len + token - query_starts[row], 0)
    page = jnp.where(live, page_table[row, pos // page_size], num_pages)
    return RaggedBatch(query_starts, context_lens, page_table, row, pos, page, pos % page_size)
