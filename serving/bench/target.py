"""Which server is measured, and how it is asked."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxpd.errors import InvalidArgument
from serving.bench.records import Backend

BACKENDS = ("openai-chat", "openai-completions", "grpc")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """`address` is a URL, or HOST:PORT for gRPC. `extra_body` is merged into the JSON of each OpenAI request.

    Raises InvalidArgument for what cannot be.
    """

    backend: str
    address: str
    model: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)  # never shown and never written
    tls: bool = False  # for gRPC, where no certificate below says it; a URL says it by https
    ssl_ca_certs: pathlib.Path | None = None
    ssl_certfile: pathlib.Path | None = None
    ssl_keyfile: pathlib.Path | None = None
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise InvalidArgument(f"--backend {self.backend} must be one of {', '.join(BACKENDS)}", field="backend")
        if self.backend != "grpc" and not self.address.startswith(("http://", "https://")):
            raise InvalidArgument(
                f"--base-url {self.address} must begin with http:// or https://, such as http://127.0.0.1:8000",
                field="base_url",
            )
        if self.backend != "grpc" and self.tls:
            raise InvalidArgument(
                "--tls is for --backend grpc; an OpenAI server's --base-url begins with https://", field="tls"
            )
        if not self.timeout_s > 0:
            raise InvalidArgument(f"--timeout {self.timeout_s:g} must be above 0 seconds", field="timeout")
        if not 0 <= self.temperature <= 100:
            raise InvalidArgument(f"--temperature {self.temperature:g} must be from 0 to 100", field="temperature")
        if self.vocab_size is not None and self.vocab_size < 2:
            raise InvalidArgument(f"--vocab-size {self.vocab_size} must be at least 2", field="vocab_size")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, missing = ("--ssl-keyfile", "--ssl-certfile")[:: 1 if self.ssl_certfile is None else -1]
            raise InvalidArgument(f"{given} needs {missing} beside it", field="ssl_certfile")
        for flag, path in (
            ("--ssl-ca-certs", self.ssl_ca_certs),
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-keyfile", self.ssl_keyfile),
        ):
            if path is not None and not path.is_file():
                raise InvalidArgument(f"{flag} {path} is no file", field=flag.lstrip("-").replace("-", "_"))

    def config(self) -> dict[str, Any]:
        """What may be written down: everything but the key."""
        values = dataclasses.asdict(self)
        values["api_key"] = None if self.api_key is None else "given, not kept"
        return {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in values.items()}


def connect(target: Target) -> Backend:
    """The client for `target`, not yet opened. Raises FailedPrecondition where a package is missing."""
    if target.backend == "grpc":
        from serving.bench.grpc_client import GrpcBackend

        return GrpcBackend(target)
    from serving.bench.openai_client import OpenAIBackend

    return OpenAIBackend(target)
