"""Page reads on Hopper, by TMA; `pallas_kernels.gpu_pages` says how."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_pages import launch, plan, pump, refuse, tiled

__all__ = ["gather_pages", "refuse"]


def gather_pages(pages_LPKSW: jax.Array, page_ids_N: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Arguments and result as the public function's."""
    L, P, K, S, W = pages_LPKSW.shape
    N, dtype = page_ids_N.shape[0], pages_LPKSW.dtype
    shape = plan(L, N, K, S, W, dtype.itemsize)
    C = shape.pieces

    def gather_pages_kernel(k: int, block: jax.Array, ids: Any, pool: Any, *refs: Any) -> None:
        *heads, buffers, barriers = refs

        def address(piece: jax.Array) -> tuple[Any, Any]:
            tile, c = piece // C, piece % C
            layer, n = tile // N, tile % N
            page = jnp.clip(ids[n], 0, P - 1)
            return pool.at[((layer * P + page) * K + k) * C + c], heads[k].at[piece]

        pump(block, jnp.int32(L * N * C), shape, address, buffers, barriers)

    head = jax.ShapeDtypeStruct((L * N * C, shape.rows, 128), dtype)
    moved = L * N * K * S * W * dtype.itemsize
    run = launch(gather_pages_kernel, shape, K, dtype, moved, (head,) * K, interpret)
    return tuple(head.reshape(L, N, S, W) for head in run(page_ids_N, tiled(pages_LPKSW, shape)))
