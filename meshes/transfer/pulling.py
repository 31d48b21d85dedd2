"""The pulling side of the remote transport: from an offer to arrays that may be given to any program.

    pull ---> QUEUED --room--> PULLING --arrived--> ARRIVED, PLACING --settled--> HANDED ON --taken--> (ack)
                |                 |                        |                          |
                +--- deadline, abort, revoke, error -------+--------- abort ----------+----> failed: the caller hears
                                                                                             of it once
    one that failed after its start: LOST, until its arrays have settled, and then they are thrown away

The true KV heads of a piece are pulled as the source has cut them, each at once onto the device where the resharding
plan wants it, so nobody touches their bytes; then they are copied to their other slots. An array that is unready or
failed would take the whole page pool with it when it meets a donating program, so a piece is handed on only after
everything has settled, and never after its deadline: what arrives later is thrown away.

The wire is not to wait for this thread: as soon as a piece has arrived the next one is asked for, and only then is the
first one placed and handed on, which takes as long as a megabyte takes to cross.

Nothing ends a pull but its connection (meshes/transfer/link.py), so the caller gets its answer at the deadline, and the
memory stays charged until the pull settles: when the peer goes on, when its process ends, or when `drop_peer` says that
it is gone. `tick` does all of the work, in one thread; the other methods only note what is to be done.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import jax

from meshes.transfer.link import Link
from meshes.transfer.messages import Ack, Offer, Refuse, Revoke
from meshes.transfer.meter import Meter
from meshes.transfer.offering import call
from meshes.transfer.piece import Cause, Done, Phase, Place, Pulls, Transfer, TransferFailed, broken, too_late, wanted
from meshes.transfer.settle import are_ready, ask_again_s, failure

__all__ = ["Cause", "Done", "PullLimits", "PullingSide", "TransferFailed"]

log = logging.getLogger(__name__)

REMEMBERED = 4096  # offers of the past, so that a message that comes twice starts nothing
ASK_LOST_S = 0.05


@dataclasses.dataclass(frozen=True)
class PullLimits:
    """How much may be in flight at once, and how long a piece may take, its time in the queue included.

    `max_count` pieces are on the wire at most. Bytes are those that cross, of what is there and not yet taken too;
    copies to other head slots, where KV heads are replicated, come on top.
    """

    max_bytes: int
    max_count: int = 8
    timeout_s: float = 15.0

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_count < 1 or not self.timeout_s > 0:
            raise ValueError(f"{self} must have positive limits")


class PullingSide:
    """The pieces that this process pulls. `wake` is called when `tick` has something to do.

    `wait_for` gets what waits for a piece, to call it in another thread and then `tick` (settle.Waiter.wait_for).
    """

    def __init__(
        self,
        link: Link,
        limits: PullLimits,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        wait_for: Callable[[Callable[[], object]], None] = lambda wait: None,
    ) -> None:
        self._link = link
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._wait_for = wait_for
        self._lock = threading.Lock()
        self._live: dict[int, Transfer] = {}  # in the order of their offers
        self._lost: list[Transfer] = []
        self._others: dict[str, set[str]] = {}  # of the processes of one worker, by the address of its first
        self._seen: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._closed = False
        self.failures: dict[Cause, int] = dict.fromkeys(Cause, 0)
        self.pulled_bytes = 0  # of pieces handed on
        self.cost = Meter()  # of pieces handed on, in bytes, from the pull on
        self.late_bytes = 0  # of pieces thrown away when they arrived, or failed, after all

    @property
    def used_bytes(self) -> int:
        """Bytes that pulls take now: under way, handed on and not taken, or lost and not settled."""
        with self._lock:
            return self._used()

    def pull(
        self, offer: Offer, targets: Sequence[jax.Device], place: Place, done: Done, *, timeout_s: float | None = None
    ) -> bool:
        """Queues an offer; head h is to land on `targets[h]`, and `place` makes of them what is handed on.

        It has `timeout_s` (None: as in the limits), but never more than the lease. `done` is called once, from another
        thread, with settled arrays or the error; after arrays call `taken` (or `abort`). False: this offer is known
        already, and `done` will not be called.
        """
        limit_s = min(self._limits.timeout_s if timeout_s is None else timeout_s, offer.lease_s)
        ends_s = self._clock() + limit_s
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            if offer.id in self._live or (offer.id, offer.generation) in self._seen:
                return False
            self._seen[offer.id, offer.generation] = None
            while len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
            if offer.elsewhere:
                self._others.setdefault(offer.address, set()).update(source.address for source in offer.elsewhere)
            self._live[offer.id] = Transfer(offer, tuple(targets), place, done, offer.nbytes, limit_s, ends_s)
        self._wake()
        return True

    def taken(self, id: int) -> Ack | None:
        """The arrays that were handed on are in the caller's pages; the message for the peer. None: not any more."""
        with self._lock:
            transfer = self._live.get(id)
            if transfer is None or transfer.phase is not Phase.HANDED_ON:
                return None
            del self._live[id]
        self._wake()
        return Ack(id, transfer.offer.generation)

    def abort(self, id: int) -> Refuse | None:
        """The caller does not want it any more; the message for the peer. None: it is over already."""
        failed = TransferFailed(Cause.ABORTED, "aborted by the decode side")
        with self._lock:
            transfer = self._live.get(id)
            if transfer is None or transfer.ending is not None:
                return None
            if transfer.phase is Phase.HANDED_ON:
                del self._live[id]
            else:
                transfer.ending = failed
        self._wake()
        return Refuse(id, transfer.offer.generation, str(failed))

    def revoked(self, revoke: Revoke) -> bool:
        """The peer has taken it back. False: it was handed on, is over, or another generation is meant."""
        failed = TransferFailed(Cause.REVOKED, f"the prefill side took it back: {revoke.reason}")
        return self._fail_soon(failed, lambda offer: (offer.id, offer.generation) == (revoke.id, revoke.generation)) > 0

    def drop_peer(self, address: str) -> None:
        """The peer is known to be gone: what is under way from it fails now and not at its deadline.

        Also to be called when a peer has been started again under its old address, whose connection is a dead one.
        """
        failed = TransferFailed(Cause.ERROR, f"the prefill side at {address} is gone")
        self._fail_soon(failed, lambda offer: offer.address == address)
        with self._lock:
            others = self._others.pop(address, set())
        for gone in (address, *sorted(others)):
            self._link.cut(gone)

    def tick(self) -> float | None:
        """Does what is due; returns the seconds until there may be more, None: nothing to wait for. One thread only."""
        now = self._clock()
        with self._lock:  # most are queued or handed on, and nothing is to be done for them
            due = [t for t in self._live.values() if t.moving or t.ending is not None or now >= t.ends_s]
        under_way = [transfer for transfer in due if self._arrive(transfer)]
        self._settle_lost()
        self._start_queued()
        for transfer in under_way:
            self._place(transfer)
        self._start_queued()  # in the room of what was taken
        now = self._clock()
        with self._lock:
            waits = [ASK_LOST_S] * bool(self._lost)
            for transfer in self._live.values():
                if transfer.phase is Phase.HANDED_ON:
                    continue
                waits.append(max(transfer.ends_s - now, 0.0))
                if transfer.moving:
                    waits.append(ask_again_s(now - transfer.began_s))
        return min(waits, default=None)

    def close(self) -> None:
        """Fails all that has not been handed on. Idempotent; call it from the thread of `tick` or after its end."""
        with self._lock:
            self._closed = True
            live, self._live = list(self._live.values()), {}
        for transfer in live:
            if transfer.phase is not Phase.HANDED_ON:
                self._fail(transfer, TransferFailed(Cause.CLOSED, "the decode side was closed"))

    def _fail_soon(self, failed: TransferFailed, meant: Callable[[Offer], bool]) -> int:
        """Marks what is under way and meant for `tick` to fail; how many. What was handed on is the caller's."""
        with self._lock:
            ending = [
                transfer
                for transfer in self._live.values()
                if transfer.phase is not Phase.HANDED_ON and transfer.ending is None and meant(transfer.offer)
            ]
            for transfer in ending:
                transfer.ending = failed
        self._wake()
        return len(ending)

    def _used(self) -> int:
        started = [t for t in self._live.values() if t.phase is not Phase.QUEUED]
        return sum(t.nbytes for t in (*started, *self._lost))

    def _start_queued(self) -> None:
        while (queued := self._next()) is not None:
            self._start(queued)

    def _next(self) -> Transfer | None:
        """The first in the queue, if there is room for it; a piece above the bound may go alone."""
        with self._lock:
            transfer = next((t for t in self._live.values() if t.phase is Phase.QUEUED and t.ending is None), None)
            if transfer is None:
                return None
            used = self._used()
            moving = sum(t.phase is Phase.PULLING for t in self._live.values()) + len(self._lost)
            if used and (moving >= self._limits.max_count or used + transfer.nbytes > self._limits.max_bytes):
                return None
            transfer.phase = Phase.PULLING
            return transfer

    def _start(self, transfer: Transfer) -> None:
        offer = transfer.offer
        transfer.began_s = self._clock()
        transfer.pull = pulls = Pulls()
        try:
            shapes = wanted(offer.shape, offer.dtype, transfer.targets)
            for source in offer.sources:
                pull = self._link.pull(source.address, source.key, [shapes[head] for head in source.heads])
                pulls.add(source.heads, pull)
        except Exception as error:
            self._drop(transfer, broken(error))
            return
        self._wait_for(transfer.wait)

    def _arrive(self, transfer: Transfer) -> bool:
        """Looks at one transfer. False: there is nothing more to do for it now, it waits or has failed."""
        if transfer.phase is Phase.HANDED_ON:
            return False
        if transfer.ending is not None:
            self._drop(transfer, transfer.ending)
            return False
        if self._clock() >= transfer.ends_s:
            self._drop(transfer, too_late(transfer))
            return False
        if transfer.phase is Phase.PULLING and transfer.pull is not None and transfer.pull.settled():
            transfer.phase = Phase.ARRIVED
        return transfer.phase in (Phase.ARRIVED, Phase.PLACING)

    def _place(self, transfer: Transfer) -> None:
        """Moves one that has arrived on as far as it goes."""
        if transfer.phase is Phase.ARRIVED:
            assert transfer.pull is not None
            try:
                transfer.arrays = transfer.place(transfer.pull.take())
            except Exception as error:  # of the connection, the peer or the copies
                self._drop(transfer, broken(error))
                return
            transfer.phase = Phase.PLACING
            if not are_ready(transfer.arrays):
                self._wait_for(transfer.wait)
        if are_ready(transfer.arrays):
            if (fault := failure(transfer.arrays)) is not None:
                self._drop(transfer, broken(fault))
            else:
                self._hand_on(transfer)

    def _hand_on(self, transfer: Transfer) -> None:
        with self._lock:
            ending = transfer.ending  # asked for since `_arrive` looked
            if ending is None:
                transfer.phase = Phase.HANDED_ON
                self.pulled_bytes += transfer.nbytes
        if ending is not None:
            self._drop(transfer, ending)
            return
        self.cost.record(transfer.nbytes, self._clock() - transfer.began_s)
        arrays, transfer.arrays, transfer.pull = transfer.arrays, (), None
        call(transfer.done, arrays, None)

    def _drop(self, transfer: Transfer, failed: TransferFailed) -> None:
        with self._lock:
            self._live.pop(transfer.offer.id, None)
        self._fail(transfer, failed)

    def _fail(self, transfer: Transfer, failed: TransferFailed) -> None:
        with self._lock:
            self.failures[failed.cause] += 1
            if transfer.pull is not None and not (transfer.pull.settled() and are_ready(transfer.arrays)):
                self._lost.append(transfer)
        log.warning("transfer %016x failed: %s", transfer.offer.id, failed)
        call(transfer.done, None, failed)

    def _settle_lost(self) -> None:
        with self._lock:
            for transfer in list(self._lost):
                assert transfer.pull is not None
                if transfer.pull.settled() and are_ready(transfer.arrays):
                    self._lost.remove(transfer)
                    self.late_bytes += transfer.nbytes
