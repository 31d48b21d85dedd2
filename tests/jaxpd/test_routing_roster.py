"""A router's state over the life of requests and of workers: whatever happens, nothing stays charged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpd.policies.breaker import MOST_FAULTS, PAUSE_S, Outcome
from jaxpd.policies.routing import POLICIES
from jaxpd.policies.workers import Asked, Leg, Reason, Refusal, Role, Route, State
from jaxpd.routing.ledger import EMPTY
from jaxpd.routing.roster import Roster

DRAWS = (0.5, 0.5)
KEYS = [b"%d" % i for i in range(10)]


def roster(policy: str = "kv_aware", workers: tuple[str, ...] = ("p0", "p1", "d0", "d1")) -> Roster:
    made = Roster(prefill=policy, decode=policy)
    for name in workers:
        made.join(name, {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]], replicas=1, pages=100)
        made.ready(name)
    return made


def send(made: Roster, request: str = "r", now_s: float = 0.0, keys: list[bytes] = KEYS, **rest: Any) -> Route:
    asked = Asked(prompt_tokens=165, answer_tokens=20, page_size=16, **rest)
    answer = made.dispatch(request, asked, keys, draws=DRAWS, now_s=now_s)
    assert isinstance(answer, Route), answer
    return answer


def test_a_policy_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="decode policy 'best' does not exist; choose one of random, round_robin"):
        Roster(prefill="random", decode="best")


def test_a_name_is_taken_once_and_sizes_are_checked() -> None:
    made = roster()
    with pytest.raises(ValueError, match="'p0' has joined already"):
        made.join("p0", Role.DECODE, replicas=1, pages=1)
    with pytest.raises(ValueError, match="replicas=0"):
        made.join("p9", Role.PREFILL, replicas=0, pages=1)


def test_both_legs_are_charged_at_dispatch_and_given_back_at_their_ends() -> None:
    made = roster()
    sent = send(made)
    total = made.ledger.total()
    assert (total.pending_tokens, total.prompts, total.context_tokens, total.arriving) == (165, 1, 185, 1)
    assert total.pages == 11 + 12
    made.first_token("r", computed=165, found_pages=0, prefill_s=0.5, now_s=1.0)
    total = made.ledger.total()
    assert (total.pending_tokens, total.prompts, total.arriving, total.running) == (0, 0, 1, 0)
    made.decoding("r", now_s=1.0, moved_bytes=1000, transfer_s=0.1)
    assert made.ledger.load(sent.decode.site).running == 1
    made.end("r", now_s=2.0)
    made.end("r", now_s=2.0)
    assert made.ledger.total() == EMPTY


def test_the_second_request_with_a_prefix_is_charged_for_the_rest_only() -> None:
    made = roster()
    first = send(made, "1")
    made.first_token("1", computed=165, found_pages=0, prefill_s=0.5, now_s=1.0)
    made.end("1", now_s=2.0)
    second = send(made, "2", now_s=3.0)
    assert second.prefill.site == first.prefill.site and second.decode.site == first.decode.site
    assert second.prefill.hit_pages == 10 and made.ledger.load(second.prefill.site).pending_tokens == 5


def test_a_burst_spreads_though_nothing_has_ended() -> None:
    made = roster("least_pending")
    sites = [send(made, str(i), keys=[b"%d-%d" % (i, j) for j in range(10)]).prefill.site.worker for i in range(6)]
    assert sites == ["p0", "p1"] * 3


def test_what_the_decode_replica_has_at_the_end_counts_for_the_next_turn() -> None:
    made = roster(workers=("m0", "m1"))
    sent = send(made)
    made.end("r", now_s=1.0, keys=[*KEYS, b"answer"])
    (has,) = [w for w in made.snapshot([*KEYS, b"answer"], now_s=2.0) if w.name == sent.decode.site.worker]
    assert has.replicas[0].hit_pages == 11


def test_a_mixed_worker_counts_each_request_once() -> None:
    made = roster(workers=("m0",))
    assert send(made).whole
    (worker,) = made.snapshot(KEYS, now_s=0.0)
    assert worker.replicas[0].queued == 1 and worker.replicas[0].free_pages == 88
    made.first_token("r", computed=165, found_pages=0, prefill_s=0.5, now_s=1.0)
    made.decoding("r", now_s=1.0)
    (worker,) = made.snapshot(KEYS, now_s=1.0)
    assert (worker.replicas[0].queued, worker.replicas[0].running) == (0, 1)


def test_a_refusal_changes_nothing() -> None:
    made = roster(workers=("p0",))
    answer = made.dispatch("r", Asked(prompt_tokens=1, page_size=16), [], draws=DRAWS, now_s=0.0)
    assert isinstance(answer, Refusal) and (answer.leg, answer.reason) == (Leg.DECODE, Reason.NO_WORKER)
    assert made.ledger.in_flight == 0 and len(made.index) == 0


def test_a_draining_worker_ends_what_it_has_and_gets_nothing_new() -> None:
    made = roster()
    old = send(made, "1").prefill.site.worker
    made.drain(old)
    assert made.states()[old] is State.DRAINING
    assert {send(made, str(i), now_s=i).prefill.site.worker for i in range(2, 6)} == {"p0", "p1"} - {old}
    made.first_token("1", computed=165, found_pages=0, prefill_s=0.5, now_s=9.0)
    made.ready(old)
    assert send(made, "9", now_s=9.0).prefill.site.worker == old


def test_the_requests_of_a_worker_that_is_gone_are_named_and_their_other_legs_freed() -> None:
    made = roster()
    sent = send(made, "1")
    lost = made.gone(sent.decode.site.worker, now_s=1.0)
    assert [(charge.request_id, charge.leg) for charge in lost] == [("1", Leg.DECODE)]
    made.lost("1", Leg.DECODE, Outcome.FAULT, now_s=1.0)
    assert made.ledger.total() == EMPTY and sent.decode.site.worker not in made.states()
    assert made.gone("never joined", now_s=1.0) == []
    made.join(sent.decode.site.worker, Role.DECODE, replicas=1, pages=100)
    hits = {w.name: w.replicas[0].hit_pages for w in made.snapshot(KEYS, now_s=2.0)}
    assert hits[sent.decode.site.worker] == 0 and hits[sent.prefill.site.worker] == 10


def test_faults_bar_the_worker_of_that_leg_and_a_probe_lets_it_in_again() -> None:
    made = roster("round_robin", workers=("p0", "d0", "d1"))
    failing = send(made, "0").decode.site.worker
    for i in range(MOST_FAULTS):
        made.lost(str(i), Leg.DECODE, Outcome.FAULT, now_s=i)
        if i + 1 < MOST_FAULTS:
            other = {"d0", "d1"} - {failing}
            assert send(made, str(i + 1), now_s=i, avoid=frozenset(other)).decode.site.worker == failing
    at = MOST_FAULTS - 1
    names = {send(made, f"after {i}", now_s=at).decode.site.worker for i in range(4)}
    assert failing not in names, "and the prefill worker, whose leg was cancelled, still works"
    names_later = [send(made, f"later {i}", now_s=at + PAUSE_S).decode.site.worker for i in range(4)]
    assert names_later.count(failing) == 1, "one probe"
    probe = f"later {names_later.index(failing)}"
    made.first_token(probe, computed=165, found_pages=0, prefill_s=0.1, now_s=at + PAUSE_S)
    made.decoding(probe, now_s=at + PAUSE_S)
    made.end(probe, now_s=at + PAUSE_S)
    assert [send(made, f"x{i}", now_s=at + PAUSE_S).decode.site.worker for i in range(4)].count(failing) == 2


def test_a_prefill_worker_may_be_at_fault_after_its_first_token() -> None:
    made = roster("round_robin", workers=("p0", "d0"))
    for i in range(MOST_FAULTS):
        send(made, str(i), now_s=i)
        made.first_token(str(i), computed=165, found_pages=0, prefill_s=0.1, now_s=i)
        made.lost(str(i), Leg.PREFILL, Outcome.FAULT, now_s=i)
        made.lost(str(i), Leg.PREFILL, Outcome.FAULT, now_s=i)
    now_s = MOST_FAULTS - 1
    barred = {w.name: (w.prefill_barred_s, w.decode_barred_s) for w in made.snapshot((), now_s=now_s)}
    assert barred == {"p0": (PAUSE_S, 0), "d0": (0, 0)}
    send(made, "probe", now_s=now_s + PAUSE_S)
    made.first_token("probe", computed=165, found_pages=0, prefill_s=0.1, now_s=now_s + PAUSE_S)
    waits = [w.prefill_barred_s for w in made.snapshot((), now_s=now_s + PAUSE_S)]
    assert max(waits) > 0, "its first token is out, but its KV was not taken yet"
    made.decoding("probe", now_s=now_s + PAUSE_S)
    assert [w.prefill_barred_s for w in made.snapshot((), now_s=now_s + PAUSE_S)] == [0, 0]


def test_a_busy_worker_is_not_punished() -> None:
    made = roster("round_robin")
    for i in range(20):
        send(made, str(i))
        made.lost(str(i), Leg.PREFILL, Outcome.BUSY, now_s=0.0)
    assert all(w.prefill_barred_s == w.decode_barred_s == 0 for w in made.snapshot((), now_s=0.0))


EVENTS = st.tuples(
    st.sampled_from(["send", "first", "decoding", "end", "fault", "busy", "drain", "ready", "gone", "join"]),
    st.integers(0, 5),
    st.sampled_from(["p0", "p1", "d0", "d1", "m0"]),
    st.sampled_from(Leg),
)


@settings(deadline=None)
@given(st.sampled_from(list(POLICIES)), st.lists(EVENTS, max_size=60))
def test_whatever_happens_nothing_stays_charged(policy: str, events: list[tuple[str, int, str, Leg]]) -> None:
    made = roster(policy, workers=("p0", "p1", "d0", "d1", "m0"))
    asked = Asked(prompt_tokens=165, answer_tokens=20, page_size=16, ttft_slo_s=1.0, tpot_slo_s=0.1)
    live: set[str] = set()
    for now, (event, number, name, leg) in enumerate(events):
        request = str(number)
        if event == "send" and request not in live:
            states = made.states()
            answer = made.dispatch(request, asked, KEYS, draws=(number / 6, 0.3), now_s=now)
            if isinstance(answer, Route):
                live.add(request)
                assert {states[c.site.worker] for c in (answer.prefill, answer.decode)} == {State.READY}
        elif event == "first":
            made.first_token(request, computed=100, found_pages=4, prefill_s=0.1 * number, now_s=now)
        elif event == "decoding":
            made.decoding(request, now_s=now, moved_bytes=number, transfer_s=0.1)
        elif event == "end":
            made.end(request, now_s=now, keys=KEYS)
            live.discard(request)
        elif event in ("fault", "busy"):
            made.lost(request, leg, Outcome(event), now_s=now)
            live.discard(request)
        elif event == "drain":
            made.drain(name)
        elif event == "ready":
            made.ready(name)
        elif event == "gone":
            for charge in made.gone(name, now_s=now):
                made.lost(charge.request_id, charge.leg, Outcome.FAULT, now_s=now)
                live.discard(charge.request_id)
        elif name not in made.states():
            made.join(name, {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]], replicas=1, pages=100)
        assert made.ledger.in_flight <= 2 * len(live)
    for request in live:
        made.end(request, now_s=1000.0)
    assert made.ledger.total() == EMPTY and made.ledger.in_flight == 0
