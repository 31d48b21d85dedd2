"""What goes over a peer stream, between `worker.proto` and the words of a hand-off (`jaxpd.remote.messages`)."""

from __future__ import annotations

import dataclasses

from jaxpd.remote.messages import FirstToken, Forget, Message, NotReserved, Piece, Reserve, Reserved
from meshes.heads import head_layout
from meshes.transfer.identity import Identity
from meshes.transfer.messages import Ack, Offer, Refuse, Revoke, Source
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.worker.description import identity_from_proto, identity_to_proto


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerHello:
    """The first message of both ends: who it is, what its KV is, and its transfer server for this peer."""

    instance: str
    identity: Identity
    transfer_address: str


def hello_to_proto(hello: PeerHello) -> pb.PeerMessage:
    """As the first message of a stream."""
    return pb.PeerMessage(
        hello=pb.PeerHello(
            instance=hello.instance,
            identity=identity_to_proto(hello.identity),
            transfer_address=hello.transfer_address,
        )
    )


def hello_from_proto(message: pb.PeerHello) -> PeerHello:
    """As it was said."""
    return PeerHello(
        instance=message.instance,
        identity=identity_from_proto(message.identity),
        transfer_address=message.transfer_address,
    )


def peer_to_proto(message: Message) -> pb.PeerMessage:
    """One message of an engine to another."""
    match message:
        case Reserve():
            return pb.PeerMessage(reserve=pb.Reserve(handoff=message.handoff))
        case Reserved():
            return pb.PeerMessage(reserved=pb.Reserved(handoff=message.handoff, hit_pages=message.hit_pages))
        case NotReserved():
            return pb.PeerMessage(not_reserved=pb.NotReserved(handoff=message.handoff, reason=message.reason))
        case Piece():
            offers = [_offer_to_proto(offer) for offer in message.offers]
            return pb.PeerMessage(
                piece=pb.Piece(handoff=message.handoff, first=message.first, count=message.count, offers=offers)
            )
        case FirstToken():
            return pb.PeerMessage(first_token=pb.FirstToken(handoff=message.handoff, token=message.token))
        case Forget():
            return pb.PeerMessage(forget=pb.Forget(handoff=message.handoff, reason=message.reason))
        case Ack():
            return pb.PeerMessage(ack=pb.Ack(id=message.id, generation=message.generation))
        case Refuse():
            return pb.PeerMessage(refuse=pb.Refuse(id=message.id, generation=message.generation, reason=message.reason))
        case Revoke():
            return pb.PeerMessage(revoke=pb.Revoke(id=message.id, generation=message.generation, reason=message.reason))


def peer_from_proto(message: pb.PeerMessage) -> Message | None:
    """None for what is no message of an engine: hello, ping, and kinds that are not known here.

    Raises ValueError for an offer that makes no sense.
    """
    match message.WhichOneof("message"):
        case "reserve":
            return Reserve(message.reserve.handoff)
        case "reserved":
            return Reserved(message.reserved.handoff, message.reserved.hit_pages)
        case "not_reserved":
            return NotReserved(message.not_reserved.handoff, message.not_reserved.reason)
        case "piece":
            piece = message.piece
            offers = tuple(_offer_from_proto(offer) for offer in piece.offers)
            return Piece(piece.handoff, piece.first, piece.count, offers)
        case "first_token":
            return FirstToken(message.first_token.handoff, message.first_token.token)
        case "forget":
            return Forget(message.forget.handoff, message.forget.reason)
        case "ack":
            return Ack(message.ack.id, message.ack.generation)
        case "refuse":
            return Refuse(message.refuse.id, message.refuse.generation, message.refuse.reason)
        case "revoke":
            return Revoke(message.revoke.id, message.revoke.generation, message.revoke.reason)
        case _:
            return None


def _offer_to_proto(offer: Offer) -> pb.Offer:
    return pb.Offer(
        id=offer.id,
        generation=offer.generation,
        key=offer.key,
        address=offer.address,
        num_heads=offer.layout.num_heads,
        num_kv_heads=offer.layout.num_kv_heads,
        tp=offer.layout.tp,
        shape=offer.shape,
        dtype=offer.dtype,
        lease_s=offer.lease_s,
        elsewhere=[pb.Source(address=it.address, key=it.key, heads=it.heads) for it in offer.elsewhere],
    )


def _offer_from_proto(message: pb.Offer) -> Offer:
    return Offer(
        id=message.id,
        generation=message.generation,
        key=message.key,
        address=message.address,
        layout=head_layout(message.num_heads, message.num_kv_heads, message.tp),
        shape=tuple(message.shape),
        dtype=message.dtype,
        lease_s=message.lease_s,
        elsewhere=tuple(Source(it.address, it.key, tuple(it.heads)) for it in message.elsewhere),
    )
