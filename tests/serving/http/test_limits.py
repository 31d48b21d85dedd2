"""Clients that send too much, too slowly or not at all, and those that take nothing: they end, others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from serving.http.options import HttpOptions

QUICK = HttpOptions(head_s=0.4, body_s=0.6, stalled_s=0.6, idle_s=0.5)
JSON_POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are looked at often enough for a test."""
    monkeypatch.setattr("serving.http.connection.SWEEP_S", 0.05)


async def answer_to(port: int, *pieces: bytes, pause_s: float = 0.0, within_s: float = 5.0) -> bytes:
    """Sends pieces with pauses and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        reading = asyncio.ensure_future(all_of(reader))
        for piece in pieces:
            if reading.done():
                break
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reading, within_s)
    finally:
        writer.close()


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends, however it does."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := await reader.read(65536):
            data += more
    return data


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer as bytes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def serves(running: Any) -> None:
    """Others are answered as ever."""
    assert (await running.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})).status_code == 200


def test_a_head_that_drips_in(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=QUICK) as running:
            drips = [JSON_POST, *(b"x-%d: y\r\n" % i for i in range(100))]
            began = time.monotonic()
            dripping = asyncio.ensure_future(answer_to(running.port, *drips, pause_s=0.05))
            await serves(running)
            status, error = error_of(await dripping)
            assert (status, error["code"]) == (408, "request_timeout")
            assert "head did not arrive within 0.4 s" in error["message"]
            assert time.monotonic() - began < 2
            health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            answers = await answer_to(running.port, health, *drips, pause_s=0.05)
            assert answers.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answers

    asyncio.run(run())


def test_a_body_that_drips_in(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=QUICK) as running:
            drips = [JSON_POST + b"content-length: 100\r\n\r\n", *([b"x"] * 99)]
            status, error = error_of(await answer_to(running.port, *drips, pause_s=0.02))
            assert (status, error["code"]) == (408, "request_timeout")
            await serves(running)

    asyncio.run(run())


def test_a_client_that_says_nothing(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=QUICK) as running:
            assert await answer_to(running.port) == b""
            health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            answer = await answer_to(running.port, health)  # and then nothing more
            assert answer.startswith(b"HTTP/1.1 200")

    asyncio.run(run())


def test_long_answers_are_not_late(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=QUICK, step_s=0.1) as running:
            events = await running.events("/v1/completions", {"prompt": "abc", "max_tokens": 15})
            assert len(events) == 15
            await serves(running)

    asyncio.run(run())


def test_requests_sent_behind_one_another(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=QUICK, step_s=0.1) as running:
            body = b'{"prompt": "abc", "max_tokens": 9}'
            request = JSON_POST + b"content-length: %d\r\n\r\n" % len(body) + body
            answer = await answer_to(running.port, request * 3)
            assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'"text": "abcabcabc"') == 3

    asyncio.run(run())


def test_a_head_without_an_end(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=HttpOptions(max_head_bytes=20_000)) as running:
            for endless in (
                [JSON_POST, *([b"x: " + b"y" * 4000 + b"\r\n"] * 100)],
                [JSON_POST + b"x: ", *([b"y" * 4000] * 100)],
            ):
                status, error = error_of(await answer_to(running.port, *endless, pause_s=0.001))
                assert (status, error["code"]) == (431, "headers_too_large")
            await serves(running)

    asyncio.run(run())


def test_headers_without_an_end_behind_a_body(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=HttpOptions(max_head_bytes=20_000)) as running:
            head = JSON_POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
            status, _ = error_of(await answer_to(running.port, head, *([b"y" * 4000] * 100), pause_s=0.001))
            assert status == 431

    asyncio.run(run())


def test_a_body_of_chunks_of_one_byte(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=HttpOptions(max_head_bytes=2000)) as running:
            body = json.dumps({"prompt": "abc", "max_tokens": 3, "user": "x" * 5000}).encode()
            chunks = [b"1\r\n%c\r\n" % byte for byte in body]
            pieces = [b"".join(chunks[i : i + 500]) for i in range(0, len(chunks), 500)]
            head = JSON_POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
            answer = await answer_to(running.port, head, *pieces, b"0\r\n\r\n", pause_s=0.01)
            assert answer.startswith(b"HTTP/1.1 200")

    asyncio.run(run())


def test_a_body_that_is_too_large(http_served: Callable[..., Any]) -> None:
    options = HttpOptions(max_body_bytes=100_000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    async def run() -> None:
        async with http_served(options=options) as running:
            declared = await running.client.post("/v1/completions", content=b"x" * 200_000)
            chunked = await running.client.post(
                "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
            )
            for response in (declared, chunked):
                assert response.status_code == 413, response.text
                assert response.json()["error"]["code"] == "request_too_large"
                assert "100000" in response.json()["error"]["message"]
            await serves(running)

    asyncio.run(run())


def test_an_endless_body_is_not_kept(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=HttpOptions(max_body_bytes=1_000_000, body_s=1.0)) as running:
            tracemalloc.start()
            head = JSON_POST + b"transfer-encoding: chunked\r\n\r\n"
            chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            answer = await answer_to(running.port, head, *([chunk] * 2000), pause_s=0.001)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert answer.startswith(b"HTTP/1.1 413")
            assert peak < 20_000_000
            await serves(running)

    asyncio.run(run())


def test_bodies_have_a_limit_together(http_served: Callable[..., Any]) -> None:
    options = HttpOptions(max_body_bytes=100_000, max_bodies_bytes=150_000)

    async def run() -> None:
        async with http_served(options=options, step_s=0.05) as running:
            big = {"prompt": "abc", "max_tokens": 20, "user": "x" * 90_000}
            first = asyncio.ensure_future(running.post("/v1/completions", big))
            while not running.engine.running:
                await asyncio.sleep(0.01)
            second = await running.post("/v1/completions", big)
            assert (second.status_code, second.headers["retry-after"]) == (503, "1")
            await serves(running)
            assert (await first).status_code == 200
            assert (await running.post("/v1/completions", big)).status_code == 200

    asyncio.run(run())


def test_connections_have_a_limit(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(options=HttpOptions(max_connections=2)) as running:
            await serves(running)  # its connection stays open
            held = await asyncio.open_connection("127.0.0.1", running.port)
            status, error = error_of(await answer_to(running.port))
            assert (status, error["code"]) == (503, "unavailable")
            held[1].close()
            await asyncio.sleep(0.05)
            assert (await answer_to(running.port, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")

    asyncio.run(run())


def stuck_client(running: Any) -> socket.socket:
    """One that asks for a long stream and reads nothing of it. Little of it fits on the way."""
    running.front._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # what it accepts inherits this
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(("127.0.0.1", running.port))
    body = b'{"prompt": "abcdefgh", "max_tokens": 900000, "stream": true, "logprobs": 20}'
    stuck.sendall(JSON_POST + b"content-length: %d\r\n\r\n" % len(body) + body)
    return stuck


def test_a_reader_that_takes_nothing(http_served: Callable[..., Any]) -> None:
    """Its tokens pile up to the end of its answer and no further; then it is cut off. Others get theirs meanwhile."""

    async def run() -> None:
        async with http_served(options=QUICK, max_model_len=1_000_000, step_s=0.002) as running:
            with stuck_client(running):
                while not running.engine.running:
                    await asyncio.sleep(0.01)
                events = await running.events("/v1/completions", {"prompt": "abc", "max_tokens": 100})
                assert "".join(event["choices"][0]["text"] for event in events) == ("abc" * 34)[:100]
                async with asyncio.timeout(30):
                    while running.engine.running:
                        await asyncio.sleep(0.02)

    asyncio.run(run())


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(http_served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_served(max_model_len=1_000_000, step_s=0.002) as running:
            with stuck_client(running):
                connections = running.front._server.server_state.connections
                async with asyncio.timeout(30):
                    while not any(connection.flow.write_paused for connection in connections):
                        await asyncio.sleep(0.02)
                await asyncio.wait_for(running.front.stop(0.1), 10)
                await asyncio.sleep(0.05)
                assert not connections
                assert not running.engine.running

    asyncio.run(run())


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http(http_served: Callable[..., Any], nonsense: bytes) -> None:
    async def run() -> None:
        async with http_served(options=QUICK) as running:
            answer = await answer_to(running.port, nonsense)
            status, _ = error_of(answer)
            assert status in (400, 408), answer
            await serves(running)

    asyncio.run(run())
