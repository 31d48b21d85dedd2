"""The options of `jaxpd serve` that concern the network, and the `ServerConfig` they make."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpd.errors import InvalidArgument

if TYPE_CHECKING:
    from serving.config import ServerConfig

SERVER = "Server"
SAFETY = "Safety"
SEEING = "Logs, traces and profiles"

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.", rich_help_panel=SERVER)]
Port = Annotated[
    int,
    typer.Option(metavar="PORT", help="Port of HTTP (OpenAI's API and the page); 0: any.", rich_help_panel=SERVER),
]
GrpcPort = Annotated[int, typer.Option(metavar="PORT", help="Port of gRPC; 0: any.", rich_help_panel=SERVER)]
Http = Annotated[bool, typer.Option("--http/--no-http", help="Serve over HTTP.", rich_help_panel=SERVER)]
Grpc = Annotated[bool, typer.Option("--grpc/--no-grpc", help="Serve over gRPC.", rich_help_panel=SERVER)]
Page = Annotated[
    bool,
    typer.Option("--page/--no-page", help="The page at / that chats and shows the meshes.", rich_help_panel=SERVER),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="What clients may call the model; give it again for more names.",
        show_default="the model's own name",
        rich_help_panel=SERVER,
    ),
]
ShutdownTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="After SIGTERM or Ctrl-C, how long running requests may take to finish.",
        rich_help_panel=SERVER,
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Only clients with this key are served; again for more. Other users of this machine may see it in the "
        "list of processes: --api-key-file is safer.",
        show_default=False,
        rich_help_panel=SAFETY,
    ),
]
ApiKeyFile = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help='TOML with a table a key: \\[name], key = "...", and if wanted max_requests and max_tokens, the most '
        "that it may have in flight.",
        show_default=False,
        rich_help_panel=SAFETY,
    ),
]
SaltByKey = Annotated[
    bool,
    typer.Option(
        "--salt-by-key",
        help="Requests of different keys share nothing in the prefix cache.",
        rich_help_panel=SAFETY,
    ),
]
SslCertfile = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="Serve TLS with this certificate (PEM).", rich_help_panel=SAFETY),
]
SslKeyfile = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="The certificate's private key (PEM).", rich_help_panel=SAFETY),
]
SslCaCerts = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help="Only clients with a certificate of one of these authorities are served (mutual TLS).",
        rich_help_panel=SAFETY,
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(metavar="text|json", help="How the log on standard error is written.", rich_help_panel=SEEING),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send a trace of each request there, such as http://127.0.0.1:4318/v1/traces.",
        show_default=False,
        rich_help_panel=SEEING,
    ),
]
ProfileDir = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="Allow /start_profile and /stop_profile, which write JAX profiles there.",
        show_default=False,
        rich_help_panel=SEEING,
    ),
]


def server_config(
    *,
    host: str,
    port: int | None,
    grpc_port: int | None,
    api_key: list[str] | None,
    api_key_file: pathlib.Path | None,
    ssl_certfile: pathlib.Path | None,
    ssl_keyfile: pathlib.Path | None,
    ssl_ca_certs: pathlib.Path | None,
    log_format: str,
    **more: Any,
) -> ServerConfig:
    """Checked before a model is fetched. Raises InvalidArgument naming the flag."""
    from serving.callers import load_keys
    from serving.config import ServerConfig
    from serving.tls import tls_of

    check_log_format(log_format)
    return ServerConfig(
        host=host,
        port=port,
        grpc_port=grpc_port,
        keys=load_keys(api_key_file, api_key or ()),
        tls=tls_of(ssl_certfile, ssl_keyfile, ssl_ca_certs),
        **more,
    )


def check_log_format(log_format: str) -> None:
    """Raises InvalidArgument for one that does not exist."""
    from serving.config import LOG_FORMATS

    if log_format not in LOG_FORMATS:
        raise InvalidArgument(f"--log-format {log_format} must be one of {', '.join(LOG_FORMATS)}", field="log_format")
