"""Decode steps on Hopper: flash decoding over pages (Dao et al., 2023), with Pallas Mosaic GPU.

A piece of work is one item (`gpu_items`: some blocks of one row's context) of one KV slot. One CUDA block for each SM
takes a piece after the other, and its memory warpgroup goes on to the next while the last is computed, so that the
memory is never left waiting for a start or an end. Two compute warpgroups take every other block, each with a maximum,
sum and output of its own, and join them at the end of the piece: one alone would be about as slow as the memory. (With
heads of 256 there are no registers for two.)

The keys and values are multiplied with the G query rows of the slot. wgmma wants 64 rows: those beyond G hold whatever
was in shared memory; each row of the result depends on its own query only, and they are not written. Arithmetic stays
far below what the tensor cores can do while memory is the bound.

Each item leaves its normalised output and the logarithm of its sum in float32; `combine` joins those of a row, in XLA.

The sum of P.V is made anew for each block and added to the running output in registers: rescaling passes over it
anyway, and the interpreter knows no accumulator that is written to.

Dimension key: that of `gpu_kernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu_pages import mosaic_gpu
from pallas_kernels.ragged_paged_attention.gpu_items import Items, decode_items
from pallas_kernels.ragged_paged_attention.gpu_kernel import (
    LOG2E,
    MASKED,
    ROWS,
    Shape,
    move,
    multiprocessors,
    ring,
    score,
    set_registers,
    spread,
    tiled,
    zero_beyond,
)

WAVES = 4  # pieces of work for each SM that a full batch is cut into at least, to even out unequal ends
LEAST_BLOCKS = 4  # of an item, so that starting one is worth it


def number_of_items(rows: int, kv_slots: int, sms: int) -> int:
    """I: one a row for rounding, and enough to give every SM `WAVES` of them."""
    return rows + max(1, -(-WAVES * sms // kv_slots))


def decode(
    q_THD: jax.Array, pages_LPKSW: jax.Array, layer: int | jax.Array, context_B: jax.Array, table_BN: jax.Array,
    *, scale: float, sliding_window: int | None, soft_cap: float | None, sinks_H: jax.Array | None, interpret: Any,
) -> jax.Array:  # fmt: skip
    """[B, H, D]; row i is token i."""
    B, H, D = q_THD.shape
    L, P, K, S, W = pages_LPKSW.shape
    G = H // K
    shape = Shape(False, D, S, G, staged=interpret is not None)
    sms = 1 if interpret else multiprocessors()
    count, M = number_of_items(B, K, sms), shape.rows
    cuda_blocks = min(count * K, 2 * sms if interpret else sms)
    items = decode_items(
        context_B, sliding_window, items=count, block=shape.block, copy=shape.copy,
        least_blocks=1 if interpret else LEAST_BLOCKS,
    )  # fmt: skip
    q_BKMD = jnp.pad(q_THD.reshape(B, K, G, D), ((0, 0), (0, 0), (0, M - G), (0, 0)))
    sizes = (B, K, count, P, table_BN.shape[1], cuda_blocks)
    run = _kernel(shape, sizes, q_THD.dtype, scale, sliding_window, soft_cap, interpret)
    out_IKMD, lse_IKM = run(
        items.packed(), jnp.asarray(layer, jnp.int32).reshape(1), table_BN, q_BKMD, pages_LPKSW.reshape(-1, W)
    )
    return combine(out_IKMD[:, :, :G], lse_IKM[:, :, :G], items, sinks_H, B).reshape(B, H, D).astype(q_THD.dtype)


def combine(out_IKGD: jax.Array, lse_IKG: jax.Array, items: Items, sinks_H: jax.Array | None, rows: int) -> jax.Array:
    """[B, K, G, D] float32: the items' outputs, each weighted with its share of its row's sum."""
    _, K, G, _ = out_IKGD.shape
    live_I = items.blocks > 0
    own_BI = (items.row == jnp.arange(rows, dtype=jnp.int32)[:, None]) & live_I
    peak_BKG = jnp.max(jnp.where(own_BI[:, :, None, None], lse_IKG, MASKED), axis=1)
    total_BKG = jnp.zeros_like(peak_BKG)
    if sinks_H is not None:
        peak_BKG = jnp.maximum(peak_BKG, sinks_H.reshape(K, G))
        total_BKG = jnp.exp(sinks_H.reshape(K, G) - peak_BKG)
    weight_IKG = jnp.where(live_I[:, None, None], jnp.exp(lse_IKG - peak_BKG[items.row]), 0)
    out_IKGD = jnp.where(live_I[:, None, None, None], out_IKGD * weight_IKG[..., None], 0)  # unwritten where not live
    add = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    own = own_BI.astype(jnp.float32)
    total_BKG += add("bi,ikg->bkg", own, weight_IKG)
    return add("bi,ikgd->bkgd", own, out_IKGD) / jnp.where(total_BKG == 0, 1, total_BKG)[..., None]


@functools.cache
def _kernel(
    shape: Shape, sizes: tuple[int, ...], dtype: Any, scale: float, window: int | None, soft_cap: float | None,
    interpret: Any,
) -> Any:  # fmt: skip
    plgpu = mosaic_gpu()

    B, K, count, P, N, cuda_blocks = sizes
    D, S, X, M, parts = shape.head_dim, shape.page_size, shape.block, shape.rows, shape.parts
    part, turns = D // parts, shape.warpgroups

    def attend(
        items_ref: Any, layer_ref: Any, table_ref: Any, q_ref: Any, pool_ref: Any, out_ref: Any, lse_ref: Any,
        **scratch: Any,
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < shape.warpgroups)
        def _() -> None:
            set_registers(shape, computes=True)
            each(items_ref, functools.partial(compute, out_ref, lse_ref, **scratch))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == shape.warpgroups)
        def _() -> None:
            set_registers(shape, computes=False)
            each(items_ref, functools.partial(fetch, layer_ref, table_ref, q_ref, pool_ref, **scratch))

    def each(items_ref: Any, do: Callable[..., None]) -> None:
        """Every piece of work of this CUDA block, with the blocks and the pieces that went before it."""

        def piece(i: Any, done: tuple[Any, Any]) -> tuple[Any, Any]:
            work = lax.axis_index("cuda_block") + i * cuda_blocks
            item, head = lax.div(work, jnp.int32(K)), lax.rem(work, jnp.int32(K))
            row, start, blocks, context = (items_ref[item, field] for field in (0, 1, 2, 6))
            begin = jnp.int32(0) if window is None else jnp.maximum(context - window, 0)

            @pl.when(blocks > 0)
            def _() -> None:
                do(*done, item=item, head=head, row=row, start=start, blocks=blocks, begin=begin, context=context)

            return done[0] + blocks, done[1] + jnp.minimum(blocks, 1)

        pieces = lax.div(count * K - lax.axis_index("cuda_block") + cuda_blocks - 1, jnp.int32(cuda_blocks))
        lax.fori_loop(0, pieces, piece, (jnp.int32(0), jnp.int32(0)))

    def queries(q_smem: Any, nth: Any, rows: int) -> tuple[Any, Any]:
        """Where the queries of the nth piece of work begin, and which of two barriers is theirs.

        The rows after a piece's own, which wgmma reads and nobody uses, may be the next piece's, just arriving.
        """
        odd = lax.rem(nth, jnp.int32(2))
        return q_smem.at[pl.ds(pl.multiple_of(odd * M, 8), rows)], odd

    def fetch(
        layer_ref: Any, table_ref: Any, q_ref: Any, pool_ref: Any, before: Any, nth: Any, *, item: Any, head: Any,
        row: Any, start: Any, blocks: Any, begin: Any, context: Any, q_smem: Any, q_full: Any, q_free: Any,
        **scratch: Any,
    ) -> None:  # fmt: skip
        q_at, odd = queries(q_smem, nth, M)

        @pl.when(nth >= 2)
        def _() -> None:
            plgpu.barrier_wait(q_free.at[odd])

        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_at, q_full.at[odd])
        move(
            shape, P, K, head=head, row=row, start=start, blocks=blocks, before=before,
            lowest=lax.div(begin, jnp.int32(S)), highest=lax.div(context - 1, jnp.int32(S)),
            layer_ref=layer_ref, table_ref=table_ref, pool_ref=pool_ref,
            **{name: scratch[name] for name in ring(shape, dtype)},
        )  # fmt: skip

    def compute(
        out_ref: Any, lse_ref: Any, before: Any, nth: Any, *, item: Any, head: Any, row: Any, start: Any, blocks: Any,
        begin: Any, context: Any, q_smem: Any, q_full: Any, q_free: Any, k_smem: Any, v_smem: Any, k_full: Any,
        v_full: Any, k_free: Any, v_free: Any, out_smem: Any, out_free: Any, out_full: Any, peak_smem: Any,
        total_smem: Any, p_smem: Any = None,
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        q_at, odd = queries(q_smem, nth, ROWS)
        plgpu.barrier_wait(q_full.at[odd])

        own = lax.rem(before + warpgroup, jnp.int32(turns))  # first of the blocks that are this warpgroup's

        def block(i: Any, carry: Any) -> Any:
            peak, total, out = carry
            b = own + turns * i
            slot = lax.rem(before + b, jnp.int32(shape.stages))
            plgpu.barrier_wait(k_full.at[slot])

            def times_k(acc_ref: Any) -> Any:
                plgpu.wgmma(acc_ref, q_at, k_smem.at[slot].T)
                return acc_ref[...]

            scores = score(pl.run_scoped(times_k, plgpu.ACC((ROWS, X), jnp.float32)), scale, soft_cap)
            plgpu.barrier_arrive(k_free.at[slot])
            at = start + b * X
            position = plgpu.broadcasted_iota(jnp.int32, (ROWS, X), 1, layout=plgpu.Layout.WGMMA) + at
            seen = position < context
            if window is not None:
                seen &= position >= begin
            scores = jnp.where(seen, scores, MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=1))
            weights = jnp.exp2(scores - spread(new_peak, scores.shape))
            shrink = jnp.exp2(peak - new_peak)
            total = total * shrink + weights.sum(axis=1)
            p = weights.astype(dtype)
            if p_smem is not None:
                p_smem[warpgroup] = p
                plgpu.commit_smem()
                p = p_smem.at[warpgroup]
            plgpu.barrier_wait(v_full.at[slot])

            @pl.when(at + X > context)
            def _() -> None:
                zero_beyond(shape, v_smem.at[slot], 0, X, context - at)
                plgpu.commit_smem()

            new = []
            for i in range(parts):

                def times_v(acc_ref: Any, i: int = i) -> Any:
                    plgpu.wgmma(acc_ref, p, v_smem.at[slot, :, pl.ds(i * part, part)])
                    return acc_ref[...]

                pv = pl.run_scoped(times_v, plgpu.ACC((ROWS, part), jnp.float32))
                new.append(out[i] * spread(shrink, pv.shape) + pv)
            plgpu.barrier_arrive(v_free.at[slot])
            return new_peak, total, new

        nothing = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        none = [plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), plgpu.Layout.WGMMA) for _ in range(parts)]
        trips = lax.div(blocks - own + turns - 1, jnp.int32(turns))
        peak, total, out = lax.fori_loop(0, trips, block, (nothing + MASKED, nothing, none))
        plgpu.barrier_arrive(q_free.at[odd])

        # Part by part, through one buffer: the second hands over what it has, the first joins it with its own.
        @pl.when(warpgroup == 1)
        def _() -> None:
            for i in range(parts):
                plgpu.barrier_wait(out_free)
                if i == 0:
                    peak_smem[...] = peak
                    total_smem[...] = total
                out_smem[...] = out[i]
                plgpu.barrier_arrive(out_full)

        @pl.when(warpgroup == 0)
        def _() -> None:
            for i in range(parts):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if turns == 2:
                    plgpu.barrier_arrive(out_free)
                    plgpu.barrier_wait(out_full)
                if i == 0:
                    joint_peak, joint, mine = peak, total, jnp.ones_like(total)
                    if turns == 2:
                        rows = plgpu.Layout.WGMMA.reduce(1)
                        other_peak = plgpu.layout_cast(peak_smem[...], rows)
                        other_total = plgpu.layout_cast(total_smem[...], rows)
                        joint_peak = jnp.maximum(peak, other_peak)
                        mine, others = jnp.exp2(peak - joint_peak), jnp.exp2(other_peak - joint_peak)
                        joint = total * mine + other_total * others  # at least one of them has seen a token
                        others /= joint
                    peak_smem[...] = (joint_peak + jnp.log2(joint)) * (1 / LOG2E)
                    mine /= joint
                joined = out[i] * spread(mine, out[i].shape)
                if turns == 2:
                    joined += plgpu.layout_cast(out_smem[...], plgpu.Layout.WGMMA) * spread(others, joined.shape)
                out_smem[...] = joined
                plgpu.commit_smem()
                lanes = pl.ds(i * part, part)
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, M)], out_ref.at[item, head, :, lanes])
                if i == 0:
                    plgpu.copy_smem_to_gmem(peak_smem.at[pl.ds(0, M)], lse_ref.at[item, head])

    scratch = ring(shape, dtype) | {
        "q_smem": tiled(dtype, shape.swizzle, M + ROWS, D),
        "q_full": plgpu.Barrier(num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=2),
        "out_smem": plgpu.SMEM((ROWS, part), jnp.float32),
        "out_free": plgpu.Barrier(),
        "out_full": plgpu.Barrier(),
        "peak_smem": plgpu.SMEM((ROWS,), jnp.float32),
        "total_smem": plgpu.SMEM((ROWS,), jnp.float32),
    }
    if shape.staged:
        scratch["p_smem"] = tiled(dtype, shape.swizzle, shape.warpgroups, ROWS, X)
    attend.__name__ = "ragged_paged_attention_decode"
    seen = min(window or N * S, N * S)
    return plgpu.kernel(
        attend,
        out_type=(
            jax.ShapeDtypeStruct((count, K, M, D), jnp.float32),
            jax.ShapeDtypeStruct((count, K, M), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(cuda_blocks,),
        grid_names=("cuda_block",),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * shape.group * D * seen,
            bytes_accessed=2 * B * K * D * shape.itemsize * (seen + shape.group),
            transcendentals=B * K * shape.group * seen,
        ),
        interpret=interpret,
    )
