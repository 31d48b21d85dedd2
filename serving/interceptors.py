"""What happens to every gRPC call before and after its handler, whichever service it is for.

    message -> StatusInterceptor     request id, trailers, errors to statuses; the last to see whatever goes wrong
            -> CallerInterceptor     API key to caller; where the call came from, for the gateway's observers
            -> handler               which finds both by `this_call()`

A caller without a valid key is refused before its message is parsed. Metrics and traces are the gateway's observers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from jaxpd.errors import InvalidArgument, JaxpdError, ResourceExhausted, Unauthenticated
from serving.callers import Keys, bearer
from serving.messages import check_request_id, new_request_id
from serving.observer import Origin
from serving.proto.jaxpd.v1 import inference_pb2
from serving.proto.open_inference import open_inference_pb2

logger = logging.getLogger(__name__)

MAX_DETAILS_BYTES = 4000  # clients refuse metadata above 8 KiB
TRACING = ("traceparent", "tracestate")
OPEN_INFERENCE = "/inference.GRPCInferenceService/"
GUARDED = ("/jaxpd.v1.", OPEN_INFERENCE)  # an API key is needed, where there are keys
PROBES = tuple(OPEN_INFERENCE + probe for probe in ("ServerLive", "ServerReady", "ModelReady"))  # but not for these

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]
Handle = Callable[[Any, grpc.aio.ServicerContext], Any]


@dataclasses.dataclass(kw_only=True)
class Call:
    """One gRPC call, as its handler finds it."""

    request_id: str
    origin: Origin
    claims_id: bool = False  # it was on offer and not yet anybody's


_this_call: contextvars.ContextVar[Call] = contextvars.ContextVar("call")


def this_call() -> Call:
    """The call that the running task answers."""
    return _this_call.get()


class Requests(Protocol):
    """What is asked of a gateway here."""

    def in_use(self, request_id: str) -> bool: ...


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Gives every call an id, and turns what its handler raises into a status that is safe to show."""

    def __init__(self, gateway: Requests) -> None:
        self._gateway = gateway
        self._claimed: set[str] = set()  # ids on offer that a running call has taken, before the gateway knows them

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Wraps every handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        make, inner = parts(handler)

        async def one(message: Any, context: grpc.aio.ServicerContext) -> Any:
            return await inner(_readable(message, method), context)

        async def many(messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
            # Closed here and now: a generator that is left to itself is closed some time, and so are those in it.
            async with (
                contextlib.aclosing(_all_readable(messages, method)) as readable,
                contextlib.aclosing(inner(readable, context)) as answers,
            ):
                async for answer in answers:
                    await context.write(answer)

        guarded = self._guarded(many if handler.request_streaming else one, method)
        return make(guarded, _parse_or_error(handler.request_deserializer), handler.response_serializer)

    def _guarded(self, handle: Handle, method: str) -> Handle:
        async def call(message: Any, context: grpc.aio.ServicerContext) -> Any:
            metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
            this = Call(request_id=new_request_id(), origin=_origin(method, metadata, context.time_remaining()))
            _this_call.set(this)
            try:
                self._name(this, message, metadata.get("x-request-id"))
                context.set_trailing_metadata((("x-request-id", this.request_id),))
                return await handle(message, context)
            except grpc.aio.AbortError:
                raise
            except grpc.aio.BaseError:  # the call has ended while its handler still wanted to say something
                raise asyncio.CancelledError from None
            except Exception as error:
                status, details, trailers = _status_of(error, method, this.request_id)
            finally:
                if this.claims_id:
                    self._claimed.discard(this.request_id)
            try:
                await context.abort(status, details, trailing_metadata=trailers)
            except (grpc.aio.UsageError, grpc.aio.InternalError):
                raise asyncio.CancelledError from None

        return call

    def _name(self, call: Call, message: Any, offered: Any) -> None:
        """The id of a call: its message's, else the metadata's where that is valid and free, else a new one.

        Raises InvalidArgument for an id in a message of jaxpd's own that cannot be used.
        """
        if isinstance(message, inference_pb2.GenerateRequest) and message.HasField("request_id"):
            check_request_id(message.request_id)
            call.request_id = message.request_id
            return
        if isinstance(message, open_inference_pb2.ModelInferRequest) and message.id:
            offered = message.id  # need not be unique there, and is only repeated in the answer where it is not
        if isinstance(offered, str) and _usable(offered) and not self._is_taken(offered):
            call.request_id, call.claims_id = offered, True
            self._claimed.add(offered)
        if isinstance(message, inference_pb2.GenerateRequest):
            message.request_id = call.request_id

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._claimed or self._gateway.in_use(request_id)


class CallerInterceptor(grpc.aio.ServerInterceptor):
    """Finds out whose key came with a call, and refuses calls without one where one is needed."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Wraps the handlers of the guarded services."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(GUARDED) or method in PROBES:
            return handler
        make, inner = parts(handler)
        try:
            caller = self._keys.find(_bearer(handler_call_details.invocation_metadata or ()))
        except Unauthenticated as error:
            return make(refusing(error, stream=handler.request_streaming), None, handler.response_serializer)

        async def call(message: Any, context: grpc.aio.ServicerContext) -> Any:
            this = this_call()
            this.origin = dataclasses.replace(this.origin, caller=caller)
            return await inner(message, context)

        return make(call, handler.request_deserializer, handler.response_serializer)


def refusing(error: JaxpdError, *, stream: bool = False) -> Handle:
    """A handler that raises `error` whatever it is asked; `stream`: one that takes a stream and answers with one."""

    async def refuse(message: Any, context: grpc.aio.ServicerContext) -> Any:
        raise error

    async def refuse_all(messages: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        nothing: tuple[Any, ...] = ()
        for none in nothing:
            yield none  # which makes it a generator
        raise error

    return refuse_all if stream else refuse


def parts(handler: grpc.RpcMethodHandler) -> tuple[Callable[..., grpc.RpcMethodHandler], Handle]:
    """How to make a handler of the same kind, and what it calls."""
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    assert not handler.request_streaming, "no service here takes a stream and answers once"
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    values = [value for key, value in metadata if key == "authorization"]
    return bearer(values[0]) if len(values) == 1 and isinstance(values[0], str) else None


def _origin(method: str, metadata: dict[str, Any], time_remaining_s: float | None) -> Origin:
    return Origin(
        front="grpc",
        operation="infer" if method.startswith(OPEN_INFERENCE) else "generate",
        headers={key: value for key in TRACING if isinstance(value := metadata.get(key), str)},
        deadline_s=None if time_remaining_s is None else time.monotonic() + time_remaining_s,
    )


def _usable(request_id: str) -> bool:
    try:
        check_request_id(request_id)
    except InvalidArgument:
        return False
    return True


def _status_of(error: Exception, method: str, request_id: str) -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
    """The status of a call that raised `error`, its text, and the trailers. What is INTERNAL is logged."""
    trailers = [("x-request-id", request_id)]
    if isinstance(error, JaxpdError):
        status, details = grpc.StatusCode[error.code], error.message
    else:
        status, details = grpc.StatusCode.INTERNAL, "internal error; the server's log says more"
    if status is grpc.StatusCode.INTERNAL:
        logger.error("%s of request %s failed", method, request_id, exc_info=error)
        details = f"{details} (request {request_id})"
    if isinstance(error, ResourceExhausted):
        trailers.append(("retry-after-ms", str(round(error.retry_after_s * 1000))))
    return status, _shortened(details), tuple(trailers)


def _parse_or_error(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Hands a DecodeError to the handler as its message: raised here, it would reach the client as an unknown error."""
    if parse is None:
        return None

    def parse_or_error(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_or_error


def _readable(message: Any, method: str) -> Any:
    if isinstance(message, DecodeError):
        raise InvalidArgument(f"the request does not parse as the message of {method}")
    return message


async def _all_readable(messages: AsyncIterator[Any], method: str) -> AsyncGenerator[Any, None]:
    async for message in messages:
        yield _readable(message, method)


def _shortened(details: str) -> str:
    """As much of a text as fits. On the wire what is not printable ASCII takes three bytes for each of UTF-8's."""
    details = details.encode("utf-8", "backslashreplace").decode("utf-8")
    room = MAX_DETAILS_BYTES
    for at, char in enumerate(details):
        room -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode("utf-8"))
        if room < 0:
            return details[:at]
    return details
