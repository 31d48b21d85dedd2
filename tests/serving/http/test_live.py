"""The page's files, and the live readings that it draws."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import APIRouter, FastAPI

from jaxpd.stats import EngineStats, Hold, ReplicaStats, SequenceStats
from serving.callers import Caller, Keys
from serving.gateway import Gateway
from serving.http import errors, live, page
from serving.http.middleware import RequestIds

NO_KEYS = Keys({})
SECRET_ID = "an-id-that-nobody-else-should-see"


class Readable:
    """An engine that is nothing but a reading."""

    def __init__(self) -> None:
        self.readings = 0
        self.reading = reading(tokens=0)

    def stats(self) -> EngineStats:
        self.readings += 1
        return self.reading


def reading(*, tokens: int, live: bool = True) -> EngineStats:
    """One request that has made so many tokens, on 2x1 + 1x2; or none."""
    decode = Hold(role="decode", pool=0, replica=1, pages=6, filled=2)
    sequence = SequenceStats(
        request_id=SECRET_ID, sample=0, state="decoding", prompt_tokens=20, computed=20, tokens=tokens, holds=(decode,)
    )
    replicas = [
        ReplicaStats(
            role=role, pool=0, replica=r, free_pages=10, num_pages=16, free_slots=3, num_slots=4, cached_pages=2
        )
        for role, r in (("prefill", 0), ("decode", 0), ("decode", 1))
    ]
    return EngineStats(
        states={"decoding": 1} if live else {},
        replicas=tuple(replicas),
        staging_bytes=4096,
        sequences=(sequence,) if live else (),
    )


@dataclasses.dataclass
class Site:
    """A gateway with the page's routes on a free port."""

    gateway: Gateway
    engine: Readable
    client: httpx.AsyncClient
    open: Any


def make_app(*routers: APIRouter) -> FastAPI:
    """The routes with errors as the real application answers them."""
    app = FastAPI()
    errors.install(app)
    for router in routers:
        app.include_router(router)
    app.add_middleware(RequestIds)
    return app


@contextlib.asynccontextmanager
async def site(scripted: ModuleType, keys: Keys = NO_KEYS, **options: Any) -> AsyncIterator[Site]:
    gateway, engine = Gateway(), Readable()
    feed = live.make_router(gateway, keys, **{"interval_s": 0.01, **options})
    app = make_app(page.make_router(), feed)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    model = scripted.served_model(None)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            yield Site(gateway, engine, client, lambda: gateway.open(engine, model))  # type: ignore[arg-type]
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def watched(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of /live that are not empty."""
    async with client.stream("GET", "/live", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")

        async def lines() -> AsyncIterator[str]:
            async for line in response.aiter_lines():
                if line:
                    yield line

        yield lines()


async def next_reading(lines: AsyncIterator[str]) -> dict[str, Any]:
    async for line in lines:
        if line.startswith("data: "):
            found: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return found
    raise AssertionError("the stream has ended")


async def until(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


# -- readings


def test_a_page_that_comes_early_sees_the_server_start_and_become_ready(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted) as at, watched(at.client) as lines:
            first = await next_reading(lines)
            assert first["state"] == "starting" and first["model"] is None and first["pools"] == []
            at.open()
            ready = await next_reading(lines)
            assert ready["state"] == "ready" and ready["model"]["name"] == "bytes"

    run(scenario())


def test_a_reading_holds_both_meshes_and_where_each_sequence_is(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted) as at:
            at.open()
            async with watched(at.client) as lines:
                shown = await next_reading(lines)
        prefill, decode = shown["pools"]
        assert (prefill["role"], prefill["mesh"], prefill["tp"], prefill["dp"]) == ("prefill", "2x1", 2, 1)
        assert (decode["role"], decode["mesh"], decode["tp"], decode["dp"]) == ("decode", "1x2", 1, 2)
        assert decode["replicas"][1] == {"free": 10, "cached": 2, "total": 16, "slots_used": 1, "slots": 4}
        assert shown["requests"] == {"queued": 0, "prefilling": 0, "offered": 0, "decoding": 1}
        (sequence,) = shown["sequences"]
        assert sequence["state"] == "decoding" and sequence["holds"] == [[1, 1, 6, 2]]
        assert shown["staging_bytes"] == 4096

    run(scenario())


def test_no_request_id_leaves_but_whoever_knows_one_finds_it(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted) as at:
            at.open()
            async with watched(at.client) as lines:
                shown = await next_reading(lines)
        assert SECRET_ID not in json.dumps(shown)
        assert shown["sequences"][0]["id"] == hashlib.sha256(SECRET_ID.encode()).hexdigest()[:8]

    run(scenario())


def test_it_sends_what_changes_and_only_heartbeats_while_nothing_does(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted, heartbeat_s=0.05) as at:
            at.open()
            async with watched(at.client) as lines:
                assert (await next_reading(lines))["sequences"][0]["tokens"] == 0
                assert await anext(lines) == ": still here"
                assert await anext(lines) == ": still here"
                at.engine.reading = reading(tokens=7)
                assert (await next_reading(lines))["sequences"][0]["tokens"] == 7

    run(scenario())


def test_the_engine_is_read_once_for_all_and_never_while_nobody_watches(scripted: ModuleType) -> None:
    async def scenario() -> None:
        feed = live.Feed(gateway := Gateway(), interval_s=0.02, heartbeat_s=1, max_watchers=9)
        engine = Readable()
        gateway.open(engine, scripted.served_model(None))  # type: ignore[arg-type]
        await asyncio.sleep(0.06)
        assert engine.readings == 0 and not feed.sampling
        with contextlib.ExitStack() as watchers:
            for _ in range(8):
                watchers.enter_context(feed.watching())
            await asyncio.sleep(0.2)
            assert 2 <= engine.readings <= 12, "one reading an interval, however many watch"
        assert not feed.sampling and feed.watchers == 0
        before = engine.readings
        await asyncio.sleep(0.06)
        assert engine.readings == before

    run(scenario())


def test_a_client_that_leaves_gives_its_place_back_and_one_too_many_is_told(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted, max_watchers=1) as at:
            at.open()
            async with watched(at.client) as lines:
                await next_reading(lines)
                refused = await at.client.get("/live")
                assert refused.status_code == 429 and "the limit is 1" in refused.json()["error"]["message"]
            async with asyncio.timeout(5):
                while (await at.client.send(at.client.build_request("GET", "/live"), stream=True)).status_code != 200:
                    await asyncio.sleep(0.02)

    run(scenario())


def test_it_ends_when_the_server_has_answered_everything_and_stops(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted) as at:
            at.open()
            async with watched(at.client) as lines:
                await next_reading(lines)
                at.gateway.close_doors()
                assert (await next_reading(lines))["state"] == "draining", "what still runs can be watched"
                at.engine.reading = reading(tokens=0, live=False)
                last = [json.loads(line.removeprefix("data: ")) async for line in lines]  # ends
                assert last[-1]["requests"]["decoding"] == 0
            async with watched(at.client) as lines:
                assert len([line async for line in lines]) == 1, "whoever comes later gets the last reading"

    run(scenario())


def test_a_reading_that_fails_ends_the_streams_and_the_next_one_works(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted) as at:
            at.open()
            async with watched(at.client) as lines:
                await next_reading(lines)
                stray = dataclasses.replace(at.engine.reading.replicas[0], pool=7)  # a pool that no mesh is known of
                at.engine.reading = dataclasses.replace(at.engine.reading, replicas=(stray,))
                assert [line async for line in lines] == []
            at.engine.reading = reading(tokens=1)
            async with watched(at.client) as lines:
                assert (await next_reading(lines))["state"] == "ready"

    run(scenario())


def test_where_keys_are_needed_it_needs_one_and_the_page_does_not(scripted: ModuleType) -> None:
    async def scenario() -> None:
        async with site(scripted, Keys({"k-1": Caller(name="ann")})) as at:
            refused = await at.client.get("/live")
            assert refused.status_code == 401 and "authorization" in refused.json()["error"]["message"]
            async with watched(at.client, authorization="Bearer k-1") as lines:
                assert (await next_reading(lines))["state"] == "starting"
            assert (await at.client.get("/")).status_code == 200

    run(scenario())


# -- files


@pytest.fixture
def client() -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=make_app(page.make_router()))
    return httpx.AsyncClient(transport=transport, base_url="http://page")


@pytest.mark.parametrize(
    ("path", "content_type"),
    [("/", "text/html"), ("/page/style.css", "text/css"), ("/page/chat.js", "text/javascript")],
)
def test_files_come_with_their_type_and_are_not_sent_twice(
    client: httpx.AsyncClient, path: str, content_type: str
) -> None:
    async def scenario() -> None:
        first = await client.get(path)
        assert first.status_code == 200 and first.headers["content-type"] == f"{content_type}; charset=utf-8"
        assert first.headers["cache-control"] == "no-cache" and first.headers["x-content-type-options"] == "nosniff"
        again = await client.get(path, headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
        assert again.status_code == 304 and again.content == b""
        head = await client.head(path)
        assert head.status_code == 200 and head.content == b""
        assert int(head.headers["content-length"]) == len(first.content)

    run(scenario())


def test_the_policy_forbids_inline_scripts_and_everything_from_elsewhere(client: httpx.AsyncClient) -> None:
    async def scenario() -> None:
        policy = (await client.get("/")).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy

    run(scenario())


def test_another_name_is_not_found(client: httpx.AsyncClient) -> None:
    async def scenario() -> None:
        for name in ("nothing.js", "..%2f__init__.py", "page.py"):
            assert (await client.get(f"/page/{name}")).status_code == 404, name

    run(scenario())


def test_the_page_names_only_files_that_are_served_and_nothing_outside() -> None:
    web = pathlib.Path(page.__file__).parent.parent / "web"
    assert sorted(path.name for path in web.iterdir()) == sorted(page.FILES)
    for name in page.FILES:
        text = (web / name).read_text()
        used = re.findall(r"""(?:src|href)="(?!data:|#)([^"]+)"|from "([^"]+)\"""", text)
        for path in (a or b for a, b in used):
            assert path.rpartition("/")[2] in page.FILES, f"{name} uses {path}"
        outside = [url for url in re.findall(r"https?://[^\s'\")]+", text) if not url.startswith("http://www.w3.org/")]
        assert not outside, f"{name} names {outside}; the page has to work offline"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=", text), name
