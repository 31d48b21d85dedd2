"""Who watches requests go by: metrics, traces and the log are observers of one gateway.

    arrived -> refused
       |
       +-----> submitted -> [progressed, sent]* -> finished, once a sample

All methods are called on the gateway's event loop and must not block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxpd.errors import JaxpdError
from jaxpd.request import Event, FinishEvent, Request
from serving.callers import ANYONE, Caller


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a request came from. `headers` are HTTP headers or gRPC metadata that concern tracing, in lower case."""

    front: str = "local"  # "http", "grpc" or "local"
    operation: str = "generate"  # "chat", "completion", "generate" or "infer"
    caller: Caller = ANYONE
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


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
        """One sample of it has ended. `event.life` has all that happened, with times."""
