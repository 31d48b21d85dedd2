"""A router without judgement: it holds sessions with workers, starts what a test says, and keeps what they answer."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import grpc

from jaxpd.request import (
    DecodeLeg,
    Event,
    FinishEvent,
    Leg,
    PrefillLeg,
    Request,
    SamplingParams,
    TokensEvent,
)
from serving.cluster import Cluster
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.worker.description import Description, description_from_proto
from serving.worker.reading import Reading, reading_from_proto
from serving.worker.wire import Started, events_from_proto, start_to_proto


class WorkerSession:
    """A session with one worker; everything that came over it. `async with` opens and ends it."""

    def __init__(self, address: str, cluster: Cluster | None = None, *, pings: bool = True) -> None:
        self.address = address
        self.messages: list[list[Event]] = []  # the events of each message
        self.readings: list[Reading] = []
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.description: Description
        self._cluster = cluster or Cluster()
        self._pings = pings
        self._news = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> WorkerSession:
        self._channel = self._cluster.channel(self.address)
        stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.call = stub.Session(metadata=self._cluster.metadata)
        await self.send(hello=pb.RouterHello(protocol=1, oldest_protocol=1, router="small"))
        first = await self.call.read()  # raises AioRpcError where the worker refuses
        assert first.WhichOneof("message") == "welcome", first
        self.description = description_from_proto(first.welcome)
        self._tasks = [asyncio.create_task(self.read())]
        if self._pings:
            self._tasks.append(asyncio.create_task(self._ping()))
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        self.call.cancel()
        await self._channel.close()

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.RouterMessage(**message))

    async def start(self, name: str, prompt: Any, leg: Leg | None = None, *, instance: str = "", **params: Any) -> None:
        outputs = params.pop("outputs", ())
        request = Request(
            request_id=name,
            prompt_ids=tuple(prompt),
            params=SamplingParams(**{"seed": 0, "ignore_eos": True, **params}),
            arrival_s=0.0,
            outputs=tuple(outputs),
        )
        await self.send(start=start_to_proto(Started(request=request, leg=leg, decode_instance=instance)))

    async def abort(self, name: str, sample: int | None = None) -> None:
        await self.send(abort=pb.Abort(request_id=name, sample=sample))

    async def read(self) -> None:
        started_s = _Now()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                async with self._news:
                    if message.HasField("events"):
                        self.messages.append(events_from_proto(message.events, started_s=started_s))
                    elif message.HasField("reading"):
                        self.readings.append(reading_from_proto(message.reading))
                    self._news.notify_all()
        async with self._news:
            self.status = await self.call.code(), await self.call.details()
            self._news.notify_all()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self.send(ping=pb.Ping())

    async def until(self, done: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        """Waits until something that came makes `done` true."""
        async with self._news:
            try:
                await asyncio.wait_for(self._news.wait_for(done), timeout_s)
            except TimeoutError:
                raise AssertionError(f"not within {timeout_s} s: {self.messages[-3:]} {self.readings[-1:]}") from None
        return done()

    def events(self, name: str, sample: int = 0) -> list[Event]:
        each = (event for events in self.messages for event in events)
        return [event for event in each if event.request_id == name and event.sample == sample]

    async def end(self, name: str, sample: int = 0, timeout_s: float = 30.0) -> FinishEvent:
        """How a sample ended, once it has."""
        await self.until(lambda: any(isinstance(e, FinishEvent) for e in self.events(name, sample)), timeout_s)
        (end,) = [event for event in self.events(name, sample) if isinstance(event, FinishEvent)]
        return end

    def tokens(self, name: str, sample: int = 0) -> dict[int, int]:
        """By output index; each came once."""
        found: dict[int, int] = {}
        for event in self.events(name, sample):
            if isinstance(event, TokensEvent):
                for index, token in enumerate(event.token_ids, event.first_index):
                    assert index not in found
                    found[index] = token
        return found


class _Now(dict[str, float]):
    """Every request was started now: tests do not look at the moments' times."""

    def get(self, key: str, default: Any = None) -> float:  # type: ignore[override]
        return time.monotonic()


async def hand_over(prefill: WorkerSession, decode: WorkerSession, name: str, prompt: Any, **params: Any) -> list[int]:
    """Starts both legs of a request and returns the tokens of its first sample, from both workers."""
    handoffs = tuple(secrets.randbits(64) for _ in range(params.get("n", 1)))
    await decode.start(name, prompt, DecodeLeg(handoffs=handoffs), **params)
    instance = decode.description.instance
    await prefill.start(name, prompt, PrefillLeg(peer=decode.address, handoffs=handoffs), instance=instance, **params)
    ends = [await prefill.end(name), await decode.end(name)]
    tokens = prefill.tokens(name) | decode.tokens(name)
    assert sorted(tokens) == list(range(len(tokens))), (tokens, ends)
    return [tokens[i] for i in range(len(tokens))]
