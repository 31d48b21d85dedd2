"""The mover of an engine that only decodes: it is handed sequences that other engines have prefilled.

    begin (DecodeLeg)      EXPECTED    QUEUED, owns nothing                          } this file ends it
    Reserve                ASKED       in the order of service, until there is room  }
    there is room          RESERVED    PREFILLING, owns pages and a slot; Reserved   }
    Piece                  pulled; when all of it has settled, to the pool, which scatters it; then Ack
    FirstToken             HANDED_ON   OFFERED: the pool's, which starts it when all pages are there

The leg and the peer's Reserve come in any order. A pull that fails before the first token ends the sequence at once,
later ones end it in the pool. A piece that arrives for a sequence that has ended is dropped; that is safe, since
whoever owns its pages next has its own writes dispatched later, by the same thread (jaxpd/handoff.py).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jaxpd.errors import HandoffFailed, Internal, InvalidArgument, JaxpdError
from jaxpd.handoff import Chunk
from jaxpd.limits import Limits
from jaxpd.mover import Ends
from jaxpd.policies.admission import DECODE_HIT_VALUE
from jaxpd.policies.chunking import Costs
from jaxpd.policies.placement import prefer_prefix
from jaxpd.pool import Pool
from jaxpd.remote.messages import FirstToken, Forget, Message, NotReserved, Peer, Piece, Reserve, Reserved
from jaxpd.remote.prefill import check_handoffs
from jaxpd.request import DecodeLeg, FinishReason, Leg
from jaxpd.reservation import reserve_one
from jaxpd.sequence import Sequence, State
from meshes.sharding import replica_mesh
from meshes.transfer.in_process import Staging
from meshes.transfer.messages import Offer, Refuse, Revoke

log = logging.getLogger(__name__)

MAX_EARLY = 4096  # Reserves whose leg has not come


@dataclasses.dataclass(eq=False)
class _Coming:
    """A sequence until it is finished; `peer` is who has asked for it."""

    seq: Sequence
    handoff: int
    peer: Peer | None = None
    asked: bool = False
    pulls: set[int] = dataclasses.field(default_factory=set)  # offers that are under way
    pieces: set[int] = dataclasses.field(default_factory=set)  # first pages of those that were announced
    arrived: int = 0  # pages that are there, those that were there before included


class DecodeSide:
    """See `jaxpd.mover.Mover` and `jaxpd.remote.messages.Side`."""

    def __init__(self, ends: Ends, limits: Limits, pools: Seq[Pool]) -> None:
        self._ends = ends
        self._limits = limits
        self._pools = list(pools)
        self._lock = threading.RLock()
        self._peers: dict[str, Peer] = {}
        self._coming: dict[int, _Coming] = {}  # by hand-off
        self._of: dict[Sequence, _Coming] = {}
        self._early: OrderedDict[int, Peer] = OrderedDict()
        self._pulled: dict[Chunk, tuple[Peer, list[int]]] = {}  # that the pool has not taken yet
        self._crossed = 0  # over transports that are gone
        self.failures: dict[str, int] = {}

    # of the engine ------------------------------------------------------------------------------------------------

    @property
    def staging_bytes(self) -> int:
        with self._lock:
            peers = list(self._peers.values())
        return sum(peer.transport.pulling.used_bytes for peer in peers)

    @property
    def crossed_bytes(self) -> int:
        with self._lock:
            peers, before = list(self._peers.values()), self._crossed
        return before + sum(peer.transport.pulling.pulled_bytes for peer in peers)

    def check(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        if not isinstance(leg, DecodeLeg):
            raise InvalidArgument("this engine only decodes: it takes the decode leg of a request", field="leg")
        with self._lock:
            check_handoffs(leg.handoffs, len(samples), self._coming)
        need = self._need(samples[0])
        most = max(space.num_pages for pool in self._pools for space in pool.spaces)
        if need > most:
            raise InvalidArgument(
                f"prompt and answer need {need} pages of {self._limits.page_size} tokens, a replica here has {most}; "
                "shorten one, or start this worker with more --kv-memory",
                field="prompt",
            )

    def begin(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        assert isinstance(leg, DecodeLeg)
        with self._lock:
            for seq, handoff in zip(samples, leg.handoffs, strict=True):
                coming = self._of[seq] = self._coming[handoff] = _Coming(seq, handoff)
                if (peer := self._early.pop(handoff, None)) is not None:
                    coming.peer, coming.asked = peer, True
        aborted = [seq for seq in samples if seq.abort_requested]  # since it was registered
        self.aborting(aborted)
        self._reserve_waiting()

    def route(self, seq: Sequence) -> None:
        raise RuntimeError("a decode engine computes no prompt on its own")

    def given_up(self) -> bool:
        return all(pool.given_up for pool in self._pools)

    def pool_given_up(self, pool: Pool, error: JaxpdError, waiting: Seq[Sequence]) -> None:
        if self.given_up():
            with self._lock:
                ending = [coming for coming in self._coming.values() if _is_ours(coming.seq)]
            for coming in ending:
                self._end(coming, FinishReason.ERROR, error)

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        return reserve_one(self._limits, seq, pool)  # of one that gave way: it is computed again here

    def costs(self) -> Costs:
        return Costs()

    def send(self, seq: Sequence, pool: Pool, chunk: Chunk) -> None:
        raise RuntimeError("a decode engine hands nothing over")

    def settled(self, chunk: Chunk) -> None:
        with self._lock:
            peer, offers = self._pulled.pop(chunk, (None, []))
        if peer is not None:
            for offer in offers:
                if (ack := peer.transport.pulling.taken(offer)) is not None:
                    peer.send(ack)

    def hand_off(self, seq: Sequence) -> None:
        raise RuntimeError("a decode engine hands nothing over")

    def aborting(self, seqs: Seq[Sequence]) -> None:
        with self._lock:
            ending = [self._of[seq] for seq in seqs if seq in self._of and _is_ours(seq)]
        for coming in ending:
            self._end(coming, FinishReason.ABORT, None)

    def ended(self, seq: Sequence) -> None:
        with self._lock:
            coming = self._of.pop(seq, None)
            if coming is not None:
                del self._coming[coming.handoff]
                self._refuse(coming)
        self._reserve_waiting()

    def close(self) -> None:
        with self._lock:
            names = list(self._peers)
        for name in names:
            self.lost(name, "this engine was closed")

    # of the carrier -----------------------------------------------------------------------------------------------

    def connected(self, peer: Peer) -> None:
        with self._lock:
            there = peer.name in self._peers
        if there:
            self.lost(peer.name, "it has connected anew")
        with self._lock:
            self._peers[peer.name] = peer

    def received(self, peer: Peer, message: Message) -> None:
        match message:
            case Reserve(handoff):
                self._asked(peer, handoff)
            case Piece():
                self._piece(peer, message)
            case FirstToken(handoff, token):
                self._first_token(peer, handoff, token)
            case Forget(handoff, reason):
                with self._lock:
                    if self._early.get(handoff) is peer:
                        del self._early[handoff]
                    coming = self._coming.get(handoff)
                if coming is not None and coming.peer is peer:
                    log.info("request %s: %s", coming.seq.request_id, reason)
                    self._end(coming, FinishReason.ABORT, None)
            case Revoke():
                peer.transport.pulling.revoked(message)
            case _:
                log.warning("%s sent a %s, which a decode worker has no use for", peer.name, type(message).__name__)

    def lost(self, name: str, reason: str) -> None:
        with self._lock:
            peer = self._peers.pop(name, None)
            if peer is None:
                return
            self._crossed += peer.transport.pulling.pulled_bytes
            for handoff in [h for h, other in self._early.items() if other is peer]:
                del self._early[handoff]
            ending = [coming for coming in self._coming.values() if coming.peer is peer]
        error = HandoffFailed("peer", f"the prefill worker {name} is lost: {reason}")
        for coming in ending:
            self._end(coming, FinishReason.ERROR, error)

    # hand-offs ----------------------------------------------------------------------------------------------------

    def _asked(self, peer: Peer, handoff: int) -> None:
        with self._lock:
            coming = self._coming.get(handoff)
            if coming is None:
                self._early[handoff] = peer
                gone = self._early.popitem(last=False) if len(self._early) > MAX_EARLY else None
            elif coming.asked:
                return
            else:
                coming.peer, coming.asked = peer, True
        if coming is not None:
            self._reserve_waiting()
        elif gone is not None:
            gone[1].send(NotReserved(gone[0], "its decode leg has not come"))

    def _reserve_waiting(self) -> None:
        """All that are asked for and fit now, in the order of service."""
        with self._lock:
            waiting = [c for c in self._coming.values() if c.asked and c.seq.state is State.QUEUED and _is_ours(c.seq)]
            for coming in sorted(waiting, key=lambda c: c.seq.rank):
                if not self._reserve(coming):
                    return  # those behind it wait, too: the first is never starved

    def _reserve(self, coming: _Coming) -> bool:
        seq, pages = coming.seq, self._need(coming.seq)
        targets = [(pool, r) for pool in self._pools for r in range(len(pool.spaces))]
        places = [place for pool in self._pools for place in pool.places(seq.chain, whole=True)]
        choice = prefer_prefix(places, pages, hit_value=DECODE_HIT_VALUE)
        if choice is None:
            return False
        pool, replica = targets[choice]
        lease = pool.acquire(replica, seq.chain, pages, whole=True)
        if lease is None:
            return False
        seq.decode_target, seq.decode_lease = (pool.index, replica), lease
        seq.sent_pages = seq.landed_pages = coming.arrived = lease.hit_pages
        seq.move(State.PREFILLING)
        assert coming.peer is not None
        coming.peer.send(Reserved(coming.handoff, lease.hit_pages))
        return True

    def _need(self, seq: Sequence) -> int:
        return -(-seq.reserved_len(self._limits.reserve_tokens) // self._limits.page_size)

    def _piece(self, peer: Peer, piece: Piece) -> None:
        with self._lock:
            coming = self._coming.get(piece.handoff)
            if coming is not None and piece.first in coming.pieces:  # it came before
                return
            if coming is None or coming.peer is not peer or coming.seq.decode_lease is None:
                coming = None
            else:
                coming.pieces.add(piece.first)
                coming.pulls |= {offer.id for offer in piece.offers}
        if coming is None:
            for offer in piece.offers:
                peer.send(Refuse(offer.id, offer.generation, "its sequence is not there (any more)"))
            return
        _Arriving(self, coming, peer, piece, self._pools[coming.seq.decode_target[0]]).start()

    def arrived(self, coming: _Coming, peer: Peer, chunk: Chunk, offers: Seq[Offer], pool: Pool) -> None:
        """All pieces of a chunk have settled on the pool's mesh."""
        ids = [offer.id for offer in offers]
        with self._lock:
            coming.pulls -= set(ids)
            coming.arrived += chunk.count
            self._pulled[chunk] = peer, ids
        pool.piece(coming.seq, chunk, chunk.pieces, None)

    def failed(self, coming: _Coming, chunk: Chunk, pool: Pool, error: Exception) -> None:
        """A chunk did not arrive."""
        with self._lock:
            ours = _is_ours(coming.seq)
        if ours:
            log.warning("the hand-off of request %s failed: %s", coming.seq.request_id, error)
            failed = HandoffFailed("copy", f"the KV hand-off failed: {error}")
            self._end(coming, FinishReason.ERROR, failed)
        else:
            pool.piece(coming.seq, chunk, None, error)

    def _first_token(self, peer: Peer, handoff: int, token: int) -> None:
        with self._lock:
            coming = self._coming.get(handoff)
            if coming is None or coming.peer is not peer or coming.seq.state is not State.PREFILLING:
                return
            seq = coming.seq
            error: JaxpdError | None = None
            try:
                if seq.add_output(token, time.monotonic()) is not None:
                    error = Internal("prefill and decode worker do not agree where the answer ends")
            except Exception as raised:  # its grammar
                error = raised if isinstance(raised, JaxpdError) else Internal("its grammar failed")
                log.warning("request %s cannot go on", seq.request_id, exc_info=raised)
            if error is None:
                seq.sampled = len(seq.outputs)
                seq.move(State.OFFERED)
                pool = self._pools[seq.decode_target[0]]
                pool.offer(seq)
        if error is not None:
            self._end(coming, FinishReason.ERROR, error)
        elif pool.given_up:
            given_up = Internal("the decode pool's device step does not end (--step-timeout); the request is given up")
            self._ends.emit(self._ends.finish(seq, FinishReason.ERROR, error=given_up))

    def _end(self, coming: _Coming, reason: FinishReason, error: JaxpdError | None) -> None:
        """Ends a sequence that no pool has; one that a pool has meanwhile is left to it."""
        with self._lock:
            if not _is_ours(coming.seq):
                if error is None:
                    return
                whole = coming.arrived * self._limits.page_size >= coming.seq.fill_len
                if coming.seq.state is State.OFFERED and not whole:  # what it lacks does not come any more
                    coming.seq.failure = coming.seq.failure or error
                    coming.seq.abort_requested = True
                    self._ends.wake()
                return
            if isinstance(error, HandoffFailed):
                self.failures[error.reason] = self.failures.get(error.reason, 0) + 1
            events = self._ends.finish(coming.seq, reason, error=error)
        self._ends.emit(events)

    def _refuse(self, coming: _Coming) -> None:
        """Tells the peer of a sequence that has ended, and ends what is under way for it."""
        peer = coming.peer
        if peer is None or self._peers.get(peer.name) is not peer:
            return
        begun = len(coming.seq.outputs) > len(coming.seq.request.outputs)  # its first token has come
        if not begun or coming.arrived * self._limits.page_size < coming.seq.fill_len:
            peer.send(NotReserved(coming.handoff, "it has ended here"))
        for offer in coming.pulls:
            if (refuse := peer.transport.pulling.abort(offer)) is not None:
                peer.send(refuse)


class _Arriving:
    """One chunk: all of its offers are pulled, and then it is the pool's; or one fails, and then all do."""

    def __init__(self, side: DecodeSide, coming: _Coming, peer: Peer, piece: Piece, pool: Pool) -> None:
        self._side = side
        self._coming = coming
        self._peer = peer
        self._offers = piece.offers
        self._pool = pool
        self._chunk = Chunk(first=piece.first, count=piece.count, pieces=[()] * len(piece.offers), staging_bytes=0)
        self._lock = threading.Lock()
        self._left = len(piece.offers)
        self._failed = False

    def start(self) -> None:
        """Queues the pulls."""
        spec = self._pool.device.spec
        mesh = replica_mesh(spec.mesh, self._coming.seq.decode_target[1])
        for i, offer in enumerate(self._offers):
            try:
                self._peer.transport.pull(offer, spec.layout.heads, mesh, self._done(i))
            except (ValueError, RuntimeError) as error:  # it does not fit, or the transport is closed
                self._peer.send(Refuse(offer.id, offer.generation, str(error)))
                self._fail(error)
                return

    def _done(self, place: int) -> Callable[[Staging | None, Exception | None], None]:
        def done(arrays: Staging | None, error: Exception | None) -> None:
            if arrays is None:
                offer = self._offers[place]
                self._peer.send(Refuse(offer.id, offer.generation, str(error)))
                self._fail(error or RuntimeError("the pull gave nothing"))
                return
            with self._lock:
                self._chunk.pieces[place] = arrays
                self._left -= 1
                whole = self._left == 0 and not self._failed
            if whole:
                self._side.arrived(self._coming, self._peer, self._chunk, self._offers, self._pool)

        return done

    def _fail(self, error: Exception) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if not first:
            return
        for offer in self._offers:  # also those that have arrived
            if (refuse := self._peer.transport.pulling.abort(offer.id)) is not None:
                self._peer.send(refuse)
        self._side.failed(self._coming, self._chunk, self._pool, error)


def _is_ours(seq: Sequence) -> bool:
    """Whether no pool has it yet: one that gave way is QUEUED too, and has an output of its own."""
    if seq.state is State.QUEUED:
        return len(seq.outputs) == len(seq.request.outputs)
    return seq.state is State.PREFILLING and seq.decode_lease is not seq.prefill_lease
