"""grpc.health.v1: "" is liveness, a service's name is readiness.

The servicer that comes with grpcio-health-checking loses the watchers of a service when one of them leaves, and keeps
`Server.stop` waiting for those that stay; this one does neither.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxpd.errors import NotFound


class Health(health_pb2_grpc.HealthServicer):
    """States of named services; every name must be known from the start."""

    def __init__(self, services: dict[str, bool]) -> None:
        self._serving = dict(services)
        self._changed = asyncio.Condition()
        self._closed = False

    async def set(self, service: str, serving: bool) -> None:
        """Changes one state and tells the watchers."""
        async with self._changed:
            self._serving[service] = serving
            self._changed.notify_all()

    async def close(self) -> None:
        """Ends all watches."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _status(self, service: str) -> int:
        if service not in self._serving:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        serving = self._serving[service]
        return health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state now; NOT_FOUND for an unknown service, as the protocol wants it."""
        if request.service not in self._serving:
            known = ", ".join(repr(name) for name in sorted(self._serving))
            raise NotFound(f"unknown service; known are {known}", field="service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """The state now and after each change, until the client leaves or the server stops."""
        last: int | None = None
        while not self._closed:
            status = self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            async with self._changed:
                while not self._closed and self._status(request.service) == last:
                    await self._changed.wait()
