"""What the router's policies rest on: estimates, circuit breakers, the ledger and the index of prefixes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpd.policies.breaker import (
    MAX_PAUSE_S,
    MOST_FAULTS,
    PAUSE_S,
    PROBE_LOST_S,
    Breaker,
    Next,
    Outcome,
    after,
    outcome,
)
from jaxpd.policies.fit import LEAST_RUNS, Fit, pooled
from jaxpd.policies.workers import Leg, Site
from jaxpd.routing.ledger import EMPTY, Ledger
from jaxpd.routing.prefix_index import PrefixIndex

SITES = [Site(worker, replica) for worker in "ab" for replica in range(2)]


def learned(*runs: tuple[float, float]) -> Fit:
    fit = Fit()
    for units, seconds in runs:
        fit = fit.learn(units, seconds)
    return fit


LINE = [(100.0 * (1 + i % 7), 0.05 + 0.1 * (1 + i % 7)) for i in range(30)]


def test_a_line_is_found_and_then_sure() -> None:
    fit = learned(*LINE)
    assert fit.line == pytest.approx((0.05, 1e-3))
    assert fit.seconds(2000) == pytest.approx(2.05) and fit.seconds(2000, 3) == pytest.approx(2.15)
    assert fit.sure and fit.spread_s < 1e-9


def test_nothing_is_sure_before_enough_runs() -> None:
    assert [learned(*LINE[:n]).sure for n in (0, 1, LEAST_RUNS - 1, LEAST_RUNS)] == [False, False, False, True]
    assert Fit().seconds(1000) == 0.0


def test_runs_that_contradict_each_other_are_not_sure() -> None:
    assert not learned(*[(100.0, float(i % 2)) for i in range(40)]).sure


def test_runs_of_one_size_are_a_rate_and_runs_of_nothing_a_constant() -> None:
    assert learned(*[(200.0, 0.4)] * 9).line == pytest.approx((0.0, 2e-3))
    assert learned(*[(0.0, 0.4)] * 9).line == pytest.approx((0.4, 0.0))


def test_one_stall_does_not_spoil_it() -> None:
    before = learned(*LINE)
    assert before.learn(400, 60.0).seconds(400) == pytest.approx(before.seconds(400), rel=0.1)


def test_a_worker_that_became_slower_is_soon_known_to_be() -> None:
    fit = learned(*LINE, *[(units, 5 * seconds) for units, seconds in LINE * 3])
    assert fit.seconds(400) == pytest.approx(5 * 0.45, rel=0.15)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e4)), max_size=40), st.floats(0, 1e9))
def test_no_estimate_is_negative(runs: list[tuple[float, float]], units: float) -> None:
    fit = learned(*runs)
    assert min(fit.line) >= 0 and fit.seconds(units) >= 0 and fit.spread_s >= 0


@pytest.mark.parametrize("run", [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_what_no_run_can_be_is_refused(run: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be finite and not negative"):
        Fit().learn(*run)


def test_pooled_is_the_line_through_the_runs_of_all() -> None:
    fit = pooled([learned(*LINE[:15]), learned(*LINE[15:]), Fit()])
    assert fit.line == pytest.approx((0.05, 1e-3))
    assert fit.sure


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (None, Outcome.FAULT),
        (200, Outcome.OK),
        (400, Outcome.NEUTRAL),
        (404, Outcome.NEUTRAL),
        (499, Outcome.NEUTRAL),
        (429, Outcome.BUSY),
        (503, Outcome.BUSY),
        (500, Outcome.FAULT),
        (502, Outcome.FAULT),
        ("OK", Outcome.OK),
        ("INTERNAL", Outcome.FAULT),
        ("UNAVAILABLE", Outcome.BUSY),
        ("RESOURCE_EXHAUSTED", Outcome.BUSY),
        ("INVALID_ARGUMENT", Outcome.NEUTRAL),
        ("CANCELLED", Outcome.NEUTRAL),
        ("DEADLINE_EXCEEDED", Outcome.NEUTRAL),
    ],
)
def test_what_an_answer_says_about_its_worker(code: str | int | None, what: Outcome) -> None:
    assert outcome(code) is what


def opened(at_s: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(MOST_FAULTS):
        breaker = breaker.ended(Outcome.FAULT, sent_s=at_s - 1, now_s=at_s)
    return breaker


def test_it_opens_after_faults_in_a_row_and_only_then() -> None:
    breaker = Breaker()
    for what in (Outcome.FAULT, Outcome.FAULT, Outcome.OK, Outcome.FAULT, Outcome.BUSY, Outcome.FAULT):
        breaker = breaker.ended(what, sent_s=0, now_s=1)
        assert breaker.waits_s(1) == 0
    breaker = breaker.ended(Outcome.FAULT, sent_s=0, now_s=1)
    assert breaker.waits_s(1) == PAUSE_S and breaker.waits_s(1 + PAUSE_S) == 0


@settings(deadline=None)
@given(st.lists(st.sampled_from([Outcome.OK, Outcome.BUSY, Outcome.NEUTRAL]), max_size=50))
def test_back_pressure_and_wrong_requests_never_open_it(outcomes: list[Outcome]) -> None:
    breaker = Breaker()
    for now, what in enumerate(outcomes):
        breaker = breaker.sent(now).ended(what, sent_s=now, now_s=now)
        assert breaker.waits_s(now) == 0


def test_one_probe_at_a_time_and_a_good_one_closes_it() -> None:
    breaker = opened(100.0)
    half = breaker.sent(101.0)
    assert half.waits_s(101.0) == PROBE_LOST_S, "a second one waits for the first"
    assert half.ended(Outcome.OK, sent_s=101.0, now_s=101.5) == Breaker()


def test_a_bad_probe_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now, pauses = opened(100.0), 100.0, []
    for _ in range(8):
        pauses.append(breaker.waits_s(now))
        now += pauses[-1]
        breaker = breaker.sent(now).ended(Outcome.FAULT, sent_s=now, now_s=now)
    assert pauses == [1, 2, 4, 8, 16, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]


def test_a_probe_that_finds_it_busy_lets_the_next_one_go_and_a_lost_one_is_given_up() -> None:
    half = opened(100.0).sent(102.0)
    assert half.ended(Outcome.BUSY, sent_s=102.0, now_s=102.5).waits_s(102.5) == 0
    assert half.waits_s(102.0 + PROBE_LOST_S) == 0


def test_those_in_flight_when_it_opens_are_one_failure() -> None:
    breaker = opened(100.0)
    for _ in range(50):
        breaker = breaker.ended(Outcome.FAULT, sent_s=99.0, now_s=100.5)
    assert breaker == opened(100.0)
    assert breaker.ended(Outcome.OK, sent_s=99.0, now_s=100.5) == breaker, "it was sent before the worker failed"


@pytest.mark.parametrize(
    ("what", "counts", "next_"),
    [
        (Outcome.FAULT, {"tries": 1}, Next.AGAIN),
        (Outcome.BUSY, {"tries": 2}, Next.AGAIN),
        (Outcome.FAULT, {"tries": 3}, Next.STOP),
        (Outcome.NEUTRAL, {"tries": 1}, Next.STOP),
        (Outcome.NEUTRAL, {"streamed": 5}, Next.STOP),
        (Outcome.FAULT, {"streamed": 5, "tries": 3, "migrations": 1}, Next.REPLAY),
        (Outcome.FAULT, {"streamed": 5, "migrations": 2}, Next.STOP),
    ],
)
def test_what_becomes_of_a_request_that_a_leg_lost(what: Outcome, counts: dict[str, int], next_: Next) -> None:
    arguments: dict[str, Any] = {"streamed": 0, "tries": 1, "max_tries": 3, "migrations": 0, "max_migrations": 2}
    assert after(what, **{**arguments, **counts}) is next_


ACTIONS = st.tuples(
    st.sampled_from(["charge", "give_back", "start", "forget"]),
    st.sampled_from("123456"),
    st.sampled_from(Leg),
    st.sampled_from(SITES),
    st.integers(0, 1000),
)


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_charge_and_give_back_sum_to_zero(actions: list[tuple[str, str, Leg, Site, int]]) -> None:
    ledger = Ledger()
    live: dict[tuple[str, Leg], tuple[Site, int]] = {}
    started: set[str] = set()
    for now, (action, request, leg, site, tokens) in enumerate(actions):
        key = (request, leg)
        if action == "charge" and key in live:
            with pytest.raises(ValueError, match="give it back first"):
                ledger.charge(request, leg, site, tokens=tokens, pages=1, now_s=now)
        elif action == "charge":
            ledger.charge(request, leg, site, tokens=tokens, pages=tokens // 7, now_s=now)
            live[key] = (site, tokens)
            if leg is Leg.DECODE:
                started.discard(request)
        elif action == "give_back":
            given = ledger.give_back(request, leg, now_s=now)
            assert (given and (given.site, given.tokens)) == live.pop(key, None)
        elif action == "start":
            ledger.start(request)
            started |= {request} if (request, Leg.DECODE) in live else set()
        else:
            lost = {(charge.request_id, charge.leg) for charge in ledger.forget(site.worker, now_s=now)}
            assert lost == {key for key, (where, _) in live.items() if where.worker == site.worker}
            live = {key: value for key, value in live.items() if key not in lost}
        for where in SITES:
            mine = [(key, n) for key, (other, n) in live.items() if other == where]
            load = ledger.load(where)
            prompts = [n for (_, leg), n in mine if leg is Leg.PREFILL]
            sequences = [(request, n) for (request, leg), n in mine if leg is Leg.DECODE]
            assert (load.pending_tokens, load.prompts) == (sum(prompts), len(prompts))
            assert load.context_tokens == sum(n for _, n in sequences)
            assert load.running == sum(request in started for request, _ in sequences)
            assert load.arriving + load.running == len(sequences)
            assert load.pages == sum(n // 7 for _, n in mine)
    for request, leg in list(live):
        assert ledger.give_back(request, leg, now_s=99) is not None
        assert ledger.give_back(request, leg, now_s=99) is None
    assert ledger.total() == EMPTY and ledger.in_flight == 0


def test_the_ledger_knows_what_a_site_computes_now_and_since_when() -> None:
    ledger, site = Ledger(), SITES[0]
    assert ledger.head(site, 1.0) == (0, 0.0) and ledger.idle_s(site, 1.0) == float("inf")
    ledger.charge("1", Leg.PREFILL, site, tokens=100, pages=1, now_s=1.0)
    ledger.charge("2", Leg.PREFILL, site, tokens=200, pages=1, now_s=2.0)
    assert ledger.head(site, 3.0) == (100, 2.0) and ledger.idle_s(site, 3.0) == 0.0
    ledger.give_back("1", Leg.PREFILL, now_s=5.0)
    assert ledger.head(site, 6.0) == (200, 1.0), "the second began when the first had ended"
    ledger.give_back("2", Leg.PREFILL, now_s=8.0)
    assert ledger.head(site, 9.0) == (0, 0.0) and ledger.idle_s(site, 9.0) == 1.0
    ledger.charge("3", Leg.PREFILL, site, tokens=300, pages=1, now_s=20.0)
    assert ledger.head(site, 21.0) == (300, 1.0), "not since the last one ended"


def chain(path: tuple[int, ...]) -> list[bytes]:
    """Keys of a prompt whose pages are named by `path`: a key names all pages up to its own."""
    return [repr(path[: i + 1]).encode() for i in range(len(path))]


PATHS = st.lists(st.integers(0, 1), max_size=12).map(tuple)


@settings(deadline=None)
@given(st.lists(PATHS, max_size=25), st.integers(1, 20), PATHS, st.integers(1, 3))
def test_the_index_is_a_cache_of_its_sites_size_and_bisection_finds_what_it_has(
    recorded: list[tuple[int, ...]], capacity: int, asked: tuple[int, ...], stride: int
) -> None:
    index = PrefixIndex(stride=stride)
    model: OrderedDict[bytes, None] = OrderedDict()
    for now, path in enumerate(recorded):
        index.record(SITES[0], chain(path), capacity=capacity, now_s=now)
        for key in reversed(chain(path)[stride - 1 :: stride][: capacity // stride]):
            model.pop(key, None)
            model[key] = None
        while len(model) > capacity // stride:
            model.popitem(last=False)
    assert len(index) == len(model) <= capacity
    for path in (*recorded, asked):
        known = [key in model for key in chain(path)[stride - 1 :: stride]]
        assert known == sorted(known, reverse=True), "a beginning is kept as long as what follows"
        assert index.hits(SITES[0], chain(path), now_s=len(recorded)) == stride * sum(known)
        assert index.hits(SITES[1], chain(path), now_s=len(recorded)) == 0


def test_what_is_old_is_not_believed_and_then_dropped() -> None:
    index = PrefixIndex(max_age_s=10)
    index.record(SITES[0], chain((1, 2, 3)), capacity=9, now_s=0)
    index.record(SITES[0], chain((1, 2)), capacity=9, now_s=5)
    assert [index.hits(SITES[0], chain((1, 2, 3)), now_s=now) for now in (9, 10, 14, 15)] == [3, 2, 2, 0]
    index.expire(12)
    assert len(index) == 2
    index.expire(20)
    assert len(index) == 0


def test_a_worker_that_is_gone_has_nothing() -> None:
    index = PrefixIndex()
    for site in SITES:
        index.record(site, chain((1, 2)), capacity=9, now_s=0)
    index.forget("a")
    assert [index.hits(site, chain((1, 2)), now_s=1) for site in SITES] == [0, 0, 2, 2]


def test_a_worker_that_never_finds_what_it_should_is_believed_less_and_can_win_it_back() -> None:
    index, keys = PrefixIndex(), chain(tuple(range(100)))
    index.record(SITES[0], keys, capacity=1000, now_s=0)
    assert index.hits(SITES[0], keys, now_s=1) == 100
    for _ in range(50):
        index.learn(SITES[0], believed=index.hits(SITES[0], keys, now_s=1), found=0)
    assert index.hits(SITES[0], keys, now_s=1) == 10
    for _ in range(60):
        index.learn(SITES[0], believed=index.hits(SITES[0], keys, now_s=1), found=100)
    assert index.hits(SITES[0], keys, now_s=1) == 100


@pytest.mark.parametrize("bad", [{"stride": 0}, {"max_keys": 0}])
def test_sizes_of_the_index_are_checked(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must each be at least 1"):
        PrefixIndex(**bad)  # type: ignore[arg-type]
