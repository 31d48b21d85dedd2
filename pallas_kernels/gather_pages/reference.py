"""Page reads in plain XLA: one gather per KV slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gather_pages(pages_LPKSW: jax.Array, page_ids_N: jax.Array) -> tuple[jax.Array, ...]:
    """Arguments and result as the public function's."""
    ids_N = jnp.clip(page_ids_N, 0, pages_LPKSW.shape[1] - 1)  # "clip" alone would count negative ids from the end
    return tuple(pages_LPKSW.at[:, ids_N, k].get(mode="promise_in_bounds") for k in range(pages_LPKSW.shape[2]))
