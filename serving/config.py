"""What a user may set of a server process; the engine's part is `jaxpd.config.EngineConfig`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from jaxpd.errors import InvalidArgument
from serving.callers import Keys

if TYPE_CHECKING:
    from serving.tls import Tls

LOG_FORMATS = ("text", "json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Ports of None are not opened, 0 takes a free one. `served_names` are the names that a client may call the model
    by; the first one is shown, and without any it is the model's own."""

    host: str = "127.0.0.1"
    port: int | None = 8000  # HTTP
    grpc_port: int | None = 50051
    shutdown_timeout_s: float = 30.0
    served_names: tuple[str, ...] = ()
    keys: Keys = dataclasses.field(default_factory=lambda: Keys({}))
    salt_by_key: bool = False  # keep the prefix caches of API keys apart
    tls: Tls | None = None
    page: bool = True  # the page at /
    profile_dir: pathlib.Path | None = None  # where /start_profile writes; None: there is no such route
    otlp_endpoint: str | None = None  # where traces go; None: nowhere

    def __post_init__(self) -> None:
        for flag, port in (("--port", self.port), ("--grpc-port", self.grpc_port)):
            if port is not None and not 0 <= port <= 65535:
                raise InvalidArgument(
                    f"{flag} {port} must be between 0 (any free port) and 65535",
                    field=flag.lstrip("-").replace("-", "_"),
                )
        if self.port is None and self.grpc_port is None:
            raise InvalidArgument("--no-http and --no-grpc leave nothing to serve; leave one of them out", field="port")
        if self.port == self.grpc_port and self.port != 0:
            raise InvalidArgument(
                f"--port {self.port} and --grpc-port {self.grpc_port} are the same; give each its own", field="port"
            )
        if not self.shutdown_timeout_s >= 0:
            raise InvalidArgument(
                f"--shutdown-timeout {self.shutdown_timeout_s} must be 0 (stop at once) or more seconds",
                field="shutdown_timeout",
            )
        if self.salt_by_key and not self.keys.required:
            raise InvalidArgument(
                "--salt-by-key keeps the prefix caches of API keys apart, and there are none; add --api-key-file",
                field="salt_by_key",
            )
        for name in self.served_names:
            if not name or not name.isprintable():
                raise InvalidArgument(f"--served-model-name {name!r} must be printable text", field="served_model_name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports that were bound."""

    http: int | None
    grpc: int | None
