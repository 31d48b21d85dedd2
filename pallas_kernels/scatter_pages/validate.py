"""Checks a call of `scatter_pages` while it is traced."""

from __future__ import annotations

import jax

from pallas_kernels.checks import check_page_ids, check_pool


def validate(pages_LPKSW: jax.Array, page_ids_N: jax.Array, heads: tuple[jax.Array, ...]) -> None:
    """Raises ValueError that names the argument, its value and its limit."""
    check_pool(pages_LPKSW)
    check_page_ids(page_ids_N)
    L, _, K, S, W = pages_LPKSW.shape
    if len(heads) != K:
        raise ValueError(f"heads has {len(heads)} arrays, need {K}: one for each KV slot of pages_LPKSW")
    shape = (L, page_ids_N.shape[0], S, W)
    for k, head in enumerate(heads):
        if head.shape != shape:
            raise ValueError(f"heads[{k}] has shape {head.shape}, need {shape}")
        if head.dtype != pages_LPKSW.dtype:
            raise ValueError(f"heads[{k}] has dtype {head.dtype}, need that of pages_LPKSW, {pages_LPKSW.dtype}")
