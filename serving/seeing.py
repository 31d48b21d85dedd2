"""What can be seen of a server from outside: metrics, traces and the log, made ready for one gateway."""

from __future__ import annotations

from collections.abc import Sequence

from serving.config import ServerConfig
from serving.gateway import Gateway
from serving.logs import RequestLog
from serving.metrics import Metrics
from serving.observer import Observer
from serving.tracing import Tracing, make_tracer


class Seeing:
    """The observers of a server. Made before its gateway, which `watch` is called with.

    Raises InvalidArgument or FailedPrecondition for traces that cannot be sent.
    """

    def __init__(self, config: ServerConfig, more: Sequence[Observer] = ()) -> None:
        self.metrics = Metrics(config.keys)
        self._watching: list[Metrics | Tracing] = [self.metrics]
        if config.otlp_endpoint is not None:
            self._watching.append(make_tracer(config.otlp_endpoint))
        self.observers: tuple[Observer, ...] = (*self._watching, RequestLog(), *more)

    def watch(self, gateway: Gateway) -> None:
        """The gateway's state and the engine's load are read when metrics are asked for."""
        for observer in self._watching:
            observer.attach(gateway)

    def close(self) -> None:
        """Sends what is left of the traces and ends; may take a few seconds."""
        for observer in self._watching:
            observer.close()
