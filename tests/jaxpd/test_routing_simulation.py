"""What each policy is for, shown on simulated clusters: a few seconds of computing for hours of traffic."""

from __future__ import annotations

import functools

import pytest

from jaxpd.policies.breaker import MAX_PAUSE_S, MOST_FAULTS
from jaxpd.policies.routing import POLICIES, Policy, prefix_affinity
from jaxpd.routing.ledger import EMPTY
from jaxpd.routing.loads import Arrival, conversations, of_blocks
from jaxpd.routing.simulation import simulate
from jaxpd.routing.synthetic import Cluster, Outage, Record, Result, Slo, Summary, quantile, summarise

CHATS = tuple(conversations(1200, rate=4.0))  # long chats with shared system prompts, about half of what 8 can do
SINGLE = tuple(conversations(1200, rate=8.5, prompts=10**4, prompt_pages=1, turns=1.0, turn_pages=9))  # no prefixes
ONE_PROMPT = tuple(conversations(1000, rate=20.0, prompts=1, prompt_pages=16, turns=1.0, turn_pages=2))  # all share it
SLO = Slo(5.0, 0.1)
EIGHT = Cluster(prefill=8, decode=4)
ALL = pytest.mark.parametrize("policy", POLICIES)


@functools.cache
def chats(policy: str) -> tuple[Result, Summary]:
    result = simulate(CHATS, EIGHT, prefill=policy, decode=policy)
    return result, summarise(result, SLO)


@functools.cache
def single(policy: str) -> Summary:
    return summarise(simulate(SINGLE, EIGHT, prefill=policy, decode=policy), SLO)


@functools.cache
def one_prompt(policy: str | Policy) -> Summary:
    return summarise(simulate(ONE_PROMPT, EIGHT, prefill=policy), SLO)


@ALL
def test_everyone_is_answered_and_nothing_stays_charged(policy: str) -> None:
    result, summary = chats(policy)
    assert (summary.requests, summary.refused, summary.failed) == (len(CHATS), 0, 0)
    assert result.roster.ledger.total() == EMPTY and result.roster.ledger.in_flight == 0
    assert all(record.tpot_s is None or record.tpot_s > 0 for record in result.records)


@ALL
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    few = CHATS[:150]
    first, second = (simulate(few, EIGHT, prefill=policy, decode=policy, seed=7) for _ in range(2))
    assert [(r.ttft_s, r.end_s, r.sent) for r in first.records] == [(r.ttft_s, r.end_s, r.sent) for r in second.records]


@pytest.mark.parametrize("policy", ["prefix_affinity", "kv_aware", "ttft_estimate"])
def test_who_knows_of_prefixes_finds_more_and_answers_sooner_than_round_robin(policy: str) -> None:
    (_, blind), (_, aware) = chats("round_robin"), chats(policy)
    assert aware.hit_rate > blind.hit_rate + 0.1
    assert aware.ttft_mean_s < 0.6 * blind.ttft_mean_s
    assert aware.ttft_p99_s < 0.6 * blind.ttft_p99_s


def test_least_pending_beats_random_in_the_tail_and_two_choices_come_close() -> None:
    least, two, any_ = (single(policy).ttft_p99_s for policy in ("least_pending", "power_of_two", "random"))
    assert least < 0.5 * any_
    assert least <= two < 0.7 * any_


def test_affinity_yields_to_load_so_that_no_worker_starves_or_drowns() -> None:
    endless: Policy = functools.partial(prefix_affinity, gap=10**12)
    sticky, gated = one_prompt(endless), one_prompt("prefix_affinity")
    assert sticky.imbalance > 7, "without the gate all eight workers' load lands on one"
    assert gated.imbalance < 1.5 and gated.idlest > 0.6
    assert gated.ttft_p99_s < 0.1 * sticky.ttft_p99_s


@pytest.mark.parametrize("policy", ["kv_aware", "ttft_estimate"])
def test_a_prefix_that_everybody_wants_is_computed_again_where_there_is_time(policy: str) -> None:
    summary = one_prompt(policy)
    assert summary.imbalance < 1.5 and summary.idlest > 0.6
    assert summary.hit_rate > 0.75, "and still is found nearly always"


@ALL
def test_no_worker_starves(policy: str) -> None:
    assert chats(policy)[1].idlest > 0.4


def test_early_rejection_keeps_what_it_promised_to_those_it_accepts() -> None:
    flood = [Arrival(a.at_s / 2, a.prompt_tokens, a.answer_tokens, a.keys) for a in SINGLE]
    blind = summarise(simulate(flood, EIGHT, prefill="kv_aware", decode="kv_aware", slo=SLO), SLO)
    early = summarise(simulate(flood, EIGHT, prefill="ttft_estimate", decode="ttft_estimate", slo=SLO), SLO)
    assert blind.refused == 0 and blind.attainment < 0.2
    assert early.refused > 0.2 * early.requests
    assert early.kept > 0.95
    assert early.attainment > 0.45, "of all, refusals included: about what eight workers can do of this load"


def test_nobody_is_refused_while_there_is_time() -> None:
    few = conversations(300, rate=1.0, turns=1.0, turn_pages=2)
    summary = summarise(simulate(few, EIGHT, prefill="ttft_estimate", decode="ttft_estimate", slo=SLO), SLO)
    assert summary.refused == 0 and summary.attainment == 1.0


def test_the_estimate_is_near_what_happens() -> None:
    result = simulate(SINGLE, EIGHT, prefill="ttft_estimate", decode="ttft_estimate")
    errors = sorted(
        abs(record.expected_s - record.ttft_s) / record.ttft_s
        for record in result.records[200:]
        if record.expected_s is not None and record.ttft_s
    )
    assert len(errors) > 900 and quantile(errors, 0.5) < 0.1 and quantile(errors, 0.9) < 0.4


def test_a_slow_worker_gets_less_where_seconds_are_counted() -> None:
    slow = Cluster(prefill=4, decode=4, slow={"p0": 4.0})
    load = conversations(600, rate=2.5, prompts=10**4, prompt_pages=1, turns=1.0, turn_pages=9)
    tokens, seconds = (
        summarise(simulate(load, slow, prefill=policy), SLO) for policy in ("least_pending", "ttft_estimate")
    )
    assert seconds.ttft_p99_s < 0.8 * tokens.ttft_p99_s


@pytest.mark.parametrize("policy", ["least_pending", "kv_aware", "ttft_estimate"])
@pytest.mark.parametrize("worker", ["p1", "d1"])
def test_a_worker_that_fails_is_left_alone_and_comes_back(policy: str, worker: str) -> None:
    down_s, up_s = 60.0, 150.0
    result = simulate(CHATS, EIGHT, prefill=policy, decode=policy, outages=[Outage(worker, down_s, up_s)])
    summary = summarise(result, SLO)
    assert summary.failed == summary.refused == 0 and result.roster.ledger.total() == EMPTY
    sent = [at for r in result.records for at, *sites in r.sent if worker in (site.worker for site in sites)]
    during = [at for at in sent if down_s <= at < up_s]
    assert len(during) <= MOST_FAULTS + 8, f"left alone but for probes: {during}"
    back = [at for at in sent if up_s <= at]
    assert min(back) <= up_s + MAX_PAUSE_S + 5 and len(back) > 30, "it works again"


def test_who_was_decoding_on_a_worker_that_died_goes_on_elsewhere() -> None:
    load = conversations(200, rate=4.0, answer_tokens=1500)
    result = simulate(load, EIGHT, prefill="kv_aware", decode="kv_aware", outages=[Outage("d0", 40.0, 50.0)])
    moved = [record for record in result.records if record.migrations]
    assert len(moved) > 3 and {record.migrations for record in moved} == {1}
    assert all(record.end_s is not None and len(record.sent) >= 2 for record in moved)
    assert all(record.sent[0][2].worker == "d0" != record.sent[-1][2].worker for record in moved)


def test_without_any_worker_of_a_role_the_answer_is_a_refusal() -> None:
    result = simulate(CHATS[:20], Cluster(prefill=1, decode=1), prefill="kv_aware", outages=[Outage("d0", 0.0, 1e6)])
    assert all(record.refused or record.failed for record in result.records)
    assert result.roster.ledger.total() == EMPTY


def test_replicas_of_one_worker_are_chosen_one_by_one() -> None:
    two = Cluster(prefill=2, decode=1, replicas=4)
    result = simulate(ONE_PROMPT, two, prefill="kv_aware")
    assert len(result.busy_s) == 8 and summarise(result, SLO).imbalance < 1.5


def test_conversations_share_beginnings_and_arrive_at_their_rate() -> None:
    load = conversations(2000, rate=5.0, prompts=3, turns=3.0, think_s=5.0)
    assert [a.at_s for a in load] == sorted(a.at_s for a in load)
    assert 2000 / load[-1].at_s == pytest.approx(5.0, rel=0.15)
    assert len({a.keys[0] for a in load}) == 3
    assert all(len(a.keys) == a.prompt_tokens // 512 for a in load)


def test_a_trace_keeps_full_pages_only() -> None:
    (made,) = of_blocks([(3.0, 1100, 7, (5, 6, 9))], page_size=512, rate=2.0)
    assert made == Arrival(1.5, 1100, 7, (b"5", b"6"))


def test_a_summary_counts_misses_of_all_kinds() -> None:
    arrival = Arrival(0.0, 100, 11, ())
    records = [
        Record(arrival=arrival, ttft_s=1.0, end_s=2.0, cached_tokens=50),
        Record(arrival=arrival, ttft_s=6.0, end_s=7.0),
        Record(arrival=arrival, ttft_s=1.0, end_s=9.0),
        Record(arrival=arrival, failed=True),
    ]
    summary = summarise(Result(records, chats("random")[0].busy_s, chats("random")[0].roster), SLO)
    assert (summary.failed, summary.attainment, summary.kept) == (1, 0.25, 0.25)
    assert (summary.ttft_p50_s, summary.ttft_p99_s, summary.tpot_p99_s) == (1.0, 6.0, 0.8)
    assert summary.hit_rate == pytest.approx(1 / 6)
