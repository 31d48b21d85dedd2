"""The XLA attention against the float64 oracle, on random ragged batches of few shapes, since each is compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.batch import RaggedBatch, lanes, ragged_batch
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.oracle import ragged_paged_attention_oracle


@dataclasses.dataclass(frozen=True)
class Shape:
    """One compiled program."""

    tokens: int
    rows: int
    kv_slots: int
    group: int
    head_dim: int
    page_size: int = 16
    table: int = 20
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"
    pages: int = 70


DECODE = [
    Shape(1, 1, 3, 3, 64),
    Shape(5, 5, 3, 3, 64),
    Shape(40, 40, 1, 1, 80, page_size=8),
    Shape(4, 4, 2, 4, 128, window=20),
    Shape(4, 4, 1, 7, 96, page_size=4, window=1, soft_cap=30.0),
    Shape(6, 6, 1, 4, 256, page_size=128, table=3, soft_cap=5.0),
    Shape(6, 6, 2, 2, 64, dtype="bfloat16"),
]
PREFILL = [
    Shape(16, 1, 3, 3, 64),
    Shape(150, 4, 3, 3, 64),
    Shape(150, 6, 1, 7, 80, page_size=8, window=20),
    Shape(32, 8, 2, 1, 96, page_size=4, window=1),
    Shape(80, 3, 1, 4, 256, page_size=128, table=3, soft_cap=5.0),
    Shape(100, 3, 2, 4, 128, window=100, soft_cap=30.0),
    Shape(100, 4, 2, 2, 64, dtype="bfloat16"),
]


@functools.cache
def program(shape: Shape) -> Callable[..., Any]:
    def run(q, pages, layer, starts, contexts, table):  # type: ignore[no-untyped-def]
        batch = ragged_batch(
            starts, contexts, table, num_tokens=shape.tokens, page_size=shape.page_size, num_pages=shape.pages
        )
        out = ragged_paged_attention(
            q, pages, layer, batch, scale=shape.head_dim**-0.5, sliding_window=shape.window, soft_cap=shape.soft_cap
        )
        return out, batch

    return jax.jit(run)


def compare(shape: Shape, lengths: list[int], contexts: list[int], seed: int, poison: float = np.nan) -> None:
    """Runs one batch; every slot that no row may see holds `poison`."""
    rng = np.random.default_rng(seed)
    slots = (2, shape.pages, shape.kv_slots, shape.page_size, lanes(shape.head_dim))
    # Pages are shared and come in any order. Unused entries of the table are as wrong as they can be.
    table = np.where(rng.random((shape.rows, shape.table)) < 0.5, -1, 2**31 - 1).astype(np.int32)
    seen = np.zeros(slots[1::2], bool)  # [P, S]
    for row, context in enumerate(contexts):
        used = -(-context // shape.page_size)
        table[row, :used] = rng.choice(shape.pages, used, replace=used > shape.pages)
        for pos in range(context):
            seen[table[row, pos // shape.page_size], pos % shape.page_size] = True
    pool = rng.standard_normal(slots, dtype=np.float32)
    pool = np.where(seen[None, :, None, :, None], pool, poison)
    pages = jnp.asarray(pool, shape.dtype)
    heads = shape.kv_slots * shape.group
    q = jnp.asarray(rng.standard_normal((shape.tokens, heads, shape.head_dim), dtype=np.float32) * 2, shape.dtype)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    layer = int(rng.integers(2))
    out, batch = program(shape)(q, pages, jnp.int32(layer), starts, np.asarray(contexts, np.int32), table)
    got = np.asarray(out.astype(jnp.float32), np.float64)
    f32 = functools.partial(np.asarray, dtype=np.float32)
    expected = ragged_paged_attention_oracle(
        f32(q.astype(jnp.float32)), f32(pages.astype(jnp.float32)), layer, RaggedBatch(*batch),
        scale=shape.head_dim**-0.5, sliding_window=shape.window, soft_cap=shape.soft_cap,
    )  # fmt: skip
    tolerance = 1e-5 if shape.dtype == "float32" else 1e-2
    assert out.dtype == q.dtype
    assert np.abs(got - expected).max() <= tolerance * max(1e-3, np.abs(expected).max())
    assert not got[starts[-1] :].any(), "padding is not zero"


def context_lengths(shape: Shape) -> st.SearchStrategy[int]:
    page, longest = shape.page_size, shape.page_size * shape.table
    edges = [n for n in (1, page - 1, page, page + 1, 4 * page, 4 * page + 1, longest) if 1 <= n <= longest]
    return st.sampled_from(edges) | st.integers(1, longest)


@pytest.mark.parametrize("shape", DECODE, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_decode_matches_the_oracle(shape: Shape, data: st.DataObject) -> None:
    live = data.draw(st.integers(0, shape.rows))
    contexts = [data.draw(context_lengths(shape)) for _ in range(min(live, 8))]
    contexts = [contexts[i % len(contexts)] for i in range(live)] + [0] * (shape.rows - live)
    compare(shape, [1] * live + [0] * (shape.rows - live), contexts, data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("shape", PREFILL, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_prefill_matches_the_oracle(shape: Shape, data: st.DataObject) -> None:
    lengths: list[int] = []
    contexts: list[int] = []
    for _ in range(data.draw(st.integers(0, shape.rows))):
        context = data.draw(context_lengths(shape))
        most = min(context, shape.tokens - sum(lengths))
        length = data.draw(st.sampled_from([most, min(1, most)]) | st.integers(0, most))
        lengths.append(length)
        contexts.append(context if length else 0)
    empty = [0] * (shape.rows - len(lengths))
    compare(shape, lengths + empty, contexts + empty, data.draw(st.integers(0, 99)))


def test_one_long_row_among_short_ones() -> None:
    compare(DECODE[1], [1, 1, 1, 1, 0], [3, 320, 1, 17, 0], seed=1)
    compare(PREFILL[1], [1, 148, 0, 1], [200, 300, 0, 1], seed=1)


def test_a_row_that_ends_inside_an_item_leaves_the_next_row_alone() -> None:
    compare(PREFILL[1], [65, 63, 1, 2], [65, 63, 1, 2], seed=2)


def test_empty_batch_is_zero_and_runs_no_block() -> None:
    for shape in (DECODE[1], PREFILL[1]):
        compare(shape, [0] * shape.rows, [0] * shape.rows, seed=3)


def test_empty_query_slots_do_no_harm() -> None:
    """On a mesh whose size does not divide the heads some query slots hold zeros: they get the mean of the values."""
    shape = PREFILL[0]
    starts, contexts = jnp.array([0, 5], jnp.int32), jnp.array([5], jnp.int32)
    table = jnp.arange(20, dtype=jnp.int32)[None]
    pages = jax.random.normal(jax.random.key(0), (2, shape.pages, 3, 16, 128))
    q = jax.random.normal(jax.random.key(1), (16, 9, 64)).at[:, 2].set(0)
    out, _ = program(shape)(q, pages, jnp.int32(0), starts, contexts, table)
    np.testing.assert_allclose(out[4, 2], pages[0, 0, 0, :5, 64:].mean(0), atol=1e-6)
    other, _ = program(shape)(q.at[:, 2].set(7), pages, jnp.int32(0), starts, contexts, table)
    np.testing.assert_array_equal(np.delete(out, 2, axis=1), np.delete(other, 2, axis=1))


def call(**changes: object) -> jax.Array:
    batch = ragged_batch(
        jnp.array([0, 3, 4], jnp.int32), jnp.array([3, 9], jnp.int32), jnp.zeros((2, 4), jnp.int32),
        num_tokens=8, page_size=16, num_pages=10,
    )  # fmt: skip
    arguments = {
        "q_THD": jnp.zeros((8, 9, 64)), "pages_LPKSW": jnp.zeros((2, 10, 3, 16, 128)), "layer": 1, "batch": batch,
        "scale": 0.125,
    }  # fmt: skip
    return ragged_paged_attention(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_THD": jnp.zeros((8, 576))}, r"q_THD has shape \(8, 576\)"),
        ({"q_THD": jnp.zeros((8, 9, 64), jnp.int32)}, "q_THD has dtype int32"),
        ({"q_THD": jnp.zeros((8, 8, 64))}, "8 query slots, need a multiple of the 3"),
        ({"q_THD": jnp.zeros((8, 9, 80))}, "head size 80, whose pages have 256 lanes, but pages_LPKSW has 128"),
        ({"q_THD": jnp.zeros((7, 9, 64))}, r"batch.token_row has shape \(8,\), need \(7,\)"),
        ({"pages_LPKSW": jnp.zeros((10, 3, 16, 128))}, "need 5 axes"),
        ({"layer": 2}, "layer=2, need 0 to 1"),
        ({"layer": -1}, "layer=-1, need 0 to 1"),
        ({"layer": jnp.zeros(1, jnp.int32)}, r"layer has shape \(1,\)"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"sliding_window": 0}, "sliding_window=0, need an int of at least 1"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"implementation": "fast"}, "implementation='fast' of ragged_paged_attention is unknown"),
    ],
)
def test_bad_calls_name_argument_value_and_limit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_bad_batch_is_named() -> None:
    good = ragged_batch(
        jnp.array([0, 3, 4], jnp.int32), jnp.array([3, 9], jnp.int32), jnp.zeros((2, 4), jnp.int32),
        num_tokens=8, page_size=16, num_pages=10,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"batch.page_table has shape \(3, 4\), need \(2, 4\)"):
        call(batch=good._replace(page_table=jnp.zeros((3, 4), jnp.int32)))
    with pytest.raises(ValueError, match="batch.context_lens has dtype float32, need int32"):
        call(batch=good._replace(context_lens=jnp.zeros(2)))
