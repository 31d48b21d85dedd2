"""Policies are pure functions: what they choose, by example and by property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpd.policies.admission import Admission, Need, admit
from jaxpd.policies.batching import POLICIES, Batch, Policy, decoupled, interleaved, stall_free
from jaxpd.policies.placement import Place

ASKED: dict[str, Any] = {"token_budget": 32, "max_rows": 8, "clock_s": 0.0}


def one_batch(decodes: int, prompts: list[int], **asked: int) -> Batch | None:
    batches = stall_free(decodes, prompts, **{**ASKED, **asked})
    assert len(batches) <= 1
    return batches[0] if batches else None


def test_decodes_come_first_and_prompts_take_what_is_left() -> None:
    assert one_batch(2, [100]) == (2, [(0, 30)])


def test_prompts_are_chunked_in_arrival_order() -> None:
    assert one_batch(0, [20, 20, 5]) == (0, [(0, 20), (1, 12)])


def test_rows_are_bounded() -> None:
    assert one_batch(0, [1] * 9, max_rows=4) == (0, [(i, 1) for i in range(4)])
    assert one_batch(3, [1] * 9, max_rows=4) == (3, [(0, 1)])


def test_decodes_above_the_budget_do_not_make_it_negative() -> None:
    assert one_batch(5, [3], token_budget=4) == (4, [])


def test_nothing_to_do_is_no_batch() -> None:
    assert one_batch(0, []) is None


def test_interleaved_computes_prompts_first() -> None:
    assert interleaved(1, [40, 3], **ASKED) == [(0, [(0, 32)])]
    assert interleaved(2, [8], **ASKED) == [(0, [(0, 8)])]
    assert interleaved(2, [], **ASKED) == [(2, [])]


def test_decoupled_makes_a_program_of_each() -> None:
    assert decoupled(2, [40], **ASKED) == [(2, []), (0, [(0, 32)])]
    assert decoupled(0, [40], **ASKED) == [(0, [(0, 32)])]
    assert decoupled(0, [], **ASKED) == []


@pytest.mark.parametrize("policy", POLICIES.values())
@given(st.integers(0, 20), st.lists(st.integers(1, 70), max_size=20), st.integers(1, 64), st.integers(1, 10))
def test_batches_are_within_their_bounds_and_never_idle_without_reason(
    policy: Policy, decodes: int, prompts: list[int], budget: int, rows: int
) -> None:
    batches = policy(decodes, prompts, token_budget=budget, max_rows=rows, clock_s=0.0)
    for batch in batches:
        assert 0 < batch.decodes + len(batch.chunks) <= rows
        assert batch.decodes + sum(n for _, n in batch.chunks) <= budget
        assert all(1 <= n <= prompts[i] for i, n in batch.chunks)
    assert sum(batch.decodes for batch in batches) <= decodes
    chosen = [i for batch in batches for i, _ in batch.chunks]
    assert chosen == list(range(len(chosen))), "in the order of service, each once"
    assert bool(batches) == bool(decodes or prompts)


def place(room: int, *, hit: int = 0, load: float = 0) -> Place:
    return Place(hit_pages=hit, room=room, free_slots=4, load=load, last_chosen=0)


def need(prefill: int, decode: int, prompt: int) -> Need:
    return Need(prefill_pages=prefill, decode_pages=decode, prompt_pages=prompt, staged_page_bytes=50)


FREE: dict[str, Any] = {"prefill_hit_value": 16, "staging_free": 1000, "staging_in_use": 0}


def test_no_decode_reservation_no_prefill() -> None:
    asked = need(2, 4, 2)
    assert admit(asked, [place(9)], [place(3), place(4)], **FREE) == Admission(0, 1, 100)
    assert admit(asked, [place(9)], [place(3)], **FREE) is None
    assert admit(asked, [place(1)], [place(9)], **FREE) is None


def test_pages_that_the_decode_replica_has_are_neither_sent_nor_staged() -> None:
    assert admit(need(4, 5, 4), [place(9)], [place(9), place(2, hit=3)], **FREE) == Admission(0, 1, 50)
    busy = place(2, hit=3, load=1)
    assert admit(need(4, 5, 4), [place(9)], [place(9), busy], **FREE) == Admission(0, 0, 200)


def test_the_staging_bound_holds_back_but_never_the_only_one() -> None:
    few = FREE | {"staging_free": 99}
    assert admit(need(2, 2, 2), [place(9)], [place(9)], **few | {"staging_in_use": 1}) is None
    assert admit(need(2, 2, 2), [place(9)], [place(9)], **few) == Admission(0, 0, 100)
