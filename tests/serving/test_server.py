"""The life of a server process: early bind, start, ready, drain, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest

from jaxpd.errors import FailedPrecondition, Unavailable
from jaxpd.request import FinishReason
from serving import server
from serving.client import AsyncClient, Client
from serving.config import ServerConfig
from serving.messages import Finished, GenerateRequest, Tokens
from serving.proto.jaxpd.v1 import control_pb2
from serving.server import serve

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
LONG = GenerateRequest(text="abc", max_tokens=60)


@pytest.fixture
def scripted_model(scripted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "served_model", lambda engine: scripted.served_model(scripted.byte_tokenizer()))


@contextlib.asynccontextmanager
async def serving(make: Callable[..., Any], **options: Any) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task]]:
    """A running `serve`: (address, the event that stops it, its task)."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = ServerConfig(port=None, grpc_port=0, **options)
    task = asyncio.create_task(serve(make, config, stop=stop, on_ready=ready.set_result))
    ports = await asyncio.wait_for(ready, 10)
    yield f"127.0.0.1:{ports.grpc}", stop, task
    stop.set()
    await asyncio.wait_for(task, 10)


def test_drain_lets_running_answers_finish(scripted: ModuleType, scripted_model: None) -> None:
    engines = []

    def make(on_events: Any) -> Any:
        engines.append(scripted.ScriptedEngine(on_events, step_s=0.01))
        return engines[0]

    async def run() -> None:
        async with serving(make, shutdown_timeout_s=10) as (address, stop, task), AsyncClient(address) as client:
            answers = [asyncio.create_task(client.generate(LONG)) for _ in range(8)]
            while engines[0].running < 8:
                await asyncio.sleep(0.01)
            stop.set()
            await asyncio.sleep(0.05)
            with pytest.raises(Unavailable, match="shutting down"):
                await client.generate(LONG)
            assert (await client.server_info()).state == control_pb2.SERVER_STATE_DRAINING
            assert engines[0].draining
            done = await asyncio.gather(*answers)
            assert {a.text for a in done} == {"abc" * 20} and {a.finish_reason for a in done} == {FinishReason.LENGTH}
            began = time.monotonic()
            await asyncio.wait_for(task, 5)
            assert time.monotonic() - began < 2, "it ends when the last answer has, not after the time-out"
        assert engines[0].closed

    asyncio.run(run())


def test_what_still_runs_at_the_timeout_is_aborted_and_says_so(scripted: ModuleType, scripted_model: None) -> None:
    async def run() -> None:
        def make(on_events: Any) -> Any:
            return scripted.ScriptedEngine(on_events, step_s=0.01)

        async with serving(make, shutdown_timeout_s=0.3) as (address, stop, task), AsyncClient(address) as client:
            stream = client.stream(GenerateRequest(text="abc", max_tokens=4000))
            got = [await anext(stream), await anext(stream)]
            stop.set()
            got += [message async for message in stream]
            assert isinstance(got[-1], Finished) and got[-1].reason is FinishReason.ABORT
            assert sum(m.count for m in got if isinstance(m, Tokens)) == got[-1].usage.completion_tokens > 0
            await asyncio.wait_for(task, 3)

    asyncio.run(run())


def test_live_before_ready_and_a_failing_start_ends_it(scripted: ModuleType) -> None:
    def make(on_events: Any) -> Any:
        time.sleep(0.3)
        raise FailedPrecondition("--kv-memory 1 does not hold one sequence")

    async def run() -> None:
        with contextlib.closing(__import__("socket").create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        task = asyncio.create_task(serve(make, ServerConfig(port=None, grpc_port=port), stop=asyncio.Event()))
        await asyncio.sleep(0.1)
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            assert (await client.server_info()).state == control_pb2.SERVER_STATE_STARTING
            with pytest.raises(Unavailable, match="the server is starting"):
                await client.generate(LONG)
        with pytest.raises(FailedPrecondition, match="--kv-memory"):
            await task

    asyncio.run(run())


def test_a_port_in_use_costs_no_loading(scripted: ModuleType, scripted_model: None) -> None:
    async def run() -> None:
        made: list[object] = []
        async with serving(scripted.ScriptedEngine) as (address, _, _):
            port = int(address.rpartition(":")[2])
            with pytest.raises(FailedPrecondition, match=f"--grpc-port {port} on --host 127.0.0.1 is in use"):
                config = ServerConfig(port=None, grpc_port=port)
                await serve(made.append, config, stop=asyncio.Event())  # type: ignore[arg-type,type-var]
        assert made == []

    asyncio.run(run())


PROGRAM = """
    import asyncio, importlib.util, sys
    spec = importlib.util.spec_from_file_location("scripted_engine", sys.argv[1])
    scripted = sys.modules["scripted_engine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scripted)
    from serving import server
    server.served_model = lambda engine: scripted.served_model(scripted.byte_tokenizer())
    def make(on_events):
        print("making", flush=True)
        return scripted.ScriptedEngine(on_events, step_s=0.02, start_s=float(sys.argv[2]))
    config = server.ServerConfig(port=0, grpc_port=0, shutdown_timeout_s=20)
    said = lambda ports: print(ports.grpc, ports.http, flush=True)
    asyncio.run(server.serve(make, config, on_ready=said))
    print("end", flush=True)
"""


@contextlib.contextmanager
def process(start_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """A server process that has printed its first line."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(HERE / "scripted_engine.py"), str(start_s)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "making\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_drains_and_exits_with_0(number: int) -> None:
    with process() as child:
        assert child.stdout is not None
        with Client(f"127.0.0.1:{int(child.stdout.readline().split()[0])}") as client:
            stream = client.stream(LONG)
            got = [next(stream), next(stream)]
            child.send_signal(number)
            got += list(stream)
        finished = got[-1]
        assert isinstance(finished, Finished) and finished.reason is FinishReason.LENGTH
        assert sum(m.count for m in got if isinstance(m, Tokens)) == 60
        assert child.stdout.read() == "end\n"
        assert child.wait(10) == 0


@pytest.mark.parametrize("streams", [16])
def test_sigterm_under_load_over_http(streams: int) -> None:
    """Running answers finish, health turns, new work is refused with 503, and the process ends with 0."""
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "stream": True}
    with process() as child:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{child.stdout.readline().split()[1]}"

        async def run() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                begun = asyncio.Semaphore(0)

                async def ask() -> str:
                    said = ""
                    async with client.stream("POST", "/v1/completions", json=body) as reply:
                        async for line in reply.aiter_lines():
                            if line.startswith("data: {"):
                                begun.release()
                                said += json.loads(line[6:])["choices"][0]["text"]
                            elif line == "data: [DONE]":
                                return said
                    raise AssertionError("the stream broke off")

                assert (await client.get("/health")).status_code == 200
                asking = [asyncio.create_task(ask()) for _ in range(streams)]
                for _ in range(streams):
                    await begun.acquire()
                child.send_signal(signal.SIGTERM)
                while (await client.get("/health")).status_code == 200:
                    await asyncio.sleep(0.01)
                refused = await client.post("/v1/completions", json=body)
                assert refused.status_code == 503 and "retry-after" in refused.headers
                assert "shutting down" in refused.json()["error"]["message"]
                assert await asyncio.gather(*asking) == ["abc" * 20] * streams

        asyncio.run(run())
        assert child.stdout.read() == "end\n"
        assert child.wait(10) == 0


def test_second_signal_ends_at_once() -> None:
    with process() as child:
        assert child.stdout is not None
        with Client(f"127.0.0.1:{int(child.stdout.readline().split()[0])}") as client:
            stream = client.stream(GenerateRequest(text="abc", max_tokens=4000))
            next(stream)
            child.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert child.poll() is None, "the first one drains"
            child.send_signal(signal.SIGTERM)
            assert child.wait(2) == -signal.SIGTERM
            with pytest.raises(Unavailable):
                list(stream)


def test_signal_while_starting_ends_at_once() -> None:
    with process(start_s=30) as child:
        time.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        assert child.wait(3) == 0
