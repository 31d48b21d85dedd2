"""What `jaxpd bench serve` makes of the text of its flags."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxpd.cli import options
from jaxpd.errors import InvalidArgument

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_SERVER = "127.0.0.1:50051"
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)\s*")


def parse_time(text: str, *, flag: str) -> float:
    """Seconds from "200ms" or "1.5s". Raises InvalidArgument naming `flag`."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"{flag} {text} is not a time; write a number with its unit, ms or s, such as 200ms or 1.5s",
            field=flag.lstrip("-").replace("-", "_"),
        )
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def address(backend: str, base_url: str | None, server: str | None) -> str:
    """Where the server is. Raises InvalidArgument for the address of another kind of server."""
    if backend == "grpc":
        if base_url is not None:
            raise InvalidArgument(
                f"--base-url {base_url} is for OpenAI servers; with --backend grpc, give --server HOST:PORT",
                field="base_url",
            )
        return options.parse_address(server or DEFAULT_SERVER)
    if server is not None:
        raise InvalidArgument(
            f"--server {server} is for --backend grpc; with --backend {backend}, give --base-url http://HOST:PORT",
            field="server",
        )
    return base_url or DEFAULT_URL


def extra_body(text: str | None) -> dict[str, Any]:
    """The object in `text`. Raises InvalidArgument."""
    if text is None:
        return {}
    try:
        body = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--extra-body {text} is no JSON: {error}", field="extra_body") from None
    if not isinstance(body, dict):
        raise InvalidArgument(
            f"--extra-body {text} must be a JSON object, such as '{{\"top_p\": 0.9}}'", field="extra_body"
        )
    return body
