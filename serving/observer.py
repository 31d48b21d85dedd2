"""Who watches requests go by: metrics, traces and the log are observers of one gateway.

    arrived -> refused
       |
       +-----> submitted -> [progressed, sent]* -> finished, once a sample -> detokenized

All methods are called on the gateway's event loop and must not block.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpd.errors import JaxpdError
from jaxpd.request import Event, FinishEvent, Request
from serving.callers import ANYONE, Caller

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a request came from. `headers` are HTTP headers or gRPC metadata that concern tracing, in lower case.

    `deadline_s` is when the caller stops waiting, in `time.monotonic()` seconds; None where it did not say.
    """

    front: str = "local"  # "http", "grpc" or "local"
    operation: str = "generate"  # "chat", "completion", "generate" or "infer"
    caller: Caller = ANYONE
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    deadline_s: float | None = None


class Observer:
    """Hears of everything and does nothing with it; observers override what they need."""

    def arrived(self, request_id: str, origin: Origin) -> None:
        """A request is about to be checked."""

    def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
        """It was not submitted: it is wrong, too much, or came at a bad time."""

    def submitted(self, request: Request, origin: Origin) -> None:
        """The engine has it."""

    def progressed(self, events: Sequence[Event]) -> None:
        """The events of one engine step, all requests together."""

    def sent(self, tokens: int) -> None:
        """A message with so many tokens went to a front."""

    def finished(self, request: Request, origin: Origin, event: FinishEvent) -> None:
        """One sample of it has ended. `event.life` has all that happened, with times.

        `event.reason` is STOP for one that the gateway has ended at a stop string.
        """

    def detokenized(self, seconds: float) -> None:
        """A request was read to its end; turning its ids into text took so long in all."""


class Observers(Observer):
    """Several as one. The fault of one of them is logged, and harms neither a request nor the others."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._all = tuple(observers)

    def arrived(self, request_id: str, origin: Origin) -> None:
        self._tell("arrived", request_id, origin)

    def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
        self._tell("refused", request_id, origin, error)

    def submitted(self, request: Request, origin: Origin) -> None:
        self._tell("submitted", request, origin)

    def progressed(self, events: Sequence[Event]) -> None:
        self._tell("progressed", events)

    def sent(self, tokens: int) -> None:
        self._tell("sent", tokens)

    def finished(self, request: Request, origin: Origin, event: FinishEvent) -> None:
        self._tell("finished", request, origin, event)

    def detokenized(self, seconds: float) -> None:
        self._tell("detokenized", seconds)

    def _tell(self, what: str, *told: Any) -> None:
        for observer in self._all:
            try:
                getattr(observer, what)(*told)
            except Exception:
                logger.exception("%s failed", type(observer).__name__)
