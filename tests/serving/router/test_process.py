"""A router process from the outside: HTTP, gRPC and the control port over scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import grpc
import httpx
import pytest

from jaxpd.errors import FailedPrecondition, InvalidArgument
from jaxpd.policies.workers import Role
from serving.cluster import Cluster
from serving.config import Ports, ServerConfig
from serving.proto.jaxpd.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from serving.router import process
from serving.router.config import RouterConfig


class Served:
    """A router process under way in this loop."""

    def __init__(self, *, cluster: Cluster | None = None, **config: Any) -> None:
        self.stop = asyncio.Event()
        self.ready: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
        self.control = ""
        self.engine: Any = None
        router = RouterConfig(listen="127.0.0.1:0", heartbeat_timeout_s=2.0, cluster=cluster or Cluster(), **config)
        server = ServerConfig(port=0, grpc_port=0, shutdown_timeout_s=5.0)
        self.task = asyncio.create_task(
            process.run(router, server, on_listening=self._listening, on_ready=self.ready.set_result, stop=self.stop)
        )

    def _listening(self, address: str, engine: Any) -> None:
        self.control, self.engine = address, engine

    async def ports(self) -> Ports:
        both: list[asyncio.Future[Any]] = [self.ready, self.task]
        await asyncio.wait(both, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        return self.ready.result()

    @contextlib.asynccontextmanager
    async def router(self) -> AsyncIterator[worker_pb2_grpc.RouterStub]:
        async with grpc.aio.insecure_channel(self.control) as channel:
            yield worker_pb2_grpc.RouterStub(channel)


@pytest.fixture
def served() -> Callable[..., Any]:
    """`async with served(**config) as router:` a router process that is ended."""

    @contextlib.asynccontextmanager
    async def serve(**config: Any) -> AsyncIterator[Served]:
        served = Served(**config)
        try:
            yield served
        finally:
            served.stop.set()
            await asyncio.wait_for(asyncio.shield(served.task), 10)

    return serve


def test_workers_join_and_it_is_ready_when_one_of_each_role_is(
    served: Any, worker_script: ModuleType, soon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with worker_script.workers(Role.PREFILL, Role.DECODE) as (p, d), served() as router:
            await soon(lambda: router.control)
            async with router.router() as stub:
                await stub.Join(worker_pb2.JoinRequest(address=p.address))
                await stub.Join(worker_pb2.JoinRequest(address=p.address))
                await soon(lambda: "ready" in [info.state for info in router.engine.fleet.infos()])
                assert not router.ready.done() and "a decode worker" in router.engine.fleet.lacking()
                await stub.Join(worker_pb2.JoinRequest(address=d.address))
                ports = await router.ports()
                url = f"http://127.0.0.1:{ports.http}"
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.get("/health")).status_code == 200
                    body = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 5, "seed": 77, "temperature": 1.0}
                    answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["usage"]["completion_tokens"] == 5
                    info = (await client.get("/server_info")).json()
                    assert info["meshes"] == {"prefill": ["1x2"], "decode": ["1x2"]} and info["mode"] == "router"
                    metrics = (await client.get("/metrics")).text
                    assert 'jaxpd:router_workers{model_name="scripted",role="decode",state="ready"} 1.0' in metrics
                    assert 'jaxpd:router_replays_total{model_name="scripted"} 0.0' in metrics
                    assert 'jaxpd:router_legs{model_name="scripted"} 0.0' in metrics
                    assert (
                        'jaxpd:kv_pages{model_name="scripted",pool="0",replica="1",role="prefill",state="used"}'
                        in metrics
                    )
                    async with client.stream("GET", "/live") as live:
                        async for line in live.aiter_lines():
                            if line.startswith("data:"):
                                reading = json.loads(line[5:])
                                break
                    assert [pool["mesh"] for pool in reading["pools"]] == ["1x2", "1x2"]
                async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
                    control = control_pb2_grpc.ControlStub(channel)
                    server = await control.GetServerInfo(control_pb2.GetServerInfoRequest())
                    assert [(pool.role, pool.mesh) for pool in server.pools] == [("prefill", "1x2"), ("decode", "1x2")]

    caplog.set_level(logging.INFO)
    asyncio.run(run())


def test_it_is_not_ready_while_a_role_is_missing(served: Any, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with worker_script.workers(Role.PREFILL, Role.DECODE) as (p, d):
            async with served(prefill=(p.address,), decode=(d.address,)) as router:
                ports = await router.ports()
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}") as client:
                    assert (await client.get("/health")).status_code == 200
                    await d.die()
                    await soon(lambda: not router.engine.ready)
                    await asyncio.sleep(0.05)
                    health = await client.get("/health")
                    assert health.status_code == 503 and "no workers" in health.text
                    body = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 5}
                    refused = await client.post("/v1/completions", json=body)
                    assert refused.status_code == 503 and "no decode worker is ready" in refused.text
                    await d.start()
                    await soon(lambda: router.engine.ready)
                    await asyncio.sleep(0.05)
                    assert (await client.get("/health")).status_code == 200
                    assert (await client.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(run())


def test_it_can_be_stopped_while_it_waits(served: Any, soon: Any) -> None:
    async def run() -> None:
        async with served(prefill=("127.0.0.1:1",)) as router:
            await soon(lambda: router.engine is not None and router.engine.fleet.infos())
            router.stop.set()
            await asyncio.wait_for(asyncio.shield(router.task), 3)
            assert not router.ready.done()

    asyncio.run(run())


def test_it_drains_what_runs_before_it_stops(served: Any, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with worker_script.workers(Role.MIXED) as (m,), served(mixed=(m.address,)) as router:
            ports = await router.ports()
            m.stop_at = 2
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}") as client:
                body = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 5}
                asking = asyncio.create_task(client.post("/v1/completions", json=body))
                await soon(lambda: m.running)
                router.stop.set()
                await asyncio.sleep(0.1)
                assert not router.task.done()
                m.stop_at = None
                assert (await asking).json()["usage"]["completion_tokens"] == 5
                await asyncio.wait_for(asyncio.shield(router.task), 8)

    asyncio.run(run())


def test_people_see_and_drain_workers(served: Any, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with worker_script.workers(Role.PREFILL, Role.DECODE) as (p, d):
            async with served(prefill=(p.address,), decode=(d.address, "127.0.0.1:1")) as router:
                await router.ports()
                async with router.router() as stub:
                    found = (await stub.ListWorkers(worker_pb2.ListWorkersRequest())).workers
                    assert [worker.name for worker in found] == [p.name, d.name, "127.0.0.1:1"]
                    assert [worker.state for worker in found] == ["ready", "ready", "connecting"]
                    assert found[0].role == worker_pb2.WORKER_ROLE_PREFILL and list(found[0].meshes) == ["prefill=1x2"]
                    assert found[0].reading.replicas[1].num_pages == 64 and found[0].silent_s < 2
                    assert "nobody answers there" in found[2].trouble
                    answer = await stub.DrainWorker(worker_pb2.DrainWorkerRequest(worker=d.name, draining=True))
                    assert answer.worker.state == "draining" and d.draining
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.DrainWorker(worker_pb2.DrainWorkerRequest(worker="x:1", draining=True))
                    assert caught.value.code() is grpc.StatusCode.NOT_FOUND and p.name in caught.value.details()
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.Join(worker_pb2.JoinRequest(address="nonsense"))
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_the_control_port_wants_the_secret_and_workers_get_it(served: Any, worker_script: ModuleType) -> None:
    secret = "s" * 20

    async def run() -> None:
        async with worker_script.workers(Role.MIXED) as (m,):
            async with served(mixed=(m.address,), cluster=Cluster(secret=secret)) as router:
                await router.ports()
                assert m.secrets == {secret}
                async with router.router() as stub:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.ListWorkers(worker_pb2.ListWorkersRequest())
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                    metadata = Cluster(secret=secret).metadata
                    assert (await stub.ListWorkers(worker_pb2.ListWorkersRequest(), metadata=metadata)).workers

    asyncio.run(run())


def test_an_open_control_port_needs_a_secret() -> None:
    async def run() -> None:
        with pytest.raises(FailedPrecondition, match="--cluster-secret-file"):
            await process.run(RouterConfig(listen="0.0.0.0:0"), ServerConfig(port=0, grpc_port=0))

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"prefill": ("a:1", "a:1")}, "a:1 stands twice in --prefill"),
        ({"prefill": ("a:1",), "decode": ("a:1",)}, "a:1 stands in --prefill and in --decode"),
        ({"mixed": ("a",)}, "--mixed a must be HOST:PORT"),
        ({"listen": "x"}, "--listen x must be HOST:PORT"),
        ({"prefill_policy": "best"}, "--prefill-policy best does not exist; choose one of random"),
        ({"max_tries": 0}, "--max-tries 0 must be at least 1"),
        ({"max_migrations": -1}, "--max-migrations -1 must be at least 0"),
        ({"heartbeat_timeout_s": 1.0}, "--heartbeat-timeout 1 must be at least 2 seconds"),
        ({"ttft_slo_s": 1.0}, "--ttft-slo refuses what --prefill-policy ttft_estimate expects"),
        ({"tpot_slo_s": 0.0, "decode_policy": "ttft_estimate"}, "--tpot-slo 0 s must be more than 0"),
    ],
)
def test_wrong_settings_name_the_flag_the_value_and_the_cure(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RouterConfig(**fields)
    assert words in caught.value.message
