"""What attention and page writes cost in one step on CPU, and that the size of the page pool is no part of it.

    python benchmarks/attention_cpu.py [--only decode] [--pool-factor 10] [--repeats 20]

Each line is one program of SmolLM2-135M's shape (30 layers, 9 query and 3 KV heads of 64, pages of 16 tokens, float32)
that holds nothing but the 30 page writes and 30 attentions, the pool carried from layer to layer and donated. Times are
minima, since whatever else runs on the machine only adds. The last columns are the compiler's count of temporary memory
and how often an array as large as the pool is copied, which must be 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import RaggedBatch, lanes, ragged_batch
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.write_pages import write_pages

LAYERS, QUERY_SLOTS, KV_SLOTS, HEAD_DIM, PAGE_SIZE = 30, 9, 3, 64, 16
MAX_CONTEXT = 2048


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: each row's query tokens and tokens in the cache, in a program of `tokens` flat tokens."""

    name: str
    tokens: int
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    sliding_window: int | None = None


def decode(rows: int, context: int, window: int | None = None, live: int | None = None) -> Case:
    live = rows if live is None else live
    name = f"decode batch {rows}" + (f" ({live} live)" if live != rows else "") + f", context {context}"
    name += f", window {window}" if window else ""
    empty = (0,) * (rows - live)
    return Case(name, rows, (1,) * live + empty, (context,) * live + empty, window)


def prefill(tokens: int, rows: int, length: int, cached: int = 0, slots: int = 8, window: int | None = None) -> Case:
    name = f"prefill {rows} x {length} of {tokens}, {cached} cached" + (f", window {window}" if window else "")
    empty = (0,) * (slots - rows)
    return Case(name, tokens, (length,) * rows + empty, (cached + length,) * rows + empty, window)


CASES = (
    decode(1, 64),
    decode(1, 512),
    decode(1, 2048),
    decode(1, 2048, window=128),
    decode(16, 128),
    decode(16, 128, live=2),
    Case("decode batch 16, contexts 64 and one 2048", 16, (1,) * 16, (2048,) + (64,) * 15),
    decode(64, 128),
    prefill(16, 1, 16),
    prefill(16, 1, 10, cached=100),
    prefill(64, 1, 64),
    prefill(128, 2, 64),
    prefill(512, 1, 512),
    prefill(512, 1, 512, window=128),
    prefill(512, 1, 512, cached=1024),
    prefill(512, 8, 64),
    prefill(512, 32, 16, slots=32),
    prefill(512, 1, 40),
)


def step(
    pages_LPKSW: jax.Array, q_THD: jax.Array, batch: RaggedBatch, *, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """All layers' writes and attentions, each fed by the one before."""
    for layer in range(LAYERS):
        pages_LPKSW = write_pages(pages_LPKSW, layer, q_THD[:, :KV_SLOTS], q_THD[:, -KV_SLOTS:], batch)
        out_THD = ragged_paged_attention(q_THD, pages_LPKSW, layer, batch, scale=HEAD_DIM**-0.5, sliding_window=window)
        q_THD = q_THD + out_THD
    return q_THD, pages_LPKSW


def make_batch(case: Case, num_pages: int) -> RaggedBatch:
    """The case's batch; every row has its own pages while there are enough."""
    rows, width = len(case.lengths), MAX_CONTEXT // PAGE_SIZE
    table = np.zeros((rows, width), np.int32)
    free = iter(np.random.default_rng(0).permutation(num_pages).tolist())
    for row, context in enumerate(case.contexts):
        pages = -(-context // PAGE_SIZE)
        table[row, :pages] = [next(free) for _ in range(pages)]
    starts = jnp.asarray(np.cumsum([0, *case.lengths]), jnp.int32)
    contexts = jnp.asarray(case.contexts, jnp.int32)
    derive = jax.jit(ragged_batch, static_argnames=("num_tokens", "page_size", "num_pages"))
    return derive(
        starts, contexts, jnp.asarray(table), num_tokens=case.tokens, page_size=PAGE_SIZE, num_pages=num_pages
    )


def pool_copies(text: str, shape: tuple[int, ...]) -> int:
    """Copies in compiled HLO whose result is as large as the pool."""
    return len(re.findall(rf"= f32\[{','.join(map(str, shape))}\]\S* copy\(", text))


def measure(case: Case, num_pages: int, repeats: int) -> tuple[float, float, int, int]:
    """(seconds a step, seconds to compile, temporary bytes, pool copies)."""
    shape = (LAYERS, num_pages, KV_SLOTS, PAGE_SIZE, lanes(HEAD_DIM))
    pages = jnp.zeros(shape, jnp.float32)
    batch = make_batch(case, num_pages)
    q_THD = jax.random.normal(jax.random.key(0), (case.tokens, QUERY_SLOTS, HEAD_DIM), jnp.float32)
    started = time.perf_counter()
    program = jax.jit(step, donate_argnums=0, static_argnames="window").lower(
        pages, q_THD, batch, window=case.sliding_window
    )
    compiled: Any = program.compile()
    compile_s = time.perf_counter() - started
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        out, pages = compiled(pages, q_THD, batch)
        jax.block_until_ready((out, pages))
        best = min(best, time.perf_counter() - started)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return best, compile_s, temporary, pool_copies(compiled.as_text(), shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--pages", type=int, default=640, help="pages of the small pool (default 640)")
    parser.add_argument("--pool-factor", type=int, default=10, help="the large pool has this many times the pages")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; pool of {args.pages} pages, and x{args.pool_factor}")
    print(f"{'case':44s} {'step':>9s} {'x pool':>9s} {'compile':>8s} {'temporary':>10s} copies")
    for case in CASES:
        if args.only not in case.name:
            continue
        best, compile_s, temporary, copies = measure(case, args.pages, args.repeats)
        large = measure(case, args.pages * args.pool_factor, args.repeats)[0] if args.pool_factor > 1 else float("nan")
        print(
            f"{case.name:44s} {best * 1e3:6.2f} ms {large * 1e3:6.2f} ms {compile_s:6.1f} s "
            f"{temporary / 1e6:7.2f} MB {copies:4d}",
            flush=True,
        )


if __name__ == "__main__":
    main()
