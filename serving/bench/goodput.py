"""Goodput: the highest request rate whose attainment reaches the target, found by doubling and bisection.

    min_rate, 2 min_rate, 4 min_rate ... until one misses (or max_rate), then halves between the last two
    until what is left between them is within the precision

The answer is the highest rate that was tried and met the target, never one in between. Attainment is taken to fall as
the rate rises; a server near its limit is noisy, and there a longer probe is a better one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable

from jaxpd.errors import InvalidArgument


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Rates in requests a second; `precision` is the share of the goodput that may stay unknown above it.

    Raises InvalidArgument for what cannot be.
    """

    attainment: float = 0.9
    min_rate: float = 1.0
    max_rate: float = 1024.0
    precision: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise InvalidArgument(
                f"--attainment {self.attainment:g} must be a share above 0 and up to 1, such as 0.9", field="attainment"
            )
        if not 0 < self.min_rate < self.max_rate < math.inf:
            raise InvalidArgument(
                f"--min-rate {self.min_rate:g} must be above 0 and below --max-rate {self.max_rate:g}, in requests a "
                "second",
                field="min_rate",
            )
        if not 0.001 <= self.precision <= 1:
            raise InvalidArgument(
                f"--precision {self.precision:g} must be from 0.001 to 1, such as 0.05 for 5 %", field="precision"
            )


@dataclasses.dataclass(frozen=True)
class Goodput:
    """`rate` met the target, None if not even min_rate did; `above` missed it, None if not even max_rate did.

    `complete` is False where the search was stopped before its precision was reached.
    """

    rate: float | None
    above: float | None
    complete: bool


async def find(attainment_at: Callable[[float], Awaitable[float | None]], search: Search) -> Goodput:
    """`attainment_at(rate)` makes one probe; None stops the search there."""
    low: float | None = None
    high: float | None = None
    rate = search.min_rate
    while True:
        attained = await attainment_at(rate)
        if attained is None:
            return Goodput(low, high, complete=False)
        if attained >= search.attainment:
            low = rate
        else:
            high = rate
        if low is None or (high is None and rate >= search.max_rate):
            return Goodput(low, high, complete=True)
        if high is None:
            rate = min(2 * low, search.max_rate)
        elif high - low <= search.precision * low:
            return Goodput(low, high, complete=True)
        else:
            rate = (low + high) / 2
