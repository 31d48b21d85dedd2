"""What is charged to whom: from the dispatch of a request's leg to its end, in exact integers.

    charge(id, leg) -> [start(id): it decodes now] -> give_back(id, leg)

Each leg of a request is charged to one site and given back once; a second `give_back` finds nothing and does nothing,
so that every way to end may call it. The sum of what is charged is what is in flight, and zero when nothing is.
"""

from __future__ import annotations

import dataclasses
import math

from jaxpd.policies.workers import Leg, Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charge:
    """One leg in flight. `tokens` are those of the prompt yet to be computed, or the context that decodes."""

    request_id: str
    leg: Leg
    site: Site
    tokens: int
    pages: int
    sent_s: float
    started: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The sum of a site's charges."""

    pending_tokens: int = 0  # of prompts without a first token
    prompts: int = 0
    context_tokens: int = 0  # of sequences, those on their way included
    arriving: int = 0  # sequences on their way to decode there
    running: int = 0
    pages: int = 0

    def plus(self, charge: Charge, sign: int) -> Load:
        """With a charge more (`sign` 1) or less (-1)."""
        prefill = charge.leg is Leg.PREFILL
        return Load(
            pending_tokens=self.pending_tokens + (sign * charge.tokens if prefill else 0),
            prompts=self.prompts + (sign if prefill else 0),
            context_tokens=self.context_tokens + (0 if prefill else sign * charge.tokens),
            arriving=self.arriving + (0 if prefill or charge.started else sign),
            running=self.running + (sign if charge.started else 0),
            pages=self.pages + sign * charge.pages,
        )


EMPTY = Load()


class Ledger:
    """The charges of one router. Not thread-safe."""

    def __init__(self) -> None:
        self._charges: dict[tuple[str, Leg], Charge] = {}
        self._loads: dict[Site, Load] = {}  # without those that are empty
        self._prompts: dict[Site, dict[str, Charge]] = {}  # in the order of dispatch, which is that of service
        self._ended_s: dict[Site, float] = {}  # when a prompt last ended there
        self._chosen: dict[Site, int] = {}
        self._choices = 0

    def charge(self, request_id: str, leg: Leg, site: Site, *, tokens: int, pages: int, now_s: float) -> None:
        """Raises ValueError for a leg that is charged already, and for a negative charge."""
        if (request_id, leg) in self._charges:
            other = self._charges[request_id, leg].site
            raise ValueError(f"{leg.value} of request {request_id!r} is charged to {other}; give it back first")
        if tokens < 0 or pages < 0:
            raise ValueError(f"request {request_id!r}: tokens={tokens} and pages={pages} must not be negative")
        new = Charge(request_id=request_id, leg=leg, site=site, tokens=tokens, pages=pages, sent_s=now_s)
        self._charges[request_id, leg] = new
        self._add(new, 1)
        if leg is Leg.PREFILL:
            self._prompts.setdefault(site, {})[request_id] = new
        self._choices += 1
        self._chosen[site] = self._choices

    def start(self, request_id: str) -> None:
        """A sequence that was on its way decodes. Nothing happens where it does so already, or has ended."""
        old = self._charges.get((request_id, Leg.DECODE))
        if old is not None and not old.started:
            self._add(old, -1)
            new = dataclasses.replace(old, started=True)
            self._charges[request_id, Leg.DECODE] = new
            self._add(new, 1)

    def give_back(self, request_id: str, leg: Leg, *, now_s: float) -> Charge | None:
        """What was charged; None where it was given back before."""
        old = self._charges.pop((request_id, leg), None)
        if old is not None:
            self._add(old, -1)
            if leg is Leg.PREFILL:
                self._ended_s[old.site] = now_s
                prompts = self._prompts[old.site]
                del prompts[request_id]
                if not prompts:
                    del self._prompts[old.site]
        return old

    def find(self, request_id: str, leg: Leg) -> Charge | None:
        """The charge in flight, if any."""
        return self._charges.get((request_id, leg))

    def forget(self, worker: str, *, now_s: float) -> list[Charge]:
        """Gives back all that is charged to a worker that is gone, and returns it: these requests need another."""
        lost = [charge for charge in self._charges.values() if charge.site.worker == worker]
        for charge in lost:
            self.give_back(charge.request_id, charge.leg, now_s=now_s)
        for kept in (self._ended_s, self._chosen):
            for site in [site for site in kept if site.worker == worker]:
                del kept[site]
        return lost

    def load(self, site: Site) -> Load:
        """What is charged to a site."""
        return self._loads.get(site, EMPTY)

    def head(self, site: Site, now_s: float) -> tuple[int, float]:
        """(tokens, seconds since it began) of the prompt that a site computes now; zeros where there is none."""
        prompts = self._prompts.get(site)
        if not prompts:
            return 0, 0.0
        first = next(iter(prompts.values()))
        began_s = max(first.sent_s, self._ended_s.get(site, first.sent_s))
        return first.tokens, max(now_s - began_s, 0.0)

    def idle_s(self, site: Site, now_s: float) -> float:
        """Seconds since a prompt ended there, 0 while there is one, infinite before the first."""
        return 0.0 if site in self._prompts else now_s - self._ended_s.get(site, -math.inf)

    def last_chosen(self, site: Site) -> int:
        """Number of the choice that chose it last, 0 before the first."""
        return self._chosen.get(site, 0)

    def legs(self, worker: str, leg: Leg) -> int:
        """How many of one kind are charged to a worker."""
        return sum(charge.leg is leg and charge.site.worker == worker for charge in self._charges.values())

    @property
    def in_flight(self) -> int:
        """Legs that are charged."""
        return len(self._charges)

    def total(self) -> Load:
        """Of all sites."""
        names = [field.name for field in dataclasses.fields(Load)]
        return Load(**{name: sum(getattr(load, name) for load in self._loads.values()) for name in names})

    def _add(self, charge: Charge, sign: int) -> None:
        load = self.load(charge.site).plus(charge, sign)
        if load == EMPTY:
            self._loads.pop(charge.site, None)
        else:
            self._loads[charge.site] = load
