"""What something will take, from what it took: seconds = fixed + per unit * units, learned one run at a time.

    Fit() -> fit.learn(units, seconds) -> another Fit, which remembers the last 50 or so -> fit.seconds(units)

Old runs fade (each counts 2% less than the one after it), so that a worker that became slower is soon known to be so.
One run that stalled (a stopped process, a lost packet) does not spoil it: what lies far above the estimate is cut down
to a few times the usual error before it is learned. If it stays that slow, the usual error grows and lets it pass.

Frozen, and sums throughout: the sum of two fits is the fit of both's runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

FADE = 0.98  # weight of a run after each later one: 1 / (1 - FADE) = 50 runs count at most
LEAST_RUNS = 8  # below this many nothing is sure
FIRST_ERRORS = 4  # runs before the errors of the estimate mean anything
CUT = 4.0  # usual errors above the estimate: a run that took longer is learned as this much
LEAST_ERROR = 0.1  # of the estimate: a smaller usual error is not believed when a run is cut
SURE_ERROR = 0.5  # of the mean run: with a larger usual error nothing is sure
LEAST_UNITS = 1e-9  # a mean below it is none: a rate would be nonsense
SAME_SIZE = 1e-3  # squared relative spread of the units: below it all runs are of one size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Faded sums over runs of (units, seconds). Units are what the caller says: tokens, bytes, sequences."""

    runs: float = 0.0
    units: float = 0.0
    total_s: float = 0.0
    units2: float = 0.0
    units_s: float = 0.0
    error_runs: float = 0.0
    error_s: float = 0.0  # absolute errors, each of the estimate before its run was learned

    def learn(self, units: float, seconds: float) -> Fit:
        """The fit after one more run. Raises ValueError for a negative or infinite one."""
        if not (0 <= units < math.inf and 0 <= seconds < math.inf):
            raise ValueError(f"a run of units={units} in seconds={seconds}: both must be finite and not negative")
        error_runs, error_s = self.error_runs * FADE, self.error_s * FADE
        if self.runs >= FIRST_ERRORS:
            expected = self.seconds(units)
            if self.runs >= LEAST_RUNS:
                usual = max(self.spread_s, LEAST_ERROR * max(expected, self.total_s / self.runs))
                seconds = min(seconds, expected + CUT * usual)
            error_runs, error_s = error_runs + 1, error_s + abs(seconds - expected)
        return Fit(
            runs=self.runs * FADE + 1,
            units=self.units * FADE + units,
            total_s=self.total_s * FADE + seconds,
            units2=self.units2 * FADE + units * units,
            units_s=self.units_s * FADE + units * seconds,
            error_runs=error_runs,
            error_s=error_s,
        )

    @functools.cached_property
    def line(self) -> tuple[float, float]:
        """(fixed seconds, seconds per unit), neither negative; zeros before the first run.

        Runs of one size cannot tell the two apart, and count as seconds per unit.
        """
        if not self.runs:
            return 0.0, 0.0
        if self.units <= LEAST_UNITS * self.runs:
            return self.total_s / self.runs, 0.0
        spread = self.runs * self.units2 - self.units**2  # runs**2 times the variance of the units
        if spread <= SAME_SIZE * self.runs * self.units2:
            return 0.0, self.total_s / self.units
        slope = (self.runs * self.units_s - self.units * self.total_s) / spread
        if slope < 0:
            return self.total_s / self.runs, 0.0
        fixed = (self.total_s - slope * self.units) / self.runs
        return (fixed, slope) if fixed >= 0 else (0.0, self.units_s / self.units2)

    def seconds(self, units: float, times: int = 1) -> float:
        """Expected seconds of `times` runs with `units` together."""
        fixed, slope = self.line
        return times * fixed + slope * units

    @property
    def spread_s(self) -> float:
        """The mean absolute error of one estimate, in seconds; 0 before there was any."""
        return self.error_s / self.error_runs if self.error_runs else 0.0

    @property
    def sure(self) -> bool:
        """Whether to act on it: enough runs, and estimates that were not far off."""
        return self.runs >= LEAST_RUNS * FADE**LEAST_RUNS and self.spread_s <= SURE_ERROR * self.total_s / self.runs


def pooled(fits: Iterable[Fit]) -> Fit:
    """One fit of the runs of all of them: what to expect of a worker that nothing is known of."""
    total = Fit()
    for fit in fits:
        total = Fit(**{f.name: getattr(total, f.name) + getattr(fit, f.name) for f in dataclasses.fields(Fit)})
    return total
