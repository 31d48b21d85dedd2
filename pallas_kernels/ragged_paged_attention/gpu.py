"""Ragged paged attention on Hopper GPUs, with Pallas Mosaic GPU: the entry of both kernels.

`gpu_items` cuts the batch into work items; `gpu_decode` (row i is token i) and `gpu_prefill` (everything else) run
them; `gpu_kernel` holds what they share.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.dispatch import Call
from pallas_kernels.gpu_pages import HOPPER, MIN_JAX, mosaic_gpu
from pallas_kernels.ragged_paged_attention.gpu_decode import decode
from pallas_kernels.ragged_paged_attention.gpu_kernel import ROWS, Shape
from pallas_kernels.ragged_paged_attention.gpu_prefill import prefill

DTYPES = ("bfloat16", "float16")
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
HEAD_SIZES = (64, 80, 96, 128, 256)


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
) -> jax.Array:
    """Arguments and result as the public function's. `interpret`: on CPU, under simulated memory, races raise."""
    options: dict[str, Any] = {
        "scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap, "sinks_H": sinks_H,
        "interpret": mosaic_gpu().InterpretGPUParams(detect_races=True) if interpret else None,
    }  # fmt: skip
    if q_THD.shape[0] == batch.context_lens.shape[0]:
        return decode(q_THD, pages_LPKSW, layer, batch.context_lens, batch.page_table, **options)
    return prefill(q_THD, pages_LPKSW, layer, batch, **options)


def resources(*, prefill: bool, head_dim: int, page_size: int, group: int) -> dict[str, int]:
    """What one CUDA block of the kernel for these sizes takes: an upper bound of its bytes of shared memory (227 KB are
    there), and the threads, ring stages and sizes that it follows from. `stages` is 0 where it does not fit."""
    shape = Shape(prefill, head_dim, page_size, group)
    return {
        "smem_bytes": shape.smem_bytes, "stages": shape.stages, "stage_bytes": shape.stage_bytes,
        "block_tokens": shape.block, "query_rows": shape.rows, "threads": 128 * (shape.warpgroups + 1),
    }  # fmt: skip


def refuse(call: Call) -> str | None:
    """Why the kernels cannot take the call, or None."""
    if jax.__version_info__[:2] < MIN_JAX:
        return f"it needs jax {'.'.join(map(str, MIN_JAX))} or newer (Python 3.12), this is {jax.__version__}"
    if call.platform == "gpu" and not any(name in call.chip.replace("-", " ").split() for name in HOPPER):
        return (
            f"it multiplies with wgmma, which only Hopper ({', '.join(HOPPER)}) has: Ampere and older came before it, "
            "Blackwell has tcgen05 instead"
        )
    if "float32" in (call.dtype, call.operand):
        return "wgmma rounds float32 to tf32 (10 bits), and float32 promises 1e-5"
    if call.dtype not in DTYPES:
        return f"wgmma multiplies one dtype with the same, and pages of {call.dtype} are not converted on the way"
    if call.operand != call.dtype:
        return f"wgmma multiplies one dtype with the same, not {call.operand} queries with {call.dtype} pages"
    if call["S"] not in PAGE_SIZES:
        return f"page size {call['S']} is not one of {', '.join(map(str, PAGE_SIZES))}"
    if call["D"] not in HEAD_SIZES:
        return f"head size {call['D']} is not one of {', '.join(map(str, HEAD_SIZES))}"
    group = call["H"] // call["K"]
    if group > ROWS:
        return f"{group} query slots per KV slot are more than the {ROWS} rows of a wgmma"
    return None
