"""How a client gets to a server: address, TLS, API key, and what it means when the way does not lead there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from jaxpd.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    JaxpdError,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

MAX_MESSAGE_BYTES = 16 * 2**20

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # a server that vanished without a word is noticed in 50 s
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)
CLASSES: dict[str, type[JaxpdError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        NotFound,
        Unauthenticated,
        ResourceExhausted,
        FailedPrecondition,
        Unavailable,
        DeadlineExceeded,
        Internal,
    )
}
# Words of gRPC's own errors while it connects, and what is then the matter.
_TLS_TROUBLE = (
    ("WRONG_VERSION_NUMBER", "the server speaks no TLS; leave tls and ca_certs out"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "no CA that is trusted here has signed its certificate; name its CA as ca_certs",
    ),
    ("Hostname Verification", "its certificate is for other names; use one of those as the address"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """`tls` is on where `ca_certs` (who may sign the server's certificate; not given: the CAs that gRPC trusts) or
    `certfile` and `keyfile` (the client's own certificate) are given. `api_key` goes with every call.

    Raises InvalidArgument for what cannot be, without repeating the key.
    """

    server: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    tls: bool = False
    ca_certs: str | os.PathLike[str] | None = None
    certfile: str | os.PathLike[str] | None = None
    keyfile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_address(self.server)
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise InvalidArgument("api_key must be visible ASCII characters; check for a line break", field="api_key")
        if (self.certfile is None) != (self.keyfile is None):
            raise InvalidArgument("certfile and keyfile are a pair; give both or neither", field="certfile")

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.tls or self.ca_certs is not None or self.certfile is not None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self) -> grpc.Channel:
        """A blocking one. Raises InvalidArgument for a file that cannot be read."""
        if self.secure:
            return grpc.secure_channel(self.server, self._credentials(), options=OPTIONS)
        return grpc.insecure_channel(self.server, options=OPTIONS)

    def aio_channel(self, more: Sequence[tuple[str, int]] = ()) -> grpc.aio.Channel:
        """One for an event loop; `more` options win. Raises InvalidArgument for a file that cannot be read."""
        options = tuple((dict(OPTIONS) | dict(more)).items())
        if self.secure:
            return grpc.aio.secure_channel(self.server, self._credentials(), options=options)
        return grpc.aio.insecure_channel(self.server, options=options)

    def _credentials(self) -> grpc.ChannelCredentials:
        ca_certs, certificate, key = (
            None if path is None else _read(field, path)
            for field, path in (("ca_certs", self.ca_certs), ("certfile", self.certfile), ("keyfile", self.keyfile))
        )
        return grpc.ssl_channel_credentials(ca_certs, key, certificate)

    @contextlib.contextmanager
    def readable_errors(self) -> Iterator[None]:
        """Raises what a server's JaxpdError was, or an error that says what happened on the way."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def _translate(self, error: grpc.RpcError) -> JaxpdError:
        status, details, server = error.code(), error.details() or "", self.server
        trailers: dict[str, Any] = {str(key): value for key, value in error.trailing_metadata() or ()}
        if "x-request-id" in trailers:  # said by jaxpd itself
            if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return ResourceExhausted(details, retry_after_s=int(trailers.get("retry-after-ms", 1000)) / 1000)
            return CLASSES.get(status.name, Internal)(details)
        if status is grpc.StatusCode.UNAVAILABLE:
            return self._unavailable(details)
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(
                f"{server} did not finish within the time-out; allow more time or ask for fewer tokens"
            )
        if status is grpc.StatusCode.CANCELLED:
            return Unavailable(f"the call to {server} was cancelled ({details or 'no reason given'})")
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return InvalidArgument(
                f"the request does not fit into one message of {MAX_MESSAGE_BYTES} bytes ({details}); "
                "shorten the prompt"
            )
        if status is grpc.StatusCode.UNIMPLEMENTED:
            return FailedPrecondition(f"{server} is no jaxpd server, or an older one: {details}")
        return Internal(f"{server} failed with {status.name}: {details}")

    def _unavailable(self, details: str) -> Unavailable:
        if self.secure:
            for word, trouble in _TLS_TROUBLE:
                if word.lower() in details.lower():
                    return Unavailable(f"no TLS connection to {self.server}: {trouble} ({details})")
        if "Socket closed" in details or "reset" in details:  # somebody listens; of why it hangs up we are not told
            if not self.secure:
                reason = (
                    "if it speaks TLS, give tls or ca_certs (--tls, --ssl-ca-certs); if it is the port of HTTP, give "
                    "that of gRPC"
                )
            elif self.certfile is None:
                reason = (
                    "if it wants a certificate of the client, give certfile and keyfile (--ssl-certfile, --ssl-keyfile)"
                )
            else:
                reason = "it may not accept the client's certificate; give one that its CA has signed"
            return Unavailable(f"{self.server} hangs up ({details}); {reason}")
        port = self.server.rpartition(":")[2]
        return Unavailable(
            f"no jaxpd server answers at {self.server} ({details}); start one with: jaxpd serve --grpc-port {port}"
        )


def check_address(server: str, flag: str = "--server") -> str:
    """`server` if it is HOST:PORT. Raises InvalidArgument naming `flag`."""
    host, colon, port = server.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InvalidArgument(
            f"{flag} {server} must be HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:50051",
            field=flag.lstrip("-").replace("-", "_"),
        )
    return server


def _read(field: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{field} {os.fspath(path)} cannot be read ({error.strerror}); name a PEM file", field=field
        ) from None
