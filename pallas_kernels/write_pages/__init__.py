"""Writes the keys and values of a step's tokens into their pages."""

from __future__ import annotations

import jax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.dispatch import AUTO, EVERYWHERE, Implementation, choose
from pallas_kernels.write_pages.reference import write_pages as _xla
from pallas_kernels.write_pages.validate import validate

IMPLEMENTATIONS = (Implementation("xla", EVERYWHERE, _xla, "the XLA reference, which runs everywhere"),)


def write_pages(
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    batch: RaggedBatch,
    *,
    implementation: str = AUTO,
) -> jax.Array:
    """The pool with each live token's key and value in its page, slot and KV slots; in place where the pool is donated.

    pages_LPKSW: [L, P, K, S, W] float; k_TKD, v_TKD: [T, K, D] float, rounded to the pool's dtype.
    layer: which L, a Python int or an int32 scalar. batch: shapes as in `RaggedBatch`.
    implementation: "auto" or a name from IMPLEMENTATIONS.

    Padding tokens (`token_page` of P or more) never write. No two live tokens share a page and slot. Raises ValueError,
    which names argument, value and limit, for shapes that do not fit, or an implementation that cannot run.
    """
    validate(pages_LPKSW, layer, k_TKD, v_TKD, batch)
    T, K, D = k_TKD.shape
    S, W = pages_LPKSW.shape[3:]
    shapes = {"T": T, "B": batch.context_lens.shape[0], "K": K, "D": D, "S": S, "W": W}
    chosen = choose("write_pages", IMPLEMENTATIONS, implementation, dtype=pages_LPKSW.dtype, shapes=shapes)
    return chosen.run(pages_LPKSW, layer, k_TKD, v_TKD, batch)
