"""A follower's part of hand-offs: its heads of staged pieces, offered from its own transfer servers.

    Gather: held --> OfferPiece: offered to a peer --> Offered --> EndOffer, or its lease: withdrawn --> Freed
              |
              +----> DropPiece: nobody wants it

The leader speaks to the peer; it learns here where this process's heads can be pulled.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxpd.errors import FailedPrecondition
from jaxpd.multihost.descriptors import (
    CloseTransport,
    Descriptor,
    DropPiece,
    EndOffer,
    Freed,
    Offered,
    OfferPiece,
    OpenTransport,
)
from meshes.heads import HeadLayout
from meshes.transfer.in_process import Staging
from meshes.transfer.link import JaxLink
from meshes.transfer.messages import Ack, Offer, Refuse
from meshes.transfer.move import own_heads
from meshes.transfer.offering import End, OfferLimits, Released
from meshes.transfer.pulling import PullLimits
from meshes.transfer.remote import RemoteTransport


class FollowerOffers:
    """Held pieces and transports. Called from one thread; answers by `send`, from others.

    Transfer servers listen at `host` (numeric, in brackets for IPv6), on the first of `ports` that is free; 0: any.
    """

    def __init__(self, host: str, ports: range, *, send: Callable[[Descriptor], None]) -> None:
        self._host = host
        self._ports = ports
        self._send = send
        self._held: dict[int, tuple[Staging, HeadLayout]] = {}
        self._transports: dict[int, RemoteTransport] = {}
        self._ids: dict[tuple[int, int], int] = {}  # (transport, the leader's id) -> the id here

    def hold(self, first: int, pieces: list[Staging], layout: HeadLayout) -> None:
        """Keeps pieces under the numbers from `first` on."""
        for i, piece in enumerate(pieces):
            self._held[first + i] = piece, layout

    def make(self, descriptor: Descriptor) -> None:
        """Does what the leader says. Raises FailedPrecondition where this process cannot listen."""
        match descriptor:
            case OpenTransport(number, streams, max_bytes, max_count, lease_s):
                limits = OfferLimits(max_bytes, max_count, lease_s)
                self._transports[number] = RemoteTransport(self._link(streams), limits, PullLimits(max_bytes))
            case CloseTransport(number):
                if (transport := self._transports.pop(number, None)) is not None:
                    transport.close()
                for key in [key for key in self._ids if key[0] == number]:
                    del self._ids[key]
            case OfferPiece(number, piece, id):
                staging, layout = self._held.pop(piece)
                self._offer(number, id, staging, layout)
            case EndOffer(number, id, end, reason):
                self._end(number, id, End(end), reason)
            case DropPiece(piece):
                self._held.pop(piece, None)
            case other:
                raise ValueError(f"{type(other).__name__} is not about offers")

    def close(self) -> None:
        """Ends all offers."""
        self._held.clear()
        while self._transports:
            self._transports.popitem()[1].close()

    def _link(self, streams: int) -> JaxLink:
        for port in self._ports:
            try:
                return JaxLink(f"{self._host}:{port}", streams=streams)
            except OSError as error:
                last = error
        raise FailedPrecondition(
            f"no port for another worker ({last}): --transfer-listen {self._host}:{self._ports[0]}-{self._ports[-1]} "
            "has one for each peer; give it a larger range, or port 0 for any",
            field="transfer_listen",
        )

    def _offer(self, number: int, id: int, staging: Staging, layout: HeadLayout) -> None:
        heads = list(own_heads(staging, layout).values())
        transport = self._transports.get(number)
        if not heads or transport is None:  # of a peer that was lost meanwhile
            return
        nbytes = sum(shard.data.nbytes for array in staging for shard in array.addressable_shards)

        def announce(offer: Offer) -> None:
            self._send(Offered(number, id, offer.key, offer.address))

        def done(released: Released) -> None:
            self._send(Freed(number, id, released.end.value, released.reason))

        own = transport.offering.offer(heads, layout, nbytes, announce, done)
        if own is None:
            self._send(Freed(number, id, End.FAILED.value, "there is no room to stage it in one of the processes"))
        else:
            self._ids[number, id] = own

    def _end(self, number: int, id: int, end: End, reason: str) -> None:
        own, transport = self._ids.pop((number, id), None), self._transports.get(number)
        if own is None or transport is None:
            return
        if end is End.ACKED:
            transport.offering.ack(Ack(own, 1))
        elif end is End.REFUSED:
            transport.offering.refuse(Refuse(own, 1, reason))
        else:
            transport.offering.abort(own)
