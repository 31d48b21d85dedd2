"""All requests of a router, on its event loop: from the choice of their workers to their last event.

    submit -> dispatch: Roster chooses and is charged -> start: both Sessions -> heard -> effects -> on_events
                 ^                                                                   |
                 +-------------------------- Retry ----------------------------------+

What each event means says `serving.router.legs`; here it is carried out. Each message of a worker makes one list of
events for the gateway.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable

from jaxpd.cache.keys import Chain
from jaxpd.errors import InvalidArgument, JaxpdError, Unavailable
from jaxpd.policies.workers import Asked, Refusal, Route
from jaxpd.request import DecodeLeg, Event, PrefillLeg, Request
from jaxpd.routing.roster import Roster
from serving.model import ServedModel
from serving.router.attempt import (
    WORD_S,
    Cancel,
    Closed,
    Decoding,
    Deliver,
    Effect,
    Moved,
    Plan,
    Prefilled,
    Retry,
    Wait,
)
from serving.router.config import RouterConfig
from serving.router.counts import Counts
from serving.router.fleet import Fleet
from serving.router.legs import Legs
from serving.worker.wire import Started

logger = logging.getLogger(__name__)

ANSWER_TOKENS = 512  # of an answer, that a choice counts with (EngineConfig.reserve_tokens)


class Live:
    """One request between its submission and the end of its last sample."""

    def __init__(self, request: Request, legs: Legs, chain: Chain) -> None:
        self.request = request
        self.legs = legs
        self.chain = chain  # of the prompt


class Requests:
    """Belongs to the router's event loop. `open` says whether requests are sent again that a worker has failed."""

    def __init__(
        self,
        config: RouterConfig,
        roster: Roster,
        fleet: Fleet,
        counts: Counts,
        on_events: Callable[[list[Event]], None],
        *,
        seed: int | None = None,
    ) -> None:
        self.live: dict[str, Live] = {}
        self.by_wire: dict[str, Live] = {}
        self.started_s: dict[str, float] = {}  # when each attempt was sent, by the id that workers know
        self.idle = asyncio.Event()
        self.idle.set()
        self.open = True
        self._config = config
        self._roster = roster
        self._fleet = fleet
        self._counts = counts
        self._on_events = on_events
        self._draw = random.Random(seed)
        self._serial = itertools.count(1)

    def submit(self, request: Request, model: ServedModel, chain: Chain) -> None:
        """Sends it to its workers. Raises InvalidArgument for an id in use, and what a refusal is."""
        if request.request_id in self.live:
            raise InvalidArgument(
                f"request_id {request.request_id!r} is in use by a running request", field="request_id"
            )
        legs = Legs(
            request,
            eos_ids=model.eos_token_ids,
            max_tries=self._config.max_tries,
            max_migrations=self._config.max_migrations,
            new_id=lambda request_id: f"{request_id}.{next(self._serial)}",
        )
        live = Live(request, legs, chain)
        plan, now_s = legs.first(), time.monotonic()
        chosen = self._dispatch(live, plan, now_s)
        if isinstance(chosen, Refusal):
            raise chosen.error()
        self.live[request.request_id] = live
        self.idle.clear()
        self._start(live, plan, chosen, now_s)

    def abort(self, request_id: str, sample: int | None) -> bool:
        """Ends it, or one sample of it; False where there is nothing to end."""
        live = self.live.get(request_id)
        if live is None:
            return False
        effects = live.legs.abort(sample, now_s=time.monotonic())
        self._carry_out([(live, effects)])
        return bool(effects)

    def abort_all(self) -> None:
        """Ends every request."""
        for request_id in list(self.live):
            self.abort(request_id, None)

    # -- what workers say

    def heard(self, name: str, events: list[Event]) -> None:
        """One message of a worker."""
        now_s = time.monotonic()
        batch: list[tuple[Live, list[Effect]]] = []
        for event in events:
            live = self.by_wire.get(event.request_id)
            if live is not None:
                batch.append((live, live.legs.heard(name, event, now_s=now_s)))
        self._carry_out(batch)

    def worker_gone(self, name: str, reason: str) -> None:
        """Its requests go on elsewhere, or end."""
        now_s = time.monotonic()
        self._carry_out([(live, live.legs.lost(name, reason, now_s=now_s)) for live in list(self.live.values())])

    def worker_draining(self, name: str) -> None:
        """With --migrate-on-drain what decodes there goes on elsewhere, where somebody takes it."""
        if not self._config.migrate_on_drain:
            return
        now_s = time.monotonic()
        for live in list(self.live.values()):
            for attempt, i in live.legs.moving(name):
                plan = live.legs.move(attempt, i)
                chosen = self._dispatch(live, plan, now_s)
                if isinstance(chosen, Refusal):
                    logger.info("request %s stays on %s: %s", live.request.request_id, name, chosen.message)
                    continue
                self._carry_out([(live, live.legs.leave(attempt, i, plan))])
                self._note_retry(plan, "it drains")
                self._start(live, plan, chosen, now_s)

    def _dispatch(self, live: Live, plan: Plan, now_s: float) -> Route | Refusal:
        """Chooses and charges both legs. A refusal changes nothing but its count."""
        model, request = self._model(), plan.request
        chosen: Route | Refusal | None = None
        for avoid in plan.avoids:
            asked = Asked(
                prompt_tokens=len(request.prompt_ids) + len(request.outputs),
                answer_tokens=max(min(request.params.max_tokens - len(request.outputs), ANSWER_TOKENS), 1),
                page_size=model.page_size,
                page_bytes=self._fleet.page_bytes,
                waited_s=max(now_s - request.arrival_s, 0.0),
                ttft_slo_s=None if plan.replay else self._config.ttft_slo_s,
                tpot_slo_s=None if plan.replay else self._config.tpot_slo_s,
                avoid=avoid,
            )
            draws = (self._draw.random(), self._draw.random())
            chosen = self._roster.dispatch(request.request_id, asked, live.chain.keys, draws=draws, now_s=now_s)
            if isinstance(chosen, Route):
                return chosen
        assert isinstance(chosen, Refusal)
        self._counts.refusals[chosen.leg.value, chosen.reason.value] += 1
        return chosen

    def _start(self, live: Live, plan: Plan, route: Route, now_s: float) -> None:
        """Sends both legs; the decode worker's first, since the other one will ask it for room."""
        attempt = live.legs.start(plan, route, now_s=now_s)
        self.by_wire[attempt.wire_id] = live
        self.started_s[attempt.wire_id] = now_s
        prefill, decode = self._fleet.member(attempt.prefill), self._fleet.member(attempt.decode)
        assert prefill is not None and decode is not None, route  # the roster knows none that is gone
        if attempt.whole:
            prefill.session.start(Started(request=plan.request))
            return
        handoffs = tuple(secrets.randbits(64) for _ in plan.samples)
        decode.session.start(Started(request=plan.request, leg=DecodeLeg(handoffs=handoffs)))
        prefill.session.start(
            Started(
                request=plan.request,
                leg=PrefillLeg(peer=decode.session.address, handoffs=handoffs),
                decode_instance=decode.description.instance,
            )
        )

    def _carry_out(self, batch: Iterable[tuple[Live, list[Effect]]]) -> None:
        delivered: list[Event] = []
        for live, effects in batch:
            now_s = time.monotonic()
            todo = list(reversed(effects))
            while todo:
                effect = todo.pop()
                if isinstance(effect, Deliver):
                    delivered.append(effect.event)
                else:
                    todo.extend(reversed(self._carry_out_one(live, effect, now_s)))
            if live.legs.done and self.live.get(live.request.request_id) is live:
                del self.live[live.request.request_id]
                if not self.live:
                    self.idle.set()
        if delivered:
            self._on_events(delivered)

    def _carry_out_one(self, live: Live, effect: Effect, now_s: float) -> list[Effect]:
        match effect:
            case Cancel():
                session = self._fleet.session(effect.worker)
                if session is not None:
                    session.abort(effect.wire_id, effect.sample)
            case Prefilled():
                self._prefilled(effect, now_s)
            case Decoding():
                self._roster.decoding(effect.attempt.wire_id, now_s=now_s)
            case Moved():
                choice, request = effect.attempt.route.decode, effect.attempt.request
                model = self._model()
                pages = -(-(len(request.prompt_ids) + len(request.outputs)) // model.page_size) - choice.hit_pages
                moved_bytes = max(pages, 0) * self._fleet.page_bytes
                self._roster.transferred(choice.site.worker, moved_bytes=moved_bytes, transfer_s=effect.transfer_s)
            case Closed():
                self._closed(live, effect, now_s)
            case Wait():
                asyncio.get_running_loop().call_later(WORD_S, self._waited, live, effect)
            case Retry():
                return self._retry(live, effect.plan, now_s)
        return []

    def _prefilled(self, effect: Prefilled, now_s: float) -> None:
        """What the worker measured; where it says nothing, how long the prompt was the first in its queue here."""
        attempt, model = effect.attempt, self._model()
        tokens, choice = len(attempt.request.prompt_ids) + len(attempt.request.outputs), attempt.route.prefill
        cached, took_s = effect.cached_tokens, effect.prefill_s
        if cached is None:
            cached = min(choice.hit_pages * model.page_size, tokens - 1)
        if took_s is None:
            took_s = self._roster.ledger.head(choice.site, now_s)[1]
        self._roster.first_token(
            attempt.wire_id,
            computed=max(tokens - cached, 1),
            found_pages=cached // model.page_size,
            prefill_s=took_s,
            now_s=now_s,
        )

    def _closed(self, live: Live, effect: Closed, now_s: float) -> None:
        attempt = effect.attempt
        self.by_wire.pop(attempt.wire_id, None)
        self.started_s.pop(attempt.wire_id, None)
        if attempt.blame is not None:
            self._roster.lost(attempt.wire_id, attempt.blame.leg, attempt.blame.what, now_s=now_s)
            return
        if live.legs.done:  # nobody dispatches it any more, so that the chain may become that of the answer
            live.chain.extend(effect.tokens[:-1])
        self._roster.end(attempt.wire_id, now_s=now_s, keys=live.chain.keys)

    def _waited(self, live: Live, wait: Wait) -> None:
        self._carry_out([(live, live.legs.waited(wait.wire_id, wait.sample, now_s=time.monotonic()))])

    def _retry(self, live: Live, plan: Plan, now_s: float) -> list[Effect]:
        chosen: Route | Refusal | JaxpdError
        chosen = Unavailable("the router is closed") if not self.open else self._dispatch(live, plan, now_s)
        if isinstance(chosen, Route):
            self._note_retry(plan, "a worker failed it")
            self._start(live, plan, chosen, now_s)
            return []
        error = chosen if isinstance(chosen, JaxpdError) else chosen.error()
        return live.legs.refused(plan, error, now_s=now_s)

    def _note_retry(self, plan: Plan, why: str) -> None:
        kind, had = ("replays", len(plan.request.outputs)) if plan.replay else ("retries", 0)
        self._counts.again[kind] += 1
        logger.info("request %s goes on elsewhere after %d tokens: %s", plan.request.request_id, had, why)

    def _model(self) -> ServedModel:
        assert self._fleet.model is not None, "nobody can be asked before a worker has joined"
        return self._fleet.model
