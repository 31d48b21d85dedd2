"""Page writes of whole pages in plain XLA: one scatter, whose out-of-range ids are dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scatter_pages(pages_LPKSW: jax.Array, page_ids_N: jax.Array, heads: tuple[jax.Array, ...]) -> jax.Array:
    """Arguments and result as the public function's."""
    # A negative index would count from the end.
    ids = jnp.where(page_ids_N < 0, pages_LPKSW.shape[1], page_ids_N)
    for k, head in enumerate(heads):
        pages_LPKSW = pages_LPKSW.at[:, ids, k].set(head, mode="drop")
    return pages_LPKSW
