"""The HTTP front as a part of a process: its port, its readiness, its end, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jaxpd.errors import FailedPrecondition, InvalidArgument
from serving.gateway import Gateway
from serving.http.front import HttpFront
from serving.observer import Origin
from serving.ports import listening_sockets

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 2000}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def until(true: Callable[[], Any], within_s: float = 5.0) -> None:
    """Waits for something to become true."""
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.005)


def test_a_port_in_use_is_refused(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served() as running:
            with pytest.raises(FailedPrecondition, match=rf"--port {running.port} on --host 127.0.0.1 is in use") as no:
                HttpFront(Gateway()).bind("127.0.0.1", running.port)
            assert no.value.field == "port"

    asyncio.run(run())


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be(port: int) -> None:
    async def run() -> None:
        with pytest.raises(InvalidArgument, match=f"--port {port} must be between 0"):
            HttpFront(Gateway()).bind("127.0.0.1", port)

    asyncio.run(run())


def test_an_address_of_another_machine() -> None:
    async def run() -> None:
        with pytest.raises(FailedPrecondition, match="--host 203.0.113.7 is no address of this machine"):
            HttpFront(Gateway()).bind("203.0.113.7", 0)

    asyncio.run(run())


def test_a_front_that_was_never_started_gives_its_port_back() -> None:
    async def run() -> None:
        front = HttpFront(Gateway())
        port = front.bind("127.0.0.1", 0)
        await front.stop(0)
        await front.stop(0)
        other = HttpFront(Gateway())
        assert other.bind("127.0.0.1", port) == port
        await other.stop(0)

    asyncio.run(run())


def test_a_probe_gets_an_answer_before_the_model_is_loaded() -> None:
    async def run() -> None:
        front = HttpFront(Gateway())
        port = front.bind("127.0.0.1", 0)
        await front.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            for path in ("/health", "/v1/models", "/tokenizer_info", "/server_info"):
                response = await client.get(path)
                assert response.status_code == 503, path
                assert "starting" in response.json()["error"]["message"]
                assert int(response.headers["retry-after"]) >= 1
            assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503
            assert (await client.post("/v1/chat/completions", json={"messages": []})).status_code == 503
            assert (await client.get("/version")).status_code == 200
        await front.stop(0)

    asyncio.run(run())


def test_health_turns_with_readiness(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served() as running:
            assert (await running.client.get("/health")).status_code == 200
            assert (await running.client.head("/health")).status_code == 200
            await running.front.set_ready(False)
            assert (await running.client.get("/health")).status_code == 503
            await running.front.set_ready(True)
            running.gateway.close_doors()
            assert "shutting down" in (await running.client.get("/health")).json()["error"]["message"]

    asyncio.run(run())


def test_stopping_lets_running_streams_finish(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(step_s=0.01) as running:
            streaming = asyncio.ensure_future(running.events(COMPLETIONS, {"prompt": "abc", "max_tokens": 60}))
            await until(lambda: running.engine.running)
            await running.front.stop(10)
            events = await streaming
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            with pytest.raises(httpx.ConnectError):
                await running.client.get("/health")

    asyncio.run(run())


def test_stopping_ends_what_takes_too_long(http_served: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with http_served(step_s=0.05) as running:
            streaming = asyncio.ensure_future(running.post(COMPLETIONS, {**LONG, "stream": True}))
            waiting = asyncio.ensure_future(running.post(COMPLETIONS, LONG))
            await until(lambda: running.engine.running == 2)
            began = time.monotonic()
            await running.front.stop(0.2)
            assert time.monotonic() - began < 3
            with pytest.raises(httpx.RemoteProtocolError):
                await streaming
            assert (await waiting).status_code == 503
            await until(lambda: not running.engine.running)

    asyncio.run(run())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(http_served: Callable[..., Any], stream: bool) -> None:
    async def run() -> None:
        async with http_served(step_s=0.02) as running:
            for path, body in (
                (COMPLETIONS, LONG),
                (COMPLETIONS, {**LONG, "prompt": ["abc", "def"]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                asking = asyncio.ensure_future(running.post(path, {**body, "stream": stream}))
                await until(lambda: running.engine.running)
                await asyncio.sleep(0.05)
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
                await until(lambda: not running.engine.running)

    asyncio.run(run())


def test_a_half_closed_connection_counts_as_left(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(step_s=0.02) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(raw_request(b'{"prompt": "abc", "max_tokens": 2000, "stream": true}'))
            await until(lambda: running.engine.running)
            writer.write_eof()
            await until(lambda: not running.engine.running)
            await reader.read()
            writer.close()

    asyncio.run(run())


def raw_request(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    """A request as bytes."""
    head = [b"POST " + path + b" HTTP/1.1", b"host: x", b"content-type: application/json", *headers]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


def test_request_ids(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(step_s=0.02) as running:
            answer = await running.post(COMPLETIONS, {"prompt": "a"}, **{"x-request-id": "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
            assert answer.json()["id"] == "cmpl-mine-1"
            assert running.engine.submitted[-1].request_id == "mine-1"
            for wrong in ("a b", "x" * 200, "\xe9"):
                answer = await running.client.get("/health", headers={"x-request-id": wrong.encode("latin-1")})
                assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])
            same = [running.post(COMPLETIONS, {"prompt": ["a", "b"]}, **{"x-request-id": "twin"}) for _ in range(2)]
            for answer in await asyncio.gather(*same):
                assert answer.status_code == 200, "an id in use is no reason to refuse a request"
                assert answer.headers["x-request-id"] == "twin"
            ids = [request.request_id for request in running.engine.submitted[1:]]
            assert len(set(ids)) == 4 and {"twin", "twin-1"} < set(ids)

    asyncio.run(run())


def test_clients_that_vanish_are_asked_after() -> None:
    (sock,) = listening_sockets("127.0.0.1", 0, "--port")
    with sock, socket.create_connection(sock.getsockname()) as client:
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert not client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_no_signal_is_touched(http_served: Callable[..., Any]) -> None:
    import signal

    async def run() -> None:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        async with http_served():
            assert {number: signal.getsignal(number) for number in before} == before

    asyncio.run(run())


def test_a_name_takes_all_its_addresses(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        front = HttpFront(Gateway())
        port = front.bind("localhost", 0)
        await front.start()
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        await front.stop(0)

    asyncio.run(run())


def test_where_a_request_came_from(http_served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces begin with the caller's context, and metrics count by front and operation."""
    origins: list[Origin] = []
    stream = Gateway.stream

    def noting(self: Gateway, asked: Any, origin: Origin) -> Any:
        origins.append(origin)
        return stream(self, asked, origin)

    monkeypatch.setattr(Gateway, "stream", noting)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def run() -> None:
        async with http_served() as running:
            for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/v1/chat/completions", CHAT)):
                for stream_ in (False, True):
                    headers = {"traceparent": parent, "cookie": "secret"}
                    asked = {**body, "max_tokens": 1, "stream": stream_}
                    assert (await running.post(path, asked, **headers)).status_code == 200

    asyncio.run(run())
    assert [(origin.front, origin.operation) for origin in origins] == [("http", "completion")] * 2 + [
        ("http", "chat")
    ] * 2
    assert all(dict(origin.headers) == {"traceparent": parent} for origin in origins)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_somebody_ends(http_served: Callable[..., Any], stream: bool) -> None:
    async def run() -> None:
        async with http_served(step_s=0.02) as running:
            body = {**LONG, "stream": stream}
            asking = asyncio.ensure_future(running.post(COMPLETIONS, body, **{"x-request-id": "mine"}))
            await until(lambda: running.engine.running)
            await asyncio.sleep(0.1)
            assert running.gateway.abort("mine")
            answer = await asking
            assert answer.status_code == 200
            assert '"finish_reason":"abort"' in answer.text.replace(": ", ":")

    asyncio.run(run())


def test_many_clients_at_once(http_served: Callable[..., Any]) -> None:
    """Nobody is dropped, whoever comes while all others are being answered."""

    async def run() -> None:
        async with http_served(max_queued=1000, step_s=0.005) as running:
            body = b'{"prompt": "abcde", "max_tokens": 40, "stream": true}'

            async def ask() -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
                writer.write(raw_request(body, b"connection: close"))
                answer = await reader.read()
                writer.close()
                return answer

            answers = await asyncio.gather(*(ask() for _ in range(200)))
            assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers)

    asyncio.run(run())
