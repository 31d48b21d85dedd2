"""Writes whole pages of all layers into a pool, from one array per KV slot: how a hand-off is accepted."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import choose, implementations
from pallas_kernels.names import AUTO
from pallas_kernels.scatter_pages import gpu, tpu
from pallas_kernels.scatter_pages.reference import scatter_pages as _xla
from pallas_kernels.scatter_pages.validate import validate

IMPLEMENTATIONS = implementations(_xla, tpu=(tpu.scatter_pages, tpu.refuse), gpu=(gpu.scatter_pages, gpu.refuse))


def scatter_pages(
    pages_LPKSW: jax.Array, page_ids_N: jax.Array, heads: tuple[jax.Array, ...], *, implementation: str = AUTO
) -> jax.Array:
    """The pool with `heads[k][:, n]` in page `page_ids_N[n]` of KV slot k; in place where the pool is donated.

    pages_LPKSW: [L, P, K, S, W]; page_ids_N: [N] int32, those within [0, P) all different; heads: K arrays
    [L, N, S, W] of the pool's dtype. Pages with an id out of range are dropped. `implementation`: "auto" or a name from
    IMPLEMENTATIONS. Raises ValueError, which names argument, value and limit, for shapes or dtypes that do not fit.
    """
    validate(pages_LPKSW, page_ids_N, heads)
    L, P, K, S, W = pages_LPKSW.shape
    shapes = {"L": L, "N": page_ids_N.shape[0], "K": K, "S": S, "W": W}
    chosen = choose("scatter_pages", IMPLEMENTATIONS, implementation, dtype=pages_LPKSW.dtype, shapes=shapes)
    return chosen.run(pages_LPKSW, page_ids_N, heads)
