"""Writes the keys and values of a step's tokens into their pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.dispatch import choose, implementations
from pallas_kernels.names import AUTO
from pallas_kernels.write_pages import tpu
from pallas_kernels.write_pages.reference import write_pages as _xla
from pallas_kernels.write_pages.validate import validate


def _quantised(x_TKD: jax.Array, scale_K: jax.Array, dtype: Any) -> jax.Array:
    """x over its scale in an 8-bit dtype. float8_e4m3fn has no infinity: what is too large would become NaN."""
    x_TKD = x_TKD.astype(jnp.float32) / scale_K[:, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x_TKD), -127, 127).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x_TKD, -largest, largest).astype(dtype)


IMPLEMENTATIONS = implementations(_xla, tpu=(tpu.write_pages, tpu.refuse))


def write_pages(
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    batch: RaggedBatch,
    *,
    kv_scales_2K: jax.Array | None = None,
    implementation: str = AUTO,
) -> jax.Array:
    """The pool with each live token's key and value in its page, slot and KV slots; in place where the pool is donated.

    pages_LPKSW: [L, P, K, S, W]; k_TKD, v_TKD: [T, K, D] float, rounded to the pool's dtype.
    layer: which L, a Python int or an int32 scalar. batch: shapes as in `RaggedBatch`.
    kv_scales_2K: [2, K] float32, with int8 and float8_e4m3fn pages: what is stored is the key over `[0, k]` and the
        value over `[1, k]`, rounded to the nearest and clipped to what the dtype holds (127, 448).
    implementation: "auto" or a name from IMPLEMENTATIONS.

    Padding tokens (`token_page` of P or more) never write. No two live tokens share a page and slot. Raises ValueError,
    which names argument, value and limit, for shapes that do not fit, or an implementation that cannot run.
    """
    validate(pages_LPKSW, layer, k_TKD, v_TKD, batch, kv_scales_2K)
    T, K, D = k_TKD.shape
    S, W = pages_LPKSW.shape[3:]
    B, N = batch.page_table.shape
    shapes = {"T": T, "B": B, "N": N, "K": K, "D": D, "S": S, "W": W}
    chosen = choose(
        "write_pages", IMPLEMENTATIONS, implementation, dtype=pages_LPKSW.dtype, operand=k_TKD.dtype, shapes=shapes
    )
    return _run(pages_LPKSW, jnp.asarray(layer, jnp.int32), k_TKD, v_TKD, batch, kv_scales_2K, run=chosen.run)


# One trace for all layers that are alike, instead of one for each.
@functools.partial(jax.jit, static_argnames="run")
def _run(
    pages_LPKSW: jax.Array,
    layer: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    batch: RaggedBatch,
    kv_scales_2K: jax.Array | None,
    *,
    run: Callable[..., jax.Array],
) -> jax.Array:
    if kv_scales_2K is not None:
        k_TKD, v_TKD = (_quantised(x, s, pages_LPKSW.dtype) for x, s in zip((k_TKD, v_TKD), kv_scales_2K, strict=True))
    return run(pages_LPKSW, layer, k_TKD, v_TKD, batch)
