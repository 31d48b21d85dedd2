"""Chunks of prompts on Hopper: flash attention over pages (Shah et al., arXiv:2407.08608), with Pallas Mosaic GPU.

One CUDA block takes one item (`gpu_items`: some query tokens of one row) of one KV slot. Its 128 query rows, a token's
G query slots next to one another, are split over two compute warpgroups. They take turns: one issues its products
while the other works on its softmax. Blocks that no query of the item sees are not fetched, and only those that some
query sees in part are masked.

XLA lays the queries out by items before the kernel, [I, K, M, D], and takes the results back after it. Rows of an item
that hold no token are computed and dropped.

Dimension key: that of `gpu_kernel`, and Q most query tokens of an item.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.gpu_pages import mosaic_gpu
from pallas_kernels.ragged_paged_attention.gpu_items import prefill_items
from pallas_kernels.ragged_paged_attention.gpu_kernel import (
    LOG2E,
    MASKED,
    ROWS,
    Shape,
    move,
    ring,
    score,
    set_registers,
    spread,
    tiled,
    zero_beyond,
)


def prefill(
    q_THD: jax.Array, pages_LPKSW: jax.Array, layer: int | jax.Array, batch: RaggedBatch,
    *, scale: float, sliding_window: int | None, soft_cap: float | None, sinks_H: jax.Array | None, interpret: Any,
) -> jax.Array:  # fmt: skip
    """[T, H, D]."""
    T, H, D = q_THD.shape
    L, P, K, S, W = pages_LPKSW.shape
    B, N = batch.page_table.shape
    G = H // K
    shape = Shape(True, D, S, G, staged=interpret is not None)
    Q, M = shape.query_tokens, shape.rows
    count = T // Q + B
    items = prefill_items(
        batch.query_starts,
        batch.context_lens,
        sliding_window,
        items=count,
        tokens=Q,
        block=shape.block,
        copy=shape.copy,
    )
    token_IQ = jnp.minimum(items.token[:, None] + jnp.arange(Q, dtype=jnp.int32), T - 1)
    q_IKRD = q_THD[token_IQ].reshape(count, Q, K, G, D).transpose(0, 2, 1, 3, 4).reshape(count, K, Q * G, D)
    q_IKMD = jnp.pad(q_IKRD, ((0, 0), (0, 0), (0, M - Q * G), (0, 0)))
    operands = [items.packed(), jnp.asarray(layer, jnp.int32).reshape(1), batch.page_table, q_IKMD]
    operands.append(pages_LPKSW.reshape(-1, W))
    if sinks_H is not None:
        sinks_KR = jnp.tile(sinks_H.reshape(K, G) * LOG2E, (1, Q))
        operands.append(jnp.pad(sinks_KR, ((0, 0), (0, M - Q * G))))
    run = _kernel(
        shape, (T, B, K, count, P, N), q_THD.dtype, scale, sliding_window, soft_cap, sinks_H is not None, interpret
    )
    out_IKMD = run(*operands)
    out_IQHD = out_IKMD[:, :, : Q * G].reshape(count, K, Q, G, D).transpose(0, 2, 1, 3, 4).reshape(count, Q, H, D)
    length_B = batch.query_starts[1:] - batch.query_starts[:-1]
    items_B = (length_B + Q - 1) // Q
    before_B = jnp.cumsum(items_B) - items_B
    done_T = jnp.arange(T, dtype=jnp.int32) - batch.query_starts[batch.token_row]
    out_THD = out_IQHD[jnp.clip(before_B[batch.token_row] + done_T // Q, 0, count - 1), done_T % Q]
    return jnp.where((jnp.arange(T) < batch.query_starts[-1])[:, None, None], out_THD, 0)


@functools.cache
def _kernel(
    shape: Shape, sizes: tuple[int, ...], dtype: Any, scale: float, window: int | None, soft_cap: float | None,
    sinks: bool, interpret: Any,
) -> Any:  # fmt: skip
    plgpu = mosaic_gpu()

    T, B, K, count, P, N = sizes
    D, S, G, X, M, parts = shape.head_dim, shape.page_size, shape.group, shape.block, shape.rows, shape.parts
    part = D // parts

    def attend(
        items_ref: Any, layer_ref: Any, table_ref: Any, q_ref: Any, pool_ref: Any, *rest: Any, **scratch: Any
    ) -> None:
        *sinks_refs, out_ref = rest
        item, head = count - 1 - lax.axis_index("item"), lax.axis_index("head")  # the longest of a row first
        row, start, blocks, first, tokens, context = (items_ref[item, i] for i in (0, 1, 2, 4, 5, 6))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(jnp.logical_and(warpgroup < shape.warpgroups, blocks > 0))
        def _() -> None:
            set_registers(shape, computes=True)
            sink_ref = sinks_refs[0].at[head] if sinks else None
            q_at, out_at = q_ref.at[item, head], out_ref.at[item, head]
            compute(warpgroup, start, blocks, first, tokens, context, q_at, sink_ref, out_at, **scratch)

        @pl.when(jnp.logical_and(warpgroup == shape.warpgroups, blocks > 0))
        def _() -> None:
            set_registers(shape, computes=False)
            begin = jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0)
            lowest, highest = lax.div(begin, jnp.int32(S)), lax.div(context - 1, jnp.int32(S))
            move(
                shape, P, K, head=head, row=row, start=start, blocks=blocks, lowest=lowest, highest=highest,
                layer_ref=layer_ref, table_ref=table_ref, pool_ref=pool_ref,
                **{name: scratch[name] for name in ring(shape, dtype)},
            )  # fmt: skip

    def compute(
        warpgroup: Any, start: Any, blocks: Any, first: Any, tokens: Any, context: Any, q_ref: Any, sink_ref: Any,
        out_ref: Any, *, q_smem: Any, q_full: Any, k_smem: Any, v_smem: Any, k_full: Any, v_full: Any, k_free: Any,
        v_free: Any, turn: Any, zeroed: Any, sink_smem: Any = None, sink_full: Any = None, p_smem: Any = None,
    ) -> None:  # fmt: skip
        q_smem = q_smem.at[warpgroup]
        rows = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[rows], q_smem, q_full.at[warpgroup])
        peak = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        if sinks:  # a sink is one score of weight 1
            plgpu.copy_gmem_to_smem(sink_ref.at[rows], sink_smem.at[warpgroup], sink_full.at[warpgroup])
            plgpu.barrier_wait(sink_full.at[warpgroup])
            peak = plgpu.layout_cast(sink_smem[warpgroup], plgpu.Layout.WGMMA.reduce(1))
            total += 1
        plgpu.barrier_wait(q_full.at[warpgroup])

        def block(b: Any, carry: Any, masked: bool) -> Any:
            peak, total, out = carry
            slot = lax.rem(b, jnp.int32(shape.stages))
            at = start + b * X
            plgpu.barrier_wait(k_full.at[slot])

            def times_k(acc_ref: Any) -> Any:
                plgpu.wgmma(acc_ref, q_smem, k_smem.at[slot].T)
                plgpu.barrier_arrive_and_wait(turn)  # products are under way: the other may issue its own
                return acc_ref[...]

            scores = score(pl.run_scoped(times_k, plgpu.ACC((ROWS, X), jnp.float32)), scale, soft_cap)
            plgpu.barrier_arrive(k_free.at[slot])
            if masked:
                # Row r is query token r // G. Without a division: x <= r // G is x * G <= r.
                wgmma_iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (ROWS, X), layout=plgpu.Layout.WGMMA)
                r = wgmma_iota(0) + warpgroup * ROWS
                after_first = wgmma_iota(1) + (at - first)
                seen = after_first * G <= r
                if window is not None:
                    seen &= (after_first + window) * G > r
                scores = jnp.where(seen, scores, MASKED)
            # A query that a window shows nothing of this block collects weights of 1; its first seen key, which each
            # query has, in a later block, multiplies them with exp2(MASKED - peak) = 0.
            new_peak = jnp.maximum(peak, scores.max(axis=1))
            weights = jnp.exp2(scores - spread(new_peak, scores.shape))
            shrink = jnp.exp2(peak - new_peak)
            total = total * shrink + weights.sum(axis=1)
            p = weights.astype(dtype)
            if p_smem is not None:
                p_smem[warpgroup] = p
                plgpu.commit_smem()
                p = p_smem.at[warpgroup]
            plgpu.barrier_arrive(turn)  # softmax is done
            plgpu.barrier_wait(v_full.at[slot])
            if masked:

                @pl.when(at + X > context)
                def _() -> None:
                    half = X // shape.warpgroups
                    zero_beyond(shape, v_smem.at[slot], pl.multiple_of(warpgroup * half, half), half, context - at)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive_and_wait(zeroed)

            plgpu.barrier_wait(turn)
            new = []
            for i in range(parts):

                def times_v(acc_ref: Any, i: int = i) -> Any:
                    plgpu.wgmma(acc_ref, p, v_smem.at[slot, :, pl.ds(i * part, part)])
                    return acc_ref[...]

                pv = pl.run_scoped(times_v, plgpu.ACC((ROWS, part), jnp.float32))
                new.append(out[i] * spread(shrink, pv.shape) + pv)
            plgpu.barrier_arrive(v_free.at[slot])
            return new_peak, total, new

        # Blocks that all queries see whole: from the one after the last query's window begins to the first query.
        whole_end = lax.div(jnp.maximum(first + 1 - start, 0), jnp.int32(X))
        whole_begin = jnp.int32(0)
        if window is not None:
            hidden = jnp.maximum(first + tokens - window - start, 0)
            whole_begin = jnp.minimum(lax.div(hidden + X - 1, jnp.int32(X)), blocks)
            whole_end = jnp.maximum(whole_end, whole_begin)

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.barrier_arrive_and_wait(turn)

        out = [plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), plgpu.Layout.WGMMA) for _ in range(parts)]
        carry = (peak, total, out)
        if window is not None:
            carry = lax.fori_loop(0, whole_begin, functools.partial(block, masked=True), carry)
        carry = lax.fori_loop(whole_begin, whole_end, functools.partial(block, masked=False), carry)
        _, total, out = lax.fori_loop(whole_end, blocks, functools.partial(block, masked=True), carry)

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.barrier_arrive_and_wait(turn)

        for i in range(parts):
            q_smem[:, pl.ds(i * part, part)] = (out[i] / spread(total, out[i].shape)).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, out_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    scratch = ring(shape, dtype) | {
        "q_smem": tiled(dtype, shape.swizzle, shape.warpgroups, ROWS, D),
        "q_full": plgpu.Barrier(num_barriers=shape.warpgroups),
        "turn": plgpu.Barrier(num_arrivals=shape.warpgroups),
        "zeroed": plgpu.Barrier(num_arrivals=shape.warpgroups),
    }
    if sinks:
        scratch["sink_smem"] = plgpu.SMEM((shape.warpgroups, ROWS), jnp.float32)
        scratch["sink_full"] = plgpu.Barrier(num_barriers=shape.warpgroups)
    if shape.staged:
        scratch["p_smem"] = tiled(dtype, shape.swizzle, shape.warpgroups, ROWS, X)
    attend.__name__ = "ragged_paged_attention_prefill"
    own = -(-T // B)  # tokens of a row in a full batch, which are its last
    seen = max(N * S - own // 2, min(N * S, own) // 2)
    seen = min(window or seen, seen)
    return plgpu.kernel(
        attend,
        out_type=jax.ShapeDtypeStruct((count, K, M, D), dtype),
        scratch_types=scratch,
        grid=(count, K),
        grid_names=("item", "head"),
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * T * K * G * D * seen,
            bytes_accessed=2 * K * D * shape.itemsize * (B * min(N * S, own + (window or N * S)) + T * G),
            transcendentals=T * K * G * seen,
        ),
        interpret=interpret,
    )
