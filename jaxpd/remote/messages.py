"""What a prefill engine and a decode engine say to each other, beside the offers of `meshes.transfer.messages`.

Plain data; `serving.worker` carries it. A hand-off is named by 64 random bits, drawn by who sends both legs. A message
that comes twice, too late, or about something that is over changes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from meshes.transfer import messages as transfer
from meshes.transfer.remote import RemoteTransport


@dataclasses.dataclass(frozen=True, slots=True)
class Reserve:
    """Prefill: the sequence is about to be computed."""

    handoff: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """Decode: pages and a slot are reserved; the first `hit_pages` of what is to be computed need not be sent."""

    handoff: int
    hit_pages: int


@dataclasses.dataclass(frozen=True, slots=True)
class NotReserved:
    """Decode: it will not take it (any more)."""

    handoff: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Prefill: pages `[first, first + count)` lie ready, an offer for each piece of `jaxpd.programs.page_pieces`."""

    handoff: int
    first: int
    count: int
    offers: tuple[transfer.Offer, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FirstToken:
    """Prefill: the first token, which the client gets from there; it did not end the sequence."""

    handoff: int
    token: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
    """Prefill: the sequence has ended before it was handed off."""

    handoff: int
    reason: str


Message = (
    Reserve | Reserved | NotReserved | Piece | FirstToken | Forget | transfer.Ack | transfer.Refuse | transfer.Revoke
)


class Peer(Protocol):
    """The other engine, and the transport that belongs to the two alone. Whoever made it closes the transport."""

    @property
    def name(self) -> str:
        """For logs and errors: its address."""
        ...

    @property
    def transport(self) -> RemoteTransport:
        """Offers to it, or pulls from it."""
        ...

    def send(self, message: Message) -> None:
        """From any thread; never blocks. Lost where the peer is gone, which `lost` will say."""


class Side(Protocol):
    """An engine's end of all hand-offs: what the carrier of the messages tells it. From any thread; nothing blocks.

    A prefill engine's side knows its peers by the address in `PrefillLeg.peer`; it asks for those it lacks (`want`).
    """

    def connected(self, peer: Peer) -> None:
        """The two have agreed (meshes.transfer.identity) and may hand over. A second one of the name is a new one."""

    def received(self, peer: Peer, message: Message) -> None:
        """In the order in which the peer has sent them."""

    def lost(self, name: str, reason: str) -> None:
        """The peer is gone, or was never reached: all that is bound to it ends, with HandoffFailed."""
