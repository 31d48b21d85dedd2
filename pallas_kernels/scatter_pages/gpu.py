"""Page writes on Hopper, by TMA, into the pool where it stands; `pallas_kernels.gpu_pages` says how."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_pages import launch, plan, pump, refuse, tiled

__all__ = ["scatter_pages", "refuse"]


def scatter_pages(
    pages_LPKSW: jax.Array, page_ids_N: jax.Array, heads: tuple[jax.Array, ...], *, interpret: bool = False
) -> jax.Array:
    """Arguments and result as the public function's."""
    L, P, K, S, W = pages_LPKSW.shape
    N, dtype = page_ids_N.shape[0], pages_LPKSW.dtype
    shape = plan(L, N, K, S, W, dtype.itemsize)
    C = shape.pieces

    def scatter_pages_kernel(k: int, block: jax.Array, live: Any, *refs: Any) -> None:
        *heads, pool, buffers, barriers = refs
        count = live[2 * N]

        def address(piece: jax.Array) -> tuple[Any, Any]:
            tile, c = piece // C, piece % C
            layer, i = tile // count, tile % count
            source = (layer * N + live[i]) * C + c
            return heads[k].at[source], pool.at[((layer * P + live[N + i]) * K + k) * C + c]

        pump(block, L * count * C, shape, address, buffers, barriers)

    moved = L * N * K * S * W * dtype.itemsize
    run = launch(scatter_pages_kernel, shape, K, dtype, moved, (), interpret)
    # A mutable array is aliased, input to output: with the pool donated nothing is copied.
    pool = jax.new_ref(tiled(pages_LPKSW, shape))
    run(live_first(page_ids_N, P), *(tiled(head, shape) for head in heads), pool)
    return jax.freeze(pool).reshape(pages_LPKSW.shape)


def live_first(page_ids_N: jax.Array, num_pages: int) -> jax.Array:
    """[2 N + 1] int32: which ids are within the pool, in order (N entries), those ids (N), and how many there are.

    So a page that is dropped costs nothing, and the kernel has no branch for it. By comparing each with each, which is
    one small fusion where a sort would be a kernel of its own.
    """
    N = page_ids_N.shape[0]
    index_N = jnp.arange(N, dtype=jnp.int32)
    valid_N = (page_ids_N >= 0) & (page_ids_N < num_pages)
    rank_N = jnp.sum(valid_N & (index_N < index_N[:, None]), axis=1, dtype=jnp.int32)
    at_NN = valid_N & (rank_N == index_N[:, None])
    source_N = jnp.sum(jnp.where(at_NN, index_N, 0), axis=1, dtype=jnp.int32)
    page_N = jnp.sum(jnp.where(at_NN, page_ids_N, 0), axis=1, dtype=jnp.int32)
    return jnp.concatenate([source_N, page_N, jnp.sum(valid_N, dtype=jnp.int32)[None]])
