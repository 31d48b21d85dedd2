"""Reads whole pages of all layers out of a pool, one array per KV slot: what a hand-off stages."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import choose, implementations
from pallas_kernels.gather_pages import gpu, tpu
from pallas_kernels.gather_pages.reference import gather_pages as _xla
from pallas_kernels.gather_pages.validate import validate
from pallas_kernels.names import AUTO

IMPLEMENTATIONS = implementations(_xla, tpu=(tpu.gather_pages, tpu.refuse), gpu=(gpu.gather_pages, gpu.refuse))


def gather_pages(pages_LPKSW: jax.Array, page_ids_N: jax.Array, *, implementation: str = AUTO) -> tuple[jax.Array, ...]:
    """K arrays [L, N, S, W], the dtype of the pool: the pages `page_ids_N` (int32) of each KV slot.

    Ids out of range are clamped: what stands there is for the caller to ignore. `implementation`: "auto" or a name from
    IMPLEMENTATIONS. Raises ValueError, which names argument, value and limit, for shapes that do not fit.
    """
    validate(pages_LPKSW, page_ids_N)
    L, P, K, S, W = pages_LPKSW.shape
    shapes = {"L": L, "N": page_ids_N.shape[0], "K": K, "S": S, "W": W}
    chosen = choose("gather_pages", IMPLEMENTATIONS, implementation, dtype=pages_LPKSW.dtype, shapes=shapes)
    return chosen.run(pages_LPKSW, page_ids_N)
