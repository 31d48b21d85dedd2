"""Workers with real engines and real transports, in this process: what a router gets of two that hand over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import httpx
import pytest

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.device import PoolDevice
from jaxpd.engine import Engine
from jaxpd.errors import HandoffFailed, Unavailable
from jaxpd.policies.workers import Role
from jaxpd.progress import SilentProgress
from jaxpd.remote.messages import FirstToken, Message
from jaxpd.request import DecodeLeg, FinishReason, PrefillLeg
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.worker import process
from serving.worker.config import WorkerConfig
from serving.worker.process import Ready
from tests.serving.worker.small_router import WorkerSession, hand_over

pytestmark = pytest.mark.heavy

TINY = pathlib.Path(__file__).parents[2] / "data" / "tiny" / "smollm2"
PROMPTS = json.loads((TINY / "expected.json").read_text())["prompts"]
SMALL: dict[str, Any] = {"precompile": False, "max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 4}


@dataclasses.dataclass
class Running:
    """A worker that is ready."""

    ready: Ready
    engine: Engine
    stop: asyncio.Event
    ended: asyncio.Task[None]

    @property
    def address(self) -> str:
        return self.ready.control


@contextlib.asynccontextmanager
async def worker(role: Role, mesh: str, *, peer_filter: Any = None, **more: Any) -> AsyncIterator[Running]:
    engines: list[Engine] = []
    readies: asyncio.Queue[Ready] = asyncio.Queue()
    stop = asyncio.Event()

    def make(on_events: Any) -> Engine:
        checkpoint = resolve(str(TINY), progress=SilentProgress())
        one = {"role": role.value} if role is not Role.MIXED else {"mode": "chunked"}
        engines.append(Engine(checkpoint, EngineConfig(mesh=mesh, **one, **SMALL), on_events=on_events))  # type: ignore[arg-type]
        return engines[0]

    config = WorkerConfig(role=role, **{"listen": "127.0.0.1:0", **more})
    ended = asyncio.create_task(
        process.run(make, config, on_ready=readies.put_nowait, stop=stop, peer_filter=peer_filter)
    )
    first = asyncio.create_task(readies.get())
    await asyncio.wait((ended, first), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        first.cancel()
        await ended
    running = Running(await first, engines[0], stop, ended)
    try:
        yield running
    finally:
        stop.set()
        await ended


def go(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 120)

    asyncio.run(bounded())


async def settled(*workers: Running, timeout_s: float = 10.0) -> None:
    """Nothing is in use any more."""

    def idle(running: Running) -> bool:
        stats = running.engine.stats()
        full = all(r.free_pages == r.num_pages and r.free_slots == r.num_slots for r in stats.replicas)
        return full and not stats.live and not stats.staging_bytes

    end = time.monotonic() + timeout_s
    while not all(idle(running) for running in workers):
        assert time.monotonic() < end, [running.engine.stats() for running in workers]
        await asyncio.sleep(0.02)


def test_two_workers_answer_like_one() -> None:
    async def run() -> None:
        async with (
            worker(Role.PREFILL, "2x1", port=0) as p,
            worker(Role.DECODE, "1x2", shutdown_timeout_s=20.0) as d,
            worker(Role.MIXED, "1x1") as m,
            WorkerSession(p.address) as prefill,
            WorkerSession(d.address) as decode,
            WorkerSession(m.address) as whole,
        ):
            for i, prompt in enumerate(PROMPTS):
                ids, count = prompt["prompt_ids"], len(prompt["greedy_ids"])
                if len(ids) + count > 160:
                    continue
                assert await hand_over(prefill, decode, f"r{i}", ids, max_tokens=count) == prompt["greedy_ids"]
                await whole.start(f"r{i}", ids, max_tokens=count)
                await whole.end(f"r{i}")
                assert list(whole.tokens(f"r{i}").values()) == prompt["greedy_ids"]
            ids = PROMPTS[1]["prompt_ids"]
            sampled: dict[str, Any] = dict(max_tokens=12, temperature=1.0, seed=3, n=3, logprobs=2)
            await hand_over(prefill, decode, "sampled", ids, **sampled)
            await whole.start("sampled", ids, **sampled)
            for sample in range(3):
                await asyncio.gather(decode.end("sampled", sample), whole.end("sampled", sample))
                tokens = prefill.tokens("sampled", sample) | decode.tokens("sampled", sample)
                assert tokens == whole.tokens("sampled", sample) and sorted(tokens) == list(range(12))
            await settled(p, d, m)
            assert d.ready.description.identity == dataclasses.replace(p.ready.description.identity)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{p.ready.http}") as http:
                assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200
                assert "jaxpd:kv_pages" in (await http.get("/metrics")).text
                assert (await http.get("/v1/models")).status_code == 404

    go(run())


def test_a_worker_drains_and_leaves() -> None:
    async def run() -> None:
        async with (
            worker(Role.PREFILL, "1x1") as p,
            worker(Role.DECODE, "1x1", shutdown_timeout_s=30.0) as d,
            WorkerSession(p.address) as prefill,
            WorkerSession(d.address) as decode,
        ):
            ids = PROMPTS[1]["prompt_ids"]
            asked = asyncio.create_task(hand_over(prefill, decode, "r", ids, max_tokens=100))
            await decode.until(lambda: decode.tokens("r"))
            d.stop.set()
            await decode.until(lambda: decode.readings and decode.readings[-1].state.value == "draining")
            assert len(await asked) == 100
            begun = time.monotonic()
            await d.ended
            assert time.monotonic() - begun < 5
            assert decode.status is not None and decode.status[0] is grpc.StatusCode.UNAVAILABLE
            await prefill.start("next", ids, PrefillLeg(peer=d.address, handoffs=(1,)), max_tokens=5)
            error = (await prefill.end("next")).error
            assert isinstance(error, HandoffFailed | Unavailable)
            await settled(p)

    go(run())


def test_what_does_not_drain_in_time_is_told_to_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PoolDevice.forward

    def slow(device: PoolDevice, *args: Any) -> Any:
        time.sleep(0.02)  # 140 tokens take seconds
        return forward(device, *args)

    monkeypatch.setattr(PoolDevice, "forward", slow)

    async def run() -> None:
        async with (
            worker(Role.MIXED, "1x1", shutdown_timeout_s=0.05) as m,
            WorkerSession(m.address) as session,
        ):
            await session.start("r", PROMPTS[1]["prompt_ids"], max_tokens=140)
            await session.until(lambda: session.tokens("r"))
            m.stop.set()
            end = await session.end("r")
            assert end.reason is FinishReason.ERROR and isinstance(end.error, Unavailable)
            await m.ended

    go(run())


def test_a_first_token_that_is_lost_ends_at_both_when_the_stream_does() -> None:
    lost: list[Message] = []

    def keep(message: Message, direction: str) -> list[Message]:
        if direction == "sent" and isinstance(message, FirstToken) and not lost:
            lost.append(message)
            return []
        return [message]

    async def run() -> None:
        async with (
            worker(Role.PREFILL, "1x1", peer_filter=keep) as p,
            worker(Role.DECODE, "1x1") as d,
            WorkerSession(p.address) as prefill,
            WorkerSession(d.address) as decode,
        ):
            ids = PROMPTS[1]["prompt_ids"]
            await decode.start("r", ids, DecodeLeg(handoffs=(5,)), max_tokens=9)
            await prefill.start("r", ids, PrefillLeg(peer=d.address, handoffs=(5,)), max_tokens=9)
            assert (await prefill.end("r")).reason is FinishReason.HANDED_OFF
            await decode.abort("r")
            assert (await decode.end("r")).reason is FinishReason.ABORT
            await settled(p, d)
            assert len(await hand_over(prefill, decode, "next", ids, max_tokens=9)) == 9
            assert lost

    go(run())


def test_a_router_that_is_joined_hears_the_address_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, dict[str, str]]] = []

    class Router(worker_pb2_grpc.RouterServicer):
        async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
            heard.append((request.address, dict(context.invocation_metadata() or ())))  # type: ignore[arg-type]
            return pb.JoinResponse()

    async def run() -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_RouterServicer_to_server(Router(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with worker(Role.MIXED, "1x1", routers=(f"127.0.0.1:{port}", "127.0.0.1:1")) as m:
            end = time.monotonic() + 10
            while len(heard) < 2:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert {address for address, _ in heard} == {m.address}
        await server.stop(0)

    go(run())


def test_a_port_that_is_taken_costs_no_loading() -> None:
    async def run() -> None:
        async with worker(Role.MIXED, "1x1") as m:
            port = m.address.rpartition(":")[2]
            with pytest.raises(Exception, match=f"port {port} on --listen 127.0.0.1 is in use"):
                async with worker(Role.MIXED, "1x1", listen=m.address):
                    pass

    go(run())
