"""Writing, gathering and scattering pages: each byte where it belongs, and not one byte elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.batch import lanes, ragged_batch
from pallas_kernels.gather_pages import gather_pages
from pallas_kernels.scatter_pages import scatter_pages
from pallas_kernels.write_pages import write_pages

LAYERS, PAGES, SLOTS = 2, 40, 8


@jax.jit
def run_write(pages, layer, k, v, starts, contexts, table):  # type: ignore[no-untyped-def]
    batch = ragged_batch(
        starts, contexts, table, num_tokens=k.shape[0], page_size=pages.shape[3], num_pages=pages.shape[1]
    )
    return write_pages(pages, layer, k, v, batch)


def check_write(rows: int, tokens: int, lengths: list[int], contexts: list[int], kv_slots: int, dim: int, seed: int,
                dtype: str = "float32") -> None:  # fmt: skip
    """Writes one batch and compares every byte of the pool with what a plain loop makes of it."""
    rng = np.random.default_rng(seed)
    width = PAGES // rows
    table = rng.permutation(PAGES)[: rows * width].reshape(rows, width).astype(np.int32)
    pages = jnp.asarray(rng.standard_normal((LAYERS, PAGES, kv_slots, SLOTS, lanes(dim))), dtype)
    k, v = (jnp.asarray(rng.standard_normal((tokens, kv_slots, dim)), dtype) for _ in range(2))
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    expected = np.array(pages)
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        for i in range(length):
            pos, token = context - length + i, starts[row] + i
            slot = expected[1, table[row, pos // SLOTS], :, pos % SLOTS]
            slot[:, :dim], slot[:, dim : 2 * dim], slot[:, 2 * dim :] = k[token], v[token], 0
    got = np.asarray(run_write(pages, jnp.int32(1), k, v, starts, np.asarray(contexts, np.int32), table))
    assert got.tobytes() == expected.tobytes()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_only_live_slots_are_written(data: st.DataObject) -> None:
    rows, tokens = data.draw(st.sampled_from([(1, 1), (4, 4), (4, 24), (1, 24)]))
    lengths: list[int] = []
    contexts: list[int] = []
    for _ in range(data.draw(st.integers(0, rows))):
        most = 1 if rows == tokens else min(tokens - sum(lengths), SLOTS * (PAGES // rows))
        length = 1 if rows == tokens else data.draw(st.integers(0, most))
        lengths.append(length)
        contexts.append(data.draw(st.integers(length, SLOTS * (PAGES // rows))))
    empty = [0] * (rows - len(lengths))
    check_write(rows, tokens, lengths + empty, contexts + empty, 3, 64, data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_head_size(dim: int, dtype: str) -> None:
    check_write(3, 24, [9, 0, 7], [20, 0, 7], 1, dim, 0, dtype)


def test_new_keys_and_values_are_rounded_to_the_dtype_of_the_pool() -> None:
    pages = jnp.zeros((1, 4, 1, SLOTS, 128), jnp.bfloat16)
    k = jnp.full((1, 1, 64), 1.001)
    out = run_write(pages, jnp.int32(0), k, k, np.array([0, 1]), np.array([1]), np.zeros((1, 2), np.int32))
    assert out.dtype == jnp.bfloat16
    assert out[0, 0, 0, 0, 0] == jnp.bfloat16(1.001)


@settings(max_examples=15, deadline=None)
@given(ids=st.lists(st.integers(-3, PAGES + 3), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_gather_takes_the_pages_and_clamps(ids: list[int], seed: int) -> None:
    pages = np.random.default_rng(seed).standard_normal((LAYERS, PAGES, 3, SLOTS, 128), dtype=np.float32)
    heads = jax.jit(gather_pages)(jnp.asarray(pages), jnp.asarray(ids, jnp.int32))
    assert len(heads) == 3
    for head, got in enumerate(heads):
        for n, page in enumerate(ids):
            if 0 <= page < PAGES:
                np.testing.assert_array_equal(got[:, n], pages[:, page, head])
        assert np.isfinite(got).all()


@settings(max_examples=15, deadline=None)
@given(
    ids=st.lists(st.integers(-PAGES, 2 * PAGES), min_size=1, max_size=4, unique=True),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_scatter_writes_the_pages_and_nothing_else(ids: list[int], seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    pages = jnp.asarray(rng.standard_normal((LAYERS, PAGES, 2, SLOTS, 128)), dtype)
    heads = tuple(jnp.asarray(rng.standard_normal((LAYERS, len(ids), SLOTS, 128)), dtype) for _ in range(2))
    expected = np.array(pages)
    for n, page in enumerate(ids):
        if 0 <= page < PAGES:
            for head in range(2):
                expected[:, page, head] = heads[head][:, n]
    got = np.asarray(jax.jit(scatter_pages)(pages, jnp.asarray(ids, jnp.int32), heads))
    assert got.tobytes() == expected.tobytes()


def test_scatter_of_a_gather_moves_pages_between_pools() -> None:
    source = jax.random.normal(jax.random.key(0), (LAYERS, PAGES, 3, SLOTS, 128))
    taken = gather_pages(source, jnp.array([7, 2, 9], jnp.int32))
    out = scatter_pages(jnp.zeros_like(source), jnp.array([0, 5, PAGES], jnp.int32), taken)
    np.testing.assert_array_equal(out[:, 0], source[:, 7])
    np.testing.assert_array_equal(out[:, 5], source[:, 2])
    assert jnp.count_nonzero(out) == jnp.count_nonzero(out[:, jnp.array([0, 5])])


def test_bad_calls_name_argument_value_and_limit() -> None:
    pages, ids = jnp.zeros((2, 10, 3, 16, 128)), jnp.zeros(4, jnp.int32)
    head = jnp.zeros((2, 4, 16, 128))
    batch = ragged_batch(
        jnp.array([0, 3], jnp.int32), jnp.array([3], jnp.int32), jnp.zeros((1, 4), jnp.int32),
        num_tokens=8, page_size=16, num_pages=10,
    )  # fmt: skip
    k = jnp.zeros((8, 3, 64))
    for run, message in (
        (lambda: gather_pages(pages, jnp.zeros((2, 2), jnp.int32)), r"page_ids_N has shape \(2, 2\)"),
        (lambda: gather_pages(pages, jnp.zeros(2)), "page_ids_N has dtype float32, need int32"),
        (lambda: gather_pages(pages, ids, implementation="fast"), "implementation='fast' of gather_pages"),
        (lambda: scatter_pages(pages, ids, (head,) * 2), "heads has 2 arrays, need 3"),
        (lambda: scatter_pages(pages, ids, (head, head, head[:, :3])), r"heads\[2\] has shape \(2, 3, 16, 128\)"),
        (lambda: scatter_pages(pages, ids, (head.astype(jnp.bfloat16),) * 3), r"heads\[0\] has dtype bfloat16"),
        (lambda: write_pages(pages, 0, k[:, :2], k, batch), r"k_TKD has shape \(8, 2, 64\), need \[T, 3, D\]"),
        (lambda: write_pages(pages, 0, k, k[:4], batch), r"v_TKD has shape \(4, 3, 64\), need that of k_TKD"),
        (lambda: write_pages(pages, 0, k[:4], k[:4], batch), r"batch.token_row has shape \(8,\), need \(4,\)"),
        (lambda: write_pages(pages, 5, k, k, batch), "layer=5, need 0 to 1"),
        (lambda: write_pages(pages, 0, jnp.zeros((8, 3, 80)), jnp.zeros((8, 3, 80)), batch), "head size 80"),
    ):
        with pytest.raises(ValueError, match=message):
            run()
