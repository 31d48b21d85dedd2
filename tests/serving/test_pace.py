"""How long the queue takes, by a clock that the tests move."""

from __future__ import annotations

import pytest

from jaxpd.errors import DeadlineExceeded
from jaxpd.request import FinishEvent, FinishReason, Request, SamplingParams, Timings, TokensEvent, Usage
from serving.observer import Origin
from serving.pace import Pace


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def submit(pace: Pace, *names: str) -> None:
    for name in names:
        request = Request(request_id=name, prompt_ids=(1,), params=SamplingParams(), arrival_s=0.0)
        pace.submitted(request, Origin())


def first_token(pace: Pace, name: str) -> None:
    pace.progressed([TokensEvent(name, 0, (1,))])


def end(pace: Pace, name: str) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=0)
    pace.progressed([FinishEvent(request_id=name, reason=FinishReason.ABORT, usage=usage, timings=Timings())])


def test_the_wait_is_what_stands_before_and_how_fast_it_moves() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.wait_s() == 0
    submit(pace, *map(str, range(30)))
    assert pace.wait_s() == 0, "nobody knows yet"
    for i in range(10):
        clock.now_s += 0.5
        first_token(pace, str(i))
    assert pace.wait_s() == pytest.approx(20 * 0.5)
    first_token(pace, "0")
    assert pace.wait_s() == pytest.approx(20 * 0.5), "a second token says nothing"
    for i in range(10, 20):
        end(pace, str(i))
    assert pace.wait_s() == pytest.approx(10 * 0.5), "who left waits no longer"
    clock.now_s += 5
    assert pace.wait_s() == pytest.approx(10 * 1.0), "a queue that stands gets longer"


def test_an_idle_time_is_forgotten() -> None:
    clock = Clock()
    pace = Pace(clock)
    submit(pace, *map(str, range(20)))
    for i in range(20):
        clock.now_s += 0.1
        first_token(pace, str(i))
    assert pace.wait_s() == 0
    clock.now_s += 3600
    submit(pace, *(f"b{i}" for i in range(20)))
    for i in range(10):
        clock.now_s += 0.1
        first_token(pace, f"b{i}")
    assert pace.wait_s() == pytest.approx(10 * 0.1)


def test_who_is_refused() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.check(None)
    pace.check(clock.now_s + 0.001)
    with pytest.raises(DeadlineExceeded, match="has passed"):
        pace.check(clock.now_s)
    submit(pace, *map(str, range(20)))
    for i in range(10):
        clock.now_s += 1
        first_token(pace, str(i))
    pace.check(clock.now_s + 5.1)  # half of the estimate may do
    with pytest.raises(DeadlineExceeded, match="in 4.9 s and 10 requests wait, about 10.0 s of work"):
        pace.check(clock.now_s + 4.9)
    pace.check(clock.now_s + 4.9, priority=-1)
    with pytest.raises(DeadlineExceeded):
        pace.check(clock.now_s + 4.9, priority=1)
