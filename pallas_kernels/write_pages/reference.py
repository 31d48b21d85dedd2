"""Page writes in plain XLA: one scatter, whose out-of-range indices (padding) are dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch


def write_pages(
    pages_LPKSW: jax.Array, layer: int | jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, batch: RaggedBatch
) -> jax.Array:
    """Arguments and result as the public function's."""
    D, W = k_TKD.shape[2], pages_LPKSW.shape[4]
    kv_TKW = jnp.concatenate([k_TKD, v_TKD], axis=-1).astype(pages_LPKSW.dtype)
    kv_TKW = jnp.pad(kv_TKW, ((0, 0), (0, 0), (0, W - 2 * D)))
    return pages_LPKSW.at[layer, batch.token_page, :, batch.token_slot].set(kv_TKW, mode="drop")
