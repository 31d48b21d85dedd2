"""Is every kernel right? Attention against the float64 oracle, page movement byte for byte against NumPy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gather_pages as gathers
from pallas_kernels import ragged_paged_attention as attentions
from pallas_kernels import scatter_pages as scatters
from pallas_kernels import write_pages as writes
from pallas_kernels.batch import lanes, ragged_batch
from pallas_kernels.ragged_paged_attention.oracle import ragged_paged_attention_oracle

from .bench import Bench

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One ragged batch. `lengths` are query tokens of each row, `contexts` what each row has once they are written."""

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    kv_heads: int = 2
    group: int = 4
    dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    tokens: int | None = None  # of the program, if more than the rows have; None: one a row

    def __str__(self) -> str:
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return " ".join(f"{k}={v}" for k, v in named.items() if v not in (None, False))


D, M = (1, 1, 1, 1, 1, 0), (0, 70, 3, 0, 1, 130)  # a decode step with its last row unused; a mixed batch


def cases(bench: Bench) -> list[Case]:
    if bench.smoke:
        small: dict[str, Any] = {"kv_heads": 1, "group": 2, "dim": 64, "page_size": 8}
        return [
            Case(lengths=(1, 0), contexts=(9, 0), **small),
            Case(lengths=(3, 5), contexts=(3, 9), tokens=16, **small),
        ]
    found = []
    for K, G, dim, S in (
        (8, 4, 128, 64),
        (3, 3, 64, 16),
        (2, 1, 128, 16),
        (1, 2, 256, 32),
        (2, 7, 80, 8),
        (2, 2, 96, 128),
    ):
        sizes: dict[str, Any] = {"kv_heads": K, "group": G, "dim": dim, "page_size": S}
        contexts = (1, S - 1, S, S + 1, 5 * S + 3, 0)
        found.append(Case(lengths=D, contexts=contexts, **sizes))
        found.append(Case(lengths=M, contexts=(0, 70, S + 3, 0, 1, 130 + S), tokens=256, **sizes))
    extra: dict[str, Any] = {"window": 37, "cap": 20.0, "sinks": True}
    found.append(Case(lengths=D, contexts=(1, 63, 64, 65, 323, 0), **extra))
    found.append(Case(lengths=M, contexts=(0, 70, 67, 0, 1, 194), tokens=256, **extra))
    found.append(Case(lengths=D, contexts=(1, 63, 64, 65, 323, 0), dtype="float16"))
    found.append(Case(lengths=D, contexts=(1, 63, 64, 65, 323, 0), dtype="float32"))
    found.append(Case(lengths=M, contexts=(0, 70, 67, 0, 1, 194), tokens=256, dtype="float32"))
    return found


def names(bench: Bench, operation: Any) -> list[str]:
    """The implementations to hold against the truth: the platform's. The interpreted ones have their own tests."""
    platform = "cpu" if bench.smoke else "gpu"
    return [i.name for i in operation.IMPLEMENTATIONS if platform in i.platforms and not i.name.endswith("interpret")]


def check(bench: Bench, what: dict[str, Any], run: Callable[[], float], limit: float) -> None:
    """A row with the error. A refusal is a row too: what it says is what the user would read."""
    with bench.attempt(**what):
        try:
            error = run()
        except ValueError as refusal:
            if "cannot run this call" not in str(refusal):
                raise
            bench.row(**what, refused=str(refusal))
        else:
            bench.row(**what, relative_error=error, limit=limit, ok=bool(error <= limit))


def attention(bench: Bench) -> None:
    for case in cases(bench):
        truth: list[np.ndarray] = []
        for name in names(bench, attentions):
            what = {"op": "attention", "who": name, "case": str(case)}
            check(bench, what, functools.partial(attention_error, case, name, truth), LIMITS[case.dtype])


def attention_error(case: Case, name: str, truth: list[np.ndarray]) -> float:
    """The largest difference from the oracle over the largest value; 0 must be where the oracle has padding."""
    rng = np.random.default_rng(0)
    B, S = len(case.lengths), case.page_size
    N = max(2, -(-max(case.contexts) // S))
    T, H = case.tokens or B, case.kv_heads * case.group
    table = rng.permutation(B * N).reshape(B, N).astype(np.int32)
    pool = jnp.asarray(rng.standard_normal((2, B * N, case.kv_heads, S, lanes(case.dim))), case.dtype)
    q = jnp.asarray(rng.standard_normal((T, H, case.dim)), case.dtype)
    sinks = rng.standard_normal(H).astype(np.float32) if case.sinks else None
    starts, contexts = np.cumsum([0, *case.lengths]).astype(np.int32), np.array(case.contexts, np.int32)
    options: dict[str, Any] = {"scale": case.dim**-0.5, "sliding_window": case.window, "soft_cap": case.cap}

    def program(q: jax.Array, pool: jax.Array, layer: jax.Array, *batch: jax.Array) -> jax.Array:
        ragged = ragged_batch(*batch, num_tokens=T, page_size=S, num_pages=B * N)
        return attentions.ragged_paged_attention(
            q,
            pool,
            layer,
            ragged,
            sinks_H=None if sinks is None else jnp.asarray(sinks),
            implementation=name,
            **options,
        )

    got = np.asarray(jax.jit(program)(q, pool, jnp.int32(1), starts, contexts, table), np.float64)
    if not truth:
        wide_q, wide_pool = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, pool))
        batch = ragged_batch(
            *(jnp.asarray(x) for x in (starts, contexts, table)), num_tokens=T, page_size=S, num_pages=B * N
        )
        truth.append(ragged_paged_attention_oracle(wide_q, wide_pool, 1, batch, sinks_H=sinks, **options))
    if not np.isfinite(got).all() or got[starts[-1] :].any():
        return float("inf")
    return float(np.abs(got - truth[0]).max() / np.abs(truth[0]).max())


def pages(bench: Bench) -> None:
    """Reads, writes and whole-page writes: equal in every byte, or not."""
    shapes = [(2, 6, 2, 8, 128)] if bench.smoke else [(4, 40, 8, 64, 256), (2, 33, 3, 8, 128), (2, 12, 2, 256, 512)]
    dtypes = ["bfloat16"] if bench.smoke else ["bfloat16", "float32", "float16", "int8", "float8_e4m3fn"]
    for shape in shapes:
        for dtype in dtypes:
            for op, operation, mistakes in (
                ("gather", gathers, gather_mistakes),
                ("scatter", scatters, scatter_mistakes),
                ("write", writes, write_mistakes),
            ):
                for name in names(bench, operation):
                    what = {"op": op, "who": name, "case": f"{dtype} {shape}"}
                    check(bench, what, functools.partial(mistakes, shape, dtype, name), 0.0)


def some(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-100, 100, shape), jnp.float32).astype(dtype)


def differ(got: Any, expected: np.ndarray) -> float:
    """The part of the bytes that differ."""
    a, b = (np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8) for x in (np.asarray(got), expected))
    return float(np.mean(a != b))


def gather_mistakes(shape: tuple[int, ...], dtype: str, name: str) -> float:
    pool, P, K = some(shape, dtype, 0), shape[1], shape[2]
    index = np.array([P - 1, -2, 0, P + 7, 2], np.int32)
    got = jax.jit(lambda p, i: gathers.gather_pages(p, i, implementation=name))(pool, index)
    expected, live = np.asarray(pool)[:, index % P], (index >= 0) & (index < P)  # what is read for the others is free
    return max(differ(np.asarray(got[k])[:, live], expected[:, live, k]) for k in range(K))


def scatter_mistakes(shape: tuple[int, ...], dtype: str, name: str) -> float:
    (L, P, K, S, W), pool = shape, some(shape, dtype, 0)
    index = np.array([P, P - 1, -1, 0, 2], np.int32)
    heads = tuple(some((L, len(index), S, W), dtype, k + 1) for k in range(K))
    expected = np.array(pool)
    for n in (1, 3, 4):
        for k in range(K):
            expected[:, index[n], k] = heads[k][:, n]
    program = jax.jit(lambda p, i, h: scatters.scatter_pages(p, i, h, implementation=name), donate_argnums=0)
    return differ(program(pool, index, heads), expected)


def write_mistakes(shape: tuple[int, ...], dtype: str, name: str) -> float:
    _, P, K, S, W = shape
    dim = W // 2
    narrow = dtype in ("int8", "float8_e4m3fn")
    scales = jnp.ones((2, K), jnp.float32) if narrow else None
    pool = some(shape, dtype, 0)
    k, v = (some((6, K, dim), "float32" if narrow else dtype, seed) for seed in (1, 2))
    starts, contexts = np.array([0, 4, 5], np.int32), np.array([S + 2, 1], np.int32)
    table = np.array([[3, 1], [0, 2]], np.int32)
    expected = np.array(pool)
    for token, (page, slot) in enumerate(((3, S - 2), (3, S - 1), (1, 0), (1, 1), (0, 0))):
        expected[1, page, :, slot, :dim] = k[token].astype(dtype)
        expected[1, page, :, slot, dim:] = v[token].astype(dtype)

    def program(p: jax.Array, k: jax.Array, v: jax.Array, *batch: jax.Array) -> jax.Array:
        ragged = ragged_batch(*batch, num_tokens=6, page_size=S, num_pages=P)
        return writes.write_pages(p, 1, k, v, ragged, kv_scales_2K=scales, implementation=name)

    return differ(jax.jit(program, donate_argnums=0)(pool, k, v, starts, contexts, table), expected)
