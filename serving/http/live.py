"""`GET /live`: what the page at `/` draws, as server-sent events.

    first watcher -> sampler: read every 200 ms, keep it when it differs -> every watcher sends the newest -> last one
                     leaves, or the server has answered everything and stops -> sampler ends

One task reads for all watchers and none while nobody watches. A watcher keeps no queue: a slow one skips readings.
No text, no token and no request id leaves here; `opaque` names a request only to who knows its id already.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxpd.errors import ResourceExhausted
from jaxpd.sequence import State as SequenceState
from jaxpd.stats import EngineStats, ReplicaStats, SequenceStats
from meshes.spec import parse_mesh_specs
from serving.callers import Keys, bearer
from serving.gateway import Gateway, State
from serving.model import ServedModel

logger = logging.getLogger(__name__)

INTERVAL_S = 0.2
HEARTBEAT_S = 15.0
MAX_WATCHERS = 32
HEARTBEAT = b": still here\n\n"

_STATES = tuple(state.value for state in SequenceState if state is not SequenceState.FINISHED)


def make_router(
    gateway: Gateway,
    keys: Keys,
    *,
    interval_s: float = INTERVAL_S,
    heartbeat_s: float = HEARTBEAT_S,
    max_watchers: int = MAX_WATCHERS,
) -> APIRouter:
    """`GET /live`. It needs a key where the server has keys, and is ResourceExhausted above `max_watchers`."""
    router = APIRouter()
    feed = Feed(gateway, interval_s=interval_s, heartbeat_s=heartbeat_s, max_watchers=max_watchers)

    # Not in the schema: it has no end, and what reads schemas to try every route would wait for it.
    @router.get("/live", include_in_schema=False)
    async def live(request: Request) -> StreamingResponse:
        keys.find(bearer(request.headers.get("authorization")))
        return FeedResponse(feed)

    return router


class Feed:
    """One reading for all who watch. Everything happens on the gateway's event loop."""

    def __init__(self, gateway: Gateway, *, interval_s: float, heartbeat_s: float, max_watchers: int) -> None:
        self._gateway = gateway
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._max_watchers = max_watchers
        self._watchers = 0
        self._sampler: asyncio.Task[None] | None = None
        self._newest = b""
        self._over = False  # the server stops and has nothing left to show
        self._changed = asyncio.Event()  # replaced at every change, so that all who wait on the old one wake up

    @property
    def watchers(self) -> int:
        """How many watch."""
        return self._watchers

    @property
    def sampling(self) -> bool:
        """Whether the engine is being read."""
        return self._sampler is not None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """One watcher's place. Raises ResourceExhausted when there is none."""
        if self._watchers >= self._max_watchers:
            raise ResourceExhausted(
                f"{self._watchers} pages watch this server, the limit is {self._max_watchers}; close one of them",
                retry_after_s=10.0,
            )
        self._watchers += 1
        if self._sampler is None:
            self._read()
            self._sampler = asyncio.create_task(self._sample(), name="jaxpd-live")
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._sampler.cancel()
                self._sampler = None

    async def events(self) -> AsyncIterator[bytes]:
        """The newest reading now and after each change, a comment when nothing changes for long."""
        sent = None
        while True:
            changed = self._changed
            if self._newest is not sent:
                sent = self._newest
                yield b"data: " + sent + b"\n\n"
                continue  # there may be a newer one by now
            if self._over:
                return
            try:
                await asyncio.wait_for(changed.wait(), self._heartbeat_s)
            except TimeoutError:
                yield HEARTBEAT

    async def _sample(self) -> None:
        try:
            while not self._over:
                await asyncio.sleep(self._interval_s)
                self._read()
        except Exception:
            logger.exception("the page's reading of the engine failed")
            self._over = True  # the watchers ask again
            self._wake()

    def _read(self) -> None:
        stats = self._gateway.stats()
        newest = json.dumps(snapshot(self._gateway, stats), separators=(",", ":")).encode()
        # What still runs is shown while it drains. Then the connections end, since the server waits for them.
        over = self._gateway.state is State.DRAINING and (stats is None or not stats.live)
        if newest != self._newest or over != self._over:
            self._newest, self._over = newest, over
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class FeedResponse(StreamingResponse):
    """Holds a watcher's place while it is sent: a generator that is never begun would not give it back."""

    def __init__(self, feed: Feed) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(feed.events(), media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the client leaves or the feed is over."""
        with self._feed.watching():
            await super().__call__(scope, receive, send)


def snapshot(gateway: Gateway, stats: EngineStats | None) -> dict[str, Any]:
    """One reading, as the page gets it; `model` is null and the lists are empty until the engine is ready."""
    if stats is None:
        return _reading(gateway.state, None, [], {}, [], 0)
    model = gateway.model
    pools = _pools(model, stats.replicas)
    index = {(pool["role"], pool["pool"]): i for i, pool in enumerate(pools)}
    sequences = [_sequence(seq, index) for seq in stats.sequences]
    about = {
        "name": model.name,
        "mode": model.mode,
        "max_model_len": model.max_model_len,
        "page_size": model.page_size,
    }
    return _reading(gateway.state, about, pools, stats.states, sequences, stats.staging_bytes)


def opaque(request_id: str) -> str:
    """A short name for a request that does not give its id away; the page makes the same from the ids it knows."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:8]


def _reading(
    state: State,
    model: dict[str, Any] | None,
    pools: list[dict[str, Any]],
    states: dict[str, int],
    sequences: list[dict[str, Any]],
    staging_bytes: int,
) -> dict[str, Any]:
    return {
        "state": state.value,
        "model": model,
        "pools": pools,
        "requests": {name: states.get(name, 0) for name in _STATES},
        "sequences": sequences,
        "staging_bytes": staging_bytes,
    }


def _pools(model: ServedModel, replicas: tuple[ReplicaStats, ...]) -> list[dict[str, Any]]:
    pools: dict[tuple[str, int], dict[str, Any]] = {}
    for replica in replicas:
        name = (replica.role, replica.pool)
        if name not in pools:
            mesh = model.meshes[replica.role][replica.pool]
            (spec,) = parse_mesh_specs(mesh, name=f"the {replica.role} mesh")
            pools[name] = {
                "role": replica.role,
                "pool": replica.pool,
                "mesh": mesh,
                "tp": spec.tp,
                "dp": spec.dp,
                "replicas": [],
            }
        pools[name]["replicas"].append(
            {
                "free": replica.free_pages,
                "cached": replica.cached_pages,
                "total": replica.num_pages,
                "slots_used": replica.num_slots - replica.free_slots,
                "slots": replica.num_slots,
            }
        )
    return list(pools.values())


def _sequence(seq: SequenceStats, index: dict[tuple[str, int], int]) -> dict[str, Any]:
    # By hand: `dataclasses.asdict` copies deeply, and took three quarters of a reading.
    return {
        "id": opaque(seq.request_id),
        "sample": seq.sample,
        "state": seq.state,
        "prompt_tokens": seq.prompt_tokens,
        "computed": seq.computed,
        "tokens": seq.tokens,
        "holds": [[index[hold.role, hold.pool], hold.replica, hold.pages, hold.filled] for hold in seq.holds],
    }
