"""The load and the figures of the benchmark of the modes; no engine runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.modes import CHAT_ANSWER, CHAT_PROMPT, LONG_ANSWER, LONG_EVERY, load, longest, summary, table
from jaxpd.errors import Internal
from jaxpd.request import FinishEvent, FinishReason, Timings, Usage


def done(name: str, exposed: float | None) -> FinishEvent:
    usage = Usage(prompt_tokens=4, completion_tokens=3)
    timings = Timings(transfer_exposed_s=exposed)
    return FinishEvent(request_id=name, reason=FinishReason.LENGTH, usage=usage, timings=timings)


def test_a_load_differs_by_its_rate_in_the_arrivals_only() -> None:
    slow, fast = load(0.5, 60, 291, 192), load(4.0, 60, 291, 192)
    assert [r[1:] for r in slow] == [r[1:] for r in fast]
    np.testing.assert_allclose([r[0] for r in slow], [8 * r[0] for r in fast])
    assert [r[0] for r in slow] == sorted(r[0] for r in slow)
    assert 60 / slow[-1][0] == pytest.approx(0.5, rel=0.5)


def test_every_sixth_prompt_is_long_and_all_fit_the_model_length() -> None:
    made = load(1.0, 60, 291, 192)
    for i, (_, prompt, answer) in enumerate(made):
        if i % LONG_EVERY == LONG_EVERY - 1:
            assert (len(prompt), answer) == (192, LONG_ANSWER)
        else:
            assert CHAT_PROMPT[0] <= len(prompt) < CHAT_PROMPT[1]
            assert CHAT_ANSWER[0] <= answer < CHAT_ANSWER[1]
        assert max(prompt) < 291
        assert len(prompt) + answer <= longest(192)
    assert (longest(192), longest(512), longest(1)) == (208, 528, 128)


def test_figures_of_a_run() -> None:
    tokens = {"a": [1.0, 1.5, 1.6], "b": [2.0, 2.1, 2.2], "c": []}
    broken = dataclasses.replace(done("c", None), reason=FinishReason.ERROR, error=Internal("it broke"))
    finished = {"a": done("a", 0.4), "b": done("b", None), "c": broken}
    found = summary(tokens, finished, {"a": 0.0, "b": 1.0, "c": 2.0}, 3.0)
    assert found["ttft_ms"]["p50"] == pytest.approx(1000)
    assert found["ttst_ms"]["p50"] == pytest.approx(1300)
    assert found["itl_ms"]["p50"] == pytest.approx(100)
    assert found["exposed_transfer_ms"]["p99"] == pytest.approx(400)
    assert found["tokens_per_s"] == pytest.approx(2)
    assert len(found["errors"]) == 1 and "it broke" in found["errors"][0]


def test_a_mode_without_transfers_says_none() -> None:
    found = summary({"a": [1.0, 1.5, 1.6]}, {"a": done("a", None)}, {"a": 0.0}, 1.0)
    about = {"name": "machine", "packages": {"jax": "1"}, "date": "today"}
    line = table([{"mode": "chunked", "rate": 0.5, **found}], about, "run it").splitlines()[-1]
    assert line == "| chunked | 0.5 | 1000 / 1000 / 1000 | 1500 / 1500 / 1500 | 300 / 460 / 496 | none | 3 |"
