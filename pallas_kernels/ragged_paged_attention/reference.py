"""Ragged paged attention in plain XLA, for every platform: two programs, one for decode steps and one for the rest.

Both cut the work into items (a row and some of its pages, or a row and some of its query tokens) and walk them in a
`while_loop` whose trip count comes from the batch, so that the cost follows the real context and neither the longest
allowed one nor the length of the page table. Both keep a running maximum, sum and output (the online softmax of
Milakov and Gimelshein, arXiv:1805.02867, tiled as in FlashAttention, arXiv:2205.14135), so that no array of scores is
as wide as the context. The pool is only read, through gathers of one block: no copy of it, or of a layer, is made.

Pages are gathered with the KV slot in front of the page, so that each slot's keys stand in one matrix: XLA's CPU
backend then calls its matrix library without a transpose. Block sizes were chosen on a 2-core x86-64 CPU with
benchmarks/attention_cpu.py.

Dimension key: that of `pallas_kernels.batch`, and G query slots per KV slot, C pages in a block, X tokens in a block
(C * S), M items in a decode block, Q query tokens in a prefill item, R rows of an item's query matrix (Q * G).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch

MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN
BLOCK_TOKENS = 64  # X
BLOCK_TOKENS_ONE_ROW = 128  # X of a decode step with one row: fewer, larger blocks
MAX_DECODE_ITEMS = 32  # M
QUERY_TOKENS = 64  # Q


Running = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # next block; maximum, sum and output so far


class Options(NamedTuple):
    """What the caller set."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks_H: jax.Array | None

    def begin(self, K: int, G: int) -> tuple[jax.Array, jax.Array]:
        """Maximum and sum [K, G] of each query slot before it has seen a token: a sink is one score of weight 1."""
        if self.sinks_H is None:
            return jnp.full((K, G), MASKED, jnp.float32), jnp.zeros((K, G), jnp.float32)
        return self.sinks_H.reshape(K, G), jnp.ones((K, G), jnp.float32)


def ragged_paged_attention(
    q_THD: jax.Array,
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Arguments and result as the public function's."""
    options = Options(scale, sliding_window, soft_cap, sinks_H)
    if q_THD.shape[0] == batch.context_lens.shape[0]:
        return _decode(q_THD, pages_LPKSW, layer, batch, options)
    return _prefill(q_THD, pages_LPKSW, layer, batch, options)


def _gather(
    pages_LPKSW: jax.Array, layer: int | jax.Array, ids_IC: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [I, K, X, D] in float32 of I runs of C pages; ids out of range are clamped."""
    K, S, W = pages_LPKSW.shape[2:]
    slots = jnp.arange(K, dtype=jnp.int32)[None, :, None]
    kv_IKCSW = pages_LPKSW.at[layer, ids_IC[:, None, :], slots].get(mode="clip").astype(jnp.float32)
    kv_IKXW = kv_IKCSW.reshape(ids_IC.shape[0], K, ids_IC.shape[1] * S, W)
    return kv_IKXW[..., :head_dim], kv_IKXW[..., head_dim : 2 * head_dim]


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Float32 through and through, also where the hardware would rather round the operands."""
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _decode(
    q_THD: jax.Array, pages_LPKSW: jax.Array, layer: int | jax.Array, batch: RaggedBatch, options: Options
) -> jax.Array:
    """One token a row. An item is X tokens of a row's context; a block of the loop takes M items, whosever they are.

    So the cost is that of all rows' pages, however unequal the rows, each from the first page that its window reaches.
    """
    B, H, D = q_THD.shape
    K, S = pages_LPKSW.shape[2:4]
    N = batch.page_table.shape[1]
    G = H // K
    C = min(N, max(1, (BLOCK_TOKENS_ONE_ROW if B == 1 else BLOCK_TOKENS) // S))
    X, M = C * S, min(B, MAX_DECODE_ITEMS)
    context_B = batch.context_lens
    begin_B = jnp.zeros_like(context_B)  # first position that the row sees
    if options.sliding_window is not None:
        begin_B = jnp.maximum(context_B - options.sliding_window, 0)
    first_page_B = begin_B // S
    items_B = (context_B - first_page_B * S + X - 1) // X
    ends_B = jnp.cumsum(items_B)  # items up to and with each row
    q_BKGD = q_THD.reshape(B, K, G, D).astype(jnp.float32) * options.scale

    def block(carry: Running) -> Running:
        i, peak_BKG, total_BKG, out_BKGD = carry
        item_M = i * M + jnp.arange(M, dtype=jnp.int32)
        row_M = jnp.minimum(jnp.sum(ends_B <= item_M[:, None], axis=1, dtype=jnp.int32), B - 1)
        page_M = first_page_B[row_M] + (item_M - ends_B[row_M] + items_B[row_M]) * C
        page_MC = page_M[:, None] + jnp.arange(C, dtype=jnp.int32)
        last_M = jnp.maximum(context_B[row_M] - 1, 0) // S
        ids_MC = batch.page_table[row_M[:, None], jnp.minimum(page_MC, last_M[:, None])]
        k_MKXD, v_MKXD = _gather(pages_LPKSW, layer, ids_MC, D)
        pos_MX = page_M[:, None] * S + jnp.arange(X, dtype=jnp.int32)
        seen_MX = pos_MX < jnp.where(item_M < ends_B[-1], context_B[row_M], 0)[:, None]
        if options.sliding_window is not None:
            seen_MX &= pos_MX >= begin_B[row_M][:, None]
        scores_MKGX = _capped(_dot("mkgd,mkxd->mkgx", q_BKGD[row_M], k_MKXD), options.soft_cap)
        scores_MKGX = jnp.where(seen_MX[:, None, None], scores_MKGX, MASKED)
        # Several items of a block may be one row's: they meet in its new maximum before the exponentials.
        own_BM = row_M == jnp.arange(B, dtype=jnp.int32)[:, None]
        item_peak_BMKG = jnp.where(own_BM[:, :, None, None], scores_MKGX.max(-1), MASKED)
        new_peak_BKG = jnp.maximum(peak_BKG, item_peak_BMKG.max(1))
        weights_MKGX = jnp.exp(scores_MKGX - new_peak_BKG[row_M][..., None])
        weights_MKGX = jnp.where(seen_MX[:, None, None], weights_MKGX, 0)
        # What a page holds beyond the context is some earlier sequence's, and 0 times its NaN would be NaN.
        v_MKXD = jnp.where(seen_MX[:, None, :, None], v_MKXD, 0)
        out_MKGD = _dot("mkgx,mkxd->mkgd", weights_MKGX, v_MKXD)
        own = own_BM.astype(jnp.float32)
        shrink_BKG = jnp.exp(peak_BKG - new_peak_BKG)
        total_BKG = total_BKG * shrink_BKG + _dot("bm,mkg->bkg", own, weights_MKGX.sum(-1))
        out_BKGD = out_BKGD * shrink_BKG[..., None] + _dot("bm,mkgd->bkgd", own, out_MKGD)
        return i + 1, new_peak_BKG, total_BKG, out_BKGD

    peak_BKG, total_BKG = (jnp.broadcast_to(x_KG, (B, K, G)) for x_KG in options.begin(K, G))
    start = (jnp.int32(0), peak_BKG, total_BKG, jnp.zeros((B, K, G, D), jnp.float32))
    _, _, total_BKG, out_BKGD = jax.lax.while_loop(lambda carry: carry[0] * M < ends_B[-1], block, start)
    out_BKGD = out_BKGD / jnp.where(total_BKG == 0, 1, total_BKG)[..., None]  # an unused row has no items: zeros
    return out_BKGD.reshape(B, H, D).astype(q_THD.dtype)


def _prefill(
    q_THD: jax.Array, pages_LPKSW: jax.Array, layer: int | jax.Array, batch: RaggedBatch, options: Options
) -> jax.Array:
    """Chunks. An item is up to Q query tokens of a row, and walks the blocks of X tokens that any of them sees.

    An item reads its queries from the array that it writes its result to, for nobody else reads them: a second array
    would be made for all layers at the start of the program, since nothing holds it back (33 MB in a program of 512
    tokens of SmolLM2-135M, and 18 ms of a step of 40 tokens in it).
    """
    T, H, D = q_THD.shape
    K, S = pages_LPKSW.shape[2:4]
    N = batch.page_table.shape[1]
    G, Q = H // K, min(T, QUERY_TOKENS)
    C = min(N, max(1, BLOCK_TOKENS // S))
    X, R = C * S, Q * G
    table_BN = jnp.pad(batch.page_table, ((0, 0), (0, -N % C)))  # whole blocks, since a slice past the end is moved
    starts, context_B = batch.query_starts, batch.context_lens
    length_B = starts[1:] - starts[:-1]
    items_B = (length_B + Q - 1) // Q
    ends_B = jnp.cumsum(items_B)  # items up to and with each row

    def item(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, q_or_out_THD = carry
        row = jnp.sum(ends_B <= i, dtype=jnp.int32)
        done = (i - ends_B[row] + items_B[row]) * Q  # query tokens of the row before this item
        token, left = starts[row] + done, length_B[row] - done
        first = context_B[row] - left  # position of the item's first query token
        last = first + jnp.minimum(left, Q) - 1
        # Near the end of the batch the Q tokens begin before the item's own, which are then the last ones.
        slice_at = jnp.minimum(token, T - Q)
        offset_Q = slice_at - token + jnp.arange(Q, dtype=jnp.int32)
        pos_R = first + jnp.repeat(offset_Q, G)
        old_QHD = jax.lax.dynamic_slice(q_or_out_THD, (slice_at, 0, 0), (Q, H, D))
        q_KRD = old_QHD.reshape(Q, K, G, D).transpose(1, 0, 2, 3).reshape(K, R, D).astype(jnp.float32) * options.scale
        begin = jnp.int32(0)
        if options.sliding_window is not None:
            begin = jnp.maximum(first - options.sliding_window + 1, 0) // X

        def block(carry: Running) -> Running:
            b, peak_KR, total_KR, out_KRD = carry
            ids_IC = jax.lax.dynamic_slice(table_BN, (row, b * C), (1, C))
            k_IKXD, v_IKXD = _gather(pages_LPKSW, layer, ids_IC, D)
            pos_X = b * X + jnp.arange(X, dtype=jnp.int32)
            seen_RX = pos_X <= pos_R[:, None]
            if options.sliding_window is not None:
                seen_RX &= pos_X > pos_R[:, None] - options.sliding_window
            scores_KRX = _capped(_dot("krd,kxd->krx", q_KRD, k_IKXD[0]), options.soft_cap)
            scores_KRX = jnp.where(seen_RX, scores_KRX, MASKED)
            new_peak_KR = jnp.maximum(peak_KR, scores_KRX.max(-1))
            # A query that a window shows nothing of this block collects weights of 1; its first seen key, which each
            # query has, in a later block, multiplies them with exp(MASKED - peak) = 0.
            weights_KRX = jnp.exp(scores_KRX - new_peak_KR[..., None])
            shrink_KR = jnp.exp(peak_KR - new_peak_KR)
            # What a page holds beyond the context is some earlier sequence's, and 0 times its NaN would be NaN.
            v_KXD = jnp.where((pos_X < context_B[row])[:, None], v_IKXD[0], 0)
            out_KRD = out_KRD * shrink_KR[..., None] + _dot("krx,kxd->krd", weights_KRX, v_KXD)
            return b + 1, new_peak_KR, total_KR * shrink_KR + weights_KRX.sum(-1), out_KRD

        peak_KR, total_KR = (jnp.tile(x_KG, (1, Q)) for x_KG in options.begin(K, G))
        start = (begin, peak_KR, total_KR, jnp.zeros((K, R, D), jnp.float32))
        _, _, total_KR, out_KRD = jax.lax.while_loop(lambda carry: carry[0] * X <= last, block, start)
        out_QKGD = (out_KRD / total_KR[..., None]).reshape(K, Q, G, D).transpose(1, 0, 2, 3)
        mine_Q = (offset_Q >= 0) & (offset_Q < left)
        out_QHD = jnp.where(mine_Q[:, None, None], out_QKGD.reshape(Q, H, D).astype(q_THD.dtype), old_QHD)
        return i + 1, jax.lax.dynamic_update_slice(q_or_out_THD, out_QHD, (slice_at, 0, 0))

    _, out_THD = jax.lax.while_loop(lambda carry: carry[0] < ends_B[-1], item, (jnp.int32(0), q_THD))
    return jnp.where((jnp.arange(T) < starts[-1])[:, None, None], out_THD, 0)
