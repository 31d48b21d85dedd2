"""Page reads in plain XLA: one gather per KV slot."""

from __future__ import annotations

import jax


def gather_pages(pages_LPKSW: jax.Array, page_ids_N: jax.Array) -> tuple[jax.Array, ...]:
    """Arguments and result as the public function's."""
    return tuple(pages_LPKSW.at[:, page_ids_N, k].get(mode="clip") for k in range(pages_LPKSW.shape[2]))
