"""Packing a step on the host and unpacking it while tracing are inverse."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpd.batch import BatchShape, PageTables, Row, from_slot, pack, unpack


def row(tokens: list[int], context: int, slot: int = 0, seed: int = 0, temperature: float = 0.0) -> Row:
    pages = np.arange(-(-context // 4), dtype=np.int32) + 10 * slot
    return Row(
        tokens, context, pages, slot=slot, output_index=slot + 5, seed=seed, temperature=temperature, flags=slot * 3
    )


def test_unpack_reads_what_pack_wrote() -> None:
    shape = BatchShape(tokens=8, rows=3, table=4)
    rows = [row([7, 8, 9], 11, slot=1, seed=2**32 - 1, temperature=0.7), row([from_slot(2)], 4, slot=2)]
    packed = pack(shape, [rows, []])
    assert packed.shape == (2, shape.packed_len) and packed.dtype == np.int32
    step = jax.jit(lambda p: unpack(shape, p))(packed[0])
    assert int(step.live_rows) == 2
    assert step.query_starts.tolist() == [0, 3, 4, 4]
    assert step.context_lens.tolist() == [11, 4, 0]
    assert step.slots.tolist() == [1, 2, np.iinfo(np.int32).max]
    assert step.output_index.tolist() == [6, 7, 0]
    assert step.seeds.dtype == np.uint32 and step.seeds.tolist() == [2**32 - 1, 0, 0]
    assert step.temperatures.tolist() == pytest.approx([0.7, 0, 0])
    assert step.flags.tolist() == [3, 6, 0]
    assert step.token_ids.tolist() == [7, 8, 9, -3, 0, 0, 0, 0]
    assert step.page_table.tolist() == [[10, 11, 12, 0], [20, 0, 0, 0], [0, 0, 0, 0]]
    idle = unpack(shape, packed[1])
    assert int(idle.live_rows) == 0 and idle.query_starts.tolist() == [0] * 4


def test_the_head_is_the_same_for_all_buckets_of_as_many_rows() -> None:
    rows = [row([7, 8, 9], 11, slot=1, seed=5, temperature=0.7), row([from_slot(2)], 4, slot=2)]
    small, large = BatchShape(tokens=8, rows=3, table=4), BatchShape(tokens=16, rows=3, table=3)
    heads = [pack(shape, [rows])[0, : shape.head.packed_len] for shape in (small, large)]
    assert small.head == large.head and (heads[0] == heads[1]).all()
    step = unpack(small.head, jax.numpy.asarray(heads[0]))
    assert step.slots.tolist()[:2] == [1, 2] and step.flags.tolist() == [3, 6, 0] and step.token_ids.size == 0


def test_rows_that_do_not_fit_are_an_error_and_not_a_cut() -> None:
    with pytest.raises((ValueError, IndexError)):
        pack(BatchShape(tokens=2, rows=1, table=1), [[row([1, 2, 3], 3)]])


def test_tables_that_are_kept_change_no_result() -> None:
    """Rows come, go, change places, and grow; a bucket of another width and an idle replica lie between."""
    rng = np.random.default_rng(1)
    wide, narrow = BatchShape(tokens=4, rows=4, table=6), BatchShape(tokens=8, rows=4, table=5)
    tables, pages = PageTables(), [rng.integers(1, 99, n).astype(np.int32) for n in (1, 2, 3, 4, 5)]
    for step in range(200):
        if step % 7 == 0:  # a lease that grows has a new array
            which = int(rng.integers(len(pages)))
            pages[which] = rng.integers(1, 99, int(rng.integers(1, 6))).astype(np.int32)
        replicas = [
            [Row((i,), 16, pages[i], slot=i, output_index=1, seed=0, temperature=0.0) for i in chosen]
            for chosen in (
                rng.permutation(5)[: rng.integers(1, 5)].tolist() if step % 3 else [0, 1, 2],
                [4][: step % 2],
            )
        ]
        shape = narrow if step % 5 == 0 else wide
        got = pack(shape, replicas, tables)
        assert (got == pack(shape, replicas)).all()
        start, length = shape.fields()["page_table"]
        for r, rows in enumerate(replicas):
            table = got[r, start : start + length].reshape(shape.rows, shape.table)
            for i in range(shape.rows):
                expected = rows[i].pages.tolist() if i < len(rows) else []
                assert table[i].tolist() == expected + [0] * (shape.table - len(expected))


def test_decodes_pack_as_prompts_of_one_token_do() -> None:
    rows = [row([from_slot(i)], 5 + i, slot=i, seed=7 * i, temperature=0.5 * i) for i in range(3)]
    long = row([1, 2], 9, slot=3)
    decode, mixed = BatchShape(tokens=4, rows=4, table=4), BatchShape(tokens=6, rows=4, table=4)
    alone, beside = pack(decode, [rows])[0], pack(mixed, [[*rows, long]])[0]
    for name, (start, _) in decode.fields().items():
        other = mixed.fields()[name][0]
        if name not in ("live_rows", "page_table"):
            assert alone[start : start + 3].tolist() == beside[other : other + 3].tolist(), name
