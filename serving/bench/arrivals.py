"""When requests arrive.

An open loop sends by the clock, whatever the server does: at `rate` requests a second, or as a trace says. Gaps are
drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, below 1 comes in bursts, above 1 is more
regular, inf is a metronome. The coefficient of variation of the gaps is 1 / sqrt(burstiness).

A closed loop (rate inf with a concurrency) sends whenever an answer has ended.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxpd.errors import InvalidArgument

DEFAULT_REQUESTS = 100
MOST_REQUESTS = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrivals:
    """`rate` in requests a second; None: as the trace says, or all at once. `duration_s` bounds the time of sending.

    Raises InvalidArgument for what cannot be.
    """

    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise InvalidArgument(
                f"--request-rate {self.rate:g} must be above 0 requests a second, or inf for all at once",
                field="request_rate",
            )
        if not self.burstiness > 0:
            raise InvalidArgument(
                f"--burstiness {self.burstiness:g} must be above 0: 1 is Poisson, less comes in bursts, inf is regular",
                field="burstiness",
            )
        for flag, value in (("concurrency", self.concurrency), ("num-requests", self.num_requests)):
            if value is not None and not 1 <= value <= MOST_REQUESTS:
                raise InvalidArgument(
                    f"--{flag} {value} must be between 1 and {MOST_REQUESTS}", field=flag.replace("-", "_")
                )
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise InvalidArgument(f"--duration {self.duration_s:g} must be above 0 seconds", field="duration")

    @property
    def by_clock(self) -> bool:
        """Whether a rate sets the times."""
        return self.rate is not None and math.isfinite(self.rate)

    def count(self) -> int | None:
        """How many requests a run at `rate` makes at most; None where only the trace or the time bounds them."""
        counts = [] if self.num_requests is None else [self.num_requests]
        if self.by_clock and self.duration_s is not None:
            assert self.rate is not None
            counts.append(max(1, math.ceil(self.rate * self.duration_s)))
        return min(counts, default=None)


def offsets(rate: float, count: int, *, burstiness: float, seed: int) -> np.ndarray:
    """float64 [count]: seconds from the first arrival, at 0, to each.

    The gaps are scaled so that their mean is exactly 1 / rate: the rate that is asked for is the rate that is made,
    also with few requests. With one seed, two rates give the same arrivals on two time scales, so that the outcomes of
    two rates differ by the rate alone.
    """
    gaps = np.ones(count - 1)
    if math.isfinite(burstiness):
        drawn = np.random.default_rng([seed, 1]).gamma(burstiness, size=count - 1)
        if drawn.sum() > 0:  # a tiny shape may draw nothing but zeros
            gaps = drawn * (count - 1) / drawn.sum()
    return np.concatenate([[0.0], np.cumsum(gaps) / rate])
