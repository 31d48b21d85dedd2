"""One router's session, as the worker has it: what waits for the router, and whether it still speaks.

    open --the router ends it, is silent too long, breaks the rules; the worker stops--> ended

What the router is slow to fetch waits as few, long messages: new tokens of a sample are added to those that wait
already, so that what waits is bounded by what its requests may make. Everything here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator

from jaxpd.errors import JaxpdError
from jaxpd.request import Event, FinishEvent, TokensEvent
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.worker.wire import events_to_proto

REMEMBERED = 4096  # requests of the past, so that a Start that comes twice starts nothing
MOST_UNITS = 500_000  # tokens and log probabilities in one message, 13 bytes each at most


class Session:
    """Between a router's hello and the end of its stream. `silent` counts heartbeats since it was last heard."""

    def __init__(self, router: str) -> None:
        self.router = router
        self.silent = 0
        self.ended: JaxpdError | None = None  # why, where that is worth telling
        self.over = asyncio.Event()
        self._past: OrderedDict[str, None] = OrderedDict()
        self._steps: deque[_Waiting] = deque()
        self._reading: pb.Reading | None = None
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()

    def starts(self, request_id: str) -> bool:
        """False where this session has started it before: the message came twice."""
        if request_id in self._past:
            return False
        self._past[request_id] = None
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)
        return True

    def add(self, events: list[Event]) -> None:
        """Events of one step, in order."""
        if self.over.is_set():
            return
        if not self._steps:
            self._steps.append(_Waiting())
        for event in events:
            if self._steps[-1].full:
                self._steps.append(_Waiting())
            self._steps[-1].add(event)
        self._news()

    def read(self, reading: pb.Reading) -> None:
        """The latest reading; one that waits is of no use any more, but for the steps that it counts."""
        if self._reading is not None:
            del self._reading.steps[:-64]
            reading.steps.MergeFrom(self._reading.steps)
        self._reading = reading
        self._news()

    def end(self, error: JaxpdError | None = None) -> None:
        """Nothing more goes out; `messages` ends, or raises `error`. Idempotent."""
        if not self.over.is_set():
            self.ended = error
            self.over.set()
            self._steps.clear()
            self._reading = None
            self._news()
            self._taken.set()

    async def messages(self) -> AsyncGenerator[pb.WorkerMessage, None]:
        """What there is to say, until the end. Raises the error that has ended the session."""
        while not self.over.is_set():
            await self._wake.wait()
            self._wake.clear()
            while self._steps and not self.over.is_set():
                events = self._steps.popleft().events()
                yield pb.WorkerMessage(events=events_to_proto(events))
            reading, self._reading = self._reading, None
            if reading is not None:
                yield pb.WorkerMessage(reading=reading)
            if not self._steps and self._reading is None:
                self._taken.set()
        if self.ended is not None:
            raise self.ended

    async def flushed(self) -> None:
        """Returns when all that waited is on its way, or nobody will fetch it."""
        await self._taken.wait()

    def _news(self) -> None:
        self._taken.clear()
        self._wake.set()


class _Run:
    """New tokens of one sample, as they pile up."""

    def __init__(self, event: TokensEvent) -> None:
        self._first = event
        self._token_ids = list(event.token_ids)
        self._logprobs = list(event.logprobs or ())

    def add(self, event: TokensEvent) -> None:
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(event.logprobs or ())

    def event(self) -> TokensEvent:
        return self._first._replace(token_ids=tuple(self._token_ids), logprobs=tuple(self._logprobs) or None)


class _Waiting:
    """Events of one message to come."""

    def __init__(self) -> None:
        self._entries: list[_Run | FinishEvent] = []
        self._units = 0
        self._runs: dict[tuple[str, int], _Run] = {}  # by request and sample

    @property
    def full(self) -> bool:
        return self._units >= MOST_UNITS

    def add(self, event: Event) -> None:
        if isinstance(event, FinishEvent):
            self._units += 1
            self._entries.append(event)
            return
        self._units += _units(event)
        run = self._runs.get((event.request_id, event.sample))
        if run is None:
            run = self._runs[event.request_id, event.sample] = _Run(event)
            self._entries.append(run)
        else:
            run.add(event)

    def events(self) -> list[Event]:
        return [entry.event() if isinstance(entry, _Run) else entry for entry in self._entries]


def _units(event: TokensEvent) -> int:
    scores = (*(event.logprobs or ()), *(event.prompt_logprobs or ()))
    return len(event.token_ids) + sum(1 + len(score.top) for score in scores)
