"""The state machine of one request, without workers: what each word of a worker means at each moment."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from jaxpd.engine import seed_of
from jaxpd.errors import HandoffFailed, Internal, InvalidArgument, JaxpdError, ResourceExhausted, Unavailable
from jaxpd.life import Life, Moment, Stage
from jaxpd.policies.breaker import Outcome
from jaxpd.policies.workers import Choice, Leg, Route, Site
from jaxpd.request import FinishEvent, FinishReason, Request, SamplingParams, Timings, TokenLogprobs, TokensEvent, Usage
from serving.router.attempt import Attempt, Cancel, Closed, Deliver, Effect, Moved, Plan, Prefilled, Retry, Wait
from serving.router.legs import Legs

P, D, M = "p", "d", "m"
SPLIT = Route(prefill=Choice(site=Site(P, 0)), decode=Choice(site=Site(D, 0)))
WHOLE = Route(prefill=Choice(site=Site(M, 0)), decode=Choice(site=Site(M, 0)))
EOS = 99


def legs_of(*, n: int = 1, max_tokens: int = 5, max_tries: int = 3, max_migrations: int = 3, **params: Any) -> Legs:
    request = Request(
        request_id="r",
        prompt_ids=(1, 2, 3),
        params=SamplingParams(n=n, max_tokens=max_tokens, seed=5, **params),
        arrival_s=10.0,
    )
    serial = itertools.count(1)
    return Legs(
        request,
        eos_ids=(EOS,),
        max_tries=max_tries,
        max_migrations=max_migrations,
        new_id=lambda name: f"{name}.{next(serial)}",
    )


def begun(legs: Legs, route: Route = SPLIT) -> Attempt:
    return legs.start(legs.first(), route, now_s=11.0)


def tokens(index: int, *ids: int, wire: str = "r.1", sample: int = 0, **more: Any) -> TokensEvent:
    return TokensEvent(wire, index, ids, sample=sample, **more)


def end(
    reason: FinishReason,
    *,
    wire: str = "r.1",
    sample: int = 0,
    error: JaxpdError | None = None,
    cached: int = 0,
    **at: float,
) -> FinishEvent:
    life = Life(moments=[Moment(Stage(stage), at_s) for stage, at_s in at.items()])
    usage = Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=cached)
    return FinishEvent(
        request_id=wire, reason=reason, usage=usage, timings=Timings(), sample=sample, error=error, life=life
    )


def failed(error: JaxpdError, **more: Any) -> FinishEvent:
    return end(FinishReason.ERROR, error=error, **more)


def handed(**more: Any) -> FinishEvent:
    return end(FinishReason.HANDED_OFF, **more)


def delivered(effects: list[Effect]) -> list[Any]:
    return [effect.event for effect in effects if isinstance(effect, Deliver)]


def plan_of(effects: list[Effect]) -> Plan:
    (plan,) = [effect.plan for effect in effects if isinstance(effect, Retry)]
    return plan


def blame_of(effects: list[Effect]) -> tuple[Leg, Outcome]:
    (closed,) = [effect for effect in effects if isinstance(effect, Closed)]
    assert closed.attempt.blame is not None
    return closed.attempt.blame.leg, closed.attempt.blame.what


def test_times_are_of_the_workers_and_of_the_router_s_clock() -> None:
    legs = legs_of(max_tokens=3)
    begun(legs)
    legs.heard(P, tokens(0, 7), now_s=20.0)
    effects = legs.heard(
        P,
        handed(cached=2, arrived=11.0, admitted=12.0, prefill_start=13.0, offered=14.0, prefill_end=19.0),
        now_s=20.0,
    )
    (prefilled,) = effects
    assert isinstance(prefilled, Prefilled) and prefilled.cached_tokens == 2 and prefilled.prefill_s == 6.0
    legs.heard(D, tokens(1, 8), now_s=25.0)
    legs.heard(D, tokens(2, 9), now_s=26.0)
    effects = legs.heard(
        D,
        end(FinishReason.LENGTH, arrived=11.0, offered=20.1, transferred=20.5, accepted=21.0, decode_start=22.0),
        now_s=26.5,
    )
    (finish,) = delivered(effects)
    assert finish.timings == Timings(
        queue_s=2.0,
        prefill_s=8.0,
        transfer_s=7.0,
        transfer_exposed_s=2.0,
        decode_s=4.0,
        ttft_s=10.0,
        ttst_s=15.0,
    )
    assert [m.stage for m in finish.life.moments].count(Stage.ARRIVED) == 1
    assert finish.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2)
    assert [effect.transfer_s for effect in effects if isinstance(effect, Moved)] == [7.0]
    assert legs.done and not legs.attempts


def test_a_decode_worker_s_clock_does_not_go_before_the_first_token() -> None:
    legs = legs_of(max_tokens=2)
    begun(legs)
    legs.heard(P, tokens(0, 7), now_s=20.0)
    legs.heard(P, handed(), now_s=20.0)
    legs.heard(D, tokens(1, 8), now_s=21.0)
    (finish,) = delivered(legs.heard(D, end(FinishReason.LENGTH, accepted=19, decode_start=19), now_s=21.0))
    assert finish.timings.transfer_exposed_s == 0.0


def test_what_is_known_is_cut_off_and_log_probabilities_with_it() -> None:
    legs = legs_of(logprobs=0)
    begun(legs)
    legs.heard(P, tokens(0, 7), now_s=1.0)
    scores = tuple(TokenLogprobs(logprob=-float(i), top=()) for i in range(3))
    (event,) = delivered(legs.heard(D, tokens(0, 7, 8, 9, logprobs=scores), now_s=2.0))
    assert (event.first_index, event.token_ids, event.logprobs) == (1, (8, 9), scores[1:])
    assert legs.heard(D, tokens(1, 8, 9), now_s=3.0) == []


@pytest.mark.parametrize(
    ("who", "error", "blamed", "left_out"),
    [
        (P, Internal("broken"), (Leg.PREFILL, Outcome.FAULT), {P}),
        (D, Internal("broken"), (Leg.DECODE, Outcome.FAULT), {D}),
        (D, ResourceExhausted("full"), (Leg.DECODE, Outcome.BUSY), {D}),
        (D, HandoffFailed("copy", "x"), (Leg.PREFILL, Outcome.FAULT), {P, D}),
        (D, HandoffFailed("peer", "x"), (Leg.PREFILL, Outcome.FAULT), {P, D}),
        (P, HandoffFailed("peer", "x"), (Leg.DECODE, Outcome.FAULT), {P, D}),
        (P, HandoffFailed("lease", "x"), (Leg.DECODE, Outcome.FAULT), {P, D}),
        (P, HandoffFailed("refused", "x"), (Leg.DECODE, Outcome.BUSY), {D}),
        (D, HandoffFailed("step", "x"), (Leg.DECODE, Outcome.FAULT), {D}),
        (D, HandoffFailed("lost", "x"), (Leg.DECODE, Outcome.BUSY), set()),
    ],
)
def test_whom_a_failure_is_about(who: str, error: JaxpdError, blamed: tuple[Leg, Outcome], left_out: set[str]) -> None:
    legs = legs_of()
    begun(legs)
    effects = legs.heard(who, failed(error), now_s=2.0)
    assert blame_of(effects) == blamed
    plan = plan_of(effects)
    assert plan.avoids[0] == left_out and not plan.replay and plan.request.outputs == ()
    # The same workers once more, where there is nobody else; but not one that is full.
    assert (plan.avoids[-1] == frozenset()) == (not isinstance(error, ResourceExhausted))
    assert {effect.worker for effect in effects if isinstance(effect, Cancel)} == {P, D}
    assert legs.heard(P, tokens(0, 7), now_s=3.0) == [], "an attempt that is over is not listened to"


@pytest.mark.parametrize(("asked", "comes"), [(0, ()), (None, None)])
def test_a_prompt_of_one_token_has_no_scores_and_says_so(asked: int | None, comes: tuple[()] | None) -> None:
    legs = legs_of(prompt_logprobs=asked)
    begun(legs)
    [first, *_] = [e.event for e in legs.heard(P, tokens(0, 7), now_s=12.0) if isinstance(e, Deliver)]
    assert isinstance(first, TokensEvent) and first.prompt_logprobs == comes


def test_all_samples_begin_again_together_while_none_has_a_token() -> None:
    legs = legs_of(n=3, prompt_logprobs=1)
    begun(legs)
    plan = plan_of(legs.lost(P, "killed", now_s=2.0))
    assert plan.samples == (0, 1, 2) and plan.request.params.n == 3 and plan.request.params.prompt_logprobs == 1
    legs.start(plan, SPLIT, now_s=3.0)
    legs.heard(P, tokens(0, 7, wire="r.2", sample=1), now_s=4.0)
    effects = legs.heard(D, failed(Internal("x"), wire="r.2", sample=0), now_s=5.0)
    plan = plan_of(effects)
    assert plan.samples == (0,) and plan.request.params.n == 1 and plan.request.params.seed == 5
    assert plan.request.params.prompt_logprobs == 1
    assert [(e.worker, e.sample) for e in effects if isinstance(e, Cancel)] == [(P, 0), (D, 0)]
    plan = plan_of(legs.heard(D, failed(Internal("x"), wire="r.2", sample=1), now_s=5.0))
    assert plan.replay and plan.request.outputs == (7,) and plan.request.params.seed == seed_of(5, 1)
    assert plan.request.params.prompt_logprobs is None
    assert not any(isinstance(e, Closed) for e in effects) and set(legs.attempts) == {"r.2"}


def test_an_answer_that_is_whole_needs_no_replay() -> None:
    for last, reason in ((8, FinishReason.LENGTH), (EOS, FinishReason.STOP)):
        legs = legs_of(max_tokens=2)
        begun(legs)
        legs.heard(P, tokens(0, 7), now_s=1.0)
        legs.heard(P, handed(), now_s=1.0)
        legs.heard(D, tokens(1, last), now_s=2.0)
        effects = legs.lost(D, "killed", now_s=3.0)
        (finish,) = delivered(effects)
        assert finish.reason is reason and finish.stop_token_id == (EOS if last == EOS else None)
        assert legs.done and not any(isinstance(effect, Retry) for effect in effects)


def test_a_decode_worker_that_gives_up_waits_for_the_prefill_worker_s_word() -> None:
    words: list[tuple[FinishEvent | None, type]] = [(end(FinishReason.LENGTH), FinishEvent), (handed(), Retry)]
    for word, kind in [*words, (None, Retry)]:
        legs = legs_of()
        begun(legs)
        legs.heard(P, tokens(0, 7), now_s=1.0)
        assert legs.heard(D, failed(Unavailable("given up")), now_s=1.0) == [Wait(wire_id="r.1", sample=0)]
        effects = legs.waited("r.1", 0, now_s=2.0) if word is None else legs.heard(P, word, now_s=1.5)
        if kind is FinishEvent:
            assert [event.reason for event in delivered(effects)] == [FinishReason.LENGTH]
        else:
            assert plan_of(effects).replay
        assert legs.waited("r.1", 0, now_s=2.0) == []


def test_bounds_and_their_words() -> None:
    legs = legs_of(max_tries=1)
    begun(legs)
    (finish,) = delivered(legs.lost(P, "killed", now_s=2.0))
    assert "p was lost (killed); the request was sent 1 times, the limit is --max-tries" in finish.error.message
    legs = legs_of(max_migrations=0)
    begun(legs)
    legs.heard(P, tokens(0, 7), now_s=1.0)
    (finish,) = delivered(legs.lost(D, "killed", now_s=2.0))
    assert (
        "moved 0 times, the limit is --max-migrations" in finish.error.message and finish.usage.completion_tokens == 1
    )
    legs = legs_of()
    begun(legs)
    (finish,) = delivered(legs.heard(P, failed(InvalidArgument("wrong", field="regex")), now_s=2.0))
    assert finish.error.field == "regex"


def test_nobody_takes_it() -> None:
    legs = legs_of(n=2)
    begun(legs)
    plan = plan_of(legs.heard(D, failed(ResourceExhausted("full", retry_after_s=2.0)), now_s=2.0))
    ends = delivered(legs.refused(plan, Unavailable("each has refused it"), now_s=3.0))
    assert [event.sample for event in ends] == [0, 1] and legs.done
    assert all(isinstance(event.error, ResourceExhausted) for event in ends), "who is full says when to come back"


def test_strange_words_are_the_worker_s_fault() -> None:
    cases: list[tuple[Route, str, list[TokensEvent | FinishEvent]]] = [
        (SPLIT, P, [handed()]),  # without a token
        (SPLIT, P, [end(FinishReason.STOP)]),
        (SPLIT, P, [tokens(1, 7)]),
        (WHOLE, M, [handed()]),
        (WHOLE, M, [tokens(0, 7), handed()]),
        (WHOLE, M, [tokens(0, 7), tokens(2, 7)]),
    ]
    for route, who, words in cases:
        legs = legs_of()
        begun(legs, route)
        effects: list[Effect] = []
        for word in words:
            effects = legs.heard(who, word, now_s=2.0)
        assert blame_of(effects)[1] is Outcome.FAULT, words
        assert plan_of(effects)


@pytest.mark.parametrize("seed", range(20))
def test_random_words_never_repeat_or_skip_a_token(seed: int) -> None:
    """Whatever the workers say, and in whatever order: tokens have their indices, and each sample has one end."""
    for i in range(15):
        walk(random.Random(100 * seed + i))


def walk(draw: random.Random) -> None:
    n = draw.choice((1, 1, 2, 3))
    legs = legs_of(n=n, max_tokens=draw.randint(1, 6))
    route = draw.choice((SPLIT, SPLIT, WHOLE))
    have, ended, open_ = [0] * n, [0] * n, set[str]()

    def take(effects: list[Effect]) -> None:
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            if isinstance(effect, Deliver):
                event = effect.event
                assert not ended[event.sample]
                if isinstance(event, TokensEvent):
                    assert event.first_index == have[event.sample]
                    # Which token it is follows from its place alone.
                    assert list(event.token_ids) == [event.first_index + k for k in range(len(event.token_ids))]
                    have[event.sample] += len(event.token_ids)
                else:
                    ended[event.sample] += 1
                    assert event.usage.completion_tokens == have[event.sample]
            elif isinstance(effect, Closed):
                open_.remove(effect.attempt.wire_id)
            elif isinstance(effect, Retry):
                assert effect.plan.request.outputs == tuple(range(have[effect.plan.samples[0]]))
                if draw.random() < 0.2:
                    todo += legs.refused(effect.plan, Unavailable("nobody"), now_s=1.0)
                else:
                    open_.add(legs.start(effect.plan, route, now_s=1.0).wire_id)

    open_.add(begun(legs, route).wire_id)
    for _ in range(120):
        who = draw.choice((P, D) if route is SPLIT else (M,))
        wire, sample, index = f"r.{draw.randint(1, 6)}", draw.randrange(n), draw.randint(0, 5)
        match draw.randrange(12):
            case 0:
                take(legs.lost(who, "killed", now_s=1.0)) if draw.random() < 0.3 else None
            case 1:
                take(legs.abort(draw.randrange(n), now_s=1.0)) if draw.random() < 0.1 else None
            case 2:
                take(legs.heard(who, end(FinishReason.LENGTH, wire=wire, sample=sample), now_s=1.0))
            case 3:
                error = draw.choice((Internal("x"), Unavailable("x"), HandoffFailed("peer", "x")))
                take(legs.heard(who, failed(error, wire=wire, sample=sample), now_s=1.0))
            case 4 | 5:
                take(legs.heard(who, handed(wire=wire, sample=sample), now_s=1.0))
            case 6:
                take(legs.waited(wire, 0, now_s=1.0))
            case _:
                ids = tuple(range(index, index + draw.randint(1, 3)))
                take(legs.heard(who, tokens(index, *ids, wire=wire, sample=sample), now_s=1.0))
        assert open_ == set(legs.attempts)
    take(legs.abort(None, now_s=1.0))
    assert ended == [1] * n and legs.done and not legs.attempts and not open_


def test_what_is_handed_over_is_the_decode_worker_s_affair() -> None:
    legs = legs_of()
    begun(legs)
    legs.heard(P, tokens(0, 7), now_s=1.0)
    legs.heard(P, handed(), now_s=1.0)
    for word in (handed(), failed(Internal("too late")), end(FinishReason.LENGTH), end(FinishReason.ABORT)):
        assert legs.heard(P, word, now_s=2.0) == []
    assert legs.lost(P, "killed", now_s=2.0) == [] and set(legs.attempts) == {"r.1"}
