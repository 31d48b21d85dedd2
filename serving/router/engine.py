"""The router as the gateway sees it: an engine that has workers in place of pools.

    submit    Roster chooses both legs, Sessions start them        serving/router/legs.py, jaxpd/routing/roster.py
    events    of both legs are one answer                          serving/router/legs.py
    failure   again, or on with the tokens so far, elsewhere       serving/router/legs.py
    abort     both legs end, the client's answer at once
    stats     of all workers, as if they were pools here           serving/router/merged.py

Everything happens on one event loop, the server's. What the gateway may call from any thread is carried there and
waited for. Each message of a worker makes one list of events for the gateway.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jaxpd.cache.keys import Chain
from jaxpd.errors import Internal, InvalidArgument, JaxpdError, Unavailable
from jaxpd.policies.workers import Asked, Refusal, Route
from jaxpd.request import DecodeLeg, Event, PrefillLeg, Request
from jaxpd.routing.roster import Roster
from jaxpd.stats import EngineStats
from serving.model import ServedModel
from serving.router.config import RouterConfig
from serving.router.counts import Counts, Numbers
from serving.router.fleet import Fleet
from serving.router.legs import (
    WORD_S,
    Cancel,
    Closed,
    Decoding,
    Deliver,
    Effect,
    Legs,
    Moved,
    Plan,
    Prefilled,
    Retry,
    Wait,
)
from serving.router.merged import merged
from serving.router.session import Channel
from serving.worker.wire import Started

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAY_S = 5.0  # between two words about what it waits for
SWEEP_S = 5.0
ANSWER_TOKENS = 512  # of an answer, that a choice counts with (EngineConfig.reserve_tokens)


class _Live:
    """One request between its submission and the end of its last sample."""

    def __init__(self, request: Request, legs: Legs, chain: Chain) -> None:
        self.request = request
        self.legs = legs
        self.chain = chain  # of the prompt


class RouterEngine:
    """Serves what its workers serve. Made anywhere; `submit`, `abort` and `stats` may be called from any thread,
    `start`, `drain` and `close` from any but the loop's.

    `on_ready_changed`, once the server has set it, is called on the loop when enough workers are there, or no more.
    """

    mode = "router"

    def __init__(
        self,
        config: RouterConfig,
        *,
        loop: asyncio.AbstractEventLoop,
        channel: Channel,
        metadata: tuple[tuple[str, str], ...] = (),
        on_events: Callable[[list[Event]], None] = lambda events: None,
        seed: int | None = None,
    ) -> None:
        """`channel` makes a connection to an address. `seed` makes the choices repeatable."""
        self.config = config
        self.on_events = on_events
        self.on_ready_changed: Callable[[bool], None] | None = None
        self.counts = Counts()
        self.roster = Roster(prefill=config.prefill_policy, decode=config.decode_policy)
        self.fleet = Fleet(
            self.roster, self, channel=channel, metadata=metadata, heartbeat_timeout_s=config.heartbeat_timeout_s
        )
        self._loop = loop
        self._draw = random.Random(seed)
        self._serial = itertools.count(1)
        self._live: dict[str, _Live] = {}
        self._by_wire: dict[str, _Live] = {}
        self._started_s: dict[str, float] = {}  # by the id that workers know
        self._state = "starting"
        self._enough = threading.Event()  # workers to begin with, or closed
        self._idle = asyncio.Event()
        self._idle.set()
        self._sweeping: asyncio.Task[None] | None = None

    # life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Dials the workers, and blocks until one of each role is ready, or a mixed one. Raises Unavailable when it is
        closed meanwhile."""
        self._on_loop(self._open)
        while not self._enough.wait(SAY_S):
            logger.info("waiting for %s", self._on_loop(self.fleet.lacking))
        if self._state == "closed":
            raise Unavailable("the router was stopped before its workers were ready")

    @property
    def ready(self) -> bool:
        """Whether enough workers are ready just now."""
        return self.fleet.ready

    def served_model(self) -> ServedModel:
        """What the workers serve. Raises Unavailable before one has joined."""
        if self.fleet.model is None:
            raise Unavailable(f"the router waits for {self.fleet.lacking()}")
        return self.fleet.model

    def drain(self, timeout_s: float) -> bool:
        """Takes nothing more and waits for what runs; False when requests are left after `timeout_s`."""

        async def drain() -> bool:
            self._state = "draining"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            return not self._live

        return asyncio.run_coroutine_threadsafe(drain(), self._loop).result()

    def numbers(self) -> Numbers | None:
        """For its metrics, in any thread; None before it knows the model."""

        def read() -> Numbers | None:
            if self.fleet.model is None:
                return None
            return Numbers(
                model=self.fleet.model.name,
                infos=self.fleet.infos(),
                counts=self.counts,
                openings=self.roster.openings,
                in_flight=self.roster.ledger.in_flight,
            )

        return self._on_loop(read)

    def close(self) -> None:
        """Ends all requests (ABORT) and all sessions, and `start` where it waits. Idempotent."""
        asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result()

    async def aclose(self) -> None:
        """`close`, on the loop."""
        self._state = "closed"
        self._enough.set()
        for request_id in list(self._live):
            self._abort(request_id, None)
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.fleet.close()

    def _open(self) -> None:
        for role, flag, address in self.config.workers():
            self.fleet.add(address, role=role, flag=flag, listed=True)
        self._sweeping = asyncio.create_task(self._sweep(), name="jaxpd-router-sweep")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.fleet.sweep()
            self.roster.index.expire(time.monotonic())

    # requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Sends a request to its workers. Raises InvalidArgument, ResourceExhausted (queues full, or it would be late)
        or Unavailable (no worker)."""
        model = self.served_model()
        request.validate(vocab_size=model.vocab_size, max_model_len=model.max_model_len)
        chain = Chain(model.page_size, request.prompt_ids, salt=request.cache_salt)
        self._on_loop(self._submit, request, model, chain)

    def abort(self, request_id: str, *, sample: int | None = None) -> bool:
        """Ends a request, or one sample of it; False when there is none. Idempotent."""
        return self._on_loop(self._abort, request_id, sample)

    def stats(self) -> EngineStats:
        """Of all workers as they last said, and the requests that run here."""
        return self._on_loop(self._stats)

    def _submit(self, request: Request, model: ServedModel, chain: Chain) -> None:
        if self._state != "ready":
            raise Unavailable(f"the router is {self._state}")
        if request.request_id in self._live:
            raise InvalidArgument(
                f"request_id {request.request_id!r} is in use by a running request", field="request_id"
            )
        legs = Legs(
            request,
            eos_ids=model.eos_token_ids,
            max_tries=self.config.max_tries,
            max_migrations=self.config.max_migrations,
            new_id=lambda request_id: f"{request_id}.{next(self._serial)}",
        )
        live = _Live(request, legs, chain)
        plan, now_s = legs.first(), time.monotonic()
        chosen = self._dispatch(live, plan, now_s)
        if isinstance(chosen, Refusal):
            raise chosen.error()
        self._live[request.request_id] = live
        self._idle.clear()
        self._start(live, plan, chosen, now_s)

    def _abort(self, request_id: str, sample: int | None) -> bool:
        live = self._live.get(request_id)
        if live is None:
            return False
        effects = live.legs.abort(sample, now_s=time.monotonic())
        self._carry_out([(live, effects)])
        return bool(effects)

    def _stats(self) -> EngineStats:
        live = ((live.request, live.legs) for live in self._live.values())
        return merged(self.fleet.readings(), self.fleet.places, self.fleet.past, live)

    def _dispatch(self, live: _Live, plan: Plan, now_s: float) -> Route | Refusal:
        """Chooses and charges both legs. A refusal changes nothing but its count."""
        model, request = self.served_model(), plan.request
        chosen: Route | Refusal | None = None
        for avoid in plan.avoids:
            asked = Asked(
                prompt_tokens=len(request.prompt_ids) + len(request.outputs),
                answer_tokens=max(min(request.params.max_tokens - len(request.outputs), ANSWER_TOKENS), 1),
                page_size=model.page_size,
                page_bytes=self.fleet.page_bytes,
                waited_s=max(now_s - request.arrival_s, 0.0),
                ttft_slo_s=None if plan.replay else self.config.ttft_slo_s,
                tpot_slo_s=None if plan.replay else self.config.tpot_slo_s,
                avoid=avoid,
            )
            draws = (self._draw.random(), self._draw.random())
            chosen = self.roster.dispatch(request.request_id, asked, live.chain.keys, draws=draws, now_s=now_s)
            if isinstance(chosen, Route):
                return chosen
        assert isinstance(chosen, Refusal)
        self.counts.refusals[chosen.leg.value, chosen.reason.value] += 1
        return chosen

    def _start(self, live: _Live, plan: Plan, route: Route, now_s: float) -> None:
        """Sends both legs; the decode worker's first, since the other one will ask it for room."""
        attempt = live.legs.start(plan, route, now_s=now_s)
        self._by_wire[attempt.wire_id] = live
        self._started_s[attempt.wire_id] = now_s
        prefill, decode = self.fleet.member(attempt.prefill), self.fleet.member(attempt.decode)
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

    # the fleet's owner --------------------------------------------------------------------------------------------

    def heard(self, name: str, events: list[Event]) -> None:
        """One message of a worker."""
        now_s = time.monotonic()
        batch: list[tuple[_Live, list[Effect]]] = []
        for event in events:
            live = self._by_wire.get(event.request_id)
            if live is not None:
                batch.append((live, live.legs.heard(name, event, now_s=now_s)))
        self._carry_out(batch)

    def worker_gone(self, name: str, reason: str) -> None:
        """Its requests go on elsewhere, or end."""
        now_s = time.monotonic()
        self._carry_out([(live, live.legs.lost(name, reason, now_s=now_s)) for live in list(self._live.values())])

    def worker_draining(self, name: str) -> None:
        """With --migrate-on-drain what decodes there goes on elsewhere, where somebody takes it."""
        if not self.config.migrate_on_drain:
            return
        now_s = time.monotonic()
        for live in list(self._live.values()):
            for attempt, i in live.legs.moving(name):
                plan = live.legs.move(attempt, i)
                chosen = self._dispatch(live, plan, now_s)
                if isinstance(chosen, Refusal):
                    logger.info("request %s stays on %s: %s", live.request.request_id, name, chosen.message)
                    continue
                self._carry_out([(live, live.legs.leave(attempt, i, plan))])
                self._note_retry(plan, "it drains")
                self._start(live, plan, chosen, now_s)

    def readiness(self, ready: bool) -> None:
        """Enough workers are there, or no more."""
        if ready and self._state == "starting":
            self._state = "ready"
            self._enough.set()
        elif ready:
            logger.info("ready again")
        else:
            logger.warning("not ready: waiting for %s", self.fleet.lacking())
        if self.on_ready_changed is not None:
            self.on_ready_changed(ready)

    def started_s(self) -> Mapping[str, float]:
        """When each attempt was sent."""
        return self._started_s

    # effects ------------------------------------------------------------------------------------------------------

    def _carry_out(self, batch: Iterable[tuple[_Live, list[Effect]]]) -> None:
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
            if live.legs.done and self._live.get(live.request.request_id) is live:
                del self._live[live.request.request_id]
                if not self._live:
                    self._idle.set()
        if delivered:
            self.on_events(delivered)

    def _carry_out_one(self, live: _Live, effect: Effect, now_s: float) -> list[Effect]:
        match effect:
            case Cancel():
                session = self.fleet.session(effect.worker)
                if session is not None:
                    session.abort(effect.wire_id, effect.sample)
            case Prefilled():
                self._prefilled(effect, now_s)
            case Decoding():
                self.roster.decoding(effect.attempt.wire_id, now_s=now_s)
            case Moved():
                choice, request = effect.attempt.route.decode, effect.attempt.request
                model = self.served_model()
                pages = -(-(len(request.prompt_ids) + len(request.outputs)) // model.page_size) - choice.hit_pages
                moved_bytes = max(pages, 0) * self.fleet.page_bytes
                self.roster.transferred(choice.site.worker, moved_bytes=moved_bytes, transfer_s=effect.transfer_s)
            case Closed():
                self._closed(live, effect, now_s)
            case Wait():
                self._loop.call_later(WORD_S, self._waited, live, effect)
            case Retry():
                return self._retry(live, effect.plan, now_s)
        return []

    def _prefilled(self, effect: Prefilled, now_s: float) -> None:
        """What the worker measured; where it says nothing, how long the prompt was the first in its queue here."""
        attempt, model = effect.attempt, self.served_model()
        tokens, choice = len(attempt.request.prompt_ids) + len(attempt.request.outputs), attempt.route.prefill
        cached, took_s = effect.cached_tokens, effect.prefill_s
        if cached is None:
            cached = min(choice.hit_pages * model.page_size, tokens - 1)
        if took_s is None:
            took_s = self.roster.ledger.head(choice.site, now_s)[1]
        self.roster.first_token(
            attempt.wire_id,
            computed=max(tokens - cached, 1),
            found_pages=cached // model.page_size,
            prefill_s=took_s,
            now_s=now_s,
        )

    def _closed(self, live: _Live, effect: Closed, now_s: float) -> None:
        attempt = effect.attempt
        self._by_wire.pop(attempt.wire_id, None)
        self._started_s.pop(attempt.wire_id, None)
        if attempt.blame is not None:
            self.roster.lost(attempt.wire_id, attempt.blame.leg, attempt.blame.what, now_s=now_s)
            return
        if live.legs.done:  # nobody dispatches it any more, so that the chain may become that of the answer
            live.chain.extend(effect.tokens[:-1])
        self.roster.end(attempt.wire_id, now_s=now_s, keys=live.chain.keys)

    def _waited(self, live: _Live, wait: Wait) -> None:
        self._carry_out([(live, live.legs.waited(wait.wire_id, wait.sample, now_s=time.monotonic()))])

    def _retry(self, live: _Live, plan: Plan, now_s: float) -> list[Effect]:
        chosen: Route | Refusal | JaxpdError
        chosen = Unavailable("the router is closed") if self._state == "closed" else self._dispatch(live, plan, now_s)
        if isinstance(chosen, Route):
            self._note_retry(plan, "a worker failed it")
            self._start(live, plan, chosen, now_s)
            return []
        error = chosen if isinstance(chosen, JaxpdError) else chosen.error()
        return live.legs.refused(plan, error, now_s=now_s)

    def _note_retry(self, plan: Plan, why: str) -> None:
        kind, had = ("replays", len(plan.request.outputs)) if plan.replay else ("retries", 0)
        self.counts.again[kind] += 1
        logger.info("request %s goes on elsewhere after %d tokens: %s", plan.request.request_id, had, why)

    # threads ------------------------------------------------------------------------------------------------------

    def _on_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Calls it on the loop, from wherever this is called."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            return function(*args)
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            try:
                result.set_result(function(*args))
            except BaseException as error:
                result.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            raise Unavailable("the router has stopped") from None
        try:
            return result.result(timeout=30.0)
        except concurrent.futures.TimeoutError:
            raise Internal("the router's event loop does not answer") from None
