"""What every part of the suite gets: its time, what was measured before it, where its rows go, and a stopwatch."""

from __future__ import annotations

import json
import logging
import math
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAMPLE_S = 0.05  # a sample is as many calls as take this long: the dispatch of one hides behind the work of another
SAMPLES = 9
MAX_CALLS = 50
MEASURE_S = 8.0  # longer than this no measurement takes samples


class OutOfTime(Exception):
    """The part's time is over; what it has found stands."""


class Bench:
    """One part's run. A row is a dictionary of numbers and words, written to a file as soon as it is found."""

    def __init__(self, name: str, rows: pathlib.Path, seconds: float, known: dict[str, Any], smoke: bool) -> None:
        self.name, self.smoke = name, smoke
        self.known = known  # {"copy_bytes_per_s": ..., "matmul_flops_per_s": ...}, where they are measured already
        self.folder = rows.parent  # for files that one part leaves to another
        self._rows = rows
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def row(self, **values: Any) -> None:
        """Keeps a row and shows it."""
        values = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        shown = {k: v for k, v in values.items() if k not in ("traceback", "time", "dispatch")}
        if shown:
            print(f"  {self.name}: " + ", ".join(f"{k} {_short(v)}" for k, v in shown.items()), flush=True)

    @contextmanager
    def attempt(self, **what: Any) -> Iterator[None]:
        """A failure inside becomes a row with `what`, and the part goes on. Skipped rows say so."""
        try:
            if self.left() <= 0:
                raise OutOfTime("not run: the time of this part was over")
            yield
        except OutOfTime as error:
            self.row(**what, skipped=str(error))
        except Exception as error:
            self.row(**what, error=f"{type(error).__name__}: {error}"[:500], traceback=traceback.format_exc()[-4000:])

    def timed(self, run: Callable[[], Any], wait: Callable[[Any], Any], max_calls: int = MAX_CALLS) -> dict[str, float]:
        """Seconds of one call: median and spread over several samples, after two calls that compile and warm up.

        `max_calls` of a sample may be in flight at once: fewer where a result takes much memory.
        """
        start = time.perf_counter()
        wait(run())
        first_s = time.perf_counter() - start
        if self.left() <= 0:
            raise OutOfTime(f"not measured: the first call took {first_s:.0f} s, and with it the time of this part")
        start = time.perf_counter()
        wait(run())
        once = max(time.perf_counter() - start, 1e-7)
        calls = 1 if self.smoke else max(1, min(max_calls, math.ceil(SAMPLE_S / once)))
        end = time.perf_counter() + min(MEASURE_S, self.left())
        samples: list[float] = []
        while len(samples) < (2 if self.smoke else SAMPLES) and (not samples or time.perf_counter() < end):
            start = time.perf_counter()
            for _ in range(calls):
                result = run()
            wait(result)
            samples.append((time.perf_counter() - start) / calls)
        return {
            "median_s": statistics.median(samples),
            "min_s": min(samples),
            "max_s": max(samples),
            "samples": len(samples),
            "calls_a_sample": calls,
            "first_call_s": first_s,
        }

    def share(self, rate: float, of: str) -> float | None:
        """`rate` as a part of what was measured of the machine before, or None."""
        ceiling = self.known.get(of)
        return round(rate / ceiling, 4) if ceiling else None


class DispatchLog(logging.Handler):
    """Collects what the dispatcher says about which implementation it picked and why."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("pallas_kernels.dispatch")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
