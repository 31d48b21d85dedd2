"""One leg of a request in a worker, and how it is given to the engine or refused."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from jaxpd.errors import FailedPrecondition, Internal, JaxpdError
from jaxpd.policies.workers import Role
from jaxpd.request import DecodeLeg, FinishEvent, FinishReason, Leg, PrefillLeg, Request, Timings, Usage
from serving.observer import Origin
from serving.worker.session import Session
from serving.worker.wire import Started

if TYPE_CHECKING:
    from serving.worker.worker import Engine

logger = logging.getLogger(__name__)

LEGS: dict[Role, type[Leg] | type[None]] = {
    Role.PREFILL: PrefillLeg,
    Role.DECODE: DecodeLeg,
    Role.MIXED: type(None),
}


@dataclasses.dataclass(eq=False)
class Running:
    """A leg that the engine has, or is just given."""

    request: Request
    origin: Origin
    session: Session | None  # None: it has ended, and nobody listens
    left: set[int]  # samples that have not ended
    submitted: bool = False
    submitting: bool = False  # in a thread
    aborts: list[int | None] = dataclasses.field(default_factory=list)  # that came before the engine had it
    asked: bool = False  # its router has aborted something of it


def check_leg(started: Started, role: Role) -> None:
    """Raises FailedPrecondition for a leg that is not this worker's; the rest of it the engine checks."""
    if not isinstance(started.leg, LEGS[role]):
        raise FailedPrecondition(
            f"this is a {role.value} worker, and it was asked for another leg of a request; check --prefill, --decode "
            "and --mixed of the router"
        )


def give(engine: Engine, request: Request, leg: Leg | None) -> None:
    """Raises what `submit` raises."""
    if leg is None:
        engine.submit(request)
    else:
        engine.submit(request, leg)


def shown(error: BaseException, request_id: str) -> JaxpdError:
    """What a router is told of it; what is a bug the log tells."""
    if isinstance(error, JaxpdError):
        return error
    logger.error("starting request %s failed", request_id, exc_info=error)
    return Internal("internal error; the worker's log says more")


def refusal(request_id: str, prompt_tokens: int, sample: int, error: JaxpdError) -> FinishEvent:
    """The end of a sample that the engine never had."""
    return FinishEvent(
        request_id=request_id,
        reason=FinishReason.ERROR,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=0),
        timings=Timings(),
        error=error,
        sample=sample,
    )
