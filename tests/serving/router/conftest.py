"""Fixtures of the router: scripted workers, and an engine over them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import pathlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import pytest

from jaxpd.request import Event, FinishEvent, Request, SamplingParams, TokensEvent
from serving.cluster import Cluster
from serving.router.config import RouterConfig
from serving.router.engine import RouterEngine

HERE = pathlib.Path(__file__).parent


class Router:
    """An engine over workers, and what it has said."""

    def __init__(self, **config: Any) -> None:
        self.events: list[Event] = []
        self.batches: list[list[Event]] = []
        cluster = Cluster()
        self.engine = RouterEngine(
            RouterConfig(**config),
            loop=asyncio.get_running_loop(),
            channel=cluster.channel,
            on_events=self._take,
            seed=0,
        )
        self._serial = itertools.count(1)

    def _take(self, events: list[Event]) -> None:
        self.batches.append(events)
        self.events += events

    def submit(self, *, max_tokens: int = 6, n: int = 1, prompt: tuple[int, ...] = (1, 2, 3), **more: Any) -> Request:
        """A request of its own seed."""
        serial = next(self._serial)
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=serial * 1000, temperature=1.0)
        request = Request(request_id=f"r{serial}", prompt_ids=prompt, params=params, arrival_s=time.monotonic(), **more)
        self.engine.submit(request)
        return request

    def tokens(self, request: Request, sample: int = 0) -> list[int]:
        """What the client has; indices are checked: none twice, none left out."""
        got: list[int] = []
        for event in self.events:
            if event.request_id == request.request_id and event.sample == sample and isinstance(event, TokensEvent):
                assert event.first_index == len(got), f"{event} after {len(got)} tokens"
                got += event.token_ids
        return got

    def end(self, request: Request, sample: int = 0) -> FinishEvent | None:
        """How a sample ended; never twice."""
        found = [
            event
            for event in self.events
            if isinstance(event, FinishEvent) and event.request_id == request.request_id and event.sample == sample
        ]
        assert len(found) <= 1, found
        return found[0] if found else None

    async def finish(self, request: Request, sample: int = 0, within_s: float = 5.0) -> FinishEvent:
        await until(lambda: self.end(request, sample) is not None, within_s)
        end = self.end(request, sample)
        assert end is not None
        return end

    def settled(self) -> None:
        """No leg is charged any more, and nothing is remembered."""
        assert self.engine.roster.ledger.in_flight == 0
        requests = self.engine.requests
        assert not requests.live and not requests.by_wire and not requests.started_s


async def until(true: Callable[[], bool], within_s: float = 5.0) -> None:
    """Returns when it holds."""
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, "it did not come to be"
        await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def worker_script() -> ModuleType:
    """tests/serving/router/scripted_worker.py"""
    if "scripted_worker" in sys.modules:
        return sys.modules["scripted_worker"]
    spec = importlib.util.spec_from_file_location("scripted_worker", HERE / "scripted_worker.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["scripted_worker"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cluster(worker_script: ModuleType) -> Callable[..., Any]:
    """`async with cluster(prefill=1, decode=2, mixed=0, **config) as (router, workers):` all of them ready."""

    @contextlib.asynccontextmanager
    async def make(
        *, prefill: int = 0, decode: int = 0, mixed: int = 0, **config: Any
    ) -> AsyncIterator[tuple[Router, list[Any]]]:
        Role = worker_script.Role
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.MIXED] * mixed
        async with worker_script.workers(*roles) as workers:
            addresses = {
                role.value: tuple(worker.address for worker in workers if worker.role is role) for role in Role
            }
            router = Router(**{"heartbeat_timeout_s": 2.0, **addresses, **config})
            starting = asyncio.create_task(asyncio.to_thread(router.engine.start))
            try:
                await until(lambda: len(router.engine.fleet.readings()) == len(workers))
                await starting
                yield router, workers
            finally:
                await router.engine.aclose()
                if not starting.done():
                    await asyncio.wait([starting])

    return make


@pytest.fixture(scope="session")
def soon() -> Callable[..., Any]:
    """`await soon(lambda: it holds)`"""
    return until
