"""A worker without a model: the real service over real gRPC, whose tokens follow from a request's seed alone.

Token i of an answer is `token_of(seed, i)`, whoever makes it, so that an answer that went over three workers can be
compared with the one it should be. Prefill and decode workers of one `Wires` hand over in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from jaxpd.engine import seed_of
from jaxpd.errors import JaxpdError
from jaxpd.life import Life, Stage
from jaxpd.policies.workers import Role
from jaxpd.request import DecodeLeg, Event, FinishEvent, FinishReason, PrefillLeg, Request, TokensEvent, Usage
from jaxpd.stats import EngineStats, ReplicaStats
from meshes.transfer.identity import Identity
from serving.gateway import State
from serving.model import ServedModel
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.worker.description import Description, description_to_proto
from serving.worker.reading import Reading, reading_to_proto
from serving.worker.wire import Started, events_to_proto, start_from_proto

EOS = 256
PAGE = 4
CACHED = 4  # tokens that every prompt longer than that is said to have in the cache


def token_of(seed: int, index: int) -> int:
    """Never EOS."""
    return (seed * 7 + index * 31) % 256


def answer_of(request: Request, sample: int = 0) -> list[int]:
    """What a client of this request has to get."""
    seed = seed_of(request.params.seed or 0, sample)
    return [token_of(seed, i) for i in range(request.params.max_tokens)]


class Wires:
    """What prefill workers tell decode workers: which hand-offs have their first token."""

    def __init__(self) -> None:
        self._ready: dict[int, asyncio.Event] = {}

    def ready(self, handoff: int) -> asyncio.Event:
        return self._ready.setdefault(handoff, asyncio.Event())


@dataclasses.dataclass(eq=False)
class Running:
    """A leg that was started. `stop_at`: it makes no token from this index on until `go` is set."""

    started: Started
    task: asyncio.Task[None] | None = None
    aborted: list[int | None] = dataclasses.field(default_factory=list)


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """One worker on a free port of 127.0.0.1. What it does can be changed while it runs:

    stop_at      no token from this index on until it is raised (None: all)
    fail         what every request that starts ends with
    fail_at      (index, error): what a request ends with instead of making this token or a later one
    early        a decode worker that does not wait for the first token to be out
    prefill_s    how long a prompt takes
    mute         says nothing any more, and keeps the stream open
    """

    def __init__(self, role: Role, wires: Wires | None = None, **differs: Any) -> None:
        self.role = role
        self.wires = wires or Wires()
        self.stop_at: int | None = None
        self.fail: JaxpdError | None = None
        self.fail_at: tuple[int, JaxpdError] | None = None
        self.early = False
        self.mute = False
        self.draining = False
        self.step_s = 0.001
        self.prefill_s = 0.0
        self.port = 0
        self.described = 0
        self.secrets: set[str] = set()  # that calls came with
        self.crossed_bytes = 0
        self.running: dict[str, Running] = {}
        self.started: list[Started] = []
        self.aborts: list[tuple[str, int | None]] = []
        self._differs = differs
        self._out: list[asyncio.Queue[pb.WorkerMessage]] = []
        self._server: grpc.aio.Server | None = None
        self.instance = ""

    # -- life

    async def start(self) -> ScriptedWorker:
        """Also again, on the same port, as another instance."""
        self.instance = secrets.token_hex(4)
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"{self.address}#{self.instance}"

    async def die(self) -> None:
        """As a process that is killed: streams end, nothing is said."""
        server, self._server = self._server, None
        for running in self.running.values():
            if running.task is not None:
                running.task.cancel()
        self.running.clear()
        if server is not None:
            await server.stop(0)

    def description(self) -> Description:
        identity: dict[str, Any] = dict(
            model="abc",
            dtype="bfloat16",
            page_size=PAGE,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            lanes=128,
            streams=1,
        )
        identity |= {k: v for k, v in self._differs.items() if k in identity or k.endswith("protocol")}
        model = ServedModel(
            name="scripted",
            architecture="scripted",
            vocab_size=257,
            max_model_len=self._differs.get("max_model_len", 4096),
            eos_token_ids=(EOS,),
            dtype="float32",
            page_size=PAGE,
            meshes={self.role.value: ("1x2",)},
            tokenizer=None,
        )
        return Description(
            version="test",
            instance=self.instance,
            role=self.role,
            identity=Identity(**identity),
            model=model,
            replicas=2,
            pages=64,
            slots=8,
            queue_limit=self._differs.get("queue_limit", 64),
            page_bytes=100,
        )

    # -- the service

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        self.described += 1
        self._note_secret(context)
        return description_to_proto(self.description())

    async def SetDraining(self, request: pb.SetDrainingRequest, context: Any) -> pb.SetDrainingResponse:
        self.draining = request.draining
        self._read()
        return pb.SetDrainingResponse()

    async def Session(
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: Any
    ) -> AsyncIterator[pb.WorkerMessage]:
        self._note_secret(context)
        first = await anext(request_iterator)
        assert first.HasField("hello"), first
        out: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._out.append(out)
        listening = asyncio.create_task(self._listen(request_iterator, out))
        beating = asyncio.create_task(self._beat())
        try:
            yield pb.WorkerMessage(welcome=description_to_proto(self.description(), tokenizer=False))
            self._read()
            while True:
                yield await out.get()
        finally:
            listening.cancel()
            beating.cancel()
            self._out.remove(out)

    def _note_secret(self, context: Any) -> None:
        self.secrets |= {value for key, value in context.invocation_metadata() if key == "x-jaxpd-cluster"}

    async def _listen(self, messages: AsyncIterator[pb.RouterMessage], out: asyncio.Queue[pb.WorkerMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "start":
                    self._begin(start_from_proto(message.start, arrival_s=asyncio.get_running_loop().time()))
                case "abort":
                    sample = message.abort.sample if message.abort.HasField("sample") else None
                    self.aborts.append((message.abort.request_id, sample))
                    running = self.running.get(message.abort.request_id)
                    if running is not None:
                        running.aborted.append(sample)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self._read()

    def _read(self) -> None:
        replicas = tuple(
            ReplicaStats(
                role=self.role.value, pool=0, replica=r, free_pages=60, num_pages=64, free_slots=8, num_slots=8
            )
            for r in range(2)
        )
        stats = EngineStats(
            states={"queued": 0, "decoding": len(self.running)},
            replicas=replicas,
            staging_bytes=5,
            crossed_bytes=self.crossed_bytes,
        )
        state = State.DRAINING if self.draining else State.READY
        self._say(pb.WorkerMessage(reading=reading_to_proto(Reading(state=state, stats=stats, steps=((2, 0.01),)))))

    def _say(self, message: pb.WorkerMessage) -> None:
        if not self.mute:
            for out in self._out:
                out.put_nowait(message)

    def say(self, *events: Event) -> None:
        """One message with these events, whatever has started."""
        self._say(pb.WorkerMessage(events=events_to_proto(events)))

    # -- requests

    def _begin(self, started: Started) -> None:
        running = self.running[started.request.request_id] = Running(started)
        self.started.append(started)
        running.task = asyncio.create_task(self._serve(running))

    async def _serve(self, running: Running) -> None:
        samples = range(running.started.request.params.n)
        try:
            async with asyncio.TaskGroup() as group:
                for i in samples:
                    group.create_task(self._sample(running, i))
        finally:
            self.running.pop(running.started.request.request_id, None)

    async def _sample(self, running: Running, sample: int) -> None:
        request, leg = running.started.request, running.started.leg
        life = Life()
        life.mark(Stage.ARRIVED)
        life.mark(Stage.ADMITTED)

        def end(reason: FinishReason, made: int, error: JaxpdError | None = None) -> None:
            cached = CACHED if len(request.prompt_ids) > CACHED else 0
            usage = Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=made, cached_tokens=cached)
            self.say(
                FinishEvent(
                    request_id=request.request_id,
                    reason=reason,
                    usage=usage,
                    timings=life.timings(),
                    sample=sample,
                    error=error,
                    life=life,
                )
            )

        if self.fail is not None:
            end(FinishReason.ERROR, 0, self.fail)
            return
        seed = seed_of(request.params.seed or 0, sample)
        index, last = len(request.outputs), request.params.max_tokens
        if isinstance(leg, DecodeLeg):
            index += 1
            ready = self.wires.ready(leg.handoffs[sample])
            while not ready.is_set() and not self.early:
                if _aborted(running, sample):
                    end(FinishReason.ABORT, 0)
                    return
                await asyncio.sleep(self.step_s)
            for stage in (Stage.TRANSFERRED, Stage.ACCEPTED, Stage.DECODE_START):
                life.mark(stage)
        else:
            life.mark(Stage.PREFILL_START)
            await asyncio.sleep(self.prefill_s)
        while True:
            while self.stop_at is not None and index >= self.stop_at and not _aborted(running, sample):
                await asyncio.sleep(self.step_s)
            if _aborted(running, sample):
                end(FinishReason.ABORT, index)
                return
            if self.fail_at is not None and index >= self.fail_at[0]:
                end(FinishReason.ERROR, index, self.fail_at[1])
                return
            self.say(TokensEvent(request.request_id, index, (token_of(seed, index),), sample=sample))
            index += 1
            if index >= last:
                end(FinishReason.LENGTH, index)
                return
            if isinstance(leg, PrefillLeg):
                life.mark(Stage.OFFERED)
                life.mark(Stage.PREFILL_END)
                self.wires.ready(leg.handoffs[sample]).set()
                end(FinishReason.HANDED_OFF, index)
                return
            await asyncio.sleep(self.step_s)


def _aborted(running: Running, sample: int) -> bool:
    return None in running.aborted or sample in running.aborted


@contextlib.asynccontextmanager
async def workers(*roles: Role, wires: Wires | None = None) -> AsyncIterator[list[ScriptedWorker]]:
    """As many workers, in this order, which hand over to each other."""
    wires = wires or Wires()
    made = [await ScriptedWorker(role, wires).start() for role in roles]
    try:
        yield made
    finally:
        for worker in made:
            await worker.die()
