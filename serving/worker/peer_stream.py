"""The stream to one other worker, and the transport that belongs to it: what goes out, in order, from any thread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from jaxpd.remote.messages import Message
from meshes.transfer.remote import RemoteTransport
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.worker.wire_peer import peer_to_proto

logger = logging.getLogger(__name__)

# For tests of faults: what becomes of a message on its way out or in.
PeerFilter = Callable[[Message, Literal["sent", "received"]], list[Message]]


class PeerStream:
    """A `jaxpd.remote.messages.Peer`. Made in the task that carries it, and its loop's, but for `send`."""

    def __init__(self, name: str, instance: str, transport: RemoteTransport, keep: PeerFilter | None) -> None:
        self.instance = instance
        self.silent = 0  # beats
        self.ended = asyncio.Event()
        self.reason = ""
        self.task = asyncio.current_task()  # that carries it
        self._name = name
        self._transport = transport
        self._filter = keep
        self._loop = asyncio.get_running_loop()
        self._leaving: deque[pb.PeerMessage] = deque()
        self._news = asyncio.Event()

    @property
    def name(self) -> str:
        """See `Peer`."""
        return self._name

    @property
    def transport(self) -> RemoteTransport:
        """See `Peer`."""
        return self._transport

    def send(self, message: Message) -> None:
        """See `Peer`."""
        try:
            self._loop.call_soon_threadsafe(self._send, message)
        except RuntimeError:  # the loop has ended: nobody is there any more
            logger.debug("a message to %s came after the end", self._name)

    def ping(self) -> None:
        """Says that this end is there, if nothing else does."""
        if not self._leaving:
            self._leave(pb.PeerMessage(ping=pb.Ping()))

    def received(self, message: Message) -> list[Message]:
        """What the engine is to hear."""
        return [message] if self._filter is None else self._filter(message, "received")

    def end(self, reason: str) -> None:
        """Nothing more goes out."""
        self.reason = self.reason or reason
        self.ended.set()
        self._news.set()

    async def leaving(self) -> AsyncGenerator[pb.PeerMessage, None]:
        """What goes to the other end, in order, until the end."""
        while not self.ended.is_set():
            await self._news.wait()
            self._news.clear()
            while self._leaving and not self.ended.is_set():
                yield self._leaving.popleft()

    def _send(self, message: Message) -> None:
        for kept in [message] if self._filter is None else self._filter(message, "sent"):
            self._leave(peer_to_proto(kept))

    def _leave(self, message: pb.PeerMessage) -> None:
        if not self.ended.is_set():
            self._leaving.append(message)
            self._news.set()
