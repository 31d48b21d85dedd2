"""What a launcher asks of a router: whom it has, and to drain one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import grpc

from jaxpd.errors import Unavailable
from serving.channel import Way
from serving.cluster import Cluster
from serving.launch.reconcile import AtRouter
from serving.launch.spec import ClusterSpec
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
    """Over gRPC, a channel an address."""

    def __init__(self, spec: ClusterSpec, secret: str) -> None:
        self._cluster = Cluster(secret=secret)
        self._files: dict[str, Any] = {
            "certfile": spec.ssl_certfile,
            "keyfile": spec.ssl_keyfile,
            "ca_certs": spec.ssl_ca_certs,
        }
        self._channel: tuple[str, grpc.Channel] | None = None

    def workers(self, address: str) -> Mapping[str, AtRouter]:
        """See `RouterCalls`. Of several incarnations at one address the last one that is not gone counts."""
        found: dict[str, AtRouter] = {}
        for info in self._call(address, "ListWorkers", worker_pb2.ListWorkersRequest()).workers:
            known = found.get(info.address)
            if known is None or known.state == "gone":
                found[info.address] = AtRouter(state=info.state, idle=_idle(info))
        return found

    def drain(self, address: str, worker: str, draining: bool) -> None:
        """See `RouterCalls`."""
        self._call(address, "DrainWorker", worker_pb2.DrainWorkerRequest(worker=worker, draining=draining))

    def close(self) -> None:
        """Ends the connection."""
        if self._channel is not None:
            self._channel[1].close()

    def _call(self, address: str, method: str, request: object) -> Any:
        if self._channel is None or self._channel[0] != address:
            self.close()
            self._channel = address, Way(server=address, **self._files).channel()
        stub = worker_pb2_grpc.RouterStub(self._channel[1])
        try:
            return getattr(stub, method)(request, timeout=CALL_S, metadata=self._cluster.metadata)
        except grpc.RpcError as error:
            raise Unavailable(f"the router at {address}: {error.code().name}, {error.details()}") from error


def _idle(info: worker_pb2.WorkerInfo) -> bool:
    """Nothing is charged to it, nothing runs in it, and nobody still fetches from it."""
    reading = info.reading
    return not (info.legs or reading.running or reading.queued or reading.staging_bytes)
