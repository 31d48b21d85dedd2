"""One router process: the control port, and a server whose engine is the workers.

    bind -> live, workers may join -> enough workers -> ready <-> not ready -> signal -> drain -> stop

The control port is bound first, so that workers may join while the router waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from serving import server
from serving.cluster import check_exposed
from serving.config import Ports, ServerConfig
from serving.control_port import ControlPort
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.router.config import RouterConfig
from serving.router.counts import RouterFamilies
from serving.router.engine import RouterEngine
from serving.router.service import SERVICE, RouterServicer

logger = logging.getLogger(__name__)

LAST_CALLS_S = 1.0


class _NoRequests:
    """Calls of the control port are no requests of clients: no id is in use."""

    def in_use(self, request_id: str) -> bool:
        return False


async def run(
    config: RouterConfig,
    server_config: ServerConfig,
    *,
    on_listening: Callable[[str, RouterEngine], None] | None = None,
    on_ready: Callable[[Ports], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Routes until a signal or until `stop` is set, then drains like any server (`serving.server.serve`).

    `on_listening` is called with the address of the control port, while workers are waited for. Raises JaxpdError when
    a port cannot be had.
    """
    check_exposed(config.listen, config.cluster, insecure=config.insecure_cluster)
    engine = RouterEngine(
        config,
        loop=asyncio.get_running_loop(),
        channel=config.cluster.channel,
        metadata=config.cluster.metadata,
    )
    control = ControlPort(
        lambda grpc_server: worker_pb2_grpc.add_RouterServicer_to_server(RouterServicer(engine), grpc_server),
        SERVICE,
        _NoRequests(),
        config.cluster,
    )
    address = control.bind(config.listen)
    await control.start()
    await control.set_ready(True)
    logger.info("control on %s", address)

    def make_engine(on_events: server.OnEvents) -> RouterEngine:
        engine.on_events = on_events
        return engine

    try:
        if on_listening is not None:
            on_listening(address, engine)
        await server.serve(
            make_engine,
            server_config,
            describe=RouterEngine.served_model,
            collectors=(RouterFamilies(engine.numbers),),
            on_ready=on_ready,
            stop=stop,
        )
    finally:
        await engine.aclose()
        await control.stop(LAST_CALLS_S)
