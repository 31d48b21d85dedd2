"""Writes whole pages of all layers into a pool, from one array per KV slot: how a hand-off is accepted."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.dispatch import (
    AUTO,
    EVERYWHERE,
    GPU,
    GPU_INTERPRET,
    TPU,
    TPU_INTERPRET,
    XLA,
    Implementation,
    choose,
)
from pallas_kernels.scatter_pages import gpu, tpu
from pallas_kernels.scatter_pages.reference import scatter_pages as _xla
from pallas_kernels.scatter_pages.validate import validate

IMPLEMENTATIONS = (
    Implementation(TPU, ("tpu",), tpu.scatter_pages, "the Pallas kernel for TPU", tpu.refuse),
    Implementation(GPU, ("gpu",), gpu.scatter_pages, "TMA copies, for Hopper", gpu.refuse),
    Implementation(XLA, EVERYWHERE, _xla, "the XLA reference, which runs everywhere"),
    Implementation(
        TPU_INTERPRET, ("cpu",), functools.partial(tpu.scatter_pages, interpret=True),
        "the Pallas kernel for TPU under simulated memory", tpu.refuse,
    ),
    Implementation(
        GPU_INTERPRET, ("cpu",), functools.partial(gpu.scatter_pages, interpret=True),
        "the kernel for Hopper under simulated memory", gpu.refuse,
    ),
)  # fmt: skip


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
