"""Head layout: any head count on any tensor-parallel size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.heads import EMPTY, head_layout

heads = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 40))  # KV heads, queries per KV head, tp


@settings(max_examples=400)
@given(heads)
def test_every_query_head_sits_once_beside_its_kv_head(sizes: tuple[int, int, int]) -> None:
    kv, per_kv, tp = sizes
    layout = head_layout(kv * per_kv, kv, tp)
    assert sorted(h for h in layout.q_slots if h != EMPTY) == list(range(kv * per_kv))
    for slot, head in enumerate(layout.kv_slots):
        queries = layout.q_slots[slot * layout.group : (slot + 1) * layout.group]
        assert all(q == EMPTY or q // per_kv == head for q in queries)
    assert set(layout.kv_slots) == set(range(kv))


@settings(max_examples=400)
@given(heads)
def test_devices_are_uniform_and_slots_as_few_as_can_be(sizes: tuple[int, int, int]) -> None:
    kv, per_kv, tp = sizes
    layout = head_layout(kv * per_kv, kv, tp)
    assert layout.kv_per_device == -(-kv // tp)
    assert layout.num_kv_slots == len(layout.kv_slots) == tp * layout.kv_per_device
    assert layout.q_per_device == layout.kv_per_device * layout.group
    assert len(layout.q_slots) == tp * layout.q_per_device
    assert [h for d in range(tp) for h in layout.device_kv(d)] == list(layout.kv_slots)
    assert [h for d in range(tp) for h in layout.device_q(d)] == list(layout.q_slots)
    copies = [layout.kv_slots.count(h) for h in range(kv)]
    assert max(copies) - min(copies) <= 1
    # one query slot fewer per KV slot would not hold the heads of the least replicated KV head
    assert (layout.group - 1) * min(copies) < per_kv


@given(heads)
def test_owner_holds_its_head(sizes: tuple[int, int, int]) -> None:
    kv, per_kv, tp = sizes
    layout = head_layout(kv * per_kv, kv, tp)
    assert [layout.kv_slots[layout.owner(h)] for h in range(kv)] == list(range(kv))


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 16))
def test_nothing_is_padded_where_heads_divide(kv_per_device: int, per_kv: int, tp: int) -> None:
    kv = kv_per_device * tp
    layout = head_layout(kv * per_kv, kv, tp)
    assert layout.kv_slots == tuple(range(kv)) and layout.q_slots == tuple(range(kv * per_kv))


def test_the_layout_of_the_docstring() -> None:
    layout = head_layout(9, 3, 8)
    assert layout.kv_slots == (0, 0, 0, 1, 1, 1, 2, 2)
    assert layout.q_slots == (0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, 7, 8, -1)
    assert [layout.owner(h) for h in range(3)] == [0, 3, 6]


@pytest.mark.parametrize(("heads", "kv", "tp"), [(0, 1, 1), (4, 0, 1), (9, 4, 1), (8, 8, 0), (2, 4, 1)])
def test_head_counts_that_are_no_grouped_attention_are_refused(heads: int, kv: int, tp: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        head_layout(heads, kv, tp)
