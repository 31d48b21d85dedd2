"""What gathering and scattering whole pages on TPU share: DMAs from HBM to HBM, a bounded number of them in flight.

One DMA moves one page of one KV slot in all layers, L pieces of S x W, so that nothing passes through VMEM and a page of
any dtype is moved as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import Call
from pallas_kernels.tpu_params import SMEM_BYTES

DMAS_IN_FLIGHT = 32


def refuse(call: Call) -> str | None:
    """Why the kernels cannot take the call, or None."""
    if call["N"] == 0:
        return "there are no pages to move"
    if 4 * call["N"] > SMEM_BYTES:
        return f"{call['N']:,} page ids take {4 * call['N']:,} bytes of SMEM, at most {SMEM_BYTES:,}: move fewer at once"
    return None


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
