"""Clients of jaxpd's gRPC: `Client` blocks, `AsyncClient` awaits; both speak `serving.messages` and raise JaxpdError.

    with Client("127.0.0.1:50051") as client:
        for message in client.stream(GenerateRequest(text="Hello", max_tokens=16)):
            ...

Leaving a stream early, by `break`, an exception or Ctrl-C, cancels the call, and the server frees everything at once.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from types import TracebackType

from serving.channel import MAX_MESSAGE_BYTES, Way, check_address
from serving.messages import Answer, GenerateRequest, Message
from serving.proto.jaxpd.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from serving.wire import request_to_proto
from serving.wire_answers import answer_from_proto, message_from_proto

__all__ = ["MAX_MESSAGE_BYTES", "AsyncClient", "Client", "check_address"]

File = str | os.PathLike[str]


class Client:
    """Blocking; may be used from several threads. `timeout_s` bounds each call, None waits for ever.

    `api_key` goes with every call. TLS is spoken with `tls` or any of its files (PEM): `ca_certs`, who may have signed
    the server's certificate, and `certfile` with `keyfile`, a certificate of the client's own.
    """

    def __init__(
        self,
        server: str,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        tls: bool = False,
        ca_certs: File | None = None,
        certfile: File | None = None,
        keyfile: File | None = None,
    ) -> None:
        self._way = Way(server=server, api_key=api_key, tls=tls, ca_certs=ca_certs, certfile=certfile, keyfile=keyfile)
        self._call = {"timeout": timeout_s, "metadata": self._way.metadata}
        self._channel = self._way.channel()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

    def generate(self, request: GenerateRequest) -> Answer:
        """The whole answer. Raises JaxpdError."""
        with self._way.readable_errors():
            return answer_from_proto(self._inference.Generate(request_to_proto(request), **self._call))

    def stream(self, request: GenerateRequest) -> Generator[Message, None, None]:
        """One Understood, Tokens, one Finished. Raises JaxpdError, also half way."""
        with self._way.readable_errors():
            call = self._inference.GenerateStream(request_to_proto(request), **self._call)
            try:
                for response in call:
                    message = message_from_proto(response)
                    if message is not None:
                        yield message
            finally:
                call.cancel()

    def server_info(self) -> control_pb2.GetServerInfoResponse:
        """State, version and load."""
        with self._way.readable_errors():
            return self._control.GetServerInfo(control_pb2.GetServerInfoRequest(), **self._call)

    def model_info(self) -> control_pb2.GetModelInfoResponse:
        """The served model and its limits."""
        with self._way.readable_errors():
            return self._control.GetModelInfo(control_pb2.GetModelInfoRequest(), **self._call)

    def abort(self, request_id: str) -> bool:
        """Ends a running request; False if there is none of that id."""
        with self._way.readable_errors():
            request = control_pb2.AbortRequest(request_id=request_id)
            return bool(self._control.Abort(request, **self._call).aborted)

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

    def __init__(
        self,
        server: str,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
        tls: bool = False,
        ca_certs: File | None = None,
        certfile: File | None = None,
        keyfile: File | None = None,
    ) -> None:
        self._way = Way(server=server, api_key=api_key, tls=tls, ca_certs=ca_certs, certfile=certfile, keyfile=keyfile)
        self._call = {"timeout": timeout_s, "metadata": self._way.metadata}
        self._channel = self._way.aio_channel()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

    async def generate(self, request: GenerateRequest) -> Answer:
        """The whole answer. Raises JaxpdError."""
        with self._way.readable_errors():
            call = self._inference.Generate(request_to_proto(request), **self._call)
            return answer_from_proto(await call)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Message, None]:
        """One Understood, Tokens, one Finished. Raises JaxpdError, also half way. Leave it by `aclosing`."""
        with self._way.readable_errors():
            call = self._inference.GenerateStream(request_to_proto(request), **self._call)
            try:
                async for response in call:
                    message = message_from_proto(response)
                    if message is not None:
                        yield message
            finally:
                call.cancel()

    async def server_info(self) -> control_pb2.GetServerInfoResponse:
        """State, version and load."""
        with self._way.readable_errors():
            return await self._control.GetServerInfo(control_pb2.GetServerInfoRequest(), **self._call)

    async def model_info(self) -> control_pb2.GetModelInfoResponse:
        """The served model and its limits."""
        with self._way.readable_errors():
            return await self._control.GetModelInfo(control_pb2.GetModelInfoRequest(), **self._call)

    async def abort(self, request_id: str) -> bool:
        """Ends a running request; False if there is none of that id."""
        with self._way.readable_errors():
            request = control_pb2.AbortRequest(request_id=request_id)
            return bool((await self._control.Abort(request, **self._call)).aborted)

    async def close(self) -> None:
        """Ends the connection and the calls on it."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
