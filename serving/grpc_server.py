"""The gRPC front: services, error statuses, health, reflection and the port.

Each call is one task. A client that cancels, leaves or runs into its deadline ends that task with CancelledError,
wherever it waits; the gateway's stream is closed on the way out, and that aborts the request. The streaming handler
writes to the context itself and is no generator, because a generator that is cancelled while its message is being
written is closed by the garbage collector, some time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxpd.errors import InvalidArgument, JaxpdError, ResourceExhausted
from serving.control import ControlServicer
from serving.gateway import Gateway
from serving.health import Health
from serving.messages import Finished, check_request_id, new_request_id
from serving.ports import addresses, bind_error, check_port
from serving.proto.jaxpd.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from serving.wire import request_from_proto
from serving.wire_answers import answer_to_proto, message_to_proto

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 2**20  # about 5.6 million token ids
MAX_DETAILS = 2000  # characters; clients refuse metadata above 8 KiB

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name

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

    def __init__(self, gateway: Gateway) -> None:
        self._health = Health({"": True, SERVICE: False})
        self._server = grpc.aio.server(interceptors=(StatusInterceptor(),), options=OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(gateway), self._server)
        control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(gateway), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        health_service = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((SERVICE, CONTROL, health_service, reflection.SERVICE_NAME), self._server)

    def bind(self, host: str, port: int) -> int:
        """Takes the port (0: any free one) on every address of `host`, and returns it.

        Raises InvalidArgument for a host or port that cannot be, FailedPrecondition for one that cannot be had.
        """
        check_port(port)
        for address in addresses(host):
            try:
                port = self._server.add_insecure_port(f"{address}:{port}")
            except RuntimeError:
                raise bind_error(host, address.strip("[]"), port) from None
        return port

    async def start(self) -> None:
        """Starts to answer: live, not ready."""
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """What the health check of `jaxpd.v1.Inference` says."""
        await self._health.set(SERVICE, ready)

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
        return answer_to_proto(await self._gateway.generate(request_from_proto(request)))

    async def GenerateStream(self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """The answer as it comes."""
        async with contextlib.aclosing(self._gateway.stream(request_from_proto(request))) as messages:
            error = None
            async for message in messages:
                await context.write(message_to_proto(message))
                if isinstance(message, Finished):
                    error = error or message.error
            if error is not None:  # of one sample; the others have been answered
                raise error


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Gives every request an id, and turns what its handler raises into a status that is safe to show."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wraps the handlers of jaxpd's own services."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/jaxpd."):
            return handler
        if handler.response_streaming:
            make, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            make, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        return make(
            _guarded(inner, handler_call_details.method),
            request_deserializer=_parse_or_error(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _guarded(inner: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        request_id = new_request_id()
        try:
            if isinstance(request, DecodeError):
                raise InvalidArgument(f"the request does not parse as the message of {method}")
            if isinstance(request, inference_pb2.GenerateRequest):
                if request.HasField("request_id"):
                    check_request_id(request.request_id)
                    request_id = request.request_id
                else:
                    request.request_id = request_id
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except JaxpdError as error:
            status, details = grpc.StatusCode[error.code], error.message
            trailers = [("x-request-id", request_id)]
            if isinstance(error, ResourceExhausted):
                trailers.append(("retry-after-ms", str(round(error.retry_after_s * 1000))))
            if status is grpc.StatusCode.INTERNAL:
                logger.error("%s of request %s failed", method, request_id, exc_info=error)
                details = f"{details} (request {request_id})"
        except Exception as error:
            logger.error("%s of request %s failed", method, request_id, exc_info=error)
            status, trailers = grpc.StatusCode.INTERNAL, [("x-request-id", request_id)]
            details = f"internal error; the server's log says more under request {request_id}"
        await context.abort(status, details[:MAX_DETAILS], trailing_metadata=tuple(trailers))

    return call


def _parse_or_error(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Hands a DecodeError to the handler as its request: raised here, it would reach the client as an unknown error."""

    def parse_or_error(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_error
