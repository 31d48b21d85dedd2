"""The router as the gateway sees it: an engine that has workers in place of pools.

    submit    Roster chooses both legs, Sessions start them        serving/router/requests.py, jaxpd/routing/roster.py
    events    of both legs are one answer                          serving/router/legs.py
    failure   again, or on with the tokens so far, elsewhere       serving/router/legs.py
    abort     both legs end, the client's answer at once
    stats     of all workers, as if they were pools here           serving/router/merged.py

Everything happens on one event loop, the server's. What the gateway may call from any thread is carried there and
waited for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxpd.cache.keys import Chain
from jaxpd.errors import Internal, Unavailable
from jaxpd.request import Event, Request
from jaxpd.routing.roster import Roster
from jaxpd.stats import EngineStats
from serving.model import ServedModel
from serving.router.config import RouterConfig
from serving.router.counts import Counts, Numbers
from serving.router.fleet import Fleet
from serving.router.merged import merged
from serving.router.requests import Requests
from serving.router.session import Channel

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAY_S = 5.0  # between two words about what it waits for
SWEEP_S = 5.0


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
        self.requests = Requests(
            config, self.roster, self.fleet, self.counts, lambda events: self.on_events(events), seed=seed
        )
        self._state = "starting"
        self._enough = threading.Event()  # workers to begin with, or closed
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
                await asyncio.wait_for(self.requests.idle.wait(), timeout_s)
            return not self.requests.live

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
        self.requests.open = False
        self.requests.abort_all()
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

    def _submit(self, request: Request, model: ServedModel, chain: Chain) -> None:
        if self._state != "ready":
            raise Unavailable(f"the router is {self._state}")
        self.requests.submit(request, model, chain)

    def abort(self, request_id: str, *, sample: int | None = None) -> bool:
        """Ends a request, or one sample of it; False when there is none. Idempotent."""
        return self._on_loop(self.requests.abort, request_id, sample)

    def stats(self) -> EngineStats:
        """Of all workers as they last said, and the requests that run here."""
        return self._on_loop(self._stats)

    def _stats(self) -> EngineStats:
        live = ((live.request, live.legs) for live in self.requests.live.values())
        return merged(self.fleet.readings(), self.fleet.places, self.fleet.past, live)

    # the fleet's owner --------------------------------------------------------------------------------------------

    def heard(self, name: str, events: list[Event]) -> None:
        """One message of a worker."""
        self.requests.heard(name, events)

    def worker_gone(self, name: str, reason: str) -> None:
        """Its requests go on elsewhere, or end."""
        self.requests.worker_gone(name, reason)

    def worker_draining(self, name: str) -> None:
        """With --migrate-on-drain its requests go on elsewhere."""
        self.requests.worker_draining(name)

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
        return self.requests.started_s

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
