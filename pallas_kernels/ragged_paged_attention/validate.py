"""Checks a call of `ragged_paged_attention` while it is traced: shapes, dtypes and options."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.checks import check_batch, check_lanes, check_layer, check_pool, check_scales, need_float


def validate(
    q_THD: jax.Array,
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks_H: jax.Array | None,
    kv_scales_2K: jax.Array | None,
) -> None:
    """Raises ValueError that names the argument, its value and its limit."""
    if q_THD.ndim != 3:
        raise ValueError(f"q_THD has shape {q_THD.shape}, need 3 axes [T, H, D]")
    need_float("q_THD", q_THD)
    check_pool(pages_LPKSW)
    T, H, D = q_THD.shape
    K = pages_LPKSW.shape[2]
    if H < K or H % K:
        raise ValueError(f"q_THD has {H} query slots, need a multiple of the {K} KV slots of pages_LPKSW")
    check_lanes("q_THD", D, pages_LPKSW)
    check_layer(layer, pages_LPKSW)
    check_batch(batch, T)
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r}, need a finite number above 0 (usually head_dim ** -0.5)")
    if sliding_window is not None and not (isinstance(sliding_window, int) and sliding_window >= 1):
        raise ValueError(f"sliding_window={sliding_window!r}, need an int of at least 1, or None for the whole context")
    if soft_cap is not None and not (isinstance(soft_cap, (int, float)) and math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap={soft_cap!r}, need a finite number above 0, or None for no cap")
    if sinks_H is not None and (sinks_H.shape != (H,) or sinks_H.dtype != jnp.float32):
        raise ValueError(f"sinks_H has shape {sinks_H.shape} and dtype {sinks_H.dtype}, need float32 {(H,)}")
    check_scales(kv_scales_2K, pages_LPKSW)
