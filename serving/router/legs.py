"""One request over its attempts: which tokens the client gets, what a failure means, and how each sample ends.

    plan -> dispatched -> start --+-- P: token 0, HANDED_OFF ---+--> D: tokens 1, 2, ... --> the sample ends
      ^                           |   D's earlier ones are held |
      |                           +-- P ends it alone: D's leg is cancelled --------------> the sample ends
      |
      +-- AGAIN   nothing streamed: both legs anew, without who failed            (at most max_tries)
      +-- REPLAY  one sample, with its tokens so far, as a request of its own     (at most max_migrations)
          STOP    the sample ends with an error

A mixed worker stands for P and D at once. A pure state machine: what comes in are events and the clock, what goes out
are effects (`attempt`), for `requests` to carry out; `judging` says what a failure means. First law: no token of a
client comes twice or is left out; so each index is checked here, and an attempt that is over is not listened to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxpd.engine import seed_of
from jaxpd.errors import HandoffFailed, Internal, JaxpdError, Unavailable
from jaxpd.life import Stage
from jaxpd.policies.breaker import Next, Outcome, after
from jaxpd.policies.workers import Leg, Route
from jaxpd.request import Event, FinishEvent, FinishReason, Request, TokensEvent
from serving.router.attempt import (
    Attempt,
    Blame,
    Cancel,
    Closed,
    Decoding,
    Deliver,
    Effect,
    Moved,
    Plan,
    Prefilled,
    Retry,
    Sample,
    Wait,
)
from serving.router.ending import BY_DECODE, BY_PREFILL, between, finish, natural_end
from serving.router.judging import avoids, verdict


class Legs:
    """One request of a client. `new_id` makes ids for the workers, unique for all time. Not thread-safe."""

    def __init__(
        self,
        request: Request,
        *,
        eos_ids: Iterable[int],
        max_tries: int,
        max_migrations: int,
        new_id: Callable[[str], str],
    ) -> None:
        self.request = request
        self.samples = [Sample(i, tokens=list(request.outputs)) for i in range(request.params.n)]
        self.attempts: dict[str, Attempt] = {}
        self._ending_ids = request.params.ending_ids(eos_ids)
        self._max_tries = max_tries
        self._max_migrations = max_migrations
        self._new_id = new_id

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finished for sample in self.samples)

    def first(self) -> Plan:
        """What is dispatched first."""
        request = dataclasses.replace(self.request, request_id=self._new_id(self.request.request_id))
        return Plan(request=request, samples=tuple(range(request.params.n)))

    def start(self, plan: Plan, route: Route, *, now_s: float) -> Attempt:
        """It was dispatched; from now on its events are listened to."""
        count = len(plan.samples)
        for index in plan.samples:
            self.samples[index].tries += 1
        attempt = self.attempts[plan.request.request_id] = Attempt(
            plan=plan,
            route=route,
            sent_s=now_s,
            over=[False] * count,
            handed=[False] * count,
            early=[[] for _ in range(count)],
            early_end=[None] * count,
        )
        return attempt

    def refused(self, plan: Plan, error: JaxpdError, *, now_s: float) -> list[Effect]:
        """There is no worker for it: its samples end."""
        error = plan.error or error
        return [self._finish(self.samples[i], FinishReason.ERROR, now_s, error=error) for i in plan.samples]

    # -- what workers say

    def heard(self, worker: str, event: Event, *, now_s: float) -> list[Effect]:
        """An event of a worker; nothing happens where it is about something that is over, or not that worker's."""
        attempt = self.attempts.get(event.request_id)
        if attempt is None or worker not in (attempt.prefill, attempt.decode):
            return []
        if not 0 <= event.sample < len(attempt.over) or attempt.over[event.sample]:
            return []
        if isinstance(event, TokensEvent):
            return self._tokens(attempt, worker, event, now_s)
        return self._ended(attempt, worker, event, now_s)

    def _tokens(self, attempt: Attempt, worker: str, event: TokensEvent, now_s: float) -> list[Effect]:
        i, sample = event.sample, self.samples[attempt.plan.samples[event.sample]]
        effects: list[Effect] = []
        if worker == attempt.decode and not attempt.decoding:
            attempt.decoding = True
            if attempt.whole:
                attempt.prefilled = True
                effects.append(Prefilled(attempt=attempt))
            effects.append(Decoding(attempt=attempt))
        if worker == attempt.decode and not attempt.whole and len(sample.tokens) == attempt.base:
            attempt.early[i].append(event)
            return effects
        effects += self._deliver(attempt, event, worker, now_s)
        if worker == attempt.prefill and not attempt.whole:
            effects += self._catch_up(attempt, i, now_s)
        return effects

    def _catch_up(self, attempt: Attempt, i: int, now_s: float) -> list[Effect]:
        """The first token is out: what the decode worker has said before it counts now."""
        effects: list[Effect] = []
        early, attempt.early[i] = attempt.early[i], []
        for event in early:
            if not attempt.over[i]:
                effects += self._deliver(attempt, event, attempt.decode, now_s)
        end = attempt.early_end[i]
        failed = end is not None and end.reason in (FinishReason.ERROR, FinishReason.ABORT)
        if end is not None and not attempt.over[i] and (attempt.handed[i] or not failed):
            attempt.early_end[i] = None
            effects += self._ended(attempt, attempt.decode, end, now_s)
        return effects

    def waited(self, wire_id: str, i: int, *, now_s: float) -> list[Effect]:
        """After a `Wait`: where the prefill worker has said nothing, the decode worker meant it."""
        attempt = self.attempts.get(wire_id)
        end = None if attempt is None else attempt.early_end[i]
        if attempt is None or end is None or attempt.over[i]:
            return []
        error = end.error or Unavailable(f"{attempt.decode} has given the request up")
        return self._failed(attempt, i, Leg.DECODE, error, now_s)

    def _deliver(self, attempt: Attempt, event: TokensEvent, worker: str, now_s: float) -> list[Effect]:
        """What is new of an event's tokens, to the client."""
        sample = self.samples[attempt.plan.samples[event.sample]]
        have = len(sample.tokens)
        if event.first_index > have:
            error = Internal(f"{worker} sent token {event.first_index} of an answer of which {have} are there")
            return self._failed(attempt, event.sample, attempt.leg_of(worker), error, now_s)
        known = have - event.first_index
        if known >= len(event.token_ids):
            return []
        ids = event.token_ids[known:]
        logprobs = None if event.logprobs is None else event.logprobs[known:]
        scores = event.prompt_logprobs
        if scores is None and have == sample.index == 0 and self.request.params.prompt_logprobs is not None:
            scores = ()  # a prompt of one token has none, and nothing is what crosses for no scores
        sample.tokens.extend(ids)
        sample.times.extend([now_s] * len(ids))
        new = TokensEvent(
            request_id=self.request.request_id,
            first_index=have,
            token_ids=ids,
            logprobs=logprobs,
            prompt_logprobs=scores,
            sample=sample.index,
        )
        return [Deliver(event=new)]

    def _ended(self, attempt: Attempt, worker: str, event: FinishEvent, now_s: float) -> list[Effect]:
        i, sample = event.sample, self.samples[attempt.plan.samples[event.sample]]
        leg = attempt.leg_of(worker)
        begun = len(sample.tokens) > attempt.base
        if leg is Leg.PREFILL and attempt.handed[i]:
            return []
        if event.reason in (FinishReason.ERROR, FinishReason.ABORT):
            # Nobody here has asked for an abort.
            error = event.error or Unavailable(f"{worker} has given the request up")
            if leg is Leg.DECODE and not attempt.whole and not attempt.handed[i] and isinstance(error, Unavailable):
                attempt.early_end[i] = event
                return [Wait(wire_id=attempt.wire_id, sample=i)]
            return self._failed(attempt, i, leg, error, now_s)
        if leg is Leg.DECODE and not attempt.whole and not begun:
            attempt.early_end[i] = event
            return []
        handed_off = event.reason is FinishReason.HANDED_OFF
        # A replay may find that nothing can follow any more; nothing else ends without a token.
        ok = begun and leg is Leg.PREFILL and not attempt.whole if handed_off else begun or attempt.base > 0
        if not ok:
            error = Internal(f"{worker} ended an answer with {event.reason.value}, after {len(sample.tokens)} tokens")
            return self._failed(attempt, i, leg, error, now_s)
        effects = self._told(attempt, sample, leg, event)
        if handed_off:
            attempt.handed[i] = True
            return effects + self._catch_up(attempt, i, now_s)
        if leg is Leg.PREFILL and not attempt.whole:
            effects.append(Cancel(worker=attempt.decode, wire_id=attempt.wire_id, sample=i))
        attempt.over[i] = True
        effects.append(self._finish(sample, event.reason, now_s, stop_token_id=event.stop_token_id))
        return effects + self._closed(attempt)

    def _told(self, attempt: Attempt, sample: Sample, leg: Leg, event: FinishEvent) -> list[Effect]:
        """Takes over what a worker tells at the end of its leg: moments, and tokens that its cache had."""
        effects: list[Effect] = []
        moments = [] if event.life is None else event.life.moments
        kept = BY_PREFILL | BY_DECODE if attempt.whole else BY_PREFILL if leg is Leg.PREFILL else BY_DECODE
        sample.moments += [moment for moment in moments if moment.stage in kept]
        if leg is Leg.PREFILL or attempt.whole:
            if sample.cached_tokens is None:
                sample.cached_tokens = event.usage.cached_tokens
            if not attempt.prefilled:
                attempt.prefilled = True
                took_s = between(moments, (Stage.PREFILL_START, Stage.ADMITTED), Stage.PREFILL_END)
                effects.append(Prefilled(attempt=attempt, cached_tokens=event.usage.cached_tokens, prefill_s=took_s))
        if leg is Leg.DECODE and not attempt.whole:
            # Both by this process's clock: the prefill worker says when it offered, this one when it had all of it.
            took_s = between(sample.moments, (Stage.OFFERED,), Stage.ACCEPTED)
            if took_s is not None:
                effects.append(Moved(attempt=attempt, transfer_s=took_s))
        return effects

    # -- failures

    def lost(self, worker: str, reason: str, *, now_s: float) -> list[Effect]:
        """A worker is gone. A sample that it has handed over is its decode worker's affair."""
        effects: list[Effect] = []
        for attempt in [a for a in self.attempts.values() if worker in (a.prefill, a.decode)]:
            leg = attempt.leg_of(worker)
            for i in range(len(attempt.over)):
                if not attempt.over[i] and not (leg is Leg.PREFILL and attempt.handed[i] and not attempt.whole):
                    effects += self._failed(attempt, i, leg, None, now_s, f"{worker} was lost ({reason})")
        return effects

    def _failed(
        self, attempt: Attempt, i: int, leg: Leg, error: JaxpdError | None, now_s: float, why: str = ""
    ) -> list[Effect]:
        """A leg of a sample failed with what its worker answered; None: it gave no answer, for the reason `why`."""
        at, what, avoid = verdict(attempt, leg, error)
        mine = self._together(attempt, i)
        effects = self._leave(attempt, mine, Blame(leg=at, what=what))
        samples = [self.samples[attempt.plan.samples[k]] for k in mine]
        for sample in samples:
            end = natural_end(self.request, sample, self._ending_ids)
            if end is not None:  # the word of it was lost on the way
                stop = sample.tokens[-1] if end is FinishReason.STOP else None
                effects.append(self._finish(sample, end, now_s, stop_token_id=stop))
        samples = [sample for sample in samples if not sample.finished]
        if not samples:
            return effects
        for sample in samples:
            sample.avoid |= avoid
        streamed = max(len(sample.tokens) for sample in samples)
        next_ = after(
            what,
            streamed=streamed,
            tries=max(sample.tries for sample in samples),
            max_tries=self._max_tries,
            migrations=max(sample.migrations for sample in samples),
            max_migrations=self._max_migrations,
        )
        if next_ is Next.STOP:
            told = error or Unavailable(f"{why}; {self._given_up(samples[0])}")
            return effects + [self._finish(sample, FinishReason.ERROR, now_s, error=told) for sample in samples]
        # Who is broken may have mended, and a hand-off may go well the next time; who is full is not asked again.
        again = what is Outcome.FAULT or isinstance(error, HandoffFailed)
        plan = self._plan(samples, avoids(samples[0], avoid, again=again), error=None if again else error)
        return [*effects, Retry(plan=plan)]

    def _together(self, attempt: Attempt, i: int) -> list[int]:
        """The samples that begin again with sample `i`: all, while none has a token; they share one prefill."""
        fresh = not any(attempt.over) and all(len(self.samples[k].tokens) == attempt.base for k in attempt.plan.samples)
        return list(range(len(attempt.over))) if fresh else [i]

    def _leave(self, attempt: Attempt, mine: Sequence[int], blame: Blame | None) -> list[Effect]:
        """Ends these samples of an attempt, here and at its workers."""
        for k in mine:
            attempt.over[k] = True
        attempt.blame = attempt.blame or blame
        workers = dict.fromkeys((attempt.prefill, attempt.decode))
        whole = len(mine) == len(attempt.over)
        effects: list[Effect] = [
            Cancel(worker=worker, wire_id=attempt.wire_id, sample=None if whole else k)
            for worker in workers
            for k in ((0,) if whole else mine)
        ]
        return effects + self._closed(attempt)

    def _plan(
        self, samples: Sequence[Sample], avoids: tuple[frozenset[str], ...], error: JaxpdError | None = None
    ) -> Plan:
        """These samples again: all as one request where they have nothing yet, one alone with its tokens so far."""
        params, first = self.request.params, samples[0]
        replay = len(first.tokens) > len(self.request.outputs)
        if replay:
            first.migrations += 1
        if len(samples) < params.n:
            assert len(samples) == 1
            own = first.index == 0 and not replay
            params = dataclasses.replace(
                params,
                n=1,
                seed=seed_of(params.seed or 0, first.index),
                prompt_logprobs=params.prompt_logprobs if own else None,
            )
        elif replay:
            params = dataclasses.replace(params, prompt_logprobs=None)
        request = dataclasses.replace(
            self.request,
            request_id=self._new_id(self.request.request_id),
            params=params,
            outputs=tuple(first.tokens),
        )
        indices = tuple(sample.index for sample in samples)
        return Plan(request=request, samples=indices, avoids=avoids, error=error, replay=replay)

    def _given_up(self, sample: Sample) -> str:
        if len(sample.tokens) > len(self.request.outputs):
            return f"the request was moved {sample.migrations} times, the limit is --max-migrations; try again"
        return f"the request was sent {sample.tries} times, the limit is --max-tries; try again"

    # -- a worker that drains

    def moving(self, worker: str) -> list[tuple[Attempt, int]]:
        """The samples that decode on `worker` and may go elsewhere."""
        return [
            (attempt, i)
            for attempt in self.attempts.values()
            if attempt.decode == worker
            for i, over in enumerate(attempt.over)
            if not over and self.samples[attempt.plan.samples[i]].migrations < self._max_migrations
        ]

    def move(self, attempt: Attempt, i: int) -> Plan:
        """Sample `i` of `attempt` elsewhere. Where that can be dispatched, `leave` the old one before `start`."""
        sample = self.samples[attempt.plan.samples[i]]
        before = sample.migrations
        plan = self._plan([sample], (sample.avoid | {attempt.decode}, frozenset((attempt.decode,))))
        sample.migrations = before  # it counts when it has left
        return plan

    def leave(self, attempt: Attempt, i: int, plan: Plan) -> list[Effect]:
        """Sample `i` goes on with `plan`."""
        self.samples[plan.samples[0]].migrations += plan.replay
        return self._leave(attempt, [i], Blame(leg=Leg.DECODE, what=Outcome.NEUTRAL))

    # -- the client

    def abort(self, sample: int | None, *, now_s: float) -> list[Effect]:
        """Ends all samples or one, at once; what workers still say of it is ignored."""
        effects: list[Effect] = []
        ending = [s for s in self.samples if not s.finished and sample in (None, s.index)]
        for attempt in list(self.attempts.values()):
            theirs = [self.samples[index] for index in attempt.plan.samples]
            mine = [i for i, over in enumerate(attempt.over) if not over and theirs[i] in ending]
            if mine:
                # A sample that a stop string ended went well; a client that left says nothing of a worker.
                blame = None if sample is not None else Blame(leg=Leg.PREFILL, what=Outcome.NEUTRAL)
                effects += self._leave(attempt, mine, blame)
        return effects + [self._finish(s, FinishReason.ABORT, now_s) for s in ending]

    # -- ends

    def _finish(
        self,
        sample: Sample,
        reason: FinishReason,
        now_s: float,
        *,
        stop_token_id: int | None = None,
        error: JaxpdError | None = None,
    ) -> Effect:
        return Deliver(event=finish(self.request, sample, reason, now_s, stop_token_id=stop_token_id, error=error))

    def _closed(self, attempt: Attempt) -> list[Effect]:
        if not all(attempt.over) or self.attempts.pop(attempt.wire_id, None) is None:
            return []
        tokens = tuple(self.samples[attempt.plan.samples[0]].tokens)
        return [Closed(attempt=attempt, tokens=tokens)]
