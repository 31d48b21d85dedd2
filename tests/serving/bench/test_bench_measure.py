"""Latencies, attainment and the search for goodput, by numbers that can be counted by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from typing import Any

import pytest

from jaxpd.errors import InvalidArgument
from serving.bench.goodput import Goodput, Search, find
from serving.bench.measure import Slo, latency, spread, summarize
from serving.bench.records import Call, Failure, Record, Reply, record
from serving.bench.run import Trial


def a_record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "index": 0,
        "due_s": None,
        "sent_s": 1.0,
        "end_s": 2.5,
        "input_len": 8,
        "output_len": 7,
        "message_s": (1.2, 1.4, 2.0),
        "message_tokens": (2, 1, 4),
        "prompt_tokens": 8,
        "completion_tokens": 7,
        "cached_tokens": None,
        "finish_reason": "length",
        "failure": None,
    }
    return Record(**{**values, **changes})


def trial(*records: Record, cut_off: int = 0) -> Trial:
    return Trial(records=records, cut_off=cut_off, stopped=False, lag_s=(0.001,), wall_start=0.0)


def test_latencies_of_messages_with_several_tokens() -> None:
    times = latency(a_record())
    assert times is not None and times.itl_s is not None and times.tpot_s is not None
    assert times.ttft_s == pytest.approx(0.2) and times.ttst_s == pytest.approx(0.2)  # the second came with the first
    assert times.tpot_s == pytest.approx(0.8 / 6)
    assert times.itl_s == pytest.approx((0.0, 0.2, 0.15, 0.15, 0.15, 0.15))
    assert sum(times.itl_s) / len(times.itl_s) == pytest.approx(times.tpot_s)
    assert times.gaps_s == pytest.approx((0.2, 0.6)) and times.e2e_s == pytest.approx(1.5)


def test_a_message_without_new_tokens_leaves_its_gap_to_the_next() -> None:
    times = latency(a_record(message_tokens=(1, 0, 2), completion_tokens=3))
    assert times is not None and times.itl_s == pytest.approx((0.4, 0.4)) and times.ttst_s == pytest.approx(1.0)


def test_what_was_held_back_arrived_when_it_was_due() -> None:
    times = latency(a_record(due_s=0.5))
    assert times is not None and times.ttft_s == pytest.approx(0.7) and times.e2e_s == pytest.approx(2.0)


def test_one_token_has_no_tpot_and_keeps_any() -> None:
    one = a_record(message_s=(1.2,), message_tokens=(1,), completion_tokens=1)
    times = latency(one)
    assert times is not None and times.tpot_s is None and times.ttst_s is None and times.itl_s == ()
    assert Slo(ttft_s=0.3, tpot_s=0.001).met(one) and not Slo(ttft_s=0.1).met(one)


def test_messages_that_do_not_say_what_they_hold() -> None:
    call = Call(index=0, due_s=None, input_len=8, output_len=7)
    reply = Reply(sent_s=11.0, end_s=12.5, message_s=[11.2, 11.4, 12.0], message_tokens=[None] * 3, completion_tokens=7)
    known = record(call, reply, 10.0)
    times = latency(known)
    assert known.message_tokens is None and known.tokens == 7
    assert times is not None and times.itl_s is None and times.tpot_s == pytest.approx(0.8 / 6)
    assert times.ttst_s == pytest.approx(0.4)
    # As many tokens as messages: one each.
    assert record(call, dataclasses.replace(reply, completion_tokens=3), 10.0).message_tokens == (1, 1, 1)
    # No usage at all: a message is taken for a token.
    assert record(call, dataclasses.replace(reply, completion_tokens=None), 10.0).tokens == 3
    # Counts that do not add up are not believed.
    uneven = dataclasses.replace(reply, message_tokens=[1, 1, 1], completion_tokens=7)
    assert record(call, uneven, 10.0).message_tokens is None


def test_failures_miss_the_slo_and_what_was_cut_off_is_left_out() -> None:
    slow = a_record(message_s=(1.9, 2.0, 2.1))
    failed = a_record(failure=Failure("http 429", "busy"), message_s=(), message_tokens=(), completion_tokens=None)
    early = a_record(failure=Failure("broken stream", "gone"))  # fast, and then it broke
    summary = summarize(trial(a_record(), a_record(), slow, failed, early, cut_off=3), Slo(ttft_s=0.5))
    assert summary.met == 2 and summary.attainment == pytest.approx(2 / 5) and summary.cut_off == 3
    assert summary.failures == {"http 429": 1, "broken stream": 1}
    assert summary.answered == 3 and summary.ttft_s.count == 3
    assert not Slo(tpot_s=0.1).met(a_record()) and Slo(tpot_s=0.2).met(a_record())


def test_summary_of_rates_and_tokens() -> None:
    summary = summarize(trial(a_record(), a_record(index=1, sent_s=2.0, end_s=5.0, cached_tokens=4)))
    assert summary.duration_s == pytest.approx(4.0) and summary.request_rate == pytest.approx(0.5)
    assert summary.output_token_rate == pytest.approx(14 / 4) and summary.total_token_rate == pytest.approx(30 / 4)
    assert (
        summary.prompt_tokens == 8
        and summary.cached_tokens == 4
        and summary.tokens_per_message == pytest.approx(14 / 6)
    )
    assert summary.offered_rate == pytest.approx(1.0) and summary.attainment is None
    nothing = summarize(trial())
    assert nothing.requests == 0 and nothing.request_rate == 0 and math.isnan(nothing.ttft_s.p50)


def test_percentiles() -> None:
    values = spread(float(i) for i in range(101))
    assert (values.count, values.mean, values.p50, values.p90, values.p99, values.max) == (101, 50, 50, 90, 99, 100)


def search_with(threshold: float, search: Search, *, noise: float = 0.0) -> tuple[Goodput, list[float]]:
    """A search on a server that keeps the SLO up to `threshold` requests a second."""
    rates: list[float] = []
    rng = random.Random(1)

    async def attainment_at(rate: float) -> float:
        rates.append(rate)
        return (0.99 if rate <= threshold else 0.4) + rng.uniform(-noise, noise)

    return asyncio.run(find(attainment_at, search)), rates


@pytest.mark.parametrize("threshold", [1.0, 1.04, 3.3, 7.99, 8.0, 41.7, 555.5, 1023.0])
@pytest.mark.parametrize("precision", [0.05, 0.01])
def test_bisection_finds_a_planted_threshold(threshold: float, precision: float) -> None:
    found, rates = search_with(threshold, Search(precision=precision), noise=0.005)
    assert found.complete and found.rate is not None and found.above is not None
    assert found.rate <= threshold < found.above
    assert threshold - found.rate <= precision * found.rate
    assert len(rates) == len(set(rates)) <= 11 + math.ceil(math.log2(1 / precision)) + 1


def test_a_threshold_outside_of_the_bounds() -> None:
    assert search_with(0.5, Search()) == (Goodput(None, 1.0, complete=True), [1.0])
    found, rates = search_with(1e9, Search(min_rate=3.0, max_rate=20.0))
    assert found == Goodput(20.0, None, complete=True) and rates == [3.0, 6.0, 12.0, 20.0]
    found, _ = search_with(19.9, Search(min_rate=3.0, max_rate=20.0, precision=0.01))
    assert found.rate is not None and 19.7 < found.rate <= 19.9


def test_a_search_that_is_stopped_says_what_it_knows() -> None:
    answers = iter([0.95, 0.95, 0.2])

    async def attainment_at(rate: float) -> float | None:
        return next(answers, None)

    assert asyncio.run(find(attainment_at, Search())) == Goodput(2.0, 4.0, complete=False)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"attainment": 0.0}, "--attainment"),
        ({"attainment": 90.0}, "--attainment"),
        ({"min_rate": 0.0}, "--min-rate"),
        ({"min_rate": 5.0, "max_rate": 5.0}, "--min-rate 5"),
        ({"max_rate": math.inf}, "--max-rate"),
        ({"precision": 0.0}, "--precision"),
    ],
)
def test_searches_that_cannot_be(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(InvalidArgument, match=flag):
        Search(**options)
