"""What a router knows of its workers at one moment, for one request; and what it may answer: a choice or a refusal.

    Asked          the request: sizes, what it was promised, which workers it has tried
    Worker         role, state, what it is measured to take
      Replica      load charged so far, room, and pages of this prompt that it probably has
    Choice         a replica of a worker, for one leg
    Refusal        why not, and when to ask again

All frozen: a policy sees a snapshot, and the snapshot has read the clock.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from jaxpd.errors import InvalidArgument, JaxpdError, ResourceExhausted, Unavailable
from jaxpd.policies.fit import Fit


class Role(enum.StrEnum):
    """What a worker does; a mixed one serves a request whole, without a hand-off."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class State(enum.StrEnum):
    """joining -> ready -> draining -> gone; only a ready worker is chosen, a draining one ends what it has."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class Leg(enum.StrEnum):
    """The two parts of serving a request, each chosen by itself."""

    PREFILL = "prefill"
    DECODE = "decode"


class Site(NamedTuple):
    """One replica of one worker."""

    worker: str
    replica: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as a policy sees it. `waited_s` counts from its arrival and against its bounds in seconds."""

    prompt_tokens: int
    answer_tokens: int = 1  # expected: min(max_tokens, a clip)
    page_size: int  # tokens
    page_bytes: int = 0  # KV of one page, what crosses between the legs
    waited_s: float = 0.0
    ttft_slo_s: float | None = None  # None: no bound
    ttst_slo_s: float | None = None
    tpot_slo_s: float | None = None
    avoid: frozenset[str] = frozenset()  # workers that have failed or refused it
    first_token_s: float = 0.0  # for the decode leg: when the prefill leg is expected to end, from now

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.answer_tokens < 1 or self.page_size < 1:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens}, answer_tokens={self.answer_tokens} and "
                f"page_size={self.page_size} must each be at least 1"
            )

    @property
    def prompt_pages(self) -> int:
        return -(-self.prompt_tokens // self.page_size)

    @property
    def all_pages(self) -> int:
        """Prompt and expected answer."""
        return -(-(self.prompt_tokens + self.answer_tokens) // self.page_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """One data replica as a router believes it to be; what is charged to it counts from the dispatch on."""

    total_pages: int
    free_pages: int  # those that only its prefix cache holds included
    hit_pages: int = 0  # of this prompt, probably in its prefix cache
    pending_tokens: int = 0  # of prompts sent there that have no first token yet, without what caches had
    context_tokens: int = 0  # of sequences that decode there or are on their way
    queued: int = 0  # prompts without first token, or sequences on their way
    running: int = 0  # sequences that decode
    head_tokens: int = 0  # of `pending_tokens`: those of the prompt that it computes now
    head_s: float = 0.0  # since it began with that
    idle_s: float = 0.0  # since a prompt ended there, while it has none; infinite before the first
    last_chosen: int = 0  # number of the choice that chose it last, 0 before the first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker. `name` is unique over restarts: a worker that comes back is another one, with empty caches."""

    name: str
    role: Role
    state: State
    replicas: tuple[Replica, ...]
    slots: int = 256  # sequences that may decode in one replica
    queue_limit: int = 1024  # queued in one replica, above it none is sent there
    prefill_barred_s: float = 0.0  # until its circuit breaker lets a request through; 0: it does
    decode_barred_s: float = 0.0
    prefill: Fit = Fit()  # seconds by uncached prompt tokens
    transfer: Fit = Fit()  # seconds by bytes, as the receiving side
    step: Fit = Fit()  # seconds of a decode step by sequences in the replica

    def barred_s(self, leg: Leg) -> float:
        """Seconds for which it should be left alone. A mixed worker has to do both."""
        if self.role is Role.MIXED:
            return max(self.prefill_barred_s, self.decode_barred_s)
        return self.prefill_barred_s if leg is Leg.PREFILL else self.decode_barred_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A replica for one leg. `after_s`: expected from now to the leg's first result, None where nothing is measured."""

    site: Site
    hit_pages: int = 0  # of the prompt, believed to be there
    after_s: float | None = None


class Reason(enum.StrEnum):
    """Why a request is refused, to count by."""

    NO_WORKER = "no_worker"  # none of that role is ready
    TOO_LARGE = "too_large"  # for every replica that there is, however empty
    TRIED = "tried"  # each that could has failed or refused it
    FAILING = "failing"  # circuit breakers keep it from each
    FULL = "full"  # queues at their limits
    TOO_LATE = "too_late"  # it would miss what it was promised


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """`retry_after_s` is None where asking again is of no use."""

    leg: Leg
    reason: Reason
    message: str
    retry_after_s: float | None

    def error(self) -> JaxpdError:
        """What the client gets: its fault, too much load, or no worker to serve it."""
        if self.reason is Reason.TOO_LARGE:
            return InvalidArgument(self.message)
        if self.reason in (Reason.FULL, Reason.TOO_LATE):
            return ResourceExhausted(self.message, retry_after_s=self.retry_after_s or 1.0)
        return Unavailable(self.message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """Both legs of a request. They are the same site where a mixed worker serves it whole."""

    prefill: Choice
    decode: Choice

    @property
    def whole(self) -> bool:
        return self.prefill.site == self.decode.site
