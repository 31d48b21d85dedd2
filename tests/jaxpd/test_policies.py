"""Policies are pure functions: what they choose, by example and by property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpd.policies.admission import Admission, Need, admit
from jaxpd.policies.batching import POLICIES, Batch, Candidate, Policy, decoupled, interleaved, stall_free
from jaxpd.policies.placement import Place


def prompt(left: int) -> Candidate:
    return Candidate(prompt_left=left, wants_token=True)


def one_batch(candidates: list[Candidate], *, token_budget: int, max_rows: int) -> Batch:
    batches = stall_free(candidates, token_budget=token_budget, max_rows=max_rows, clock_s=0.0)
    assert len(batches) <= 1
    return batches[0] if batches else []


DECODE = Candidate(prompt_left=0, wants_token=True)
DONE = Candidate(prompt_left=0, wants_token=False)


def test_decodes_come_first_and_prompts_take_what_is_left() -> None:
    assert one_batch([prompt(100), DECODE, DONE, DECODE], token_budget=32, max_rows=8) == [(1, 1), (3, 1), (0, 30)]


def test_prompts_are_chunked_in_arrival_order() -> None:
    assert one_batch([prompt(20), prompt(20), prompt(5)], token_budget=32, max_rows=8) == [(0, 20), (1, 12)]


def test_rows_are_bounded() -> None:
    assert one_batch([prompt(1)] * 9, token_budget=32, max_rows=4) == [(i, 1) for i in range(4)]


def test_decodes_above_the_budget_do_not_make_it_negative() -> None:
    assert one_batch([DECODE] * 5 + [prompt(3)], token_budget=4, max_rows=8) == [(i, 1) for i in range(4)]


def test_interleaved_computes_prompts_first() -> None:
    asked: dict[str, Any] = {"token_budget": 32, "max_rows": 8, "clock_s": 0.0}
    assert interleaved([DECODE, prompt(40), prompt(3)], **asked) == [[(1, 32)]]
    assert interleaved([DECODE, prompt(8), DONE, DECODE], **asked) == [[(1, 8)]]
    assert interleaved([DECODE, DONE, DECODE], **asked) == [[(0, 1), (2, 1)]]


def test_decoupled_makes_a_program_of_each() -> None:
    asked: dict[str, Any] = {"token_budget": 32, "max_rows": 8, "clock_s": 0.0}
    assert decoupled([DECODE, prompt(40), DECODE], **asked) == [[(0, 1), (2, 1)], [(1, 32)]]
    assert decoupled([prompt(40)], **asked) == [[(0, 32)]]
    assert decoupled([DONE], **asked) == []


@pytest.mark.parametrize("policy", POLICIES.values())
@given(
    st.lists(st.builds(Candidate, prompt_left=st.integers(0, 70), wants_token=st.booleans()), max_size=20),
    st.integers(1, 64),
    st.integers(1, 10),
)
def test_batches_are_within_their_bounds_and_never_idle_without_reason(
    policy: Policy, candidates: list[Candidate], budget: int, rows: int
) -> None:
    batches = policy(candidates, token_budget=budget, max_rows=rows, clock_s=0.0)
    for chosen in batches:
        assert 0 < len(chosen) <= rows and sum(n for _, n in chosen) <= budget
        for i, n in chosen:
            assert 1 <= n <= max(candidates[i].prompt_left, 1)
    everybody = [i for chosen in batches for i, _ in chosen]
    assert len(set(everybody)) == len(everybody)
    if any(c.prompt_left or c.wants_token for c in candidates):
        assert batches


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
