"""Policies are pure functions: what they choose, by example and by property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpd.policies.admission import Need, Room, admit, choose_replica
from jaxpd.policies.batching import POLICIES, Batch, Candidate, Policy, decoupled, interleaved, stall_free


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


def room(pages: int, slots: int = 4, load: int = 0) -> Room:
    return Room(free_pages=pages, free_slots=slots, load=load)


def test_the_least_loaded_replica_with_room_is_chosen() -> None:
    assert choose_replica([room(9, load=2), room(9, load=1), room(1)], 5) == 1
    assert choose_replica([room(5), room(9)], 5) == 1
    assert choose_replica([room(9, slots=0), room(4)], 5) is None


def test_no_decode_reservation_no_prefill() -> None:
    need = Need(prefill_pages=2, decode_pages=4, staging_bytes=100)
    free = {"staging_free": 1000, "staging_in_use": 0}
    assert admit(need, [room(9)], [room(3), room(4)], **free) == (0, 1)
    assert admit(need, [room(9)], [room(3)], **free) is None
    assert admit(need, [room(1)], [room(9)], **free) is None


def test_the_staging_bound_holds_back_but_never_the_only_one() -> None:
    need = Need(prefill_pages=1, decode_pages=1, staging_bytes=100)
    assert admit(need, [room(9)], [room(9)], staging_free=99, staging_in_use=1) is None
    assert admit(need, [room(9)], [room(9)], staging_free=99, staging_in_use=0) == (0, 0)
