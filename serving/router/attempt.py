"""What one request is over its attempts, and what is to be done about it: the nouns of `serving.router.legs`.

Sample    what the client has of one answer, over all attempts
Plan      a request for workers, before it is dispatched
Attempt   after it: which of its samples are over, and why
Effect    what is to be done now: one of the frozen classes below, for `serving.router.requests` to carry out
"""

from __future__ import annotations

import dataclasses

from jaxpd.errors import JaxpdError
from jaxpd.life import Moment
from jaxpd.policies.breaker import Outcome
from jaxpd.policies.workers import Leg, Route
from jaxpd.request import Event, FinishEvent, Request, TokensEvent

WORD_S = 0.25  # how long a `Wait` takes


@dataclasses.dataclass(eq=False)
class Sample:
    """What the client has of one sample."""

    index: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)  # when each came
    moments: list[Moment] = dataclasses.field(default_factory=list)
    cached_tokens: int | None = None
    tries: int = 0
    migrations: int = 0
    avoid: frozenset[str] = frozenset()  # workers that have failed it
    finished: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A request for workers, to be dispatched. `samples`: the client's sample of each of its own.

    `avoids` are sets of workers to leave out, to be tried in order until one leaves somebody. `error` is what the
    client gets where none does; None: why not.
    """

    request: Request
    samples: tuple[int, ...]
    avoids: tuple[frozenset[str], ...] = (frozenset(),)
    error: JaxpdError | None = None
    replay: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blame:
    """What an attempt says about its workers: `leg` ended with `what`, the other says nothing."""

    leg: Leg
    what: Outcome


@dataclasses.dataclass(eq=False)
class Attempt:
    """One dispatch. Lists have an entry for each sample of its request."""

    plan: Plan
    route: Route
    sent_s: float
    over: list[bool]
    handed: list[bool]  # the prefill worker is done with it
    early: list[list[TokensEvent]]  # of the decode worker, before the first token
    early_end: list[FinishEvent | None]  # of the decode worker, before the prefill worker is done with the sample
    prefilled: bool = False
    decoding: bool = False
    blame: Blame | None = None

    @property
    def request(self) -> Request:
        return self.plan.request

    @property
    def wire_id(self) -> str:
        return self.plan.request.request_id

    @property
    def base(self) -> int:
        """Tokens that each of its samples had when it began."""
        return len(self.plan.request.outputs)

    @property
    def whole(self) -> bool:
        return self.route.whole

    @property
    def prefill(self) -> str:
        return self.route.prefill.site.worker

    @property
    def decode(self) -> str:
        return self.route.decode.site.worker

    def leg_of(self, worker: str) -> Leg:
        """Which leg a worker has; a mixed one's faults count for the decode leg once it has a token."""
        if self.whole:
            return Leg.DECODE if self.decoding else Leg.PREFILL
        return Leg.PREFILL if worker == self.prefill else Leg.DECODE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deliver:
    """To the client."""

    event: Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel:
    """Tell a worker to abort a request, or one sample of it."""

    worker: str
    wire_id: str
    sample: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefilled:
    """The prompt is computed. None: the worker does not say (yet)."""

    attempt: Attempt
    cached_tokens: int | None = None
    prefill_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """The first token of the decode leg has come."""

    attempt: Attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """How long a hand-off took, as the decode worker says."""

    attempt: Attempt
    transfer_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Closed:
    """The attempt is over. `tokens` are those of its first sample."""

    attempt: Attempt
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retry:
    """Dispatch it; then `Legs.start`, or `Legs.refused`."""

    plan: Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """The decode worker has given a sample up, maybe since the prefill worker has ended it: which will say so, or not.
    Call `Legs.waited` in `WORD_S` seconds."""

    wire_id: str
    sample: int


Effect = Deliver | Cancel | Prefilled | Decoding | Moved | Closed | Retry | Wait
