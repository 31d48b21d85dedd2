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
    page_T, slot_T = batch.token_page, batch.token_slot
    if page_T.shape[0] == 1:
        # XLA turns a scatter of one index into a select and an update that copy the whole pool (seen on CPU, jax
        # 0.10.2); a second index that is dropped keeps it a scatter, in place.
        page_T = jnp.concatenate([page_T, jnp.full(1, pages_LPKSW.shape[1], page_T.dtype)])
        slot_T, kv_TKW = jnp.repeat(slot_T, 2), jnp.repeat(kv_TKW, 2, axis=0)
    return pages_LPKSW.at[layer, page_T, :, slot_T].set(kv_TKW, mode="drop")
