"""How fast the queue moves, and whether a caller with a deadline can wait for its turn.

    submitted -> waiting -> first token, or the end
                   |            |
                   +-> wait_s <-+   requests that wait x mean time between the latest first tokens

An estimate, and it is used as one: only a request that has less than half of the time is refused, so that it does not
take a place in the queue, a reservation and a prefill for an answer that nobody will read.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence

from jaxpd.errors import DeadlineExceeded
from jaxpd.request import Event, FinishEvent, Request
from serving.observer import Observer, Origin

REMEMBERED = 32  # first tokens
NEEDED = 8  # first tokens before anything is said
SHARE = 0.5  # of the estimated wait that a caller must have


class Pace(Observer):
    """Watches requests between `submit` and their first token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: set[str] = set()
        self._firsts: collections.deque[float] = collections.deque(maxlen=REMEMBERED)

    def submitted(self, request: Request, origin: Origin) -> None:
        """One more that waits."""
        if not self._waiting:
            self._firsts.clear()  # an idle time says nothing about how fast a queue moves
            self._firsts.append(self._clock())
        self._waiting.add(request.request_id)

    def progressed(self, events: Sequence[Event]) -> None:
        """Some may have got their first token, or have ended without."""
        if not self._waiting:
            return
        for event in events:
            if event.request_id in self._waiting:
                self._waiting.discard(event.request_id)
                if not isinstance(event, FinishEvent):
                    self._firsts.append(self._clock())

    def wait_s(self) -> float:
        """About how long a request that comes now waits for its first token, in seconds; 0 where nothing is known."""
        if len(self._firsts) < NEEDED or not self._waiting:
            return 0.0
        return len(self._waiting) * (self._clock() - self._firsts[0]) / (len(self._firsts) - 1)

    def check(self, deadline_s: float | None, *, priority: int = 0) -> None:
        """Raises DeadlineExceeded when a caller's time is over, or cannot be enough. One that goes before others
        (`priority` below 0) is not measured by their queue."""
        if deadline_s is None:
            return
        left_s = deadline_s - self._clock()
        wait_s = self.wait_s() if priority >= 0 else 0.0
        if left_s <= 0:
            raise DeadlineExceeded("the deadline of the call has passed before the request was queued; allow more time")
        if left_s < SHARE * wait_s:
            raise DeadlineExceeded(
                f"the deadline of the call is in {left_s:.1f} s and {len(self._waiting)} requests wait, about "
                f"{wait_s:.1f} s of work; allow more time, or ask again later"
            )
