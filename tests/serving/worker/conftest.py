"""Fixtures of the workers' tests: a worker on a scripted engine, at a free port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import pytest

from jaxpd.policies.workers import Role
from meshes.transfer.identity import Identity
from serving.cluster import Cluster
from serving.control_port import ControlPort
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.worker.description import Description
from serving.worker.service import SERVICE, WorkerServicer
from serving.worker.worker import Worker

IDENTITY = Identity("hash", "float32", 16, 2, 4, 2, 128, 1)


@dataclasses.dataclass
class Working:
    """A worker that takes requests."""

    address: str
    worker: Worker
    servicer: WorkerServicer
    port: ControlPort
    engine: Any


@pytest.fixture
def working(scripted: ModuleType) -> Callable[..., Any]:
    """`async with working(**options) as w:` a ready worker. `beat_s` makes a second shorter."""

    @contextlib.asynccontextmanager
    async def work(
        *,
        role: Role = Role.MIXED,
        cluster: Cluster | None = None,
        beat_s: float = 0.05,
        silence_s: float = 5.0,
        opened: bool = True,
        **options: Any,
    ) -> AsyncIterator[Working]:
        worker = Worker(role, silence_s=silence_s, beat_s=beat_s)
        servicer = WorkerServicer(worker)
        add = functools.partial(worker_pb2_grpc.add_WorkerServicer_to_server, servicer)
        port = ControlPort(add, SERVICE, worker, cluster or Cluster())
        address = port.bind("127.0.0.1:0")
        await port.start()
        engine = scripted.ScriptedEngine(worker.on_events, **options)
        engine.start()
        description = Description(
            version="1",
            instance="me",
            role=role,
            identity=IDENTITY,
            model=scripted.served_model(scripted.byte_tokenizer()),
            replicas=2,
            pages=9,
            slots=1,
            queue_limit=64,
            page_bytes=1024,
        )
        if opened:
            worker.open(engine, description)
            await port.set_ready(True)
        beating = asyncio.create_task(worker.beat())
        try:
            yield Working(address, worker, servicer, port, engine)
        finally:
            beating.cancel()
            await port.stop(0)
            engine.close()

    return work
