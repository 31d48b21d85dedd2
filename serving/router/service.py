"""jaxpd.v1.Router: how workers come to a router, and how people see and move them."""

from __future__ import annotations

import grpc

from jaxpd.errors import InvalidArgument
from jaxpd.policies.workers import Leg
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.router.config import check_address
from serving.router.engine import RouterEngine
from serving.router.fleet import Info
from serving.wire import refuse_unknown_fields
from serving.worker.description import ROLES
from serving.worker.reading import reading_to_proto

SERVICE = pb.DESCRIPTOR.services_by_name["Router"].full_name


class RouterServicer(worker_pb2_grpc.RouterServicer):
    """The service of one router, on its event loop."""

    def __init__(self, engine: RouterEngine) -> None:
        self._engine = engine

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
        """Dials the worker from now on; it comes to serve when the session to it stands."""
        refuse_unknown_fields(request)
        check_address(request.address, "address")
        self._engine.fleet.add(request.address, role=None, flag="Router.Join")
        return pb.JoinResponse()

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListWorkersResponse:
        """All that are listed or have joined."""
        refuse_unknown_fields(request)
        return pb.ListWorkersResponse(workers=[self._info(info) for info in self._engine.fleet.infos()])

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainWorkerResponse:
        """Gives a worker nothing new, or something again. Raises NotFound, Unavailable, FailedPrecondition."""
        refuse_unknown_fields(request)
        if not request.worker:
            raise InvalidArgument("worker is missing; give its name or its address", field="worker")
        member = await self._engine.fleet.hold(request.worker, request.draining)
        info = next(info for info in self._engine.fleet.infos() if info.address == member.session.address)
        return pb.DrainWorkerResponse(worker=self._info(info))

    def _info(self, info: Info) -> pb.WorkerInfo:
        ledger = self._engine.roster.ledger
        return pb.WorkerInfo(
            name=info.name,
            address=info.address,
            role=pb.WORKER_ROLE_UNSPECIFIED if info.role is None else ROLES[info.role],
            state=info.state,
            meshes=info.meshes,
            reading=None if info.reading is None else reading_to_proto(info.reading),
            silent_s=info.silent_s,
            trouble=info.trouble,
            legs=sum(ledger.legs(info.name, leg) for leg in Leg),
        )
