"""One connection of a client: uvicorn's protocol, held to limits that uvicorn leaves to others.

    accepted -> head -> body -> answering -> idle -> head ...
        |        |       |          |          |
      too many  head_s  body_s   stalled_s   idle_s     -> an error where one can still be sent, and closed

One task looks at all connections once a second (`close_late_ones`), which costs less than a timer for every request.
A client that ends its own side of the connection has left, as far as can be told, and its request is aborted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.http.errors import error_body
from serving.http.options import HttpOptions

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
LINGER_S = 2.0  # for a client that was refused to read why
FRAMING = 6  # most bytes that may frame a byte of a body; one byte a chunk takes five


class Connection(HttpToolsProtocol):
    """A connection with limits. `serving.http.front` makes a subclass for each server, with its `options`."""

    options = HttpOptions()
    most_connections = options.max_connections

    _deadline: float | None = None  # time.monotonic()
    _waits_for = ""  # of the client: "head", "body", "idle" (for the next request) or "end"
    _spare = 0  # bytes that may still come and are no body: the head, and what frames a body sent in chunks
    _stalled_at: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock, or turns the client away."""
        super().connection_made(transport)
        self._expect("head", self.options.head_s)
        self._spare = self.options.max_head_bytes
        if len(self.connections) > self.most_connections:
            self._refuse(503, f"{self.most_connections} connections are open, which is the limit", retry=True)

    def data_received(self, data: bytes) -> None:
        """Counts what is not body: the parser collects heads, and headers behind a body, without an end."""
        if self._waits_for == "end" or self.transport.is_closing():
            return
        self._spare -= len(data)
        super().data_received(data)
        if self._spare < 0:
            most = self.options.max_head_bytes
            self._refuse(431, f"the request's first line and headers have more than {most} bytes; send fewer")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._expect("head", self.options.head_s)
        self._spare = self.options.max_head_bytes

    def on_headers_complete(self) -> None:
        """Its body follows, if it has one."""
        self._expect("body", self.options.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body, whose size is `serving.http.middleware.Bodies`' concern."""
        self._spare += (1 + FRAMING) * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here; what follows is up to us."""
        super().on_message_complete()
        self._waits_for, self._deadline = "", None
        if self.cycle.response_complete:  # it was refused before it had been read
            self._expect("idle", self.options.idle_s)

    def on_response_complete(self) -> None:
        """It has been answered; the client may send the next."""
        super().on_response_complete()
        if not self._waits_for and self.cycle.response_complete:  # else another has been sent behind it
            self._expect("idle", self.options.idle_s)

    def pause_writing(self) -> None:
        """The client does not keep up with what it gets."""
        super().pause_writing()
        self._stalled_at = time.monotonic()

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._stalled_at = None

    def send_400_response(self, msg: str) -> None:
        """What arrived is no HTTP."""
        self._refuse(400, "what was sent is not HTTP/1.1 that can be read")

    def close_if_late(self, now: float) -> None:
        """Ends the connection if its client has been silent, slow or deaf for too long."""
        if self._stalled_at is not None and now - self._stalled_at > self.options.stalled_s:
            logger.info("a client took nothing of its answer for %.0f s: closed", self.options.stalled_s)
            self.transport.abort()
        elif self._deadline is not None and now > self._deadline:
            if self._waits_for == "end":
                self.transport.abort()
                return
            silent = self._waits_for == "head" and self._spare == self.options.max_head_bytes
            answered = self._waits_for == "body" and self.cycle.response_started
            if silent or answered or self._waits_for == "idle":
                self.transport.close()
            else:
                limit = self.options.head_s if self._waits_for == "head" else self.options.body_s
                self._refuse(408, f"the request's {self._waits_for} did not arrive within {limit:g} s; send it at once")

    def _expect(self, what: str, within_s: float) -> None:
        self._waits_for, self._deadline = what, time.monotonic() + within_s

    def _refuse(self, status: int, message: str, *, retry: bool = False) -> None:
        """Says why and closes. Past the beginning of an answer there is nothing to be said."""
        self._deadline = None
        if self._waits_for == "end" or self.transport.is_closing():
            return
        cycle = self.cycle  # the latest; the one that is being answered, where none wait behind it
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            self.transport.write(_raw_answer(status, error_body(status, message), retry))
        if cycle is not None:
            cycle.disconnected = True  # whatever its route still says is not sent
            cycle.message_event.set()
        # To close while the client still sends would make its system throw away what we have just said.
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._expect("end", LINGER_S)
        else:
            self.transport.close()


def _raw_answer(status: int, body: dict[str, Any], retry: bool) -> bytes:
    text = json.dumps(body).encode()
    head = [
        STATUS_LINE[status],
        b"content-type: application/json\r\n",
        b"content-length: %d\r\n" % len(text),
        b"connection: close\r\n",
        b"retry-after: 1\r\n" if retry else b"",
        b"\r\n",
    ]
    return b"".join(head) + text


async def close_late_ones(connections: Iterable[Any]) -> None:
    """Looks at all connections again and again, until it is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        now = time.monotonic()
        for connection in list(connections):
            try:
                connection.close_if_late(now)
            except Exception:  # of one connection must not let all others stay for ever
                logger.exception("a connection could not be looked at")
