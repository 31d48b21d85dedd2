"""Fixtures of the HTTP front: a server on a free port over a scripted engine, and readers of what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from serving.callers import Keys
from serving.gateway import Gateway
from serving.http.app import make_app
from serving.http.front import HttpFront
from serving.http.options import HttpOptions
from serving.tls import Tls


@dataclasses.dataclass
class RunningHttp:
    """A server that takes requests, and a client of it."""

    gateway: Gateway
    engine: Any
    client: httpx.AsyncClient
    front: HttpFront | None = None
    port: int = 0

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """A JSON request."""
        return await self.client.post(path, json=body, headers=headers)

    async def events(self, path: str, body: Any, **headers: str) -> list[dict[str, Any]]:
        """All events of a stream, which has to end as streams do."""
        response = await self.post(path, {**body, "stream": True}, **headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_events(response.text)


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], text[-300:]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@pytest.fixture
def http_served(opened: Callable[..., Any]) -> Callable[..., Any]:
    """`async with http_served(**options) as running:` a ready server on a free port."""

    @contextlib.asynccontextmanager
    async def serve(
        *,
        keys: Keys | None = None,
        tls: Tls | None = None,
        options: HttpOptions | None = None,
        metrics_render: Callable[[str], tuple[bytes, str]] | None = None,
        **engine_options: Any,
    ) -> AsyncIterator[RunningHttp]:
        gateway, engine = opened(**engine_options)
        front = HttpFront(gateway, keys=keys, tls=tls, metrics_render=metrics_render, options=options)
        port = front.bind("127.0.0.1", 0)
        await front.start()
        await front.set_ready(True)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
            try:
                yield RunningHttp(gateway, engine, client, front, port)
            finally:
                await front.stop(0)
                engine.close()

    return serve


@pytest.fixture
def http_app(opened: Callable[..., Any]) -> Callable[..., Any]:
    """`async with http_app(**options) as running:` the same routes without sockets, for what they say."""

    @contextlib.asynccontextmanager
    async def make(
        *, keys: Keys | None = None, options: HttpOptions | None = None, **engine_options: Any
    ) -> AsyncIterator[RunningHttp]:
        gateway, engine = opened(**engine_options)
        transport = httpx.ASGITransport(make_app(gateway, keys=keys or Keys({}), options=options))
        async with httpx.AsyncClient(base_url="http://test", timeout=20, transport=transport) as client:
            yield RunningHttp(gateway, engine, client)
        engine.close()

    return make
