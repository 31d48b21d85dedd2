"""Attention over paged KV: decode against the copy bandwidth, prefill against the matmul rate, and what others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import lanes, ragged_batch
from pallas_kernels.names import GPU, XLA
from pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS, ragged_paged_attention

from .bench import Bench, OutOfTime

LAYERS = 2  # of the pool; the second is read


class Shape(NamedTuple):
    """`rows` sequences of `context` tokens each; `tokens` query tokens of each."""

    rows: int
    tokens: int
    context: int
    kv_heads: int = 8
    group: int = 4
    dim: int = 128

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def bytes(self) -> int:
        """Of one call in bfloat16: live keys and values once, queries and results once."""
        kv = self.rows * self.context * self.kv_heads * 2 * self.dim
        return 2 * (kv + 2 * self.rows * self.tokens * self.heads * self.dim)

    @property
    def flops(self) -> int:
        """Of one call, the causal half only."""
        first = self.context - self.tokens + 1
        pairs = self.rows * self.tokens * (first + self.context) // 2
        return 4 * pairs * self.heads * self.dim


def decode_shape(bench: Bench) -> Shape:
    return Shape(2, 1, 64, kv_heads=1, group=2, dim=64) if bench.smoke else Shape(64, 1, 8192)


def prefill_shape(bench: Bench) -> Shape:
    return Shape(1, 32, 32, kv_heads=1, group=2, dim=64) if bench.smoke else Shape(1, 8192, 8192)


def call(shape: Shape, page_size: int, implementation: str) -> Callable[[], jax.Array]:
    """A call of ours, ready to be repeated. Pages lie in the pool in random order."""
    B, N = shape.rows, shape.context // page_size
    pages = B * N
    table_BN = np.random.default_rng(0).permutation(pages).reshape(B, N).astype(np.int32)
    # A small random part repeated: random values cost more power than zeros, and so much noise more memory than it is.
    some = jax.random.normal(jax.random.key(0), (1, min(pages, 64), shape.kv_heads, page_size, lanes(shape.dim)))
    repeats = (LAYERS, -(-pages // some.shape[1]), 1, 1, 1)
    pool_LPKSW = jax.jit(lambda x: jnp.tile(x.astype(jnp.bfloat16), repeats)[:, :pages])(some)
    q_THD = jax.random.normal(jax.random.key(1), (B * shape.tokens, shape.heads, shape.dim), jnp.bfloat16)
    starts = jnp.arange(0, B * shape.tokens + 1, shape.tokens, dtype=jnp.int32)
    contexts = jnp.full(B, shape.context, jnp.int32)

    @jax.jit
    def program(q: jax.Array, pool: jax.Array, starts: jax.Array, contexts: jax.Array, table: jax.Array) -> jax.Array:
        batch = ragged_batch(starts, contexts, table, num_tokens=len(q), page_size=page_size, num_pages=pages)
        return ragged_paged_attention(q, pool, 1, batch, scale=shape.dim**-0.5, implementation=implementation)

    return lambda: program(q_THD, pool_LPKSW, starts, contexts, jnp.asarray(table_BN))


def ours(bench: Bench) -> str:
    """The kernel that is measured; its interpreted form is no thing to time, so on CPU it is the reference."""
    if bench.smoke:
        return XLA
    if GPU not in [i.name for i in IMPLEMENTATIONS]:
        raise RuntimeError(f"this checkout has no {GPU} attention")
    return GPU


def record(bench: Bench, shape: Shape, who: str, run: Callable[[], Any], wait: Any, **more: Any) -> None:
    """Times it and writes the row of a decode step or of a prompt."""
    time = bench.timed(run, wait)
    seconds = time["median_s"]
    if shape.tokens == 1:
        rate, share = shape.bytes / seconds, bench.share(shape.bytes / seconds, "copy_bytes_per_s")
        bench.row(op="decode", who=who, **more, ms=1e3 * seconds, bytes_per_s=rate, share_of_copy=share, time=time)
    else:
        rate, share = shape.flops / seconds, bench.share(shape.flops / seconds, "matmul_flops_per_s")
        bench.row(op="prefill", who=who, **more, ms=1e3 * seconds, flops_per_s=rate, share_of_matmul=share, time=time)


def decode(bench: Bench) -> None:
    """Ours, at three page sizes."""
    for page_size in (16,) if bench.smoke else (64, 16, 128):
        with bench.attempt(op="decode", page_size=page_size):
            shape, who = decode_shape(bench), ours(bench)
            size = min(page_size, shape.context)
            record(bench, shape, who, call(shape, size, who), jax.block_until_ready, page_size=size)


def prefill(bench: Bench) -> None:
    """Ours, at two page sizes."""
    for page_size in (16,) if bench.smoke else (64, 16):
        with bench.attempt(op="prefill", page_size=page_size):
            shape, who = prefill_shape(bench), ours(bench)
            size = min(page_size, shape.context)
            record(bench, shape, who, call(shape, size, who), jax.block_until_ready, page_size=size)


def peers(bench: Bench) -> None:
    """jax.nn on keys and values that lie side by side (no pages), and last, since it is slow, the XLA reference."""
    for shape in (decode_shape(bench), prefill_shape(bench)):
        for implementation in ("cudnn", "xla"):
            who = f"jax.nn.dot_product_attention, {implementation}"
            with bench.attempt(op="decode" if shape.tokens == 1 else "prefill", who=who):
                if implementation == "cudnn" and bench.smoke:
                    bench.row(who=who, skipped="cuDNN is for GPUs")
                    continue
                record(bench, shape, who, jax_nn(shape, implementation), jax.block_until_ready)
    for shape in (decode_shape(bench), prefill_shape(bench)):
        with bench.attempt(op="decode" if shape.tokens == 1 else "prefill", who=XLA):
            size = min(64, shape.context)
            record(bench, shape, XLA, call(shape, size, XLA), jax.block_until_ready, page_size=size)
    if not bench.smoke:
        agreement(bench)


def agreement(bench: Bench) -> None:
    """The largest difference between ours and the XLA reference on the measured shapes, over the largest value."""
    for op, shape in (("decode", decode_shape(bench)), ("prefill", prefill_shape(bench))):
        with bench.attempt(op=op, what="agreement with xla"):
            if bench.left() < 10:
                raise OutOfTime("not run: too little time was left")
            mine, reference = (np.asarray(call(shape, 64, who)(), np.float32) for who in (ours(bench), XLA))
            error = float(np.abs(mine - reference).max() / np.abs(reference).max())
            bench.row(op=op, what="agreement with xla", relative_error=error, ok=error < 2e-2)


def jax_nn(shape: Shape, implementation: str) -> Callable[[], jax.Array]:
    q, k, v = (
        jax.random.normal(jax.random.key(i), (shape.rows, tokens, heads, shape.dim), jnp.bfloat16)
        for i, (tokens, heads) in enumerate(
            ((shape.tokens, shape.heads), (shape.context, shape.kv_heads), (shape.context, shape.kv_heads))
        )
    )

    @jax.jit
    def program(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        causal = shape.tokens > 1
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)  # type: ignore[call-overload]

    return lambda: program(q, k, v)
