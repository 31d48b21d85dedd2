"""What a launcher asks of a router: whom it has, and to drain one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import grpc

from jaxpd.errors import Unavailable
from serving.launch.reconcile import AtRouter
from serving.proto.jaxpd.v1 import worker_pb2, worker_pb2_grpc

CALL_S = 2.0


class RouterCalls(Protocol):
    """The two calls, at a control address. Both raise Unavailable where there is no answer."""

    def workers(self, address: str) -> Mapping[str, AtRouter]:
        """By the address that each worker listens on."""
        ...

    def drain(self, address: str, worker: str, draining: bool) -> None:
        """The router gives the worker at this address nothing new, or does again."""
        ...


class GrpcRouterCalls:
    """Over gRPC, a channel an address. `credentials` where the control plane speaks TLS."""

    def __init__(self, secret: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._metadata = (("x-jaxpd-cluster", secret),)
        self._credentials = credentials
        self._channels: dict[str, grpc.Channel] = {}

    def workers(self, address: str) -> Mapping[str, AtRouter]:
        """See `RouterCalls`. Of several incarnations at one address the last one that is not gone counts."""
        reply = self._call(address, "ListWorkers", worker_pb2.ListWorkersRequest())
        found: dict[str, AtRouter] = {}
        for info in reply.workers:
            known = found.get(info.address)
            if known is None or known.state == "gone":
                found[info.address] = AtRouter(state=info.state, idle=_idle(info))
        return found

    def drain(self, address: str, worker: str, draining: bool) -> None:
        """See `RouterCalls`."""
        self._call(address, "DrainWorker", worker_pb2.DrainWorkerRequest(worker=worker, draining=draining))

    def close(self) -> None:
        """Ends the connections."""
        for channel in self._channels.values():
            channel.close()

    def _call(self, address: str, method: str, request: object) -> worker_pb2.ListWorkersResponse:
        if address not in self._channels:
            for channel in self._channels.values():
                channel.close()
            if self._credentials is None:
                self._channels = {address: grpc.insecure_channel(address)}
            else:
                self._channels = {address: grpc.secure_channel(address, self._credentials)}
        stub = worker_pb2_grpc.RouterStub(self._channels[address])
        try:
            return getattr(stub, method)(request, timeout=CALL_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise Unavailable(
                f"the router at {address} does not answer: {error.code().name}, {error.details()}"
            ) from error


def _idle(info: worker_pb2.WorkerInfo) -> bool:
    """Nothing is charged to it, nothing runs in it, and nobody still fetches from it."""
    reading = info.reading
    return not (info.legs or reading.running or reading.queued or reading.staging_bytes)
