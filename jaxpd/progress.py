"""Progress of long work (download, load, compile), as a protocol that the CLI draws and a library user may ignore."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol


class Stage(Protocol):
    """One running piece of work."""

    def advance(self, amount: float = 1.0, detail: str = "") -> None:
        """`amount` more is done (of the stage's total); `detail` says what, e.g. the program that was compiled."""


class Progress(Protocol):
    """Where stages are shown. Stages run one after the other; `advance` may be called from any thread."""

    def stage(
        self, name: str, *, total: float | None = None, unit: str = ""
    ) -> contextlib.AbstractContextManager[Stage]:
        """A stage named `name`, e.g. "compiling"; `total` in `unit` ("bytes", "programs"), None if not known."""
        ...

    def note(self, text: str) -> None:
        """One line for a person, such as a default that was derived."""


class _SilentStage:
    def advance(self, amount: float = 1.0, detail: str = "") -> None:
        del amount, detail


class SilentProgress:
    """Shows nothing."""

    @contextlib.contextmanager
    def stage(self, name: str, *, total: float | None = None, unit: str = "") -> Iterator[Stage]:
        del name, total, unit
        yield _SilentStage()

    def note(self, text: str) -> None:
        del text


class TimedProgress:
    """Passes everything on, and keeps how long each stage took: `seconds` by the stage's name."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, *, total: float | None = None, unit: str = "") -> Iterator[Stage]:
        """See `Progress`."""
        start_s = time.monotonic()
        with self._shown.stage(name, total=total, unit=unit) as stage:
            yield stage
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start_s

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._shown.note(text)
