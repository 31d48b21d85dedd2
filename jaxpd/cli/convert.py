"""`jaxpd convert`: any checkpoint that jaxpd reads, written as an Orbax folder."""

from __future__ import annotations

import pathlib
import shlex
import sys
from typing import Annotated

import typer

from jaxpd.cli.options import Dtype
from jaxpd.cli.progress import console_progress
from jaxpd.cli.render import command_name


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="What to read: a path, a built-in name or a hub id.")],
    dst: Annotated[
        pathlib.Path,
        typer.Argument(metavar="DST", help="Folder to write; it must not exist, or be empty.", show_default=False),
    ],
    dtype: Dtype = None,
) -> None:
    """Write a checkpoint as an Orbax folder."""
    from jaxpd.checkpoints.convert import convert as write

    write(src, dst, dtype=dtype, progress=console_progress())
    print(f"wrote {dst}; serve it with: {command_name()} serve {shlex.quote(str(dst))}", file=sys.stderr)
