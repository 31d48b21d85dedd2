"""The pulling side of the remote transport: from an offer to arrays that may be given to any program.

    pull ---> QUEUED --room--> PULLING --arrived--> PLACING --settled--> HANDED ON --taken--> (ack)
                |                 |                    |                     |
                +--- deadline, abort, revoke, error ---+------ abort --------+----> failed: the caller hears of it once

    a PULLING or PLACING one that failed so: LOST, until its arrays have settled, and then they are thrown away

The true KV heads of a piece are pulled as the source has cut them, each at once onto the device where the resharding
plan wants it, so nobody touches their bytes; then they are copied to their other slots. An array that is unready or
failed would take the whole page pool with it when it meets a donating program, so a piece is handed on only after
everything has settled, and never after its deadline: what arrives later is thrown away.

Nothing ends a pull but its connection (meshes/transfer/link.py), so the caller gets its answer at the deadline, and the
memory stays charged until the pull settles: when the peer goes on, when its process ends, or when `drop_peer` says that
it is gone. `tick` does all of the work, in one thread; the other methods only note what is to be done.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from meshes.transfer.link import Link, Pull
from meshes.transfer.messages import Ack, Offer, Refuse, Revoke
from meshes.transfer.meter import Meter
from meshes.transfer.offering import call
from meshes.transfer.settle import are_ready, ask_again_s, failure

log = logging.getLogger(__name__)

REMEMBERED = 4096  # offers of the past, so that a message that comes twice starts nothing
ASK_LOST_S = 0.05

Arrays = tuple[jax.Array, ...]
Place = Callable[[Sequence[jax.Array]], Arrays]


@dataclasses.dataclass(frozen=True)
class PullLimits:
    """How much may be in flight at once, and how long a piece may take, its time in the queue included.

    Bytes are those that cross; copies to other head slots, where KV heads are replicated, come on top.
    """

    max_bytes: int
    max_count: int = 8
    timeout_s: float = 15.0

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_count < 1 or not self.timeout_s > 0:
            raise ValueError(f"{self} must have positive limits")


class Cause(enum.StrEnum):
    """Why a piece could not be had."""

    DEADLINE = "deadline"
    ABORTED = "aborted"
    REVOKED = "revoked"
    ERROR = "error"  # of the connection, the peer or the device
    CLOSED = "closed"


class TransferFailed(RuntimeError):
    """A piece did not arrive; the message says why, `cause` in one word."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


Done = Callable[[Arrays | None, TransferFailed | None], None]


class _Pulls:
    """A `Pull` of one piece, made of one from each of its sources: there when all are there."""

    def __init__(self) -> None:
        self._parts: list[tuple[tuple[int, ...], Pull]] = []

    def add(self, heads: tuple[int, ...], pull: Pull) -> None:
        self._parts.append((heads, pull))

    def settled(self) -> bool:
        return all(pull.settled() for _, pull in self._parts)

    def take(self) -> list[jax.Array]:
        """All true KV heads in order."""
        taken = [(heads, pull.take()) for heads, pull in self._parts]
        by_head = {head: array for heads, arrays in taken for head, array in zip(heads, arrays, strict=True)}
        return [by_head[head] for head in range(len(by_head))]


class _Phase(enum.Enum):
    QUEUED = enum.auto()
    PULLING = enum.auto()
    PLACING = enum.auto()
    HANDED_ON = enum.auto()


@dataclasses.dataclass(eq=False)
class _Transfer:
    offer: Offer
    targets: list[jax.Device]
    place: Place
    done: Done
    limit_s: float
    ends_s: float
    phase: _Phase = _Phase.QUEUED
    began_s: float = 0.0
    pull: Pull | None = None
    arrays: Arrays = ()
    ending: TransferFailed | None = None


class PullingSide:
    """The pieces that this process pulls. `wake` is called when `tick` has something to do."""

    def __init__(
        self, link: Link, limits: PullLimits, *, clock: Callable[[], float], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._link = link
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        self._live: dict[int, _Transfer] = {}  # in the order of their offers
        self._lost: list[_Transfer] = []
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
            self._live[offer.id] = _Transfer(offer, list(targets), place, done, limit_s, ends_s)
        self._wake()
        return True

    def taken(self, id: int) -> Ack | None:
        """The arrays that were handed on are in the caller's pages; the message for the peer. None: not any more."""
        with self._lock:
            transfer = self._live.get(id)
            if transfer is None or transfer.phase is not _Phase.HANDED_ON:
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
            if transfer.phase is _Phase.HANDED_ON:
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
        with self._lock:
            live = list(self._live.values())
        for transfer in live:
            self._step(transfer)
        self._settle_lost()
        while (queued := self._next()) is not None:
            self._start(queued)
        now = self._clock()
        with self._lock:
            waits = [ASK_LOST_S] * bool(self._lost)
            for transfer in self._live.values():
                if transfer.phase is _Phase.HANDED_ON:
                    continue
                waits.append(max(transfer.ends_s - now, 0.0))
                if transfer.phase is not _Phase.QUEUED:
                    waits.append(ask_again_s(now - transfer.began_s))
        return min(waits, default=None)

    def close(self) -> None:
        """Fails all that has not been handed on. Idempotent; call it from the thread of `tick` or after its end."""
        with self._lock:
            self._closed = True
            live, self._live = list(self._live.values()), {}
        for transfer in live:
            if transfer.phase is not _Phase.HANDED_ON:
                self._fail(transfer, TransferFailed(Cause.CLOSED, "the decode side was closed"))

    def _fail_soon(self, failed: TransferFailed, meant: Callable[[Offer], bool]) -> int:
        """Marks what is under way and meant for `tick` to fail; how many. What was handed on is the caller's."""
        with self._lock:
            ending = [
                transfer
                for transfer in self._live.values()
                if transfer.phase is not _Phase.HANDED_ON and transfer.ending is None and meant(transfer.offer)
            ]
            for transfer in ending:
                transfer.ending = failed
        self._wake()
        return len(ending)

    def _used(self) -> int:
        started = [t for t in self._live.values() if t.phase is not _Phase.QUEUED]
        return sum(t.offer.nbytes for t in (*started, *self._lost))

    def _next(self) -> _Transfer | None:
        """The first in the queue, if there is room for it; a piece above the bound may go alone."""
        with self._lock:
            transfer = next((t for t in self._live.values() if t.phase is _Phase.QUEUED and t.ending is None), None)
            if transfer is None:
                return None
            used = self._used()
            moving = sum(t.phase in (_Phase.PULLING, _Phase.PLACING) for t in self._live.values()) + len(self._lost)
            if used and (moving >= self._limits.max_count or used + transfer.offer.nbytes > self._limits.max_bytes):
                return None
            transfer.phase = _Phase.PULLING
            return transfer

    def _start(self, transfer: _Transfer) -> None:
        offer = transfer.offer
        transfer.began_s = self._clock()
        wanted = [
            jax.ShapeDtypeStruct(offer.shape, jnp.dtype(offer.dtype), sharding=SingleDeviceSharding(device))
            for device in transfer.targets
        ]
        transfer.pull = pulls = _Pulls()
        try:
            for source in offer.sources:
                pull = self._link.pull(source.address, source.key, [wanted[head] for head in source.heads])
                pulls.add(source.heads, pull)
        except Exception as error:
            self._drop(transfer, _broken(error))

    def _step(self, transfer: _Transfer) -> None:
        """Moves one transfer on as far as it goes."""
        if transfer.phase is _Phase.HANDED_ON:
            return
        if transfer.ending is not None:
            self._drop(transfer, transfer.ending)
            return
        if self._clock() >= transfer.ends_s:
            self._drop(transfer, _too_late(transfer))
            return
        if transfer.phase is _Phase.PULLING and transfer.pull is not None and transfer.pull.settled():
            try:
                transfer.arrays = transfer.place(transfer.pull.take())
            except Exception as error:  # of the connection, the peer or the copies
                self._drop(transfer, _broken(error))
                return
            transfer.phase = _Phase.PLACING
        if transfer.phase is _Phase.PLACING and are_ready(transfer.arrays):
            if (broken := failure(transfer.arrays)) is not None:
                self._drop(transfer, _broken(broken))
            else:
                self._hand_on(transfer)

    def _hand_on(self, transfer: _Transfer) -> None:
        with self._lock:
            ending = transfer.ending  # asked for since `_step` looked
            if ending is None:
                transfer.phase = _Phase.HANDED_ON
                self.pulled_bytes += transfer.offer.nbytes
        if ending is not None:
            self._drop(transfer, ending)
            return
        self.cost.record(transfer.offer.nbytes, self._clock() - transfer.began_s)
        arrays, transfer.arrays, transfer.pull = transfer.arrays, (), None
        call(transfer.done, arrays, None)

    def _drop(self, transfer: _Transfer, failed: TransferFailed) -> None:
        with self._lock:
            self._live.pop(transfer.offer.id, None)
        self._fail(transfer, failed)

    def _fail(self, transfer: _Transfer, failed: TransferFailed) -> None:
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
                    self.late_bytes += transfer.offer.nbytes


def _too_late(transfer: _Transfer) -> TransferFailed:
    offer = transfer.offer
    doing = "waited for its turn" if transfer.phase is _Phase.QUEUED else "was under way"
    return TransferFailed(
        Cause.DEADLINE,
        f"a piece of {offer.nbytes} bytes from {offer.address} {doing} and did not arrive within {transfer.limit_s} s "
        f"(its lease is {offer.lease_s} s)",
    )


def _broken(error: Exception) -> TransferFailed:
    failed = TransferFailed(Cause.ERROR, f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
