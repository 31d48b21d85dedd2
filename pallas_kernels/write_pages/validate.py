"""Checks a call of `write_pages` while it is traced."""

from __future__ import annotations

import jax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.checks import check_batch, check_lanes, check_layer, check_pool, check_scales, need_float


def validate(
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    batch: RaggedBatch,
    kv_scales_2K: jax.Array | None,
) -> None:
    """Raises ValueError that names the argument, its value and its limit."""
    check_pool(pages_LPKSW)
    K = pages_LPKSW.shape[2]
    for name, array in (("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        if array.ndim != 3 or array.shape[1] != K:
            raise ValueError(f"{name} has shape {array.shape}, need [T, {K}, D]: pages_LPKSW has {K} KV slots")
        need_float(name, array)
    if k_TKD.shape != v_TKD.shape:
        raise ValueError(f"v_TKD has shape {v_TKD.shape}, need that of k_TKD, {k_TKD.shape}")
    check_lanes("k_TKD", k_TKD.shape[2], pages_LPKSW)
    check_layer(layer, pages_LPKSW)
    check_batch(batch, k_TKD.shape[0])
    check_scales(kv_scales_2K, pages_LPKSW)
