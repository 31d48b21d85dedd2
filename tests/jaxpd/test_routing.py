"""The router's policies: what each chooses by example, and what none of them ever does, for any cluster."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpd.errors import InvalidArgument, JaxpdError, ResourceExhausted, Unavailable
from jaxpd.policies.candidates import MOST_RETRY_S
from jaxpd.policies.estimates import STALE_S
from jaxpd.policies.routing import (
    AFFINITY_GAP,
    POLICIES,
    Policy,
    kv_aware,
    least_pending,
    power_of_two,
    prefix_affinity,
    random,
    round_robin,
    route,
    ttft_estimate,
)
from jaxpd.policies.workers import Asked, Choice, Leg, Reason, Refusal, Role, Route, State, Worker
from tests.jaxpd.routing_views import PAGE, asked, clusters, measured, requests, worker

DRAWS = st.floats(0, 1, exclude_max=True)
BY_NAME = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def chosen(answer: Choice | Refusal) -> str:
    assert isinstance(answer, Choice), answer
    return answer.site.worker


def refused(answer: object) -> Refusal:
    assert isinstance(answer, Refusal), answer
    assert answer.message and (answer.retry_after_s is None) == (answer.reason is Reason.TOO_LARGE)
    assert answer.retry_after_s is None or 0 < answer.retry_after_s <= MOST_RETRY_S
    return answer


def may_take(asked: Asked, worker: Worker, replica: int, leg: Leg) -> bool:
    """Said again, in other words than the policies'."""
    whole = worker.role is Role.MIXED
    tokens = asked.prompt_tokens + (asked.answer_tokens if whole or leg is Leg.DECODE else 0)
    barred = worker.decode_barred_s > 0 and (whole or leg is Leg.DECODE)
    barred |= worker.prefill_barred_s > 0 and leg is Leg.PREFILL
    return (
        worker.state is State.READY
        and (worker.role.value == leg.value or (whole and leg is Leg.PREFILL))
        and worker.name not in asked.avoid
        and not barred
        and worker.replicas[replica].queued < worker.queue_limit
        and tokens <= worker.replicas[replica].total_pages * PAGE
    )


@BY_NAME
@settings(deadline=None)
@given(requests(), clusters(), st.sampled_from(Leg), DRAWS)
def test_only_those_are_chosen_that_can_and_a_refusal_says_why(
    policy: Policy, asked: Asked, workers: tuple[Worker, ...], leg: Leg, draw: float
) -> None:
    answer = policy(asked, workers, leg, draw)
    able = {(w.name, i) for w in workers for i in range(len(w.replicas)) if may_take(asked, w, i, leg)}
    if isinstance(answer, Choice):
        assert answer.site in able
    elif refused(answer).reason is Reason.TOO_LATE:
        assert able and policy is ttft_estimate
        assert asked.ttft_slo_s or asked.ttst_slo_s or asked.tpot_slo_s
    else:
        assert not able, f"{answer.message}, but {able} could"


@BY_NAME
@settings(deadline=None)
@given(requests(), clusters(), st.sampled_from(Leg), DRAWS)
def test_the_order_of_the_workers_decides_nothing(
    policy: Policy, asked: Asked, workers: tuple[Worker, ...], leg: Leg, draw: float
) -> None:
    if policy in (random, power_of_two):
        return
    here, there = policy(asked, workers, leg, draw), policy(asked, workers[::-1], leg, draw)
    if isinstance(here, Choice) and isinstance(there, Choice):
        assert here.site == there.site
    else:
        assert isinstance(here, Refusal) and isinstance(there, Refusal) and here.reason is there.reason


@settings(deadline=None)
@given(requests(), clusters(), st.sampled_from(list(POLICIES)), st.sampled_from(list(POLICIES)), DRAWS, DRAWS)
def test_a_route_has_both_legs_or_a_reason(
    asked: Asked, workers: tuple[Worker, ...], prefill: str, decode: str, first: float, second: float
) -> None:
    answer = route(asked, workers, prefill=POLICIES[prefill], decode=POLICIES[decode], draws=(first, second))
    by_name = {w.name: w for w in workers}
    if isinstance(answer, Refusal):
        assert isinstance(refused(answer).error(), JaxpdError)
        return
    sites = (answer.prefill.site, answer.decode.site)
    assert may_take(asked, by_name[sites[0].worker], sites[0].replica, Leg.PREFILL)
    if by_name[sites[0].worker].role is Role.MIXED:
        assert sites[1] == sites[0] and answer.whole
    else:
        assert may_take(asked, by_name[sites[1].worker], sites[1].replica, Leg.DECODE) and not answer.whole


@BY_NAME
def test_each_reason_has_its_case(policy: Policy) -> None:
    def reason(*workers: Worker, **rest: object) -> Refusal:
        return refused(policy(asked(100, **rest), workers, Leg.PREFILL, 0.5))

    assert reason().reason is Reason.NO_WORKER
    assert reason(worker("d", "decode")).reason is Reason.NO_WORKER
    joining = reason(worker("a", state="joining"), worker("b", state="draining"), worker("c", state="gone"))
    assert joining.reason is Reason.NO_WORKER and "a is joining, b is draining" in joining.message
    large = reason(worker("a", total_pages=6))
    assert reason(worker("a", total_pages=6), worker("b", state="joining")).reason is Reason.NO_WORKER
    assert large.reason is Reason.TOO_LARGE and "7 pages of 16" in large.message and "has 6" in large.message
    assert reason(worker("a"), avoid=frozenset("a")).reason is Reason.TRIED
    failing = reason(worker("a", prefill_barred_s=3.0), worker("b", prefill_barred_s=2.0))
    assert failing.reason is Reason.FAILING and failing.retry_after_s == 2.0
    full = reason(worker("a", queued=5, queue_limit=5, head_tokens=500, head_s=0.1, prefill=measured(1e-3)))
    assert full.reason is Reason.FULL and full.retry_after_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.NO_WORKER, Unavailable),
        (Reason.TRIED, Unavailable),
        (Reason.FAILING, Unavailable),
        (Reason.FULL, ResourceExhausted),
        (Reason.TOO_LATE, ResourceExhausted),
        (Reason.TOO_LARGE, InvalidArgument),
    ],
)
def test_a_refusal_is_an_error_that_a_client_understands(reason: Reason, kind: type[JaxpdError]) -> None:
    error = Refusal(leg=Leg.PREFILL, reason=reason, message="why", retry_after_s=2.5).error()
    assert type(error) is kind and error.message == "why"
    assert getattr(error, "retry_after_s", 2.5) == 2.5


def test_random_reaches_each_replica_as_often() -> None:
    two = dataclasses.replace(worker("b"), replicas=worker("b").replicas * 2)
    workers = (worker("a"), two)
    sites = [random(asked(), workers, Leg.PREFILL, i / 300) for i in range(300)]
    counts = Counter(s.site for s in sites if isinstance(s, Choice))
    assert counts == {("a", 0): 100, ("b", 0): 100, ("b", 1): 100}


def test_round_robin_takes_turns_also_when_workers_come_and_go() -> None:
    last = {"a": 0, "b": 0, "c": 0}
    order = ""
    for turn in range(1, 13):
        if turn == 8:
            last["d"] = 0
        if turn == 10:
            del last["a"]
        name = chosen(round_robin(asked(), [worker(n, last_chosen=at) for n, at in last.items()], Leg.PREFILL, 0.9))
        last[name] = turn
        order += name
    assert order == "abcabca" + "db" + "cdb"


def test_least_pending_counts_what_the_leg_has_to_do() -> None:
    a: dict[str, Any] = {"pending_tokens": 50, "context_tokens": 900}
    b: dict[str, Any] = {"pending_tokens": 60, "context_tokens": 800}
    assert chosen(least_pending(asked(), [worker("a", **a), worker("b", **b)], Leg.PREFILL, 0.0)) == "a"
    decodes = [worker("a", "decode", **a), worker("b", "decode", **b)]
    assert chosen(least_pending(asked(), decodes, Leg.DECODE, 0.0)) == "b"


def test_ties_go_to_the_longer_prefix_and_then_to_the_one_chosen_longest_ago() -> None:
    workers = [worker("a", last_chosen=3), worker("b", last_chosen=1), worker("c", last_chosen=2)]
    assert chosen(least_pending(asked(), workers, Leg.PREFILL, 0.0)) == "b"
    assert chosen(kv_aware(asked(), workers, Leg.PREFILL, 0.0)) == "b"
    workers.append(worker("d", last_chosen=9, hit_pages=1))
    assert chosen(least_pending(asked(), workers, Leg.PREFILL, 0.0)) == "d"


def test_power_of_two_compares_every_pair_and_takes_the_lighter() -> None:
    pending = {"a": 3, "b": 1, "c": 2, "d": 0}
    workers = [worker(name, pending_tokens=tokens) for name, tokens in pending.items()]
    got = [chosen(power_of_two(asked(), workers, Leg.PREFILL, (i + 0.5) / 12)) for i in range(12)]
    assert got == [min(pair, key=lambda name: pending[name]) for pair in itertools.permutations("abcd", 2)]
    assert chosen(power_of_two(asked(), workers[:1], Leg.PREFILL, 0.99)) == "a"


def test_affinity_holds_up_to_the_gap_and_yields_above_it() -> None:
    def choose(pending: int, hit_pages: int = 50) -> str:
        near = worker("near", pending_tokens=pending + 7, hit_pages=hit_pages)
        workers = [near, worker("idle", pending_tokens=7), worker("second", pending_tokens=9)]
        return chosen(prefix_affinity(asked(1000), workers, Leg.PREFILL, 0.0))

    assert choose(AFFINITY_GAP) == "near"
    assert choose(AFFINITY_GAP + 1) == "idle"
    assert choose(1, hit_pages=18) == "idle", "288 of 1000 tokens are no reason to go anywhere"


def test_affinity_finds_the_next_best_copy_when_the_best_is_busy() -> None:
    workers = [
        worker("busy", pending_tokens=AFFINITY_GAP + 1, hit_pages=60),
        worker("copy", pending_tokens=500, hit_pages=40),
        worker("idle"),
    ]
    assert chosen(prefix_affinity(asked(1000), workers, Leg.PREFILL, 0.0)) == "copy"


def test_kv_aware_computes_again_exactly_when_waiting_costs_more() -> None:
    def choose(pending: int) -> str:
        workers = [worker("near", pending_tokens=pending, hit_pages=50), worker("idle", last_chosen=1)]
        return chosen(kv_aware(asked(1000), workers, Leg.PREFILL, 0.0))

    assert choose(50 * PAGE - 1) == "near"
    assert choose(50 * PAGE) == "near", "the longer prefix breaks the tie"
    assert choose(50 * PAGE + 1) == "idle"


def test_kv_aware_chooses_the_replica_and_weighs_transfer_against_context() -> None:
    near = worker("d", "decode", hit_pages=50, context_tokens=390).replicas[0]
    idle = worker("d", "decode").replicas[0]
    two = dataclasses.replace(worker("d", "decode"), replicas=(idle, near))
    answer = kv_aware(asked(1000), [two], Leg.DECODE, 0.0)
    assert isinstance(answer, Choice) and answer.site.replica == 1 and answer.hit_pages == 50
    busy = dataclasses.replace(near, context_tokens=410)
    answer = kv_aware(asked(1000), [dataclasses.replace(two, replicas=(idle, busy))], Leg.DECODE, 0.0)
    assert isinstance(answer, Choice) and answer.site.replica == 0


def test_room_now_comes_before_a_queue_in_decode() -> None:
    workers = [worker("full", "decode", free_pages=10), worker("room", "decode", context_tokens=9999)]
    assert chosen(least_pending(asked(1000), workers, Leg.DECODE, 0.0)) == "room"
    assert chosen(least_pending(asked(1000), workers[:1], Leg.DECODE, 0.0)) == "full"
    slots = [worker("full", "decode", queued=1, running=2, slots=3), worker("room", "decode", context_tokens=9999)]
    assert chosen(least_pending(asked(1000), slots, Leg.DECODE, 0.0)) == "room"


def test_estimates_are_in_seconds_so_that_a_fast_worker_takes_more() -> None:
    workers = [
        worker("slow", pending_tokens=400, queued=1, prefill=measured(4e-3)),
        worker("fast", pending_tokens=1000, queued=1, prefill=measured(1e-3)),
    ]
    assert chosen(kv_aware(asked(1000), workers, Leg.PREFILL, 0.0)) == "slow"
    answer = ttft_estimate(asked(1000), workers, Leg.PREFILL, 0.0)
    assert chosen(answer) == "fast"
    assert isinstance(answer, Choice) and answer.after_s == pytest.approx(2.0, rel=0.01)


def test_an_estimate_leaves_out_what_is_computed_and_what_is_cached() -> None:
    busy = worker("a", pending_tokens=500, queued=1, head_tokens=500, head_s=0.3, hit_pages=50, prefill=measured(1e-3))
    answer = ttft_estimate(asked(1000), [busy], Leg.PREFILL, 0.0)
    assert isinstance(answer, Choice) and answer.after_s == pytest.approx(0.2 + 0.2, rel=0.01)
    overdue = dataclasses.replace(busy, replicas=(dataclasses.replace(busy.replicas[0], head_s=60.0),))
    answer = ttft_estimate(asked(1000), [overdue], Leg.PREFILL, 0.0)
    assert isinstance(answer, Choice) and answer.after_s == pytest.approx(0.2, rel=0.01)


def test_who_would_miss_its_ttft_is_refused_with_the_time_it_lacks() -> None:
    load = {"a": 3000, "b": 2000}
    workers = [worker(name, pending_tokens=n, queued=1, prefill=measured(1e-3)) for name, n in load.items()]
    late = refused(ttft_estimate(asked(1000, ttft_slo_s=1.5), workers, Leg.PREFILL, 0.0))
    assert late.reason is Reason.TOO_LATE and late.retry_after_s == pytest.approx(1.5, rel=0.05)
    assert chosen(ttft_estimate(asked(1000, ttft_slo_s=3.2), workers, Leg.PREFILL, 0.0)) == "b"
    waited = asked(1000, ttft_slo_s=3.2, waited_s=0.5)
    assert refused(ttft_estimate(waited, workers, Leg.PREFILL, 0.0)).reason is Reason.TOO_LATE


def test_nothing_is_refused_on_a_guess() -> None:
    unknown = [worker("a", pending_tokens=10**6, queued=9), worker("b", prefill=measured(1.0, runs=5))]
    assert chosen(ttft_estimate(asked(1000, ttft_slo_s=0.1), unknown, Leg.PREFILL, 0.0)) == "b"


def test_a_newcomer_is_taken_for_the_best_and_so_is_one_that_had_nothing_for_long() -> None:
    workers = [worker("old", pending_tokens=100, queued=1, prefill=measured(1e-3)), worker("new")]
    answer = ttft_estimate(asked(1000), workers, Leg.PREFILL, 0.0)
    assert chosen(answer) == "new" and isinstance(answer, Choice) and answer.after_s == pytest.approx(1.0, rel=0.01)
    spoilt = worker("spoilt", prefill=measured(1e-2))
    assert chosen(ttft_estimate(asked(1000), [workers[0], spoilt], Leg.PREFILL, 0.0)) == "old"
    rested = worker("spoilt", prefill=measured(1e-2), idle_s=STALE_S + 1)
    assert chosen(ttft_estimate(asked(1000), [workers[0], rested], Leg.PREFILL, 0.0)) == "spoilt"


def test_an_estimate_that_nothing_confirms_fades_so_that_refusing_ends() -> None:
    def choose(idle_s: float) -> Choice | Refusal:
        stuck = worker("a", idle_s=idle_s, prefill=measured(1e-2))
        return ttft_estimate(asked(1000, ttft_slo_s=3.0), [stuck], Leg.PREFILL, 0.0)

    assert refused(choose(0.0)).reason is Reason.TOO_LATE
    assert refused(choose(STALE_S)).reason is Reason.TOO_LATE
    assert chosen(choose(2 * STALE_S)) == "a"


def test_decode_is_held_against_tpot_and_ttst_but_an_empty_replica_takes_one() -> None:
    step = measured(1e-3)  # a millisecond for each sequence
    busy = worker("d", "decode", running=30, queued=10, step=step, transfer=measured(1e-6))
    assert chosen(ttft_estimate(asked(100, tpot_slo_s=0.05), [busy], Leg.DECODE, 0.0)) == "d"
    late = refused(ttft_estimate(asked(100, tpot_slo_s=0.04), [busy], Leg.DECODE, 0.0))
    assert late.reason is Reason.TOO_LATE and "TPOT" in late.message
    for bound, answer in ((2.0, Choice), (1.0, Refusal)):  # 0.8 s of prefill, 0.7 s of transfer, a step of 41 ms
        second = asked(100, page_bytes=100_000, ttst_slo_s=bound, first_token_s=0.8)
        assert isinstance(ttft_estimate(second, [busy], Leg.DECODE, 0.0), answer)
    idle = worker("d", "decode", step=measured(1.0))
    assert chosen(ttft_estimate(asked(100, tpot_slo_s=0.04), [idle], Leg.DECODE, 0.0)) == "d"


def test_decode_weighs_the_transfer_against_the_steps() -> None:
    near: dict[str, Any] = {"hit_pages": 62, "running": 30, "step": measured(1e-3), "transfer": measured(1e-6)}
    workers = [worker("near", "decode", **near), worker("idle", "decode", **{**near, "hit_pages": 0, "running": 0})]
    big = {"page_bytes": 20_000}  # 1.24 s for all pages
    assert chosen(ttft_estimate(asked(1000, answer_tokens=10, **big), workers, Leg.DECODE, 0.0)) == "near"
    assert chosen(ttft_estimate(asked(1000, answer_tokens=100, **big), workers, Leg.DECODE, 0.0)) == "idle"


def test_a_mixed_worker_serves_both_legs_and_steps_in_where_decode_is_missing() -> None:
    def both(*workers: Worker) -> Route | Refusal:
        return route(asked(), workers, prefill=least_pending, decode=least_pending, draws=(0.0, 0.0))

    p, m, d = worker("p"), worker("m", "mixed", pending_tokens=500), worker("d", "decode")
    apart = both(p, m, d)
    assert isinstance(apart, Route) and (apart.prefill.site.worker, apart.decode.site.worker) == ("p", "d")
    whole = both(p, m)
    assert isinstance(whole, Route) and whole.whole and whole.prefill.site.worker == "m"
    whole = both(worker("p", pending_tokens=501), m, d)
    assert isinstance(whole, Route) and whole.whole
    missing = refused(both(p))
    assert (missing.leg, missing.reason) == (Leg.DECODE, Reason.NO_WORKER)
    assert refused(both(d)).leg is Leg.PREFILL
