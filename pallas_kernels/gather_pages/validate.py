"""Checks a call of `gather_pages` while it is traced."""

from __future__ import annotations

import jax

from pallas_kernels.checks import check_page_ids, check_pool


def validate(pages_LPKSW: jax.Array, page_ids_N: jax.Array) -> None:
    """Raises ValueError that names the argument, its value and its limit."""
    check_pool(pages_LPKSW)
    check_page_ids(page_ids_N)
