"""Both clients against a scripted server, and what they say when there is none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpd.errors import FailedPrecondition, Internal, InvalidArgument, ResourceExhausted, Unavailable
from jaxpd.request import FinishReason, Usage
from serving.client import MAX_MESSAGE_BYTES, AsyncClient, Client
from serving.messages import Finished, GenerateRequest, Tokens, Understood

Served = Callable[..., Any]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def blocking(served: Served, work: Callable[[Client, Any], None], **options: Any) -> None:
    """Runs `work` with a blocking client in a thread, the server on the loop."""

    async def run() -> None:
        async with served(**options) as running:
            with Client(running.address) as client:
                await asyncio.to_thread(work, client, running)

    asyncio.run(run())


def test_blocking_client(served: Served) -> None:
    def work(client: Client, running: Any) -> None:
        answer = client.generate(GenerateRequest(text="abc", max_tokens=4, want_prompt_ids=True, request_id="me"))
        assert answer.token_ids == (97, 98, 99, 97) and answer.text == "abca"
        assert answer.finish_reason is FinishReason.LENGTH and answer.error is None
        assert answer.usage == Usage(prompt_tokens=3, completion_tokens=4) and answer.timings.prefill_s == 0.5
        assert answer.understood.request_id == "me" and answer.understood.prompt_ids == (97, 98, 99)
        messages = list(client.stream(GenerateRequest(token_ids=(97,), max_tokens=2)))
        assert isinstance(messages[0], Understood) and isinstance(messages[-1], Finished)
        assert "".join(m.text or "" for m in messages if isinstance(m, Tokens)) == "aa"
        assert client.model_info().name == "bytes" and client.server_info().version
        assert client.abort("me") is False

    blocking(served, work)


def test_async_client(served: Served) -> None:
    async def run() -> None:
        async with served() as running, AsyncClient(running.address) as client:
            asked = [GenerateRequest(text=chr(97 + i) * 3, max_tokens=5) for i in range(20)]
            answers = await asyncio.gather(*(client.generate(request) for request in asked))
            assert [a.text for a in answers] == [chr(97 + i) * 5 for i in range(20)]
            messages = [m async for m in client.stream(GenerateRequest(chat=({"role": "user", "content": "hi"},)))]
            assert isinstance(messages[0], Understood) and messages[0].prompt_tokens == len("user:hi;")
            assert (await client.model_info()).name == "bytes" and (await client.server_info()).version
            assert await client.abort("nobody") is False

    asyncio.run(run())


def test_leaving_a_stream_early_frees_the_request(served: Served) -> None:
    long = GenerateRequest(text="abc", max_tokens=4000)

    def gone(running: Any) -> bool:
        for _ in range(200):
            if running.engine.running == 0:
                return True
            time.sleep(0.01)
        return False

    def work(client: Client, running: Any) -> None:
        for message in client.stream(long):
            if isinstance(message, Tokens):
                break
        assert gone(running)
        with contextlib.closing(client.stream(long)) as stream, contextlib.suppress(KeyboardInterrupt):
            next(stream)
            raise KeyboardInterrupt
        assert gone(running) and len(running.engine.aborts) == 2

    blocking(served, work, step_s=0.002)

    async def run() -> None:
        async with served(step_s=0.002) as running, AsyncClient(running.address) as client:
            async with contextlib.aclosing(client.stream(long)) as stream:
                await anext(stream)
            assert await asyncio.to_thread(gone, running)
            task = asyncio.create_task(client.generate(long))
            while running.engine.running == 0:
                await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(gone, running)

    asyncio.run(run())


def test_errors_come_back_as_they_were(served: Served) -> None:
    def work(client: Client, running: Any) -> None:
        with pytest.raises(InvalidArgument, match="max_tokens=0 must be at least 1"):
            client.generate(GenerateRequest(text="a", max_tokens=0))
        with pytest.raises(InvalidArgument, match="temperature=-1.0"):
            next(client.stream(GenerateRequest(text="a", temperature=-1.0)))
        with pytest.raises(Internal, match=r"the KV hand-off failed \(request r1\)"):
            client.generate(GenerateRequest(text="!a", request_id="r1"))
        got = []
        with pytest.raises(Internal, match="hand-off failed"):
            for message in client.stream(GenerateRequest(text="!a")):
                got.append(message)
        assert isinstance(got[-1], Finished) and got[-1].reason is FinishReason.ERROR
        running.engine.max_queued = 0
        with pytest.raises(ResourceExhausted, match="wait already") as caught:
            client.generate(GenerateRequest(text="a"))
        assert caught.value.retry_after_s == 2.5
        with pytest.raises(InvalidArgument, match=f"one message of {MAX_MESSAGE_BYTES} bytes"):
            client.generate(GenerateRequest(text="a" * (MAX_MESSAGE_BYTES + 1)))

    blocking(served, work, fail_with=Internal("the KV hand-off failed"))


def test_timeout(served: Served) -> None:
    async def run() -> None:
        async with served(step_s=0.01) as running, AsyncClient(running.address, timeout_s=0.2) as client:
            with pytest.raises(Unavailable, match="did not finish within the time-out"):
                await client.generate(GenerateRequest(text="abc", max_tokens=4000))

    asyncio.run(run())


def test_nobody_there() -> None:
    port = free_port()
    advice = rf"no jaxpd server answers at 127.0.0.1:{port} .*jaxpd serve --grpc-port {port}"
    with Client(f"127.0.0.1:{port}") as client:
        for call in (
            lambda: client.generate(GenerateRequest(text="a")),
            lambda: list(client.stream(GenerateRequest(text="a"))),
            client.server_info,
        ):
            with pytest.raises(Unavailable, match=advice):
                call()

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(Unavailable, match=advice):
                await client.generate(GenerateRequest(text="a"))

    asyncio.run(run())


def test_another_kind_of_server() -> None:
    """A gRPC server without jaxpd's services."""

    async def run() -> None:
        import grpc

        other = grpc.aio.server()
        port = other.add_insecure_port("127.0.0.1:0")
        await other.start()
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(FailedPrecondition, match="is no jaxpd server"):
                await client.generate(GenerateRequest(text="a"))
        await other.stop(0)

    asyncio.run(run())


@pytest.mark.parametrize("server", ["", "host", "host:", ":50051", "host:0", "host:65536", "host:x", "host:-1"])
def test_bad_address(server: str) -> None:
    with pytest.raises(InvalidArgument, match="--server .* must be HOST:PORT"):
        Client(server)


def test_generator_type_is_closed_by_garbage(served: Served) -> None:
    """A stream that is dropped without a word is cancelled as well."""

    def work(client: Client, running: Any) -> None:
        stream: Iterator[Any] | None = client.stream(GenerateRequest(text="abc", max_tokens=4000))
        assert stream is not None
        next(stream)
        stream = None
        deadline = time.monotonic() + 2
        while running.engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert running.engine.running == 0

    blocking(served, work, step_s=0.002)
