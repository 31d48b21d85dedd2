"""Who belongs to a cluster: its secret and its certificates, at both ends of the calls between routers and workers.

    secret       every call carries it as metadata; who has another or none is refused before its message is parsed
    certificate  one pair for both ends; with CA certificates each end wants one of the other that they have signed

Probes (grpc.health.v1) get their answer without a secret.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import pathlib

import grpc

from jaxpd.errors import FailedPrecondition, InvalidArgument, Unauthenticated
from serving.channel import Way
from serving.interceptors import Continuation, parts, refusing
from serving.tls import Tls

HEADER = "x-jaxpd-cluster"
GUARDED = ("/jaxpd.v1.Worker/", "/jaxpd.v1.Router/")
SHORTEST = 16  # characters of a secret
# A prompt's log probabilities come in one message: of 280,000 tokens, with 20 alternatives each.
MAX_MESSAGE_BYTES = 64 * 2**20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that was away is tried again at once when somebody asks for it: who dials here waits by itself.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What this process shows others, and wants to see. `tls.ca_certs` are those that both ends' certificates need."""

    secret: str | None = dataclasses.field(default=None, repr=False)
    tls: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return () if self.secret is None else ((HEADER, self.secret),)

    def channel(self, address: str) -> grpc.aio.Channel:
        """To another process of the cluster. Raises InvalidArgument for an address that is none."""
        tls = self.tls
        way = Way(
            server=address,
            tls=tls is not None,
            ca_certs=None if tls is None else tls.ca_certs,
            certfile=None if tls is None else tls.certfile,
            keyfile=None if tls is None else tls.keyfile,
        )
        return way.aio_channel(CHANNEL_OPTIONS)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For `add_secure_port`; None: plaintext."""
        return None if self.tls is None else self.tls.grpc_credentials()


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls between processes of a cluster without its secret; without one everybody is let in."""

    def __init__(self, secret: str | None) -> None:
        self._digest = None if secret is None else _digest(secret)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Wraps the handlers of the guarded services."""
        handler = await continuation(handler_call_details)
        if handler is None or self._digest is None or not handler_call_details.method.startswith(GUARDED):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        if len(shown) == 1 and hmac.compare_digest(self._digest, _digest(shown[0])):
            return handler
        what = "another cluster secret" if shown else "no cluster secret"
        make, _ = parts(handler)
        error = Unauthenticated(f"the call has {what}; start both with the same --cluster-secret-file")
        return make(refusing(error, stream=handler.request_streaming), None, handler.response_serializer)


def read_secret(file: pathlib.Path | None) -> str | None:
    """The first line of a file; None without one. Raises InvalidArgument, which never repeats it."""
    if file is None:
        return None
    flag, field = f"--cluster-secret-file {file}", "cluster_secret_file"
    try:
        secret = file.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise InvalidArgument(f"{flag} cannot be read: {reason}", field=field) from None
    if len(secret) < SHORTEST or not (secret.isascii() and secret.isprintable()):
        raise InvalidArgument(
            f"{flag}: its first line has {len(secret)} characters, it must be at least {SHORTEST} of visible ASCII; "
            "make one with: openssl rand -hex 32",
            field=field,
        )
    return secret


def check_exposed(listen: str, cluster: Cluster, *, insecure: bool) -> None:
    """Raises FailedPrecondition where anybody on the network could command this process.

    `insecure` says that this is meant (--insecure-cluster).
    """
    host, _ = split_address(listen, "--listen")
    if cluster.secret is None and not insecure and not is_loopback(host):
        raise FailedPrecondition(
            f"--listen {listen} can be reached from other machines, and without a secret all of them are obeyed; give "
            "--cluster-secret-file, listen on 127.0.0.1, or say --insecure-cluster where the network is trusted",
            field="listen",
        )


def split_address(text: str, flag: str) -> tuple[str, int]:
    """Host, without brackets, and port (0: any) of HOST:PORT. Raises InvalidArgument naming `flag`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise InvalidArgument(
            f"{flag} {text} must be HOST:PORT with a port from 0 (any free one) to 65535, such as 127.0.0.1:7100",
            field=flag.lstrip("-").replace("-", "_"),
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine gets there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _digest(secret: str | bytes) -> bytes:
    """Of one length, so that comparing takes as long for any."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()
