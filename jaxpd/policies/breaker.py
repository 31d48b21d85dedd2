"""When a worker is left alone, and what becomes of a request that one of its legs lost. Frozen states, injected clock.

    closed --3 faults in a row--> open --pause is over--> half open --the probe went well--> closed
                                    ^                         |
                                    +--the probe failed, pause doubled

Each leg of each worker has its own breaker: a prefill worker that fails says nothing about the decode worker. Only what
shows that a worker is broken counts: no answer at all, or one that says so (`Outcome.FAULT`). A worker that is full or
draining says so and is healthy (`BUSY`): try another. A request that was wrong, cancelled or too late for its own
deadline says nothing (`NEUTRAL`). In the half-open state one request at a time goes there, the probe.

Outcomes of requests that were sent before it opened are ignored while it is open: when a worker dies a hundred requests
fail together, and that is one failure. A probe that is never heard of again is given up after `PROBE_LOST_S`.
"""

from __future__ import annotations

import dataclasses
import enum

MOST_FAULTS = 3  # in a row
PAUSE_S = 1.0  # the first; doubled each time that a probe fails
MAX_PAUSE_S = 30.0
PROBE_LOST_S = 15.0  # design: a stopped process is an answer within 15 s


class Outcome(enum.StrEnum):
    """What a leg's end says about its worker."""

    OK = "ok"
    FAULT = "fault"
    BUSY = "busy"
    NEUTRAL = "neutral"


_FAULTS = frozenset(("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"))
_BUSY = frozenset(("RESOURCE_EXHAUSTED", "UNAVAILABLE"))


def outcome(code: str | int | None) -> Outcome:
    """Of an answer's gRPC status name or HTTP status; None: there was no answer (refused, cut off, silent too long).

    `UNAVAILABLE` is what a worker *answered*; a gRPC library that says it because it could not connect is None here.
    """
    if code is None:
        return Outcome.FAULT
    if isinstance(code, int):
        if code in (429, 503):
            return Outcome.BUSY
        return Outcome.OK if code < 400 else Outcome.NEUTRAL if code < 500 else Outcome.FAULT
    if code == "OK":
        return Outcome.OK
    return Outcome.FAULT if code in _FAULTS else Outcome.BUSY if code in _BUSY else Outcome.NEUTRAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaker:
    """Of one leg of one worker. Times are seconds of one monotonic clock."""

    faults: int = 0  # in a row, while closed
    openings: int = 0  # in a row, without a success between them
    opened_s: float | None = None  # None: closed
    probe_s: float | None = None  # when the probe that is out was sent

    def waits_s(self, now_s: float) -> float:
        """Seconds until a request may go there; 0: now."""
        if self.opened_s is None:
            return 0.0
        pause_s = min(PAUSE_S * 2.0 ** min(self.openings - 1, 30), MAX_PAUSE_S)
        ready_s = self.opened_s + pause_s
        if self.probe_s is not None:
            ready_s = max(ready_s, self.probe_s + PROBE_LOST_S)
        return max(ready_s - now_s, 0.0)

    def sent(self, now_s: float) -> Breaker:
        """A request goes there. It is the probe unless the breaker is closed."""
        return self if self.opened_s is None else dataclasses.replace(self, probe_s=now_s)

    def ended(self, what: Outcome, *, sent_s: float, now_s: float) -> Breaker:
        """A request that was sent at `sent_s` is over."""
        if self.opened_s is None:
            if what is Outcome.OK:
                return Breaker()
            if what is not Outcome.FAULT:
                return self
            if self.faults + 1 < MOST_FAULTS:
                return dataclasses.replace(self, faults=self.faults + 1)
            return Breaker(openings=self.openings + 1, opened_s=now_s)
        if sent_s < self.opened_s:
            return self
        if what is Outcome.OK:
            return Breaker()
        if what is Outcome.FAULT:
            return Breaker(openings=self.openings + 1, opened_s=now_s)
        return dataclasses.replace(self, probe_s=None)


class Next(enum.StrEnum):
    """What becomes of a request that a leg lost; the other leg is cancelled in every case."""

    AGAIN = "again"  # both legs are chosen anew, without the worker that failed
    REPLAY = "replay"  # the same with the prompt and the tokens so far: the client sees a pause
    STOP = "stop"  # the client gets the error


def after(what: Outcome, *, streamed: int, tries: int, max_tries: int, migrations: int, max_migrations: int) -> Next:
    """What to do after a leg ended with `what`.

    Args:
        streamed: tokens that the client has; with any the request cannot simply begin again.
        tries: how often it was sent before its first token, this time included.
        migrations: how often it was replayed so far.
    """
    if what not in (Outcome.FAULT, Outcome.BUSY):
        return Next.STOP
    if streamed:
        return Next.REPLAY if migrations < max_migrations else Next.STOP
    return Next.AGAIN if tries < max_tries else Next.STOP
