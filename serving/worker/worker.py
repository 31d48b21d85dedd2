"""Between the sessions of routers and the engine: who has started what, and where its events go.

    starting --open--> ready <--set_draining--> draining        a worker; `close_doors` drains it for good
    start -> submit -> [tokens]* -> ended, once a sample        a leg, which belongs to the session that started it

A leg stays known until the engine has ended each of its samples, so that an id is never used twice at once. When its
session ends it is aborted, and nobody hears of it any more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from jaxpd.errors import InvalidArgument, JaxpdError, Unavailable
from jaxpd.policies.workers import Role
from jaxpd.request import (
    Event,
    FinishEvent,
    FinishReason,
    Leg,
    PrefillLeg,
    Request,
)
from serving.gateway import SUBMITTING_THREADS, State
from serving.observer import Observer, Observers, Origin
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.understand import LONG_PROMPT
from serving.worker.description import Description
from serving.worker.legs import Running, check_leg, give, refusal, shown
from serving.worker.reading import Reading, Steps, reading_to_proto
from serving.worker.session import Session
from serving.worker.wire import Started, start_from_proto

if TYPE_CHECKING:
    from jaxpd.stats import EngineStats
    from serving.model import ServedModel

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # both ends of a stream say something so often


class Engine(Protocol):
    """What a worker needs of `jaxpd.engine.Engine`; all of it may be called from any thread."""

    def submit(self, request: Request, leg: Leg | None = None) -> None: ...
    def abort(self, request_id: str, *, sample: int | None = None) -> bool: ...
    def stats(self) -> EngineStats: ...


class Neighbours(Protocol):
    """What a worker that prefills needs of `serving.worker.peers`."""

    def check(self, address: str, instance: str) -> None:
        """Raises Unavailable where the worker there is known to be another one than is meant."""


class Worker:
    """Made on the event loop that serves the network; `on_events` is the only method for other threads."""

    def __init__(
        self, role: Role, *, silence_s: float = 5.0, beat_s: float = BEAT_S, observers: Iterable[Observer] = ()
    ) -> None:
        self.role = role
        self._loop = asyncio.get_running_loop()
        self._beat_s = beat_s
        self._most_silent = max(round(silence_s / beat_s), 1)
        self._observers = Observers(observers)
        self._state = State.STARTING
        self._closing = False
        self._engine: Engine | None = None
        self._neighbours: Neighbours | None = None
        self._description: Description | None = None
        self._running: dict[str, Running] = {}
        self._sessions: set[Session] = set()
        self._steps = Steps()
        self._submitting = concurrent.futures.ThreadPoolExecutor(SUBMITTING_THREADS, thread_name_prefix="jaxpd-submit")

    # -- life of the worker

    @property
    def state(self) -> State:
        """Whether requests are taken."""
        return self._state

    @property
    def description(self) -> Description:
        """Raises Unavailable until the model is loaded."""
        if self._description is None:
            raise Unavailable("the worker is starting (loading weights, compiling); ask again in a moment")
        return self._description

    @property
    def model(self) -> ServedModel:
        """Raises Unavailable until it is loaded."""
        return self.description.model

    def stats(self) -> EngineStats | None:
        """The engine's load; None until it is ready."""
        return None if self._engine is None else self._engine.stats()

    def in_use(self, request_id: str) -> bool:
        """Whether a leg of this name runs."""
        return request_id in self._running

    def open(self, engine: Engine, description: Description, neighbours: Neighbours | None = None) -> None:
        """The engine is ready: take requests."""
        self._engine, self._description, self._neighbours = engine, description, neighbours
        self._steps.replicas = description.replicas
        if self._state is State.STARTING:
            self._state = State.READY

    def set_draining(self, draining: bool) -> State:
        """Take nothing new, or take it again; what runs goes on. Raises Unavailable before it is ready."""
        _ = self.description
        if not self._closing and self._state is not State.STARTING:
            self._change(State.DRAINING if draining else State.READY)
        return self._state

    def close_doors(self) -> None:
        """Take nothing new, for good."""
        self._closing = True
        self._change(State.DRAINING)

    def abort_all(self) -> None:
        """Ends every leg; their routers hear that this worker is not there for them any more."""
        for request_id, running in list(self._running.items()):
            self._abort(request_id, running, None)

    async def flush(self, timeout_s: float) -> None:
        """Returns when the sessions have what there is to say, or after `timeout_s`."""
        waiting = [asyncio.ensure_future(session.flushed()) for session in self._sessions]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for task in late:
                task.cancel()

    def end_sessions(self, why: str) -> None:
        """The last thing that routers hear."""
        for session in list(self._sessions):
            session.end(Unavailable(why))

    def _change(self, state: State) -> None:
        if state is not self._state:
            logger.info("the worker is %s", state.value)
            self._state = state
            self._read()

    # -- heartbeats

    async def beat(self) -> None:
        """Once a beat, for ever: a reading for each session, and an end to those that are silent for too long.

        Beats are counted and not seconds, so that a stall of this process is nobody's silence.
        """
        while True:
            await asyncio.sleep(self._beat_s)
            for session in list(self._sessions):
                session.silent += 1
                if session.silent > self._most_silent:
                    logger.warning("router %s is silent for %d beats: its requests end", session.router, session.silent)
                    self._leave(session, Unavailable("the router has said nothing for too long"))
            try:
                self._read()
            except Exception:
                logger.exception("the engine cannot be read")

    def _read(self) -> None:
        if self._engine is None or not self._sessions:
            return
        reading = reading_to_proto(Reading(state=self._state, stats=self._engine.stats(), steps=self._steps.take()))
        for session in self._sessions:
            copy = pb.Reading()
            copy.CopyFrom(reading)
            session.read(copy)

    # -- sessions

    @contextlib.contextmanager
    def session(self, router: str) -> Iterator[Session]:
        """A session, which hears of all that it starts. At its end all of that is aborted."""
        session = Session(router)
        self._sessions.add(session)
        logger.info("router %s has opened a session", router)
        try:
            assert self._engine is not None
            session.read(reading_to_proto(Reading(state=self._state, stats=self._engine.stats())))
            yield session
        finally:
            self._leave(session, None)

    def hear(self, session: Session, message: pb.RouterMessage) -> None:
        """One message of a router."""
        session.silent = 0
        match message.WhichOneof("message"):
            case "start":
                self._start(session, message.start)
            case "abort":
                abort = message.abort
                running = self._running.get(abort.request_id)
                if running is not None and running.session is session:
                    running.asked = True
                    self._abort(abort.request_id, running, abort.sample if abort.HasField("sample") else None)

    def _leave(self, session: Session, error: JaxpdError | None) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            logger.info("the session of router %s has ended", session.router)
        session.end(error)
        for request_id, running in list(self._running.items()):
            if running.session is session:
                running.session = None
                self._abort(request_id, running, None)

    # -- legs

    def _start(self, session: Session, message: pb.Start) -> None:
        request_id = message.request.request_id
        if not session.starts(request_id):
            logger.warning("router %s has started request %s twice: once counts", session.router, request_id)
            return
        origin = Origin(front="router", operation=self.role.value)
        self._observers.arrived(request_id, origin)
        try:
            started = start_from_proto(message, arrival_s=time.monotonic())
            self._check(started)
            if request_id in self._running:
                raise InvalidArgument(
                    f"request_id {request_id!r} is in use by a running request; routers draw ids that are unique",
                    field="request_id",
                )
            self._submit(session, started, origin)
        except Exception as error:
            self._refuse(session, message.request, origin, error)

    def _check(self, started: Started) -> None:
        if self._state is not State.READY:
            raise Unavailable(f"the worker is {self._state.value} and takes nothing new; ask another one")
        check_leg(started, self.role)
        if isinstance(started.leg, PrefillLeg) and self._neighbours is not None:
            self._neighbours.check(started.leg.peer, started.decode_instance)

    def _submit(self, session: Session, started: Started, origin: Origin) -> None:
        """Gives a leg to the engine; in a thread where that takes time. Raises what the engine raises at once."""
        engine, request, leg = self._engine, started.request, started.leg
        assert engine is not None
        running = Running(request, origin, session, set(range(request.params.n)))
        self._running[request.request_id] = running  # its first events may be here before `submit` is back
        if request.params.structured is None and len(request.prompt_ids) + len(request.outputs) <= LONG_PROMPT:
            try:
                give(engine, request, leg)
            except BaseException:
                del self._running[request.request_id]
                raise
            self._submitted(running)
            return
        running.submitting = True
        giving = self._loop.run_in_executor(self._submitting, give, engine, request, leg)
        giving.add_done_callback(lambda done: self._given(running, done))

    def _given(self, running: Running, done: asyncio.Future[None]) -> None:
        """`submit` is back from its thread."""
        running.submitting = False
        request = running.request
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._submitted(running)
            for sample in running.aborts:
                self._abort(request.request_id, running, sample)
            self._forget(running)
            return
        self._running.pop(request.request_id, None)
        what = shown(error, request.request_id)
        if running.session is not None:
            ends = [refusal(request.request_id, len(request.prompt_ids), sample, what) for sample in running.left]
            running.session.add([*ends])
        self._observers.refused(request.request_id, running.origin, what)

    def _refuse(self, session: Session, request: pb.EngineRequest, origin: Origin, error: Exception) -> None:
        """A leg that could not be started: it ends, for all of its samples."""
        what = shown(error, request.request_id)
        for sample in range(max(request.sampling.n, 1)):
            session.add([refusal(request.request_id, len(request.prompt_ids), sample, what)])
        self._observers.refused(request.request_id, origin, what)

    def _submitted(self, running: Running) -> None:
        """The engine has it: `submit` says so, or an event that was faster. Observers hear of it once."""
        if not running.submitted:
            running.submitted = True
            self._observers.submitted(running.request, running.origin)

    def _abort(self, request_id: str, running: Running, sample: int | None) -> None:
        if running.submitting:
            running.aborts.append(sample)
            return
        assert self._engine is not None
        self._engine.abort(request_id, sample=sample)

    # -- events

    def on_events(self, events: list[Event]) -> None:
        """The events of one step, from an engine's thread."""
        at_s, thread = time.monotonic(), threading.get_ident()
        try:
            self._loop.call_soon_threadsafe(self._deliver, events, at_s, thread)
        except RuntimeError:  # the loop has ended, and with it everybody who could hear of them
            logger.debug("%d events came after the end", len(events))

    def _deliver(self, events: list[Event], at_s: float, thread: int) -> None:
        self._steps.note(events, at_s, thread)
        by_session: dict[Session, list[Event]] = {}
        ended: list[tuple[Running, FinishEvent]] = []
        for event in events:
            running = self._running.get(event.request_id)
            if running is None:
                continue
            self._submitted(running)
            if isinstance(event, FinishEvent):
                ended.append((running, event))
                event = self._told(running, event)
            if running.session is not None:
                by_session.setdefault(running.session, []).append(event)
        self._observers.progressed(events)
        for session, told in by_session.items():
            session.add(told)
        for running, event in ended:
            self._observers.finished(running.request, running.origin, event)
            running.left.discard(event.sample)
            self._forget(running)

    def _forget(self, running: Running) -> None:
        if not running.left and not running.submitting:
            self._running.pop(running.request.request_id, None)

    def _told(self, running: Running, event: FinishEvent) -> FinishEvent:
        """What this worker has ended for reasons of its own can go on at another one: that is no abort."""
        if event.reason is not FinishReason.ABORT or running.asked:
            return event
        error = Unavailable("the worker is shutting down and has ended what it had; ask another one")
        return dataclasses.replace(event, reason=FinishReason.ERROR, error=error)
