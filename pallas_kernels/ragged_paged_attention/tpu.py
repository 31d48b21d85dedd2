"""Ragged paged attention on TPU: cuts the batch into items, calls the kernel, puts the results back in order.

Queries are laid out by item before the kernel and results gathered by token after it, in XLA, where both fuse with
what is around them: the kernel then meets only whole, aligned tiles, whatever the lengths of the rows. Decode and
prefill run the same kernel with other sizes (`tpu_blocks`).

Dimension key: that of `tpu_kernel`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.checks import EIGHT_BIT
from pallas_kernels.dispatch import Call, target
from pallas_kernels.ragged_paged_attention.tpu_blocks import (
    Blocks,
    Sizes,
    choose_blocks,
    full_batch,
    kv_bytes_read,
    most_items,
    pairs_seen,
    vmem_bytes,
)
from pallas_kernels.ragged_paged_attention.tpu_kernel import Items, Options, attend
from pallas_kernels.tpu_params import SMEM_BYTES, interpret_params, stays_in_hbm

ITEM_WORDS = 6  # int32 per item


def sizes_of(call: Call) -> Sizes:
    """The dimensions of a call as the block sizes need them."""
    return Sizes(
        T=call["T"], B=call["B"], N=call["N"], K=call["K"], G=call["H"] // call["K"], D=call["D"], S=call["S"],
        W=call["W"], pool_bytes=jnp.dtype(call.dtype).itemsize, query_bytes=jnp.dtype(call.operand).itemsize,
    )  # fmt: skip


def refuse(call: Call) -> str | None:
    """Why the kernel cannot take the call, or None."""
    sizes = sizes_of(call)
    if call.operand not in ("float32", "bfloat16"):
        return f"q_THD has dtype {call.operand}, need float32 or bfloat16"
    if call.dtype not in (call.operand, *EIGHT_BIT):
        return f"pages_LPKSW has dtype {call.dtype}, need that of q_THD, {call.operand}, or one of {EIGHT_BIT}"
    if sizes.S % 8 or sizes.S & (sizes.S - 1):
        return f"page size {sizes.S}, need a power of two from 8"
    blocks = choose_blocks(sizes, call.chip)
    if blocks is None:
        return f"{sizes.K} KV slots of {sizes.W} lanes do not fit the VMEM of {call.chip or 'the chip'}"
    smem = 4 * (sizes.B * sizes.N + ITEM_WORDS * padded_items(sizes, blocks))
    if smem > SMEM_BYTES:
        return (
            f"page tables of {sizes.B} rows x {sizes.N} pages take {smem:,} bytes of SMEM, at most {SMEM_BYTES:,}: use "
            "larger pages, fewer rows or a shorter longest sequence"
        )
    return None


def padded_items(sizes: Sizes, blocks: Blocks) -> int:
    """I: items of the program, a whole number of grid steps for each core."""
    each = blocks.cores * blocks.items_per_step
    return -(-most_items(sizes, blocks) // each) * each


def cost_estimate(sizes: Sizes, blocks: Blocks, sliding_window: int | None) -> pl.CostEstimate:
    """Cost of the largest batch (`full_batch`), the only one that the shapes tell of: pages read as often as items need
    them, queries and results once; operations that the pairs of query and seen token need."""
    lengths, contexts = full_batch(sizes)
    H = sizes.K * sizes.G
    pairs = pairs_seen(lengths, contexts, sliding_window) * H
    live_items = int((-(-lengths // blocks.query_tokens)).sum())
    item_bytes = sizes.K * blocks.rows * (sizes.key_lanes + sizes.value_lanes) * sizes.query_bytes
    return pl.CostEstimate(
        flops=4 * pairs * sizes.D,
        bytes_accessed=kv_bytes_read(sizes, blocks, lengths, contexts, sliding_window) + live_items * item_bytes,
        transcendentals=pairs,
    )


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
    interpret: bool = False,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Arguments and result as the public function's. `blocks`: other sizes than `choose_blocks` would take."""
    T, H, D = q_THD.shape
    _, _, K, S, W = pages_LPKSW.shape
    B, N = batch.page_table.shape
    sizes = Sizes(T, B, N, K, H // K, D, S, W, pages_LPKSW.dtype.itemsize, q_THD.dtype.itemsize)
    chip = target()[1]
    if blocks is None:
        blocks = choose_blocks(sizes, chip)
        assert blocks is not None  # `refuse` saw to it
    row_I, first_I, count_I, token_I = _cut(batch, sizes, blocks)
    options = Options(scale, sliding_window, soft_cap, sinks_H is not None)
    out_IKRZ = attend(
        _describe(row_I, first_I, count_I, layer, batch, sizes, blocks, sliding_window),
        jnp.zeros((1,), jnp.float32) if sinks_H is None else sinks_H,
        _by_item(q_THD, token_I, sizes, blocks),
        stays_in_hbm(pages_LPKSW, interpret),
        sizes=sizes,
        blocks=blocks,
        options=options,
        cost=cost_estimate(sizes, blocks, sliding_window),
        vmem_limit=vmem_bytes(sizes, blocks) * 5 // 4 + (4 << 20),
        interpret=interpret_params() if interpret else False,
    )
    return _by_token(out_IKRZ, batch, sizes, blocks)


def _cut(batch: RaggedBatch, sizes: Sizes, blocks: Blocks) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of each item [I]: its row, the position of its first query token, how many it has, and their first flat token."""
    item_I = jnp.arange(padded_items(sizes, blocks), dtype=jnp.int32)
    starts, context_B = batch.query_starts, batch.context_lens
    if sizes.decode:
        row_I = jnp.minimum(item_I, sizes.B - 1)
        live_I = (item_I < sizes.B) & (context_B[row_I] > 0)
        return row_I, jnp.maximum(context_B[row_I] - 1, 0), live_I.astype(jnp.int32), row_I
    length_B = starts[1:] - starts[:-1]
    items_B = -(-length_B // blocks.query_tokens)
    ends_B = jnp.cumsum(items_B)
    row_I = jnp.minimum(jnp.sum(ends_B <= item_I[:, None], axis=1, dtype=jnp.int32), sizes.B - 1)
    done_I = (item_I - ends_B[row_I] + items_B[row_I]) * blocks.query_tokens
    count_I = jnp.where(item_I < ends_B[-1], jnp.minimum(length_B[row_I] - done_I, blocks.query_tokens), 0)
    return row_I, context_B[row_I] - length_B[row_I] + done_I, count_I, starts[row_I] + done_I


def _describe(
    row_I: jax.Array,
    first_I: jax.Array,
    count_I: jax.Array,
    layer: int | jax.Array,
    batch: RaggedBatch,
    sizes: Sizes,
    blocks: Blocks,
    sliding_window: int | None,
) -> Items:
    """The prefetched scalars. Grid step s of core c takes block s * cores + c of the items: cores share a half-empty
    batch evenly, since live items stand in front."""
    each, cores = blocks.items_per_step, blocks.cores
    chain = row_I.shape[0] // cores
    end_I = jnp.where(count_I > 0, first_I + count_I, 0)
    begin_I = jnp.zeros_like(end_I)
    if sliding_window is not None:
        begin_I = jnp.where(count_I > 0, jnp.maximum(first_I - sliding_window + 1, 0) // sizes.S, 0)
    num_blocks_I = -(-(-(-end_I // sizes.S) - begin_I) // blocks.pages)

    def chains(x_I: jax.Array) -> jax.Array:
        return x_I.reshape(-1, cores, each).transpose(1, 0, 2).reshape(cores, chain)

    num_blocks = chains(num_blocks_I)
    place = jnp.arange(chain, dtype=jnp.int32)
    with_blocks = jnp.where(num_blocks > 0, place, chain)
    # The least place of an item with blocks from here to the end, and past here.
    from_here = jax.lax.cummin(with_blocks, axis=1, reverse=True)
    following = jnp.concatenate([from_here[:, 1:], jnp.full((cores, 1), chain, jnp.int32)], axis=1)
    return Items(
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        table=batch.page_table.reshape(-1),
        row=chains(row_I).reshape(-1),
        first=chains(first_I).reshape(-1),
        begin_page=chains(begin_I).reshape(-1),
        end=chains(end_I).reshape(-1),
        before=(jnp.cumsum(num_blocks, axis=1) - num_blocks).reshape(-1),
        following=following.reshape(-1),
        start=from_here[:, 0],
        last_step=jnp.max(jnp.where(num_blocks > 0, place, 0), axis=1) // each,
    )


def _by_item(q_THD: jax.Array, token_I: jax.Array, sizes: Sizes, blocks: Blocks) -> jax.Array:
    """Queries [I, K, R, Y]; the rows of absent tokens and of padded query slots hold anything finite."""
    T, _, D = q_THD.shape
    K, G, Q = sizes.K, sizes.G, blocks.query_tokens
    token_IQ = jnp.clip(token_I[:, None] + jnp.arange(Q, dtype=jnp.int32), 0, T - 1)
    q_IQKGD = q_THD[token_IQ].reshape(-1, Q, K, G, D)
    q_IKGQD = q_IQKGD.transpose(0, 2, 3, 1, 4)
    pad = ((0, 0), (0, 0), (0, blocks.group - G), (0, 0), (0, sizes.key_lanes - D))
    return jnp.pad(q_IKGQD, pad).reshape(-1, K, blocks.rows, sizes.key_lanes)


def _by_token(out_IKRZ: jax.Array, batch: RaggedBatch, sizes: Sizes, blocks: Blocks) -> jax.Array:
    """Results [T, H, D], zeros for padding."""
    T, K, G, D, Q = sizes.T, sizes.K, sizes.G, sizes.D, blocks.query_tokens
    out_IKGQZ = out_IKRZ.reshape(-1, K, blocks.group, Q, sizes.value_lanes)
    lane = sizes.value_lanes - sizes.W + D  # where the values begin
    out_IQKGD = out_IKGQZ[:, :, :G, :, lane : lane + D].transpose(0, 3, 1, 2, 4)
    if sizes.decode:
        out_TKGD, live_T = out_IQKGD[:T, 0], batch.context_lens > 0
    else:
        starts, row_T = batch.query_starts, batch.token_row
        items_B = -(-(starts[1:] - starts[:-1]) // Q)
        place_T = jnp.arange(T, dtype=jnp.int32) - starts[row_T]
        live_T = jnp.arange(T) < starts[-1]
        item_T = jnp.where(live_T, (jnp.cumsum(items_B) - items_B)[row_T] + place_T // Q, 0)
        out_TKGD = out_IQKGD[item_T, jnp.where(live_T, place_T % Q, 0)]
    return jnp.where(live_T[:, None, None], out_TKGD.reshape(T, K * G, D), 0)
