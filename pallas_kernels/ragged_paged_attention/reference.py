"""Ragged paged attention in plain XLA, for every platform: two programs, one for decode steps and one for the rest.

Both walk a row's pages block by block in a `while_loop` whose trip count comes from the batch, so that the cost follows
the real context and not the longest allowed one, and keep a running maximum, sum and output (the online softmax of
Milakov and Gimelshein, arXiv:1805.02867, as in FlashAttention, arXiv:2205.14135), so that no score matrix is as wide
as the context. The pool is only ever read through gathers of one block: no copy of it, or of a layer, is made.

Dimension key: that of `pallas_kernels.batch`, and G query slots per KV slot, C pages in a block, X tokens in a block
(C * S), Q query tokens in a work item.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch

MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN


class Options(NamedTuple):
    """What the caller set; static."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None


def ragged_paged_attention(
    q_THD: jax.Array,
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Arguments and result as the public function's."""
    options = Options(scale, sliding_window, soft_cap)
    if q_THD.shape[0] == batch.context_lens.shape[0]:
        return _decode(q_THD, pages_LPKSW, layer, batch, options)
    return _prefill(q_THD, pages_LPKSW, layer, batch, options)


def _padded_table(page_table: jax.Array, block: int) -> jax.Array:
    """Page table [B, N] widened to whole blocks, for slices that must not be clamped."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block)))


def _decode(
    q_THD: jax.Array, pages_LPKSW: jax.Array, layer: int | jax.Array, batch: RaggedBatch, options: Options
) -> jax.Array:
    """One token a row: all rows step through their contexts together, from the first block that a window reaches."""
    B, H, D = q_THD.shape
    _, _, K, S, W = pages_LPKSW.shape
    G, N = H // K, batch.page_table.shape[1]
    C = min(N, 16)
    X = C * S
    table = batch.page_table
    context = batch.context_lens
    first_page = jnp.zeros_like(context)
    if options.sliding_window is not None:
        first_page = jnp.maximum(context - options.sliding_window, 0) // S
    q_BKGD = q_THD.reshape(B, K, G, D).astype(jnp.float32) * options.scale
    trips = jnp.max((context - first_page * S + X - 1) // X)

    def block(carry):
        i, peak, total, out = carry
        columns = first_page[:, None] + i * C + jnp.arange(C, dtype=jnp.int32)  # [B, C]
        ids = jnp.take_along_axis(table, jnp.minimum(columns, N - 1), axis=1)
        kv_BCKSW = pages_LPKSW.at[layer, ids].get(mode="clip").astype(jnp.float32)
        pos = columns[:, :, None] * S + jnp.arange(S, dtype=jnp.int32)  # [B, C, S]
        seen = pos < context[:, None, None]
        if options.sliding_window is not None:
            seen &= pos >= (context - options.sliding_window)[:, None, None]
        scores = jnp.einsum("bkgd,bcksd->bkgcs", q_BKGD, kv_BCKSW[..., :D])
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max((-1, -2)))
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - new_peak[..., None, None]), 0)
        shrink = jnp.exp(peak - new_peak)
        v = jnp.where(seen[:, :, None, :, None], kv_BCKSW[..., D : 2 * D], 0)
        out = out * shrink[..., None] + jnp.einsum("bkgcs,bcksd->bkgd", weights, v)
        return i + 1, new_peak, total * shrink + weights.sum((-1, -2)), out

    zero = jnp.zeros((B, K, G), jnp.float32)
    start = (jnp.int32(0), zero + MASKED, zero, jnp.zeros((B, K, G, D), jnp.float32))
    _, _, total, out = jax.lax.while_loop(lambda carry: carry[0] < trips, block, start)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    live = jnp.arange(B) < batch.query_starts[-1]
    return jnp.where(live[:, None, None], out.reshape(B, H, D), 0).astype(q_THD.dtype)


def _prefill(
    q_THD: jax.Array, pages_LPKSW: jax.Array, layer: int | jax.Array, batch: RaggedBatch, options: Options
) -> jax.Array:
    """Chunks: work items of up to Q query tokens of one row, each over the blocks of pages that its tokens can see."""
    T, H, D = q_THD.shape
    _, _, K, S, W = pages_LPKSW.shape
    B, N = batch.page_table.shape
    G = H // K
    Q = min(T, 64)
    C = min(N, 8)
    X = C * S
    table = _padded_table(batch.page_table, C)
    starts, context = batch.query_starts, batch.context_lens
    length = starts[1:] - starts[:-1]
    ends = jnp.cumsum((length + Q - 1) // Q)  # work items up to and with each row
    q_KTGD = q_THD.reshape(T, K, G, D).transpose(1, 0, 2, 3).astype(jnp.float32) * options.scale
    q_KTGD = jnp.pad(q_KTGD, ((0, 0), (0, Q), (0, 0), (0, 0)))
    offset = jnp.arange(Q, dtype=jnp.int32)

    def item(carry):
        i, out_KTGD = carry
        row = jnp.sum(ends <= i)
        part = i - jnp.where(row == 0, 0, ends[row - 1])
        token = starts[row] + part * Q
        left = length[row] - part * Q  # query tokens from here to the end of the row
        first = context[row] - left  # position of the first query token
        pos_q = first + offset
        last = first + jnp.minimum(left, Q) - 1
        q_KRD = jax.lax.dynamic_slice(q_KTGD, (0, token, 0, 0), (K, Q, G, D)).reshape(K, Q * G, D)
        begin = jnp.int32(0)
        if options.sliding_window is not None:
            begin = jnp.maximum(first - options.sliding_window + 1, 0) // X

        def block(carry):
            b, peak, total, out = carry
            ids = jax.lax.dynamic_slice(table, (row, b * C), (1, C))[0]
            kv_CKSW = pages_LPKSW.at[layer, ids].get(mode="clip").astype(jnp.float32)
            kv_KXW = kv_CKSW.transpose(1, 0, 2, 3).reshape(K, X, W)
            pos = b * X + jnp.arange(X, dtype=jnp.int32)
            seen = pos[None] <= pos_q[:, None]  # [Q, X]
            if options.sliding_window is not None:
                seen &= pos[None] > pos_q[:, None] - options.sliding_window
            seen_RX = jnp.repeat(seen, G, axis=0)
            scores = jnp.einsum("krd,kxd->krx", q_KRD, kv_KXW[..., :D])
            if options.soft_cap is not None:
                scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
            scores = jnp.where(seen_RX, scores, MASKED)
            new_peak = jnp.maximum(peak, scores.max(-1))
            weights = jnp.where(seen_RX, jnp.exp(scores - new_peak[..., None]), 0)
            shrink = jnp.exp(peak - new_peak)
            v = jnp.where((pos < context[row])[:, None], kv_KXW[..., D : 2 * D], 0)
            out = out * shrink[..., None] + jnp.einsum("krx,kxd->krd", weights, v)
            return b + 1, new_peak, total * shrink + weights.sum(-1), out

        zero = jnp.zeros((K, Q * G), jnp.float32)
        start = (begin, zero + MASKED, zero, jnp.zeros((K, Q * G, D), jnp.float32))
        _, _, total, out = jax.lax.while_loop(lambda carry: carry[0] * X <= last, block, start)
        out = (out / jnp.where(total == 0, 1, total)[..., None]).reshape(K, Q, G, D)
        # Rows come in order, so what is written past the end of this one is written again by the next; or stays zero.
        out = jnp.where((offset < left)[None, :, None, None], out, 0)
        return i + 1, jax.lax.dynamic_update_slice(out_KTGD, out, (0, token, 0, 0))

    out_KTGD = jnp.zeros((K, T + Q, G, D), jnp.float32)
    _, out_KTGD = jax.lax.while_loop(lambda carry: carry[0] < ends[-1], item, (jnp.int32(0), out_KTGD))
    return out_KTGD[:, :T].transpose(1, 0, 2, 3).reshape(T, H, D).astype(q_THD.dtype)
