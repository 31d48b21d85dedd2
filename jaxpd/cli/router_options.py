"""The options of `jaxpd router` that concern its workers and how it chooses among them."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxpd.policies.routing import POLICIES

WORKERS = "Workers"
CHOICE = "Choice of workers"

_POLICY = f"One of {', '.join(POLICIES)}."

Prefill = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,...",
        help="Control ports of workers that prefill; more may join at --listen.",
        show_default=False,
        rich_help_panel=WORKERS,
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT,...", help="Of workers that decode.", show_default=False, rich_help_panel=WORKERS),
]
Mixed = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,...",
        help="Of workers that serve requests whole.",
        show_default=False,
        rich_help_panel=WORKERS,
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Where workers join and `jaxpd workers` asks; port 0: any.",
        rich_help_panel=WORKERS,
    ),
]
PrefillPolicy = Annotated[
    str, typer.Option(metavar="POLICY", help=f"Who computes a prompt. {_POLICY}", rich_help_panel=CHOICE)
]
DecodePolicy = Annotated[
    str, typer.Option(metavar="POLICY", help="Who decodes; the same names.", rich_help_panel=CHOICE)
]
TtftSlo = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Refuse at once what would get its first token later, such as 500ms or 2s; with --prefill-policy "
        "ttft_estimate.",
        show_default=False,
        rich_help_panel=CHOICE,
    ),
]
TpotSlo = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Refuse at once what would get its tokens further apart; with --decode-policy ttft_estimate.",
        show_default=False,
        rich_help_panel=CHOICE,
    ),
]
MaxTries = Annotated[
    int,
    typer.Option(metavar="N", help="How often a request is sent before its first token.", rich_help_panel=CHOICE),
]
MaxMigrations = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="How often an answer goes on elsewhere when its worker is lost; the client sees a pause.",
        rich_help_panel=CHOICE,
    ),
]
MigrateOnDrain = Annotated[
    bool,
    typer.Option(
        "--migrate-on-drain",
        help="Answers of a worker that drains go on elsewhere; otherwise it finishes them.",
        rich_help_panel=CHOICE,
    ),
]
