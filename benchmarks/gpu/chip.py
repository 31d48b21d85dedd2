"""What the machine can do: its name, how fast it copies and how fast it multiplies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .bench import Bench


def run(bench: Bench) -> None:
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    bench.row(
        device=device.device_kind,
        platform=device.platform,
        devices=len(jax.devices()),
        usable_bytes=memory,
        platform_version=device.client.platform_version,
    )
    with bench.attempt(what="copy"):
        copy(bench)
    with bench.attempt(what="matmul"):
        matmul(bench)


def copy(bench: Bench) -> None:
    """Bytes read and written a second, of the faster of a plain copy and an addition."""
    size = (1 << 20) if bench.smoke else (1 << 30)
    x = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    rates = []
    for name, function in (("copy", jnp.copy), ("add one", lambda x: x + 1)):
        time = bench.timed(functools.partial(jax.jit(function), x), jax.block_until_ready, max_calls=16)
        rates.append(2 * size / time["median_s"])
        bench.row(what=name, bytes_per_s=rates[-1], time=time)
    bench.row(copy_bytes_per_s=max(rates))


def matmul(bench: Bench) -> None:
    """bfloat16 operations a second."""
    n = 256 if bench.smoke else 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    program = jax.jit(lambda a, b: a @ b)
    time = bench.timed(lambda: program(a, b), jax.block_until_ready)
    bench.row(what=f"matmul {n}", matmul_flops_per_s=2 * n**3 / time["median_s"], time=time)
