"""One worker process: from the bound port to the last event.

    bind -> live, joining -> (engine starts in a thread) -> ready -> signal -> not ready -> drain -> close -> return

It is like `serving.server`, with routers for clients. What is drained: legs that run end here, and so do hand-offs that
the decode workers still fetch. What is left after the time is told to its routers, and goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING

from jaxpd.policies.workers import Role
from meshes.transfer.remote import RemoteTransport
from serving.cluster import split_address
from serving.control_port import ControlPort
from serving.logs import RequestLog
from serving.metrics import Metrics
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.server import LAST_MESSAGES_S, Front, MakeEngine, leave_at_once, start_in_thread, stop_on_signals
from serving.worker.config import WorkerConfig
from serving.worker.describing import describe, peer_settings
from serving.worker.description import Description
from serving.worker.joining import join
from serving.worker.peer_stream import PeerFilter
from serving.worker.peers import MakeTransport, Peers
from serving.worker.service import SERVICE, WorkerServicer
from serving.worker.worker import Worker

if TYPE_CHECKING:
    from jaxpd.engine import Engine

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """Where a worker is reached, and what it is. `http` is None where that port is not opened."""

    control: str  # HOST:PORT
    http: int | None
    description: Description


async def run(
    make_engine: MakeEngine,
    config: WorkerConfig,
    *,
    on_ready: Callable[[Ready], None] | None = None,
    stop: asyncio.Event | None = None,
    peer_filter: PeerFilter | None = None,
) -> None:
    """Works until a signal or until `stop` is set, then drains for at most `shutdown_timeout_s` seconds.

    `make_engine` is called in a thread with the function that takes the engine's events, and the engine is started
    there. With `stop` given no signal is touched. `peer_filter` is for tests of faults. Raises JaxpdError when a port
    cannot be had or the engine cannot start.
    """
    metrics = Metrics()
    worker = Worker(config.role, silence_s=config.heartbeat_timeout_s, observers=(metrics, RequestLog()))
    metrics.attach(worker)
    servicer = WorkerServicer(worker)
    add = functools.partial(worker_pb2_grpc.add_WorkerServicer_to_server, servicer)
    control = ControlPort(add, SERVICE, worker, config.cluster)
    address = control.bind(config.listen)
    fronts: list[Front] = [control]
    http: int | None = None
    if config.port is not None:
        front, http = _http(worker, config, metrics)
        fronts.append(front)
    for each in fronts:
        await each.start()
    stopping = stop if stop is not None else stop_on_signals()
    starting = start_in_thread(make_engine, worker.on_events)
    interrupted = asyncio.ensure_future(stopping.wait())
    joining = _started(join(router, address, config.cluster) for router in config.routers)
    beating: list[asyncio.Future[None]] = []
    try:
        await asyncio.wait((starting, interrupted), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await _stop_all(fronts, 0)
            if stop is None:
                leave_at_once()
            engine = await starting
            await asyncio.to_thread(engine.close)
            return
        engine = await starting
        try:
            description = await asyncio.to_thread(describe, engine, config, secrets.token_hex(8))
            peers = servicer.peers = _peers(engine, config, description, peer_filter)
            worker.open(engine, description, peers)
            beating += _started([worker.beat(), *([] if peers is None else [peers.beat()])])
            for each in fronts:
                await each.set_ready(True)
            if on_ready is not None:
                on_ready(Ready(control=address, http=http, description=description))
            await interrupted
            await _ended(joining)  # or a router would come back to a worker that leaves
            await _drain(worker, peers, fronts, engine, config.shutdown_timeout_s)
        finally:
            await asyncio.to_thread(engine.close)
    finally:
        interrupted.cancel()
        await _ended(joining + beating)
        await _stop_all(fronts, 0)
        metrics.close()


def _http(worker: Worker, config: WorkerConfig, metrics: Metrics) -> tuple[Front, int]:
    """Probes and metrics. Raises JaxpdError where the port cannot be had."""
    from serving.http.app import make_system_app
    from serving.http.front import HttpFront

    assert config.port is not None
    tls = config.cluster.tls  # but those who probe and scrape have no certificate of the cluster
    tls = None if tls is None else dataclasses.replace(tls, ca_certs=None)
    front = HttpFront(worker, tls=tls, metrics_render=metrics.render, make=make_system_app)
    host, _ = split_address(config.listen, "--listen")
    return front, front.bind(host, config.port)


def _peers(
    engine: Engine, config: WorkerConfig, description: Description, peer_filter: PeerFilter | None
) -> Peers | None:
    if config.role is Role.MIXED:
        return None
    make_transport: MakeTransport = RemoteTransport
    if engine.followers is not None:
        make_transport = functools.partial(engine.followers.transport, streams=config.transfer_streams)
    settings = peer_settings(engine, config, description, peer_filter)
    peers = Peers(settings, engine.side, make_transport=make_transport)
    if config.role is Role.PREFILL:
        engine.side.want = peers.want  # type: ignore[attr-defined]
    return peers


async def _drain(worker: Worker, peers: Peers | None, fronts: list[Front], engine: Engine, timeout_s: float) -> None:
    """Lets what runs finish, ends what is left after `timeout_s`, and closes the ports."""
    end_s = time.monotonic() + timeout_s
    for front in fronts:
        await front.set_ready(False)
    worker.close_doors()
    if not await asyncio.to_thread(engine.drain, timeout_s):
        logger.warning("still running after %.0f s (--shutdown-timeout); routers send the rest elsewhere", timeout_s)
        worker.abort_all()
        await asyncio.to_thread(engine.drain, LAST_MESSAGES_S)
    if peers is not None:
        await peers.fetched(max(end_s - time.monotonic(), 0.0))
    await worker.flush(LAST_MESSAGES_S)
    worker.end_sessions("the worker has shut down; ask another one")
    if peers is not None:
        await peers.close()
    await _stop_all(fronts, LAST_MESSAGES_S)


def _started(works: Iterable[Coroutine[None, None, None]]) -> list[asyncio.Future[None]]:
    """What goes on beside the rest."""
    tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(work) for work in works]
    for task in tasks:
        task.add_done_callback(_say_if_failed)
    return tasks


async def _ended(tasks: list[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _say_if_failed(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task of the worker has ended", exc_info=error)


async def _stop_all(fronts: list[Front], grace_s: float) -> None:
    await asyncio.gather(*(front.stop(grace_s) for front in fronts))
