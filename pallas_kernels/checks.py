"""Checks that several operations share. All look at shapes and dtypes only, so they run while a program is traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch, lanes

EIGHT_BIT = ("int8", "float8_e4m3fn")
POOL_DTYPES = ("float32", "bfloat16", "float16", *EIGHT_BIT)


def need_float(name: str, array: jax.Array) -> None:
    """Raises ValueError unless the array holds floating-point numbers."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {array.dtype}, need a floating-point dtype")


def need_int32(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the array is int32 of that shape."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, need {shape}")
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} has dtype {array.dtype}, need int32")


def check_pool(pages_LPKSW: jax.Array) -> None:
    """Raises ValueError unless this is a page pool."""
    if pages_LPKSW.ndim != 5 or 0 in pages_LPKSW.shape:
        raise ValueError(f"pages_LPKSW has shape {pages_LPKSW.shape}, need 5 axes [L, P, K, S, W], each at least 1")
    if str(pages_LPKSW.dtype) not in POOL_DTYPES:
        raise ValueError(f"pages_LPKSW has dtype {pages_LPKSW.dtype}, need one of {', '.join(POOL_DTYPES)}")


def check_scales(kv_scales_2K: jax.Array | None, pages_LPKSW: jax.Array) -> None:
    """Raises ValueError unless the scales are those of the pool: needed with 8-bit pages, wrong with wider ones."""
    K, narrow = pages_LPKSW.shape[2], str(pages_LPKSW.dtype) in EIGHT_BIT
    if kv_scales_2K is None:
        if narrow:
            raise ValueError(
                f"kv_scales_2K is None, but pages_LPKSW holds {pages_LPKSW.dtype}: give float32 [2, {K}], what one "
                "unit of a stored key and of a stored value is worth in each KV slot"
            )
        return
    if not narrow:
        raise ValueError(f"kv_scales_2K is given, but pages_LPKSW holds {pages_LPKSW.dtype}: need None for it")
    if kv_scales_2K.shape != (2, K) or kv_scales_2K.dtype != jnp.float32:
        raise ValueError(
            f"kv_scales_2K has shape {kv_scales_2K.shape} and dtype {kv_scales_2K.dtype}, need float32 {(2, K)}"
        )


def check_lanes(name: str, head_dim: int, pages_LPKSW: jax.Array) -> None:
    """Raises ValueError unless the pool's lanes are those of this head size."""
    W = pages_LPKSW.shape[4]
    if W != lanes(head_dim):
        raise ValueError(
            f"{name} has head size {head_dim}, whose pages have {lanes(head_dim)} lanes, but pages_LPKSW has {W}: "
            "make the pool with pallas_kernels.batch.lanes(head_dim)"
        )


def check_layer(layer: int | jax.Array, pages_LPKSW: jax.Array) -> None:
    """Raises ValueError unless `layer` is an int within the pool or an int32 scalar."""
    L = pages_LPKSW.shape[0]
    if isinstance(layer, int):
        if not 0 <= layer < L:
            raise ValueError(f"layer={layer}, need 0 to {L - 1}: pages_LPKSW has {L} layers")
    else:
        need_int32("layer", layer, ())


def check_batch(batch: RaggedBatch, num_tokens: int) -> None:
    """Raises ValueError unless the batch's arrays are int32, fit one another and have `num_tokens` tokens."""
    if batch.context_lens.ndim != 1 or batch.context_lens.shape[0] < 1:
        raise ValueError(f"batch.context_lens has shape {batch.context_lens.shape}, need [B] with B at least 1")
    B = batch.context_lens.shape[0]
    if batch.page_table.ndim != 2 or batch.page_table.shape[1] < 1:
        raise ValueError(f"batch.page_table has shape {batch.page_table.shape}, need [B, N] with N at least 1")
    need_int32("batch.context_lens", batch.context_lens, (B,))
    need_int32("batch.query_starts", batch.query_starts, (B + 1,))
    need_int32("batch.page_table", batch.page_table, (B, batch.page_table.shape[1]))
    for name in ("token_row", "token_pos", "token_page", "token_slot"):
        need_int32(f"batch.{name}", getattr(batch, name), (num_tokens,))


def check_page_ids(page_ids_N: jax.Array) -> None:
    """Raises ValueError unless this is a vector of int32 page ids."""
    if page_ids_N.ndim != 1:
        raise ValueError(f"page_ids_N has shape {page_ids_N.shape}, need one axis [N]")
    need_int32("page_ids_N", page_ids_N, page_ids_N.shape)
