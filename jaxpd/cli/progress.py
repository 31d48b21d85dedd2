"""Progress on stderr: bars where a person watches, plain lines where a file does, one line a stage in a notebook.

All number the stages, show the elapsed time, and never go silent for ten seconds while a stage runs.

    [1] downloading smollm2-135m
    [1] downloading smollm2-135m 41.2/92.9 MB 20.6 MB/s, 2.5 s left
    [1] downloading smollm2-135m done in 4.4 s
    [2] compiling 3/12 prefill_t256 (6.2 s)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import rich.console
import rich.progress

from jaxpd.cli.render import amount, seconds
from jaxpd.progress import Progress, Stage

HEARTBEAT_S = 8.0  # below ten seconds, also when the machine is busy
EVERY_S = 2.0  # between lines of a stage whose pieces are many and small
FEW = 100  # a stage of at most this many pieces gets a line for each


def console_progress(stream: TextIO | None = None) -> Progress:
    """Progress for `stream` (stderr): bars on a terminal, lines otherwise."""
    stream = stream or sys.stderr
    console = rich.console.Console(file=stream)
    return RichProgress(console) if console.is_terminal and not console.is_dumb_terminal else LineProgress(stream)


class LineProgress:
    """One line a step, no carriage returns, a heartbeat while nothing happens. Lines of two threads never mix."""

    def __init__(
        self,
        stream: TextIO,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._heartbeat_s = heartbeat_s
        self._every_s = every_s
        self._clock = clock
        self._number = 0

    @contextlib.contextmanager
    def stage(self, name: str, *, total: float | None = None, unit: str = "") -> Iterator[Stage]:
        """See `jaxpd.progress.Progress`."""
        self._number += 1
        stage = _LineStage(self, f"[{self._number}] {name}", total, unit)
        self._passing(stage.title)
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(stage, ended), daemon=True, name="progress")
        beat.start()
        outcome = "failed after"
        try:
            yield stage
            outcome = "done in"
        finally:
            ended.set()
            beat.join()
            self.note(f"{stage.title} {outcome} {seconds(self._clock() - stage.start_s)}")

    def note(self, text: str) -> None:
        """See `jaxpd.progress.Progress`."""
        self._stream.write(text + "\n")  # one write, so that lines of two threads do not mix
        self._stream.flush()

    def _passing(self, text: str) -> None:
        """How far a stage is just now."""
        self.note(text)

    def _beat(self, stage: _LineStage, ended: threading.Event) -> None:
        while not ended.wait(self._heartbeat_s / 8):
            stage.beat(self._heartbeat_s)


class NotebookProgress(LineProgress):
    """One line a stage, rewritten in place and kept when the stage ends: a notebook understands a carriage return."""

    def __init__(self, stream: TextIO | None = None, *, heartbeat_s: float = 1.0) -> None:
        super().__init__(stream or sys.stdout, heartbeat_s=heartbeat_s, every_s=0.5)
        self._width = 0  # of the line that is rewritten

    def note(self, text: str) -> None:
        """See `jaxpd.progress.Progress`."""
        self._stream.write(self._over(text) + "\n")
        self._stream.flush()
        self._width = 0

    def _passing(self, text: str) -> None:
        self._stream.write(self._over(text))
        self._stream.flush()
        self._width = len(text)

    def _over(self, text: str) -> str:
        """`text` in place of the line before, of which nothing is left to see."""
        return f"\r{text:<{self._width}}" if self._width else text


class _LineStage:
    def __init__(self, parent: LineProgress, title: str, total: float | None, unit: str) -> None:
        self.title = title
        self.start_s = parent._clock()
        self._parent = parent
        self._total = total
        self._unit = unit
        self._done = 0.0
        self._line_s = self.start_s
        self._lock = threading.Lock()
        self._each = total is not None and total <= FEW and unit != "bytes"

    def advance(self, amount: float = 1.0, detail: str = "") -> None:
        """See `jaxpd.progress.Stage`."""
        with self._lock:
            self._done += amount
            if self._each or self._parent._clock() - self._line_s >= self._parent._every_s:
                self._line(detail)

    def beat(self, silence_s: float) -> None:
        """Writes a line if there was none for `silence_s`, less what the next look may come too late."""
        with self._lock:
            if self._parent._clock() - self._line_s >= silence_s * 7 / 8:
                self._line("")

    def _line(self, detail: str) -> None:
        now = self._parent._clock()
        state = describe(self._done, self._total, self._unit, now - self.start_s)
        self._line_s = now
        self._parent._passing(" ".join(part for part in (self.title, state, detail) if part))


def describe(done: float, total: float | None, unit: str, elapsed_s: float) -> str:
    """How far a stage is: "3/12 programs, 14 s, 42 s left", "41.2/92.9 MB, 20.6 MB/s, 2.5 s left"."""
    parts = []
    if total is not None:
        parts.append(amount(done, unit, of=total))
    elif done:
        parts.append(amount(done, unit))
    if unit == "bytes" and done and elapsed_s > 0:
        parts.append(f"{amount(done / elapsed_s, unit)}/s")
    parts.append(seconds(elapsed_s))
    if total is not None and 0 < done < total:
        parts.append(f"{seconds(elapsed_s * (total - done) / done)} left")
    return ", ".join(parts)


class RichProgress:
    """A bar a stage, with elapsed time and an estimate of what is left."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._number = 0

    @contextlib.contextmanager
    def stage(self, name: str, *, total: float | None = None, unit: str = "") -> Iterator[Stage]:
        """See `jaxpd.progress.Progress`."""
        self._number += 1
        bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(finished_text="[green]done[/]" if self._console.no_color else "[green]✓[/]"),
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.fields[state]}", markup=False),
            rich.progress.TextColumn("{task.fields[detail]}", markup=False, style="dim"),
            console=self._console,
        )
        with bar:
            stage = _RichStage(bar, f"[{self._number}] {name}", total, unit)
            yield stage
            stage.finish()

    def note(self, text: str) -> None:
        """See `jaxpd.progress.Progress`."""
        self._console.print(text, markup=False, highlight=False)


class _RichStage:
    def __init__(self, bar: rich.progress.Progress, title: str, total: float | None, unit: str) -> None:
        self._bar = bar
        self._unit = unit
        self._lock = threading.Lock()
        self._task = bar.add_task(title, total=total, state="", detail="")

    def advance(self, amount: float = 1.0, detail: str = "") -> None:
        """See `jaxpd.progress.Stage`."""
        with self._lock:
            self._bar.advance(self._task, amount)
            self._show(detail)

    def finish(self) -> None:
        """The stage ended well: a full bar, also where no total was known."""
        with self._lock:
            task = self._bar.tasks[0]
            self._bar.update(self._task, total=task.total or 1, completed=task.total or 1)
            self._show("")

    def _show(self, detail: str) -> None:
        task = self._bar.tasks[0]
        state = describe(task.completed, task.total, self._unit, task.elapsed or 0.0)
        self._bar.update(self._task, state=state, detail=detail)
