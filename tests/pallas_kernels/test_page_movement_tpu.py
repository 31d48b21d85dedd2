"""The TPU kernels that move pages, interpreted: byte for byte what XLA does, no race, and as many DMAs as they say.

Pools hold random bytes, so that NaNs of every kind are among them and must survive.

A DMA that nobody waits for never runs in the interpreter, and leaves wrong bytes rather than a race.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from pallas_kernels import tpu_pages
from pallas_kernels.batch import RaggedBatch, lanes, ragged_batch
from pallas_kernels.checks import EIGHT_BIT
from pallas_kernels.dispatch import Call
from pallas_kernels.gather_pages import gather_pages
from pallas_kernels.names import TPU_INTERPRET, XLA
from pallas_kernels.scatter_pages import scatter_pages
from pallas_kernels.tpu_params import races_found, reset_interpreter
from pallas_kernels.write_pages import tpu as write_tpu
from pallas_kernels.write_pages import write_pages

LAYERS = 2
DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn"]


started: list[None] = []  # one entry for each DMA of interpreted kernels; blocks that Pallas fetches do not count


@pytest.fixture(autouse=True, scope="module")
def _dmas_are_counted() -> Iterator[None]:
    start = interpret_pallas_call.dma_start

    def counted(*args: Any, **kwargs: Any) -> Any:
        started.append(None)
        return start(*args, **kwargs)

    jax.clear_caches()  # a trace keeps the function that it saw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpret_pallas_call, "dma_start", counted)
        yield


@pytest.fixture(autouse=True)
def dmas() -> list[None]:
    """Empty when a test starts."""
    reset_interpreter()  # whatever the test before it did
    started.clear()
    return started


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    itemsize = jnp.dtype(dtype).itemsize
    array = np.frombuffer(rng.bytes(int(np.prod(shape)) * itemsize), jnp.dtype(dtype)).reshape(shape)
    if dtype == "bfloat16":  # XLA on CPU, the reference, makes other NaNs into this one in jax 0.10
        array = np.where(np.isnan(array.astype(np.float32)), jnp.bfloat16(np.nan), array)
    return jnp.asarray(array)


def same(got: jax.Array, expected: jax.Array) -> bool:
    """Equal bytes, without a race; waits for the kernel."""
    equal = got.shape == expected.shape and np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    assert not races_found()
    return equal


run_batch = jax.jit(ragged_batch, static_argnames=("num_tokens", "page_size", "num_pages"))


def make_batch(
    rng: np.random.Generator, T: int, lengths: list[int], contexts: list[int], S: int, num_pages: int
) -> RaggedBatch:
    B, N = len(lengths), 8
    pages = rng.permutation(num_pages)
    table = np.full((B, N), num_pages + 7, np.int32)  # what is not used must not be read
    for row, context in enumerate(contexts):
        used, pages = np.split(pages, [-(-context // S)])
        table[row, : len(used)] = used
    starts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    return run_batch(
        starts, jnp.asarray(contexts, jnp.int32), jnp.asarray(table), num_tokens=T, page_size=S, num_pages=num_pages
    )


@functools.partial(jax.jit, static_argnames="implementation")
def run_write(pages, layer, k, v, batch, scales, implementation):  # type: ignore[no-untyped-def]
    return write_pages(pages, layer, k, v, batch, kv_scales_2K=scales, implementation=implementation)


WRITES = {  # tokens, lengths, contexts
    "decode": (4, [1, 1, 1, 0], [1, 16, 21, 0]),
    "decode of one": (1, [1], [10]),
    "nothing is live": (2, [0, 0], [0, 0]),
    "a row of one token": (8, [1], [9]),
    "whole groups": (16, [16], [24]),
    "rows that end within groups": (16, [9, 0, 2], [15, 0, 2]),
}


@pytest.mark.parametrize(
    ("case", "dtype", "S", "K", "D"),
    [
        ("decode", "float32", 8, 3, 64),
        ("decode", "bfloat16", 16, 2, 80),
        ("decode", "int8", 256, 1, 64),
        ("decode", "float8_e4m3fn", 64, 2, 64),
        ("decode of one", "bfloat16", 8, 1, 128),
        ("nothing is live", "float32", 16, 1, 64),
        ("a row of one token", "int8", 8, 2, 64),
        ("whole groups", "bfloat16", 128, 2, 64),
        ("rows that end within groups", "float32", 32, 1, 96),
        ("rows that end within groups", "bfloat16", 8, 3, 64),
        ("rows that end within groups", "float8_e4m3fn", 16, 2, 64),
    ],
)
def test_write(case: str, dtype: str, S: int, K: int, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_tpu, "MOST_IN_BLOCK", 2)  # several blocks, the last one padded
    rng = np.random.default_rng(0)
    T, lengths, contexts = WRITES[case]
    num_pages = sum(-(-context // S) for context in contexts) + 2
    pages = random_bytes(rng, (LAYERS, num_pages, K, S, lanes(D)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((T, K, D)), jnp.float32) for _ in range(2))
    scales = jnp.full((2, K), 0.02, jnp.float32) if dtype in EIGHT_BIT else None
    batch = make_batch(rng, T, lengths, contexts, S, num_pages)
    arguments = (pages, jnp.int32(1), k, v, batch, scales)
    expected = run_write(*arguments, implementation=XLA)
    assert (expected != pages).any() == any(lengths) or dtype not in EIGHT_BIT
    assert same(run_write(*arguments, implementation=TPU_INTERPRET), expected)


def test_a_token_without_a_page_does_not_write_even_within_a_row() -> None:
    rng = np.random.default_rng(0)
    pages, (k, v) = random_bytes(rng, (LAYERS, 6, 1, 8, 128), "bfloat16"), jnp.ones((2, 12, 1, 64))
    batch = make_batch(rng, 12, [10], [19], 8, 6)
    batch = batch._replace(token_page=batch.token_page.at[jnp.array([0, 4])].set(6))
    expected = run_write(pages, jnp.int32(0), k, v, batch, None, implementation=XLA)
    assert same(run_write(pages, jnp.int32(0), k, v, batch, None, implementation=TPU_INTERPRET), expected)


@pytest.mark.parametrize(
    ("T", "lengths", "contexts", "partly_new", "whole"),
    [
        (4, [1, 1, 1, 1], [1, 9, 12, 24], 4, 0),  # a full decode step
        (4, [1, 0, 0, 0], [5, 0, 0, 0], 1, 0),
        (32, [18, 14], [33, 21], 4, 3),  # 1 + 8 + 8 + 1 and 1 + 8 + 5 tokens in groups: the most that 32 can touch
    ],
)
def test_dmas_of_a_write(
    T: int, lengths: list[int], contexts: list[int], partly_new: int, whole: int, dmas: list[None]
) -> None:
    """A group is one DMA, and one more where it is not new as a whole. A full batch costs what the kernel announces."""
    rng, K, S = np.random.default_rng(0), 1, 8
    pages = random_bytes(rng, (LAYERS, 16, K, S, 128), "float32")
    k = jnp.ones((T, K, 64))
    batch = make_batch(rng, T, lengths, contexts, S, 16)
    run_write(pages, jnp.int32(0), k, k, batch, None, implementation=TPU_INTERPRET).block_until_ready()
    assert len(dmas) == 2 * partly_new + whole
    group_bytes, B = K * 8 * 128 * 4, len(lengths)
    new = write_tpu.padded_items(T, B, write_tpu.block_items(T, B, group_bytes))  # fetched by Pallas
    announced = write_tpu.dma_bytes(T, B, group_bytes)
    assert (len(dmas) + new) * group_bytes == announced or sum(lengths) < T


def test_items_are_the_groups_of_the_tokens() -> None:
    """For many batches of one shape: as many items as groups that tokens fall into, each once, within the bound."""
    T, S, num_pages = 40, 16, 40
    rng = np.random.default_rng(0)
    kv_TKW = jnp.arange(T, dtype=jnp.float32)[:, None, None] * jnp.ones((1, 1, 128))
    run = jax.jit(lambda batch: write_tpu.make_items(kv_TKW, batch, num_pages, S, 4))
    most = 0
    for _ in range(40):
        lengths = np.diff(np.sort(rng.integers(0, T + 1, 5))).tolist()  # four rows
        contexts = [n and n + int(rng.integers(0, 60)) for n in lengths]
        batch = make_batch(rng, T, lengths, contexts, S, num_pages)
        items = jax.tree.map(np.asarray, run(batch))
        got = {
            int(group) * 8 + slot: int(items.kv_IKGW[item, 0, slot, 0])
            for item, group in enumerate(items.group_I)
            for slot in range(8)
            if items.new_slots_I[item] >> slot & 1
        }
        live = items.new_slots_I != 0
        page, slot = np.asarray(batch.token_page), np.asarray(batch.token_slot)
        assert got == {int(page[t]) * S + int(slot[t]): t for t in range(sum(lengths))}
        assert (items.group_I[~live] == num_pages * S // 8).all()
        assert len(set(items.group_I[live])) == live.sum() <= write_tpu.most_items(T, 4)
        most = max(most, int(live.sum()))
    assert most >= write_tpu.most_items(T, 4) - 2


@pytest.mark.parametrize(
    ("dtype", "S", "K"), [(d, s, k) for d, s, k in zip(DTYPES, (8, 32, 128, 16), (1, 3, 2, 2), strict=True)]
)
def test_gather_and_scatter(dtype: str, S: int, K: int, monkeypatch: pytest.MonkeyPatch, dmas: list[None]) -> None:
    monkeypatch.setattr(tpu_pages, "DMAS_IN_FLIGHT", 2 * K)  # fewer in flight than there are pages
    rng, P = np.random.default_rng(0), 7
    pages = random_bytes(rng, (LAYERS, P, K, S, 128), dtype)
    ids = jnp.array([5, -1, 0, P, 6, 2**31 - 1], jnp.int32)
    heads = jax.jit(functools.partial(gather_pages, implementation=TPU_INTERPRET))(pages, ids)
    for got, expected in zip(heads, gather_pages(pages, jnp.clip(ids, 0, P - 1), implementation=XLA), strict=True):
        assert same(got, expected)
    assert len(dmas) == len(ids) * K
    piece = LAYERS * S * 128 * jnp.dtype(dtype).itemsize
    assert tpu_pages.cost_estimate(LAYERS, len(ids), K, S, 128, dtype).bytes_accessed == 2 * len(dmas) * piece

    dmas.clear()
    heads = tuple(random_bytes(rng, head.shape, dtype) for head in heads)
    got = jax.jit(functools.partial(scatter_pages, implementation=TPU_INTERPRET))(pages, ids, heads)
    assert same(got, scatter_pages(pages, ids, heads, implementation=XLA))
    assert len(dmas) == 3 * K


def test_what_is_refused() -> None:
    def refusal(refuse: Any, dtype: str = "bfloat16", **shapes: int) -> str:
        usual = {"T": 64, "B": 64, "N": 4, "K": 2, "D": 64, "L": 2, "S": 16, "W": 128}
        return refuse(Call("tpu", "", dtype, dtype, tuple((usual | shapes).items()))) or "taken"

    for refuse in (write_tpu.refuse, tpu_pages.refuse):
        for dtype in DTYPES:
            assert refusal(refuse, dtype) == "taken"
        for size in (8, 16, 32, 64, 128, 256):
            assert refusal(refuse, S=size) == "taken"
        assert "float16" in refusal(refuse, "float16")
        assert "12 slots" in refusal(refuse, S=12)
        assert "96 lanes" in refusal(refuse, W=96)
    assert "1,200,000 bytes of SMEM, at most 983,040" in refusal(tpu_pages.refuse, N=300_000)
    assert "no pages" in refusal(tpu_pages.refuse, N=0)
    assert "bytes of SMEM, at most 983,040" in refusal(write_tpu.refuse, T=200_000, B=200_000)
    assert "of VMEM" in refusal(write_tpu.refuse, K=1024, W=512)
