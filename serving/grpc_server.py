"""The gRPC front: services, health, reflection and the port. `interceptors` is what every call passes on its way in.

Each call is one task. A client that cancels, leaves or runs into its deadline ends that task with CancelledError,
wherever it waits; the gateway's stream is closed on the way out, and that aborts the request. The streaming handler
writes to the context itself and is no generator, because a generator that is cancelled while its message is being
written is closed by the garbage collector, some time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from serving.callers import Keys
from serving.control import ControlServicer
from serving.gateway import Gateway
from serving.health import Health
from serving.interceptors import CallerInterceptor, StatusInterceptor, this_call
from serving.messages import Finished
from serving.open_inference import OpenInferenceServicer
from serving.ports import addresses, bind_error, check_port
from serving.proto.jaxpd.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from serving.proto.open_inference import open_inference_pb2, open_inference_pb2_grpc
from serving.tls import Tls
from serving.wire import request_from_proto
from serving.wire_answers import answer_to_proto, message_to_proto

MAX_MESSAGE_BYTES = 16 * 2**20  # about 5.6 million token ids

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
OPEN_INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
READINESS = (SERVICE, OPEN_INFERENCE)

OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server on the same port starts in silence and gets half the calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A long prefill sends nothing. By default a client that pings meanwhile is cut off for "too many pings" after four.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Our own pings find clients that vanished without a word, so that their requests are aborted.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class GrpcFront:
    """One gRPC server over one gateway; made, bound, started and stopped on one event loop."""

    def __init__(self, gateway: Gateway, *, keys: Keys | None = None, tls: Tls | None = None) -> None:
        self._health = Health({"": True} | dict.fromkeys(READINESS, False))
        self._credentials = None if tls is None else tls.grpc_credentials()
        interceptors = (StatusInterceptor(gateway), CallerInterceptor(keys or Keys({})))
        self._server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(gateway), self._server)
        control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(gateway), self._server)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(OpenInferenceServicer(gateway), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services = (SERVICE, CONTROL, OPEN_INFERENCE, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._server, pool=_Pools())

    def bind(self, host: str, port: int) -> int:
        """Takes the port (0: any free one) on every address of `host`, and returns it.

        Raises InvalidArgument for a host or port that cannot be, FailedPrecondition for one that cannot be had.
        """
        check_port(port)
        for address in addresses(host):
            try:
                if self._credentials is None:
                    port = self._server.add_insecure_port(f"{address}:{port}")
                else:
                    port = self._server.add_secure_port(f"{address}:{port}", self._credentials)
            except RuntimeError:
                raise bind_error(host, address.strip("[]"), port) from None
        return port

    async def start(self) -> None:
        """Starts to answer: live, not ready."""
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """What the health checks of `jaxpd.v1.Inference` and of the Open Inference Protocol say."""
        for service in READINESS:
            await self._health.set(service, ready)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and gives running ones `grace_s` seconds before it cancels them."""
        await self._health.close()
        await self._server.stop(grace_s)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """jaxpd.v1.Inference."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GenerateResponse:
        """The whole answer."""
        return answer_to_proto(await self._gateway.generate(request_from_proto(request), this_call().origin))

    async def GenerateStream(self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """The answer as it comes."""
        stream = self._gateway.stream(request_from_proto(request), this_call().origin)
        async with contextlib.aclosing(stream) as messages:
            error = None
            async for message in messages:
                await context.write(message_to_proto(message))
                if isinstance(message, Finished):
                    error = error or message.error
            if error is not None:  # of one sample; the others have been answered
                raise error


class _Pools:
    """What reflection looks things up in: `open_inference_pb2` has a pool of its own."""

    _pools = (descriptor_pool.Default(), open_inference_pb2.DESCRIPTOR.pool)

    def __getattr__(self, find: str) -> Callable[..., Any]:
        def find_in_each(*what: Any) -> Any:
            for pool in self._pools[:-1]:
                with contextlib.suppress(KeyError):
                    return getattr(pool, find)(*what)
            return getattr(self._pools[-1], find)(*what)

        return find_in_each
