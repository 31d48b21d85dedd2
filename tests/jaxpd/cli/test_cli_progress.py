"""Progress: lines where no terminal is, bars where one is, never silent."""

from __future__ import annotations

import io
import time

import pytest
import rich.console

from jaxpd.cli.progress import LineProgress, NotebookProgress, RichProgress, console_progress, describe


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_of_few_pieces_gets_a_line_for_each() -> None:
    out, clock = io.StringIO(), Clock()
    progress = LineProgress(out, clock=clock)
    with progress.stage("loading", total=2, unit="tensors") as stage:
        clock.now = 1.0
        stage.advance(2)
    with progress.stage("compiling", total=3, unit="programs") as stage:
        for name in ("prefill_t256", "decode_b4", "decode_b8"):
            clock.now += 4.0
            stage.advance(detail=name)
    assert out.getvalue().splitlines() == [
        "[1] loading",
        "[1] loading 2/2 tensors, 1.0 s",
        "[1] loading done in 1.0 s",
        "[2] compiling",
        "[2] compiling 1/3 programs, 4.0 s, 8.0 s left prefill_t256",
        "[2] compiling 2/3 programs, 8.0 s, 4.0 s left decode_b4",
        "[2] compiling 3/3 programs, 12 s decode_b8",
        "[2] compiling done in 12 s",
    ]


def test_bytes_are_counted_in_few_lines() -> None:
    out, clock = io.StringIO(), Clock()
    with LineProgress(out, clock=clock).stage("downloading", total=1000 * 2**20, unit="bytes") as stage:
        for _ in range(1000):
            clock.now += 0.01
            stage.advance(2**20)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 + 4  # begin, end, and one in two seconds
    assert lines[1] == "[1] downloading 200.0/1000.0 MiB, 100.0 MiB/s, 2.0 s, 8.0 s left"
    assert "\r" not in out.getvalue()


def test_a_silent_stage_has_a_heartbeat() -> None:
    out = io.StringIO()
    with LineProgress(out, heartbeat_s=0.08).stage("compiling", total=2, unit="programs"):
        time.sleep(0.6)
    beats = [line for line in out.getvalue().splitlines() if "0/2 programs" in line]
    assert len(beats) >= 3


def test_a_stage_that_fails_says_so_and_passes_the_error_on() -> None:
    out = io.StringIO()
    with pytest.raises(OSError, match="disk"), LineProgress(out, clock=Clock()).stage("loading"):
        raise OSError("disk")
    assert out.getvalue().splitlines()[-1] == "[1] loading failed after 0.00 s"


def test_bars_show_name_count_and_note() -> None:
    out = io.StringIO()
    progress = RichProgress(rich.console.Console(file=out, force_terminal=True, width=120, color_system=None))
    progress.note("dtype [float32] was derived")
    with progress.stage("compiling", total=2, unit="programs") as stage:
        stage.advance(detail="decode_b4")
        stage.advance(detail="decode_b8")
    shown = out.getvalue()
    assert "dtype [float32] was derived" in shown
    assert "[1] compiling" in shown and "2/2 programs" in shown


def test_no_terminal_means_lines() -> None:
    assert isinstance(console_progress(io.StringIO()), LineProgress)


@pytest.mark.parametrize(
    ("done", "total", "unit", "elapsed", "text"),
    [
        (0, 12, "programs", 3.0, "0/12 programs, 3.0 s"),
        (0, None, "", 20.0, "20 s"),
        (3, None, "files", 130.0, "3 files, 2 min 10 s"),
        (512, 1024, "bytes", 1.0, "0.5/1.0 KiB, 512 B/s, 1.0 s, 1.0 s left"),
    ],
)
def test_describe(done: float, total: float | None, unit: str, elapsed: float, text: str) -> None:
    assert describe(done, total, unit, elapsed) == text


def test_a_notebook_has_one_line_a_stage() -> None:
    out = io.StringIO()
    progress = NotebookProgress(out, heartbeat_s=60)
    with progress.stage("compiling", total=2, unit="programs") as stage:
        stage.advance(detail="a program with a very long name")
        stage.advance(detail="b")
    progress.note("and then")
    lines = out.getvalue().split("\n")
    assert len(lines) == 3 and lines[1:] == ["and then", ""]
    written = lines[0].split("\r")
    assert "very long name" in written[1] and written[2].rstrip().endswith("b")
    assert len(written[2]) >= len(written[1])  # nothing of the longer line is left to see
    assert written[-1].startswith("[1] compiling done in")
