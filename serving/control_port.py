"""The port at which a worker or a router is reached by the others of its cluster: gRPC with health, secret and TLS.

bind -> start (live, not ready) -> set_ready(True) -> set_ready(False) -> stop
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2_grpc

from serving.cluster import MAX_MESSAGE_BYTES, Cluster, SecretInterceptor, join_address, split_address
from serving.grpc_server import OPTIONS
from serving.health import Health
from serving.interceptors import Requests, StatusInterceptor
from serving.ports import addresses, bind_error

SERVER_OPTIONS = (
    *OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


class ControlPort:
    """One gRPC server; made, bound, started and stopped on one event loop. `add` adds the servicer of `service`.

    Health: "" is liveness, `service` is readiness.
    """

    def __init__(
        self, add: Callable[[grpc.aio.Server], None], service: str, requests: Requests, cluster: Cluster
    ) -> None:
        self._service = service
        self._credentials = cluster.server_credentials()
        self._health = Health({"": True, service: False})
        interceptors = (StatusInterceptor(requests), SecretInterceptor(cluster.secret))
        options = tuple(dict(SERVER_OPTIONS).items())
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def bind(self, listen: str, flag: str = "--listen") -> str:
        """Takes HOST:PORT (port 0: any free one) and returns it with its real port.

        Raises InvalidArgument or FailedPrecondition for one that cannot be had, naming `flag`.
        """
        host, port = split_address(listen, flag)
        for address in addresses(host, flag):
            try:
                if self._credentials is None:
                    port = self._server.add_insecure_port(f"{address}:{port}")
                else:
                    port = self._server.add_secure_port(f"{address}:{port}", self._credentials)
            except RuntimeError:
                raise bind_error(host, address.strip("[]"), port, "port", host_flag=flag) from None
        return join_address(host, port)

    async def start(self) -> None:
        """Starts to answer: live, not ready."""
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """What the health check of the service says."""
        await self._health.set(self._service, ready)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and gives running ones `grace_s` seconds before it cancels them."""
        await self._health.close()
        await self._server.stop(grace_s)
