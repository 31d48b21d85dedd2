"""The table of states: what it allows, what it refuses, and that everything in it is reachable."""

from __future__ import annotations

import itertools

import pytest

from jaxpd.cache.keys import Chain
from jaxpd.request import FinishReason, Request, SamplingParams
from jaxpd.sequence import TRANSITIONS, Sequence, State


def sequence(**params: object) -> Sequence:
    options = SamplingParams(**{"max_tokens": 3, "seed": 0, **params})  # type: ignore[arg-type]
    request = Request(request_id="r", prompt_ids=(1, 2), params=options, arrival_s=0.0)
    return Sequence(request=request, eos_ids=frozenset({9}), chain=Chain(16))


@pytest.mark.parametrize(("start", "end"), list(itertools.product(State, State)))
def test_only_the_tables_transitions_are_legal(start: State, end: State) -> None:
    seq = sequence()
    seq.state = start
    if end in TRANSITIONS[start]:
        seq.move(end)
        assert seq.state is end
    else:
        with pytest.raises(RuntimeError, match=f"{start.value} to {end.value}"):
            seq.move(end)


def test_every_state_is_reachable_and_can_end() -> None:
    reached, frontier = {State.QUEUED}, [State.QUEUED]
    while frontier:
        new = TRANSITIONS[frontier.pop()] - reached
        reached |= new
        frontier.extend(new)
    assert reached == set(State)
    assert all(State.FINISHED in TRANSITIONS[s] for s in State if s is not State.FINISHED)
    assert not TRANSITIONS[State.FINISHED]


def test_outputs_end_by_length_eos_and_stop_token() -> None:
    seq = sequence()
    assert [seq.add_output(t, 0.0) for t in (5, 6)] == [None, None]
    assert seq.add_output(7, 0.0) == (FinishReason.LENGTH, None)
    assert sequence().add_output(9, 0.0) == (FinishReason.STOP, 9)
    assert sequence(ignore_eos=True).add_output(9, 0.0) is None
    assert sequence(ignore_eos=True, stop_token_ids=(9,)).add_output(9, 0.0) == (FinishReason.STOP, 9)
