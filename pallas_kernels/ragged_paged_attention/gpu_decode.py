"""Decode steps on Hopper: flash decoding over pages (Dao et al., 2023), with Pallas Mosaic GPU.

One CUDA block takes one item (`gpu_items`: some blocks of one row's context) of one KV slot, and multiplies them with
the G query rows of the slot. wgmma wants 64 rows: those beyond G hold whatever was in shared memory; each row of the
result depends on its own query only, and they are not written. Arithmetic stays far below what the tensor cores can do
while memory is the bound.

Each item leaves its normalised output and the logarithm of its sum in float32; `combine` joins those of a row, in XLA.

The sum of P.V is made anew for each block and added to the running output in registers: rescaling passes over it
anyway, and the interpreter knows no accumulator that is written to.

Dimension key: that of `gpu_kernel`.
"""

from __future__ import annotations

import functools
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
    ring,
    score,
    spread,
    tiled,
    zero_beyond,
)

SMS = 132  # H100 and H200; a grid that fits another Hopper less exactly is no mistake
WAVES = 4  # CUDA blocks for each SM that a full batch is cut into, to even out unequal ends
LEAST_BLOCKS = 4  # of an item, so that starting one is worth it


def number_of_items(rows: int, kv_slots: int, sms: int = SMS) -> int:
    """I: one a row for rounding, and enough to fill the chip `WAVES` times."""
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
    count, M = number_of_items(B, K, 1 if interpret else SMS), shape.rows
    items = decode_items(
        context_B, sliding_window, items=count, block=shape.block, copy=shape.copy,
        least_blocks=1 if interpret else LEAST_BLOCKS,
    )  # fmt: skip
    q_BKMD = jnp.pad(q_THD.reshape(B, K, G, D), ((0, 0), (0, 0), (0, M - G), (0, 0)))
    run = _kernel(shape, (B, K, count, P, table_BN.shape[1]), q_THD.dtype, scale, sliding_window, soft_cap, interpret)
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

    B, K, count, P, N = sizes
    D, S, X, M, parts = shape.head_dim, shape.page_size, shape.block, shape.rows, shape.parts
    part = D // parts

    def attend(
        items_ref: Any, layer_ref: Any, table_ref: Any, q_ref: Any, pool_ref: Any, *outputs: Any, **scratch: Any
    ) -> None:
        item, head = lax.axis_index("item"), lax.axis_index("head")
        row, start, blocks, context = (items_ref[item, i] for i in (0, 1, 2, 6))
        begin = jnp.int32(0) if window is None else jnp.maximum(context - window, 0)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(jnp.logical_and(warpgroup == 0, blocks > 0))
        def _() -> None:
            compute(item, head, start, blocks, begin, context, q_ref.at[row, head], *outputs, **scratch)

        @pl.when(jnp.logical_and(warpgroup == 1, blocks > 0))
        def _() -> None:
            lowest, highest = lax.div(begin, jnp.int32(S)), lax.div(context - 1, jnp.int32(S))
            move(
                shape, P, K, head=head, row=row, start=start, blocks=blocks, lowest=lowest, highest=highest,
                layer_ref=layer_ref, table_ref=table_ref, pool_ref=pool_ref,
                **{name: scratch[name] for name in ring(shape, dtype)},
            )  # fmt: skip

    def compute(
        item: Any, head: Any, start: Any, blocks: Any, begin: Any, context: Any, q_ref: Any, out_ref: Any, lse_ref: Any,
        *, q_smem: Any, q_full: Any, k_smem: Any, v_smem: Any, k_full: Any, v_full: Any, k_free: Any, v_free: Any,
        out_smem: Any, lse_smem: Any, p_smem: Any = None,
    ) -> None:  # fmt: skip
        plgpu.copy_gmem_to_smem(q_ref, q_smem.at[pl.ds(0, M)], q_full)
        plgpu.barrier_wait(q_full)

        def block(b: Any, carry: Any) -> Any:
            peak, total, out = carry
            slot = lax.rem(b, jnp.int32(shape.stages))
            plgpu.barrier_wait(k_full.at[slot])

            def times_k(acc_ref: Any) -> Any:
                plgpu.wgmma(acc_ref, q_smem, k_smem.at[slot].T)
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
                p_smem[...] = p
                plgpu.commit_smem()
                p = p_smem
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
        peak, total, out = lax.fori_loop(0, blocks, block, (nothing + MASKED, nothing, none))
        for i in range(parts):
            out_smem[:, pl.ds(i * part, part)] = out[i] / spread(total, out[i].shape)
        lse_smem[...] = (peak + jnp.log2(total)) * (1 / LOG2E)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, M)], out_ref.at[item, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[pl.ds(0, M)], lse_ref.at[item, head])
        plgpu.wait_smem_to_gmem(0)

    scratch = ring(shape, dtype) | {
        "q_smem": tiled(dtype, shape.swizzle, ROWS, D),
        "q_full": plgpu.Barrier(),
        "out_smem": plgpu.SMEM((ROWS, D), jnp.float32),
        "lse_smem": plgpu.SMEM((ROWS,), jnp.float32),
    }
    if shape.staged:
        scratch["p_smem"] = tiled(dtype, shape.swizzle, ROWS, X)
    attend.__name__ = "ragged_paged_attention_decode"
    seen = min(window or N * S, N * S)
    return plgpu.kernel(
        attend,
        out_type=(
            jax.ShapeDtypeStruct((count, K, M, D), jnp.float32),
            jax.ShapeDtypeStruct((count, K, M), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(count, K),
        grid_names=("item", "head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * shape.group * D * seen,
            bytes_accessed=2 * B * K * D * shape.itemsize * (seen + shape.group),
            transcendentals=B * K * shape.group * seen,
        ),
        interpret=interpret,
    )
