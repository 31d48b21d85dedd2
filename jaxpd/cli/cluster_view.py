"""What a person sees of a cluster that starts, changes and ends."""

from __future__ import annotations

import pathlib
import sys
import time
from typing import TYPE_CHECKING, Protocol

from jaxpd.cli.render import command_name, rows, seconds
from jaxpd.errors import Unavailable
from jaxpd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from serving.launch.controller import Status

POLL_S = 0.25


class Cluster(Protocol):
    """One that runs, here or on Ray."""

    def status(self, after: int = 0) -> Status: ...
    def scale(self, counts: Mapping[str, int]) -> Status: ...
    def end(self) -> Status: ...


def follow(
    cluster: Cluster, done: Callable[[Status], bool], timeout_s: float, *, after: int = 0, silent: bool = False
) -> Status:
    """Shows what happens until `done`. Raises Unavailable after `timeout_s`, with what is missing."""
    end_s = time.monotonic() + timeout_s
    while True:
        status = cluster.status(after)
        after = status.events[-1][0] if silent and status.events else show_events(status, after)
        if done(status):
            return status
        if time.monotonic() >= end_s:
            raise Unavailable(
                f"cluster {status.name} is not as wanted after {timeout_s:g} s (--timeout); it goes on trying:\n"
                + "\n".join(table(status))
            )
        time.sleep(POLL_S)


def show_events(status: Status, after: int) -> int:
    for number, text in status.events:
        print(f"jaxpd: {text}", file=sys.stderr, flush=True)
        after = number
    return after


def banner(status: Status, ready_s: float, folder: pathlib.Path | None, *, more: str) -> list[str]:
    """What a person sees when the cluster is ready; `more` are the flags that name it in the lines to be typed."""
    wanted = ", ".join(f"{count} {role}" for role, count in status.wanted.items() if count)
    places = [f"HTTP on {status.http}"] if status.http else []
    places += [f"gRPC on {status.grpc}"] if status.grpc else []
    stop = "Ctrl-C stops it" if folder is not None else "it goes on by itself"
    return [
        "",
        f"jaxpd {__version__} cluster {status.name} serves {status.model}: {wanted}",
        f"{', '.join(places)}, ready in {seconds(ready_s)}; {stop}.",
        *([f"Logs are in {folder}"] if folder is not None else []),
        "",
        f"    {command_name()} up{more} --scale decode=2",
        f"    {command_name()} down{more}",
        "",
    ]


def table(status: Status) -> list[str]:
    """A line for each process."""
    lines = {"wanted": ", ".join(f"{count} {role}" for role, count in status.wanted.items() if count)}
    for unit in status.units:
        words = [unit.phase, *([f"control on {unit.address}"] if unit.address else []), unit.where]
        words += [f"started {unit.generation} times"] if unit.generation > 1 else []
        words += [unit.trouble.partition("\n")[0]] if unit.trouble and unit.phase != "ready" else []
        lines[unit.name] = ", ".join(filter(None, words))
    return rows(lines)


def failure(status: Status, folder: pathlib.Path | None) -> str:
    failed = next(unit for unit in status.units if unit.phase == "failed")
    where = f"\nIts log is {folder / failed.name}.log" if folder is not None else ""
    return f"{failed.name} cannot start, so the cluster was stopped: {failed.trouble}{where}"
