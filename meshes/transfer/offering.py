"""The offering side of the remote transport: staged pieces, from their gather to the moment their memory is free.

    offer -----> STAGED ----settled----> OFFERED ------ack, refuse, abort, expiry------> released, exactly once
     (charged)     |     put; announce      ^   |                                        withdraw; memory free; done
                   |     the lease starts   +---+ again: the next generation, a new key
                   +---failed, abort-----------------------------------------------------^

An offer is announced when the piece can be pulled and not before: arrays that are offered unready make the peer wait
for a program, and failed ones are a fault of this process. Staging is an immutable copy, so a pull that is under way
when its offer ends does no harm: it gets right bytes, which nobody takes any more.

`tick` does all of the work, in one thread; the other methods only note what is to be done, from any thread. Nothing
here depends on a peer: what it does not say, the lease says.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
from collections.abc import Callable, Sequence

import jax

from meshes.heads import HeadLayout
from meshes.transfer.leases import Lease, Leases, draw_id
from meshes.transfer.link import Link
from meshes.transfer.messages import Ack, Offer, Refuse, Revoke
from meshes.transfer.settle import are_ready, ask_again_s, failure

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OfferLimits:
    """How much may be staged at once, and for how long."""

    max_bytes: int
    max_count: int = 1024
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_count < 1 or not self.lease_s > 0:
            raise ValueError(f"{self} must have positive limits")


class End(enum.StrEnum):
    """Why an offer ended."""

    ACKED = "acked"
    REFUSED = "refused"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True)
class Released:
    """The staging of an offer is free again. `generation` 0: it was never announced."""

    id: int
    generation: int
    nbytes: int
    end: End
    reason: str


Announce = Callable[[Offer], None]
Done = Callable[[Released], None]


@dataclasses.dataclass(eq=False)
class _Staged:
    heads: list[jax.Array]
    layout: HeadLayout
    announce: Announce
    done: Done
    since_s: float
    key: int | None = None  # of the generation that is offered
    due: bool = True  # it is to be put and announced, as soon as it is ready


class OfferingSide:
    """The pieces that this process offers. `wake` is called when `tick` has something to do."""

    def __init__(
        self, link: Link, limits: OfferLimits, *, clock: Callable[[], float], wake: Callable[[], None] = lambda: None
    ) -> None:
        self._link = link
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        self._leases = Leases(limits.max_bytes, limits.max_count, clock=clock)
        self._staged: dict[int, _Staged] = {}
        self._ended: list[tuple[Lease, _Staged, End, str]] = []  # their memory is still to be freed
        self._closed = False
        self.ends: dict[End, int] = dict.fromkeys(End, 0)

    @property
    def used_bytes(self) -> int:
        """Bytes staged now, those included that `tick` is about to free."""
        with self._lock:
            return self._leases.used_bytes

    def offer(
        self, heads: Sequence[jax.Array], layout: HeadLayout, nbytes: int, announce: Announce, done: Done
    ) -> int | None:
        """Takes charge of a piece: true KV heads [1, L, N, S, W], ready or still computed; returns its id.

        None: `nbytes` more than fit at the moment, nothing was taken. From another thread `announce` is called once
        per generation, when the piece can be pulled, and `done` once, when its memory is free.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            if (lease := self._leases.grant(nbytes)) is None:
                return None
            self._staged[lease.id] = _Staged(list(heads), layout, announce, done, self._clock())
        self._wake()
        return lease.id

    def again(self, id: int) -> bool:
        """Offers a piece anew, after a pull of it has failed: next generation, new lease. False: it is gone."""
        with self._lock:
            if (staged := self._staged.get(id)) is None:
                return False
            staged.due = True
        self._wake()
        return True

    def ack(self, ack: Ack) -> bool:
        """The peer has it. False: there was nothing to end (a duplicate, an earlier generation, or too late)."""
        return self._end(ack.id, ack.generation, End.ACKED, "acknowledged")

    def refuse(self, refuse: Refuse) -> bool:
        """The peer does not want it; as `ack`."""
        return self._end(refuse.id, refuse.generation, End.REFUSED, refuse.reason)

    def abort(self, id: int) -> Revoke | None:
        """This side takes it back; the message for the peer. None: it has ended already."""
        with self._lock:
            lease = self._leases.end(id)
            if lease is None:
                return None
            self._ended.append((lease, self._staged.pop(id), End.ABORTED, "aborted by the prefill side"))
        self._wake()
        return Revoke(id, lease.generation, "aborted by the prefill side")

    def tick(self) -> float | None:
        """Does what is due; returns the seconds until there may be more, None: nothing to wait for. One thread only."""
        now = self._clock()
        with self._lock:
            for lease in self._leases.expired():
                reason = f"nobody took it within its lease of {self._limits.lease_s} s"
                self._note_end(lease.id, End.EXPIRED, reason)
            due = [(id, staged) for id, staged in self._staged.items() if staged.due]
        for id, staged in due:
            if are_ready(staged.heads):
                self._put(id, staged)
        self._free_ended()
        with self._lock:
            waits = [ask_again_s(now - staged.since_s) for staged in self._staged.values() if staged.due]
            if (next_s := self._leases.next_end_s()) is not None:
                waits.append(max(next_s - self._clock(), 0.0))
        return min(waits, default=None)

    def close(self) -> None:
        """Ends all offers. Idempotent; call it from the thread of `tick`, or when that has ended."""
        with self._lock:
            self._closed = True
            for id in self._leases.ids():
                self._note_end(id, End.CLOSED, "the prefill side was closed")
        self._free_ended()

    def _end(self, id: int, generation: int, end: End, reason: str) -> bool:
        with self._lock:
            if (lease := self._leases.end(id, generation)) is None:
                return False
            self._ended.append((lease, self._staged.pop(id), end, reason))
        self._wake()
        return True

    def _note_end(self, id: int, end: End, reason: str) -> None:
        if (lease := self._leases.end(id)) is not None:
            self._ended.append((lease, self._staged.pop(id), end, reason))

    def _put(self, id: int, staged: _Staged) -> None:
        error = failure(staged.heads)
        key, old = draw_id(), staged.key
        if error is None:
            staged.key = key  # should the offer end before the next line, `_free_ended` withdraws it after that
            try:
                if old is not None:
                    self._link.withdraw(old)
                self._link.put(key, staged.heads)
            except Exception as raised:  # the link is closed, or its server fails: this piece cannot be had
                error = raised
        with self._lock:
            staged.due = False
            if error is not None:
                log.warning("offer %016x failed: %s", id, error)
                self._note_end(id, End.FAILED, f"{type(error).__name__}: {error}")
                return
            lease = self._leases.start(id, self._limits.lease_s)
        if lease is None:
            return
        head = staged.heads[0]
        offer = Offer(
            id=id,
            generation=lease.generation,
            key=key,
            address=self._link.address,
            layout=staged.layout,
            shape=tuple(head.shape),
            dtype=str(head.dtype),
            lease_s=self._limits.lease_s,
        )
        call(staged.announce, offer)

    def _free_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for lease, staged, end, reason in ended:
            if staged.key is not None:
                self._link.withdraw(staged.key)
            staged.heads.clear()
            with self._lock:
                self._leases.free(lease)
                self.ends[end] += 1
            call(staged.done, Released(lease.id, lease.generation, lease.nbytes, end, reason))


def call(callback: Callable, *arguments: object) -> None:
    """Calls back; what that raises is logged and stays away from the transfers of others."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("a call-back of the remote transport failed")
