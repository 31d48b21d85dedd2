"""The options that say how a server is reached: its API key and TLS. For the commands that are clients."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from jaxpd.errors import InvalidArgument

PANEL = "The server's key and TLS"

ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="The API key itself; others on this machine may see it in the list of processes.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
ApiKeyFile = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE", help="File whose first line is the API key.", show_default=False, rich_help_panel=PANEL
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Speak TLS over gRPC; certificates below say so too, and https:// in a URL.",
        rich_help_panel=PANEL,
    ),
]
SslCaCerts = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificates that the server's must be signed by (PEM).",
        show_default="the system's",
        rich_help_panel=PANEL,
    ),
]
SslCertfile = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE", help="Our own certificate, for mutual TLS (PEM).", show_default=False, rich_help_panel=PANEL
    ),
]
SslKeyfile = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="Its private key (PEM).", show_default=False, rich_help_panel=PANEL),
]


def read_api_key(key: str | None, file: pathlib.Path | None) -> str | None:
    """The key, if one was given. Raises InvalidArgument, which never repeats it."""
    if key is not None and file is not None:
        raise InvalidArgument("--api-key and --api-key-file both give a key; leave one out", field="api_key")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").split("\n", 1)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text file"
            raise InvalidArgument(f"--api-key-file {file} cannot be read: {reason}", field="api_key_file") from None
        key = lines[0].strip()
        if key.startswith("["):
            raise InvalidArgument(
                f"--api-key-file {file} looks like a server's list of keys; here it is a file with the one key to send "
                "on its first line",
                field="api_key_file",
            )
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise InvalidArgument("the API key must be printable ASCII, and not empty", field="api_key")
    return key
