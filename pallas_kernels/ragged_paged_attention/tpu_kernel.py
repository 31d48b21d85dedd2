"""The TPU attention kernel: walks items, and for each the blocks of its context, through a ring of blocks in VMEM.

    pool in HBM --DMA, one a page--> ring of blocks --> scores, running maximum and sum, running output --> result

Pages are read straight from the stacked pool: nothing is sliced outside. A cursor in SMEM runs ahead of the block that
is computed and starts the reads of later ones, also those of the next items, so that the memory is busy from the first
block to the last. The items form one chain for each core (a v4 or v5p device has two); a chain's blocks are numbered
through, and block g uses buffer g modulo the number of buffers.

Dimension key: that of `pallas_kernels.batch`, and I items, G query slots per KV slot (padded), Q query tokens of an
item, R rows of its query matrix (G * Q, ordered by query slot), X tokens of a block, Y lanes of queries, Z lanes of
results, A buffers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu_blocks import Blocks, Sizes

MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN


class Items(NamedTuple):
    """What the kernel must know of each item, int32, prefetched into SMEM. M: items of all chains, chain by chain."""

    layer: jax.Array  # [1]
    table: jax.Array  # [B * N]
    row: jax.Array  # [M]
    first: jax.Array  # [M] position of its first query token
    begin_page: jax.Array  # [M] first page that any of its queries sees
    end: jax.Array  # [M] context that its last query sees; 0 for none
    before: jax.Array  # [M] blocks of the chain before this item
    following: (
        jax.Array
    )  # [M] next item of the chain that has blocks, counted in the chain; its length if there is none
    start: jax.Array  # [cores] the first such item
    last_step: jax.Array  # [cores] last grid step with an item that has blocks


class Options(NamedTuple):
    """Static."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_sinks: bool


def attend(
    items: Items,
    sinks_H: jax.Array,
    q_IKRY: jax.Array,
    pages_LPKSW: jax.Array,
    *,
    sizes: Sizes,
    blocks: Blocks,
    options: Options,
    cost: pl.CostEstimate,
    vmem_limit: int,
    interpret: Any,
) -> jax.Array:
    """Results [I, K, R, Z] in the dtype of the queries; those of items without blocks are zeros or unwritten."""
    num_items, K, R, Y = q_IKRY.shape
    Z, X, A = sizes.value_lanes, blocks.pages * sizes.S, blocks.buffers
    steps = num_items // (blocks.cores * blocks.items_per_step)

    def window(core: jax.Array, step: jax.Array, *scalars: Any) -> tuple[Any, ...]:
        # A step without blocks stays on the window before it: nothing is moved for it.
        refs = Items(*scalars[: len(Items._fields)])
        return jnp.minimum(step, refs.last_step[core]) * blocks.cores + core, 0, 0, 0

    per_item = functools.partial(pl.BlockSpec, index_map=window)
    kernel = functools.partial(
        _kernel, sizes=sizes, blocks=blocks, options=options, chain=steps * blocks.items_per_step
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_items, K, R, Z), q_IKRY.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Items._fields) + 1,
            grid=(blocks.cores, steps),
            in_specs=[per_item((blocks.items_per_step, K, R, Y)), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=per_item((blocks.items_per_step, K, R, Z)),
            scratch_shapes=[
                pltpu.VMEM((A, K, X, sizes.W), pages_LPKSW.dtype),
                pltpu.VMEM((K, R, 128), jnp.float32),
                pltpu.VMEM((K, R, 128), jnp.float32),
                pltpu.VMEM((K, R, Z), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((A,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=cost,
        interpret=interpret,
        name="ragged_paged_attention_decode" if sizes.decode else "ragged_paged_attention_prefill",
    )(*items, sinks_H, q_IKRY, pages_LPKSW)


def _kernel(*refs: Any, sizes: Sizes, blocks: Blocks, options: Options, chain: int) -> None:
    items = Items(*refs[: len(Items._fields)])
    sinks_H, q_IKRY, pages_LPKSW, out_IKRZ, ring_AKXW, peak_KRl, total_KRl, sum_KRZ, cursor, arrived_A = refs[
        len(Items._fields) :
    ]
    core, step = pl.program_id(0), pl.program_id(1)
    S, N, K, C, A = sizes.S, sizes.N, sizes.K, blocks.pages, blocks.buffers
    X, R = C * S, blocks.rows
    layer, base = items.layer[0], core * chain

    def num_pages(t: jax.Array) -> jax.Array:
        return pl.cdiv(items.end[base + t], S) - items.begin_page[base + t]

    def reads(t: jax.Array, block: jax.Array, buffer: jax.Array, do: str) -> None:
        """Starts, or waits for, the reads of the live pages of a block, one DMA each."""
        first_entry = items.row[base + t] * N + items.begin_page[base + t] + block * C

        def page(c: jax.Array, _: None) -> None:
            copy = pltpu.make_async_copy(
                pages_LPKSW.at[layer, items.table[first_entry + c]],
                ring_AKXW.at[buffer, :, pl.ds(pl.multiple_of(c * S, S), S)],
                arrived_A.at[buffer],
            )
            copy.start() if do == "start" else copy.wait()

        jax.lax.fori_loop(0, jnp.minimum(num_pages(t) - block * C, C), page, None)

    def start_next() -> None:
        """Starts the reads of the block at the cursor, if the chain has one more, and moves the cursor on."""
        t, block = cursor[0], cursor[1]

        @pl.when(t < chain)
        def start_reads() -> None:
            reads(t, block, (items.before[base + t] + block) % A, "start")
            done = (block + 1) * C >= num_pages(t)
            cursor[0] = jnp.where(done, items.following[base + t], t)
            cursor[1] = jnp.where(done, 0, block + 1)

    @pl.when(step == 0)
    def fill_ring() -> None:
        cursor[0], cursor[1] = items.start[core], 0
        for _ in range(A - 1):
            start_next()

    def item(i: jax.Array, _: None) -> None:
        t = step * blocks.items_per_step + i
        num_blocks = pl.cdiv(num_pages(t), C)

        @pl.when(num_blocks > 0)
        def walk() -> None:
            end, first = items.end[base + t], items.first[base + t]

            def begin(k: jax.Array, _: None) -> None:
                peak_Rl, total_Rl = _begin(k, sinks_H, sizes=sizes, blocks=blocks, options=options)
                peak_KRl[k], total_KRl[k] = peak_Rl, total_Rl
                sum_KRZ[k] = jnp.zeros(sum_KRZ.shape[1:], jnp.float32)

            def block(b: jax.Array, _: None) -> None:
                start_next()  # into the buffer of the block before this one, which is done with
                buffer = (items.before[base + t] + b) % A
                at = (items.begin_page[base + t] + b * C) * S  # position of the block's first token
                reads(t, b, buffer, "wait")

                @pl.when(at + X > end)
                def clear_tail() -> None:
                    # Beyond the context the buffer holds what an earlier block left, or an earlier owner of the page:
                    # 0 times its NaN would be NaN.
                    def clear(k: jax.Array, _: None) -> None:
                        kv_XW = ring_AKXW[buffer, k]
                        wide_XW = kv_XW.astype(jnp.float32)
                        live_XW = at + jax.lax.broadcasted_iota(jnp.int32, wide_XW.shape, 0) < end
                        ring_AKXW[buffer, k] = jnp.where(live_XW, wide_XW, 0).astype(kv_XW.dtype)

                    _each(K, clear)

                pos_RX = at + jax.lax.broadcasted_iota(jnp.int32, (R, X), 1)
                query_RX = first + (jax.lax.broadcasted_iota(jnp.int32, (R, X), 0) & (blocks.query_tokens - 1))
                seen_RX = pos_RX <= jnp.minimum(query_RX, end - 1)
                if options.sliding_window is not None:
                    seen_RX &= pos_RX > query_RX - options.sliding_window

                def head(k: jax.Array, _: None) -> None:
                    kv_XW = ring_AKXW[buffer, k].astype(q_IKRY.dtype)
                    k_XY, v_XZ = kv_XW[:, : sizes.key_lanes], kv_XW[:, -sizes.value_lanes :]
                    scores_RX = _dot(q_IKRY[i, k], k_XY, 1) * options.scale
                    if options.soft_cap is not None:
                        scores_RX = options.soft_cap * jnp.tanh(scores_RX / options.soft_cap)
                    scores_RX = jnp.where(seen_RX, scores_RX, MASKED)
                    old_R1 = peak_KRl[k][:, :1]
                    peak_R1 = jnp.maximum(old_R1, jnp.max(scores_RX, axis=1, keepdims=True))
                    # A query that sees nothing of this block and saw nothing before collects weights of 1; its first
                    # seen token multiplies them with exp(MASKED - peak) = 0.
                    weights_RX = jnp.exp(scores_RX - peak_R1)
                    shrink_R1 = jnp.exp(old_R1 - peak_R1)
                    total_R1 = total_KRl[k][:, :1] * shrink_R1 + jnp.sum(weights_RX, axis=1, keepdims=True)
                    sum_KRZ[k] = sum_KRZ[k] * shrink_R1 + _dot(weights_RX.astype(v_XZ.dtype), v_XZ, 0)
                    peak_KRl[k] = jnp.broadcast_to(peak_R1, (R, 128))
                    total_KRl[k] = jnp.broadcast_to(total_R1, (R, 128))

                _each(K, head)

            def finish(k: jax.Array, _: None) -> None:
                out_IKRZ[i, k] = (sum_KRZ[k] / total_KRl[k][:, :1]).astype(out_IKRZ.dtype)

            _each(K, begin)
            jax.lax.fori_loop(0, num_blocks, block, None)
            _each(K, finish)

    jax.lax.fori_loop(0, blocks.items_per_step, item, None)


def _each(count: int, body: Any) -> None:
    """Calls `body(k, None)` for each KV slot: unrolled where they are few, so that one's matrices overlap another's."""
    jax.lax.fori_loop(0, count, body, None, unroll=count <= 4)


def _dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _begin(
    k: jax.Array, sinks_H: Any, *, sizes: Sizes, blocks: Blocks, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Maximum and sum [R, 128] before the first token: a sink is one score of weight 1."""
    shape = (blocks.rows, 128)
    if not options.has_sinks:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    slot_Rl = jax.lax.broadcasted_iota(jnp.int32, shape, 0) >> (blocks.query_tokens.bit_length() - 1)
    peak_Rl = jnp.zeros(shape, jnp.float32)
    for g in range(sizes.G):
        peak_Rl = jnp.where(slot_Rl == g, sinks_H[k * sizes.G + g], peak_Rl)
    return peak_Rl, jnp.ones(shape, jnp.float32)
