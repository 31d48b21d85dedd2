"""The mover of an engine that only prefills: what it computes decodes in engines elsewhere.

    begin:  want the peer            bound, not asked
    reserve (its turn is near)       asked     -> Reserve, once the peer is connected
    Reserved                         granted   -> the next `reserve` takes prefill pages and staging
    send                             pieces offered, announced as soon as all of a chunk can be pulled
    hand_off                         FirstToken; the sequence is finished here, its offers live on
    ended before that                Forget; its offers are taken back

A sequence that is not granted yet waits in its pool's queue: back-pressure of the decode engine stays there. The decode
engine's pages are asked for only when the sequence is among the first of the queue, so that a long queue here does not
pin its memory.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from typing import Protocol

from jaxpd.errors import HandoffFailed, InvalidArgument, JaxpdError
from jaxpd.handoff import Chunk
from jaxpd.limits import Limits
from jaxpd.mover import Ends
from jaxpd.policies.chunking import Costs
from jaxpd.policies.placement import prefer_prefix
from jaxpd.pool import Pool
from jaxpd.remote.messages import FirstToken, Forget, Message, NotReserved, Peer, Piece, Reserve, Reserved
from jaxpd.request import FinishReason, Leg, PrefillLeg
from jaxpd.reservation import free_staging, least_loaded, measured_costs, scores_prompt, staged_page_bytes
from jaxpd.sequence import Sequence
from meshes.transfer.in_process import StagingBound
from meshes.transfer.messages import Ack, Offer, Refuse
from meshes.transfer.meter import Meter
from meshes.transfer.offering import End, Released

log = logging.getLogger(__name__)


class Want(Protocol):
    """Asks for a peer by its address; answered by `connected` or `lost`. Idempotent, from any thread, never blocks."""

    def __call__(self, address: str, /) -> None: ...


@dataclasses.dataclass(eq=False)
class _Bound:
    """What a sequence has to do with its peer."""

    seq: Sequence
    handoff: int
    address: str
    peer: Peer | None = None  # that was asked; it must stay the same one
    hit_pages: int | None = None  # of the peer's; None: not granted
    offers: set[int] = dataclasses.field(default_factory=set)  # that are not over
    handed_off: bool = False


class PrefillSide:
    """See `jaxpd.mover.Mover` and `jaxpd.remote.messages.Side`. `want` is set by whoever carries the messages."""

    def __init__(self, ends: Ends, limits: Limits, pools: Seq[Pool], *, max_staging_bytes: int) -> None:
        self.want: Want = _nobody
        self._ends = ends
        self._limits = limits
        self._pools = list(pools)
        self._staging = StagingBound(max_staging_bytes)
        self._cost = Meter()  # of offers, from the announcement to the end, in bytes
        self._lock = threading.RLock()
        self._peers: dict[str, Peer] = {}
        self._bound: dict[int, _Bound] = {}  # by hand-off
        self._of: dict[Sequence, _Bound] = {}
        self._crossed = 0
        self.failures: dict[str, int] = {}

    # of the engine ------------------------------------------------------------------------------------------------

    @property
    def staging_bytes(self) -> int:
        return self._staging.used

    @property
    def crossed_bytes(self) -> int:
        with self._lock:
            return self._crossed

    def check(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        if not isinstance(leg, PrefillLeg):
            raise InvalidArgument("this engine only prefills: it takes the prefill leg of a request", field="leg")
        with self._lock:
            check_handoffs(leg.handoffs, len(samples), self._bound)

    def begin(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        assert isinstance(leg, PrefillLeg)
        with self._lock:
            for seq, handoff in zip(samples, leg.handoffs, strict=True):
                self._of[seq] = self._bound[handoff] = _Bound(seq, handoff, leg.peer)
            there = leg.peer in self._peers
        if not there:
            self.want(leg.peer)
        samples[0].siblings = list(samples[1:])
        self.route(samples[0])

    def route(self, seq: Sequence) -> None:
        least_loaded(self._pools).submit(seq)

    def given_up(self) -> bool:
        return all(pool.given_up for pool in self._pools)

    def pool_given_up(self, pool: Pool, error: JaxpdError, waiting: Seq[Sequence]) -> None:
        """Those that wait are in the pool, and are answered with it."""

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        bound = self._of.get(seq)
        if bound is None:  # ended meanwhile
            return False
        alone = ends_with_first(seq)
        if not alone and not self._granted(bound):
            return False
        size, fresh = self._limits.page_size, scores_prompt(seq)
        pages = -(-seq.fill_len // size)
        hit = pages if alone else min(bound.hit_pages or 0, pages)
        replica = prefer_prefix(pool.places(seq.chain, whole=False, fresh=fresh), pages, hit_value=size)
        staged = (pages - hit) * staged_page_bytes(pool)
        if replica is None or not self._staging.charge(staged):
            return False
        seq.staging_bytes = staged
        seq.prefill_replica = replica
        seq.prefill_lease = pool.acquire(replica, seq.chain, pages, whole=False, fresh=fresh)
        if seq.prefill_lease is None:
            free_staging(seq, self._staging)
            return False
        seq.sent_pages = seq.landed_pages = hit
        return True

    def costs(self) -> Costs:
        return measured_costs(self._pools[0], self._cost, self._limits.page_size)

    def send(self, seq: Sequence, pool: Pool, chunk: Chunk) -> None:
        with self._lock:
            bound = self._of.get(seq)
        sending = _Sending(self, bound, chunk, pool)
        sending.start()

    def settled(self, chunk: Chunk) -> None:
        self._staging.give_back(chunk.staging_bytes)
        self._ends.wake()

    def hand_off(self, seq: Sequence) -> None:
        with self._lock:
            bound = self._of.get(seq)
            if bound is not None and bound.peer is not None:
                bound.handed_off = True
                bound.peer.send(FirstToken(bound.handoff, seq.outputs[-1]))
        self._ends.emit(self._ends.finish(seq, FinishReason.HANDED_OFF))

    def aborting(self, seqs: Seq[Sequence]) -> None:
        """Their pools look for them."""

    def ended(self, seq: Sequence) -> None:
        free_staging(seq, self._staging)
        with self._lock:
            bound = self._of.pop(seq, None)
            if bound is None:
                return
            if not (bound.handed_off and bound.offers):
                self._bound.pop(bound.handoff, None)  # the last offer may have been over before
            if bound.handed_off or bound.peer is None:
                return
            peer = bound.peer
        peer.send(Forget(bound.handoff, "the prefill side has ended it"))
        self._take_back(bound)

    def close(self) -> None:
        with self._lock:
            names = list(self._peers)
        for name in names:
            self.lost(name, "this engine was closed")

    # of the carrier -----------------------------------------------------------------------------------------------

    def connected(self, peer: Peer) -> None:
        with self._lock:
            before, self._peers[peer.name] = self._peers.get(peer.name), peer
            ending = [b for b in self._bound.values() if b.peer is not None and b.peer is before]
        self._lose(ending, peer.name, "it has connected anew")
        self._ends.wake()

    def received(self, peer: Peer, message: Message) -> None:
        match message:
            case Reserved(handoff, hit_pages):
                with self._lock:
                    bound = self._bound.get(handoff)
                    if bound is None or bound.peer is not peer or bound.hit_pages is not None:
                        return
                    bound.hit_pages = hit_pages
                self._ends.wake()
            case NotReserved(handoff, reason):
                with self._lock:
                    bound = self._bound.get(handoff)
                if bound is not None and bound.peer is peer:
                    self.fail(bound, HandoffFailed("refused", f"the decode worker does not take it: {reason}"))
                    if bound.handed_off:
                        self._take_back(bound)
            case Ack():
                peer.transport.offering.ack(message)
            case Refuse():
                peer.transport.offering.refuse(message)
            case _:
                log.warning("%s sent a %s, which a prefill worker has no use for", peer.name, type(message).__name__)

    def lost(self, name: str, reason: str) -> None:
        with self._lock:
            self._peers.pop(name, None)
            ending = [b for b in self._bound.values() if b.address == name]
        self._lose(ending, name, reason)

    # both ---------------------------------------------------------------------------------------------------------

    def fail(self, bound: _Bound, error: HandoffFailed) -> None:
        """Its pool ends it with this error, unless it is handed off: then the decode side will know."""
        seq = bound.seq
        with self._lock:
            if seq.failure is None:
                self.failures[error.reason] = self.failures.get(error.reason, 0) + 1
                seq.failure = error
            if bound.handed_off:
                return
        seq.abort_requested = True
        self._ends.wake()

    def offered(self, bound: _Bound, offer: int) -> None:
        """An offer of a sequence's is alive."""
        with self._lock:
            bound.offers.add(offer)

    def released(self, bound: _Bound, released: Released, seconds: float | None) -> None:
        """It is over."""
        with self._lock:
            bound.offers.discard(released.id)
            if bound.handed_off and not bound.offers:
                self._bound.pop(bound.handoff, None)
            if released.end is End.ACKED:
                self._crossed += released.nbytes
        if released.end is End.ACKED and seconds is not None:
            self._cost.record(released.nbytes, seconds)
        elif released.end in (End.FAILED, End.EXPIRED):
            reason = "copy" if released.end is End.FAILED else "lease"
            self.fail(bound, HandoffFailed(reason, f"pages could not be handed over: {released.reason}"))

    def _take_back(self, bound: _Bound) -> None:
        """Ends the offers of a sequence that nobody will fetch."""
        with self._lock:
            peer, offers = bound.peer, list(bound.offers)
        if peer is not None:
            for offer in offers:
                if (revoke := peer.transport.offering.abort(offer)) is not None:
                    peer.send(revoke)

    def _lose(self, ending: Seq[_Bound], name: str, reason: str) -> None:
        for bound in ending:
            self.fail(bound, HandoffFailed("peer", f"the decode worker {name} is lost: {reason}"))

    def _granted(self, bound: _Bound) -> bool:
        """Whether the peer has reserved; asked for it if it was not yet."""
        with self._lock:
            if bound.hit_pages is not None:
                return True
            peer = self._peers.get(bound.address)
            if peer is not None:
                if bound.peer is None:
                    bound.peer = peer
                    peer.send(Reserve(bound.handoff))
                return False
        self.want(bound.address)
        return False


class _Sending:
    """One chunk: its pieces are offered, announced together, and over when each of them is."""

    def __init__(self, side: PrefillSide, bound: _Bound | None, chunk: Chunk, pool: Pool) -> None:
        self._side = side
        self._bound = bound
        self._chunk = chunk
        self._layout = pool.device.spec.layout.heads
        self._lock = threading.Lock()
        self._total = self._left = len(chunk.pieces)
        self._ready: dict[int, Offer] = {}  # by the place of the piece
        self._gone: set[int] = set()
        self._announced_s: float | None = None

    def start(self) -> None:
        """Offers all pieces. Where that cannot be, the sequence ends and the staging is free."""
        pieces = list(self._chunk.pieces)
        self._chunk.pieces.clear()  # the transport holds them, and lets go of each as it ends
        bound, peer = self._bound, None if self._bound is None else self._bound.peer
        if bound is None or peer is None:  # it has ended meanwhile
            self._over(len(pieces))
            return
        for i, piece in enumerate(pieces):
            try:
                offer = peer.transport.offer(piece, self._layout, announce=self._announce(i), done=self._done)
            except RuntimeError as error:  # closed: the peer is lost
                self._fail(bound, "peer", str(error), len(pieces) - i)
                return
            if offer is None:
                self._fail(bound, "copy", "there is no room to stage it", len(pieces) - i)
                return
            with self._lock:
                if offer not in self._gone:  # it may be over already
                    self._side.offered(bound, offer)

    def _fail(self, bound: _Bound, reason: str, message: str, left: int) -> None:
        self._side.fail(bound, HandoffFailed(reason, f"pages could not be offered: {message}"))
        self._over(left)

    def _announce(self, place: int) -> Callable[[Offer], None]:
        def announce(offer: Offer) -> None:
            with self._lock:
                self._ready[place] = offer
                if len(self._ready) < self._total:
                    return
                offers = tuple(self._ready[i] for i in range(self._total))
                self._announced_s = time.monotonic()
            assert self._bound is not None and self._bound.peer is not None
            chunk = self._chunk
            self._bound.peer.send(Piece(self._bound.handoff, chunk.first, chunk.count, offers))

        return announce

    def _done(self, released: Released) -> None:
        assert self._bound is not None
        seconds = None if self._announced_s is None else time.monotonic() - self._announced_s
        with self._lock:
            self._gone.add(released.id)
        self._side.released(self._bound, released, seconds)
        self._over(1)

    def _over(self, count: int) -> None:
        with self._lock:
            self._left -= count
            over = self._left == 0
        if over:
            self._side.settled(self._chunk)


def ends_with_first(seq: Sequence) -> bool:
    """Whether the next token is its last, whatever it is: nothing has to be handed over."""
    return seq.max_tokens - len(seq.outputs) <= 1


def check_handoffs(handoffs: Seq[int], samples: int, known: Container[int]) -> None:
    """Raises InvalidArgument where the ids do not fit the samples, or are in use."""
    if len(handoffs) != samples or len(set(handoffs)) != samples:
        raise InvalidArgument(
            f"{len(handoffs)} hand-off ids for {samples} samples; one each, all different", field="leg"
        )
    if any(handoff in known for handoff in handoffs):
        raise InvalidArgument("a hand-off id is in use; draw others", field="leg")


def _nobody(address: str, /) -> None:
    log.warning("nobody connects to %s", address)
