"""What something costs, from what it cost so far: seconds = fixed + per unit * units, fitted to the latest runs."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

LATEST = 64


class Meter:
    """A line through the latest measurements. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: deque[tuple[float, float]] = deque(maxlen=LATEST)
        self._fit: tuple[float, float] | None = None

    def record(self, units: float, seconds: float) -> None:
        """One run: so many bytes or tokens took so long."""
        with self._lock:
            self._latest.append((units, seconds))
            self._fit = None

    def fit(self) -> tuple[float, float]:
        """(fixed seconds, seconds per unit), neither negative; zeros before the first run.

        Least squares; runs of one size cannot tell the two apart, and count as seconds per unit.
        """
        with self._lock:
            if self._fit is None:
                self._fit = _line(list(self._latest))
            return self._fit


def _line(runs: list[tuple[float, float]]) -> tuple[float, float]:
    if not runs:
        return 0.0, 0.0
    units, seconds = np.asarray(runs).T
    through_zero = float(seconds.sum() / max(units.sum(), 1e-12))
    if np.ptp(units) < 0.25 * units.max():
        return 0.0, through_zero
    slope, fixed = np.polyfit(units, seconds, 1)
    if slope < 0:
        return float(seconds.mean()), 0.0
    return (float(fixed), float(slope)) if fixed >= 0 else (0.0, through_zero)
