"""The staging of a hand-off: pages of all layers out of a pool and into one, against the copy bandwidth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gather_pages import gather_pages
from pallas_kernels.names import GPU, XLA
from pallas_kernels.scatter_pages import scatter_pages

from .bench import Bench

# layers, pages in the pool, KV heads, page size, lanes, pages moved: what is asked for, the smallest piece, one KV head
SHAPES = ((32, 256, 8, 64, 256, 64), (32, 256, 8, 64, 256, 4), (32, 2048, 1, 64, 256, 64), (32, 1024, 8, 16, 256, 64))
SMOKE = ((2, 8, 2, 8, 128, 4),)


def run(bench: Bench) -> None:
    for who in (XLA,) if bench.smoke else (GPU, XLA):
        for shape in SMOKE if bench.smoke else SHAPES:
            for op, measure in (("gather", gather), ("scatter", scatter)):
                with bench.attempt(op=op, who=who, shape=shape):
                    measure(bench, shape, who)


def random_pages(shape: tuple[int, ...]) -> jax.Array:
    bits = jax.random.bits(jax.random.key(0), shape, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits & 0xBFFF, jnp.bfloat16)  # no NaN, no infinity


def ids(pages: int, count: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).permutation(pages)[:count].astype(np.int32))


def record(bench: Bench, op: str, who: str, shape: tuple[int, ...], time: dict[str, float]) -> None:
    L, _, K, S, W, N = shape
    moved = 2 * L * K * S * W * N * 2  # read and written, bfloat16
    rate = moved / time["median_s"]
    bench.row(
        op=op, who=who, shape=shape, ms=1e3 * time["median_s"], bytes_per_s=rate,
        share_of_copy=bench.share(rate, "copy_bytes_per_s"), time=time,
    )  # fmt: skip


def gather(bench: Bench, shape: tuple[int, ...], who: str) -> None:
    *pool_shape, count = shape
    pool, index = random_pages(tuple(pool_shape)), ids(shape[1], count)
    program = jax.jit(lambda pool, index: gather_pages(pool, index, implementation=who))
    time = bench.timed(lambda: program(pool, index), jax.block_until_ready, max_calls=16)
    record(bench, "gather", who, shape, time)


def scatter(bench: Bench, shape: tuple[int, ...], who: str) -> None:
    L, P, K, S, W, count = shape
    index = ids(P, count)
    heads = tuple(random_pages((L, count, S, W)) for _ in range(K))
    held = [jnp.zeros((L, P, K, S, W), jnp.bfloat16)]
    program = jax.jit(
        lambda pool, index, heads: scatter_pages(pool, index, heads, implementation=who), donate_argnums=0
    )

    def call() -> jax.Array:
        held.append(program(held.pop(), index, heads))
        return held[0]

    record(bench, "scatter", who, shape, bench.timed(call, jax.block_until_ready))
