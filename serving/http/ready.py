"""Whether the server takes requests, as `/health` says it."""

from __future__ import annotations

import dataclasses

from jaxpd.errors import Unavailable
from serving.gateway import State
from serving.metrics import Source


@dataclasses.dataclass
class Ready:
    """`ready` is what the process says of itself; the gateway, or worker, has its doors besides."""

    gateway: Source
    ready: bool = False

    def check(self) -> None:
        """Raises Unavailable unless requests are taken."""
        if self.gateway.state is State.DRAINING:
            raise Unavailable("the server is shutting down and takes no new requests; ask another one")
        if not self.ready and self.gateway.state is State.READY:
            raise Unavailable("the server has no workers to serve with just now; ask again in a moment")
        if not self.ready or self.gateway.state is State.STARTING:
            raise Unavailable("the server is starting (loading weights, compiling); ask again in a moment")
