"""The record of what happened to a sequence, and the timings that come from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.life import Life, Stage
from jaxpd.request import Timings

Started = Callable[..., Any]
IN_ORDER = [Stage.ARRIVED, Stage.ADMITTED, Stage.PREFILL_START, Stage.CHUNK]


def test_timings_are_spans_between_moments() -> None:
    life = Life()
    assert life.timings() == Timings()
    for at, stage in enumerate(
        (
            Stage.ARRIVED,
            Stage.ADMITTED,
            Stage.CHUNK,
            Stage.OFFERED,
            Stage.CHUNK,
            Stage.PREFILL_END,
            Stage.ACCEPTED,
            Stage.DECODE_START,
        )
    ):
        life.mark(stage, at_s=float(at))
    life.token_times += [5.0, 9.0, 10.0]
    assert life.timings() == Timings(
        queue_s=1.0,
        prefill_s=4.0,
        transfer_s=3.0,
        transfer_exposed_s=2.0,
        decode_s=3.0,
        ttft_s=5.0,
        ttst_s=9.0,
    )
    assert life.first(Stage.CHUNK) == 2.0 and life.count(Stage.CHUNK) == 2 and life.first(Stage.FAILED) is None


@pytest.mark.parametrize("place", ["disaggregated", "chunked"])
def test_a_sequence_records_its_life(place: str, started: Started) -> None:
    if place == "chunked":
        running = started("smollm2", None, None, mode="chunked", mesh="1x1")
    else:
        running = started("smollm2", "1x1", "1x1")
    answer = running.submit("one", list(range(3, 103)), max_tokens=5)
    running.wait()
    life = answer.finish.life
    moments = life.moments
    assert [m.at_s for m in moments] == sorted(m.at_s for m in moments)
    stages = [m.stage for m in moments]
    assert stages[:4] == IN_ORDER and stages[-1] is Stage.FINISHED
    assert sum(m.tokens for m in moments if m.stage is Stage.CHUNK) == 100
    between = [stage for stage in dict.fromkeys(stages) if stage not in (*IN_ORDER, Stage.FINISHED)]
    handed_off = {Stage.OFFERED, Stage.TRANSFERRED, Stage.ACCEPTED}
    assert set(between) == {Stage.PREFILL_END, Stage.DECODE_START} | (set() if place == "chunked" else handed_off)
    assert len(life.token_times) == 5 and life.reason == "length"
    assert life.timings() == answer.finish.timings
