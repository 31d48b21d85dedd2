"""What the TPU kernels that move pages share. Whole pages go by DMAs from HBM to HBM, a bounded number in flight.

One DMA moves one page of one KV slot in all layers, L pieces of S x W: nothing passes through VMEM, and a page of any
dtype is moved as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import Call
from pallas_kernels.tpu_params import SMEM_BYTES

GROUP = 8  # slots of a tile: a DMA moves whole ones
LANES = 128
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
DMAS_IN_FLIGHT = 32
VMEM_LIMIT_BYTES = 16 << 20


def refuse_pool(call: Call) -> str | None:
    """Why no TPU kernel that moves pages can take such a pool, or None."""
    if call.dtype not in DTYPES:
        return f"pages_LPKSW has dtype {call.dtype}, need one of {', '.join(DTYPES)}"
    if call["S"] % GROUP:
        return f"pages of {call['S']} slots, need a multiple of {GROUP}: XLA pads others and copies the pool"
    if call["W"] % LANES:
        return f"pages of {call['W']} lanes, need a multiple of {LANES}: XLA pads others and copies the pool"
    return None


def refuse(call: Call) -> str | None:
    """Why the kernels that move whole pages cannot take the call, or None."""
    if call["N"] == 0:
        return "there are no pages to move"
    if 4 * call["N"] > SMEM_BYTES:
        return (
            f"{call['N']:,} page ids take {4 * call['N']:,} bytes of SMEM, at most {SMEM_BYTES:,}: move fewer at once"
        )
    return refuse_pool(call)


def pages_in_flight(N: int, K: int) -> int:
    """Pages whose DMAs, one for each KV slot, are in flight together."""
    return min(N, max(1, DMAS_IN_FLIGHT // K))


def cost_estimate(L: int, N: int, K: int, S: int, W: int, dtype: Any) -> pl.CostEstimate:
    """Cost of N pages, each in range: every byte is read once and written once."""
    moved = 2 * L * N * K * S * W * jnp.dtype(dtype).itemsize
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)


def each_page(N: int, in_flight: int, start: Callable[[Any], None], wait: Callable[[Any], None]) -> None:
    """Within a kernel: starts pages 0 to N - 1, each once the one `in_flight` pages before it has arrived."""

    def step(n: Any, _: None) -> None:
        pl.when(n >= in_flight)(lambda: wait(n - in_flight))
        start(n)

    jax.lax.fori_loop(0, N, step, None)
    jax.lax.fori_loop(N - in_flight, N, lambda n, _: wait(n), None)
