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
    if kv_TKW.shape[0] == 1:
        return _write_one(pages_LPKSW, layer, kv_TKW[0], batch.token_page[0], batch.token_slot[0])
    return pages_LPKSW.at[layer, batch.token_page, :, batch.token_slot].set(kv_TKW, mode="drop")


def _write_one(
    pages_LPKSW: jax.Array, layer: int | jax.Array, kv_KW: jax.Array, page: jax.Array, slot: jax.Array
) -> jax.Array:
    """A loop of one round, or of none for padding: XLA makes a scatter of one index a select that copies the pool."""
    K, W = kv_KW.shape

    def write(_: jax.Array, pages_LPKSW: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(pages_LPKSW, kv_KW.reshape(1, 1, K, 1, W), (layer, page, 0, slot, 0))

    rounds = (page < pages_LPKSW.shape[1]).astype(jnp.int32)
    return jax.lax.fori_loop(0, rounds, write, pages_LPKSW)
