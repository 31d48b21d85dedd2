"""Clients of jaxpd's gRPC: `Client` blocks, `AsyncClient` awaits; both speak `serving.messages` and raise JaxpdError.

    with Client("127.0.0.1:50051") as client:
        for message in client.stream(GenerateRequest(text="Hello", max_tokens=16)):
            ...

Leaving a stream early, by `break`, an exception or Ctrl-C, cancels the call, and the server frees everything at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Iterator
from types import TracebackType
from typing import Any

import grpc

from jaxpd.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    JaxpdError,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from serving.messages import Answer, GenerateRequest, Message
from serving.proto.jaxpd.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from serving.wire import request_to_proto
from serving.wire_answers import answer_from_proto, message_from_proto

MAX_MESSAGE_BYTES = 16 * 2**20

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # a server that vanished without a word is noticed in 50 s
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_CLASSES: dict[str, type[JaxpdError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        NotFound,
        Unauthenticated,
        ResourceExhausted,
        FailedPrecondition,
        Unavailable,
        Internal,
    )
}


class Client:
    """Blocking; may be used from several threads. `timeout_s` bounds each call, None waits for ever."""

    def __init__(self, server: str, *, timeout_s: float | None = None) -> None:
        self._server = check_address(server)
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(self._server, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

    def generate(self, request: GenerateRequest) -> Answer:
        """The whole answer. Raises JaxpdError."""
        with _readable_errors(self._server):
            return answer_from_proto(self._inference.Generate(request_to_proto(request), timeout=self._timeout_s))

    def stream(self, request: GenerateRequest) -> Generator[Message, None, None]:
        """One Understood, Tokens, one Finished. Raises JaxpdError, also half way."""
        with _readable_errors(self._server):
            call = self._inference.GenerateStream(request_to_proto(request), timeout=self._timeout_s)
            try:
                for response in call:
                    message = message_from_proto(response)
                    if message is not None:
                        yield message
            finally:
                call.cancel()

    def server_info(self) -> control_pb2.GetServerInfoResponse:
        """State, version and load."""
        with _readable_errors(self._server):
            return self._control.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=self._timeout_s)

    def model_info(self) -> control_pb2.GetModelInfoResponse:
        """The served model and its limits."""
        with _readable_errors(self._server):
            return self._control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=self._timeout_s)

    def abort(self, request_id: str) -> bool:
        """Ends a running request; False if there is none of that id."""
        with _readable_errors(self._server):
            request = control_pb2.AbortRequest(request_id=request_id)
            return bool(self._control.Abort(request, timeout=self._timeout_s).aborted)

    def close(self) -> None:
        """Ends the connection and the calls on it."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same on an event loop; made and used on one."""

    def __init__(self, server: str, *, timeout_s: float | None = None) -> None:
        self._server = check_address(server)
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(self._server, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

    async def generate(self, request: GenerateRequest) -> Answer:
        """The whole answer. Raises JaxpdError."""
        with _readable_errors(self._server):
            call = self._inference.Generate(request_to_proto(request), timeout=self._timeout_s)
            return answer_from_proto(await call)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Message, None]:
        """One Understood, Tokens, one Finished. Raises JaxpdError, also half way. Leave it by `aclosing`."""
        with _readable_errors(self._server):
            call = self._inference.GenerateStream(request_to_proto(request), timeout=self._timeout_s)
            try:
                async for response in call:
                    message = message_from_proto(response)
                    if message is not None:
                        yield message
            finally:
                call.cancel()

    async def server_info(self) -> control_pb2.GetServerInfoResponse:
        """State, version and load."""
        with _readable_errors(self._server):
            return await self._control.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=self._timeout_s)

    async def model_info(self) -> control_pb2.GetModelInfoResponse:
        """The served model and its limits."""
        with _readable_errors(self._server):
            return await self._control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=self._timeout_s)

    async def abort(self, request_id: str) -> bool:
        """Ends a running request; False if there is none of that id."""
        with _readable_errors(self._server):
            request = control_pb2.AbortRequest(request_id=request_id)
            return bool((await self._control.Abort(request, timeout=self._timeout_s)).aborted)

    async def close(self) -> None:
        """Ends the connection and the calls on it."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def check_address(server: str) -> str:
    """`server` if it is HOST:PORT. Raises InvalidArgument."""
    host, colon, port = server.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InvalidArgument(
            f"--server {server} must be HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:50051", field="server"
        )
    return server


@contextlib.contextmanager
def _readable_errors(server: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _translate(error, server) from error


def _translate(error: grpc.RpcError, server: str) -> JaxpdError:
    """The error a server's JaxpdError was, or one that says what happened on the way."""
    status, details = error.code(), error.details() or ""
    trailers: dict[str, Any] = {str(key): value for key, value in error.trailing_metadata() or ()}
    if "x-request-id" in trailers:  # said by jaxpd itself
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(details, retry_after_s=int(trailers.get("retry-after-ms", 1000)) / 1000)
        return _CLASSES.get(status.name, Internal)(details)
    if status is grpc.StatusCode.UNAVAILABLE:
        port = server.rpartition(":")[2]
        return Unavailable(
            f"no jaxpd server answers at {server} ({details}); start one with: jaxpd serve --grpc-port {port}"
        )
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"{server} did not finish within the time-out; allow more time or ask for fewer tokens")
    if status is grpc.StatusCode.CANCELLED:
        return Unavailable(f"the call to {server} was cancelled ({details or 'no reason given'})")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidArgument(
            f"the request does not fit into one message of {MAX_MESSAGE_BYTES} bytes ({details}); shorten the prompt"
        )
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return FailedPrecondition(f"{server} is no jaxpd server, or an older one: {details}")
    return Internal(f"{server} failed with {status.name}: {details}")
