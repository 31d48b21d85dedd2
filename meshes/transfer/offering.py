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
import math
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
        if self.max_bytes < 1 or self.max_count < 1 or not 0 < self.lease_s < math.inf:
            raise ValueError(f"{self} must have positive limits, and leases that end")


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
    offer: Offer  # but for its key and generation
    announce: Announce
    done: Done
    since_s: float
    key: int | None = None  # of the generation that is offered
    due: bool = True  # it is to be put and announced, as soon as it is ready

    def wait(self) -> None:
        """Blocks until it is computed. In a thread of its own: it may have ended meanwhile."""
        jax.block_until_ready(self.heads)


class OfferingSide:
    """The pieces that this process offers. `wake` is called when `tick` has something to do.

    `wait_for` gets what waits for a piece, to call it in another thread and then `tick` (settle.Waiter.wait_for).
    """

    def __init__(
        self,
        link: Link,
        limits: OfferLimits,
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
        per generation, when the piece can be pulled, and `done` once, when its memory is free. Raises ValueError for
        shapes that cannot be offered, RuntimeError when closed.
        """
        offer = Offer(
            id=0,
            generation=1,
            key=0,
            address=self._link.address,
            layout=layout,
            shape=tuple(heads[0].shape),
            dtype=str(heads[0].dtype),
            lease_s=self._limits.lease_s,
        )
        now_s = self._clock()
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            if (lease := self._leases.grant(nbytes)) is None:
                return None
            offer = dataclasses.replace(offer, id=lease.id)
            staged = self._staged[lease.id] = _Staged(list(heads), offer, announce, done, now_s)
        if are_ready(staged.heads):
            self._wake()
        else:
            self._wait_for(staged.wait)
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
        return self._end(ack.id, End.ACKED, "acknowledged", ack.generation) is not None

    def refuse(self, refuse: Refuse) -> bool:
        """The peer does not want it; as `ack`."""
        return self._end(refuse.id, End.REFUSED, refuse.reason, refuse.generation) is not None

    def abort(self, id: int) -> Revoke | None:
        """This side takes it back; the message for the peer (generation 0: it never heard of it). None: it is over."""
        reason = "aborted by the prefill side"
        lease = self._end(id, End.ABORTED, reason)
        return None if lease is None else Revoke(id, lease.generation, reason)

    def tick(self) -> float | None:
        """Does what is due; returns the seconds until there may be more, None: nothing to wait for. One thread only."""
        now = self._clock()
        with self._lock:
            expired = self._leases.expired()
            due = [(id, staged) for id, staged in self._staged.items() if staged.due]
        for lease in expired:
            reason = f"nobody took it within its lease of {self._limits.lease_s} s"
            self._end(lease.id, End.EXPIRED, reason, lease.generation)
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
            live = self._leases.ids()
        for id in live:
            self._end(id, End.CLOSED, "the prefill side was closed")
        self._free_ended()

    def _end(self, id: int, end: End, reason: str, generation: int | None = None) -> Lease | None:
        """Everything ends here: once, and only in the generation that is meant (None: any)."""
        with self._lock:
            lease = self._leases.end(id, generation)
            if lease is not None:
                self._ended.append((lease, self._staged.pop(id), end, reason))
        if lease is not None:
            self._wake()
        return lease

    def _put(self, id: int, staged: _Staged) -> None:
        staged.due = False
        try:
            if (error := failure(staged.heads)) is not None:
                raise error
            key, old = draw_id(), staged.key
            staged.key = key  # should the offer end before the next lines, `_free_ended` withdraws it after them
            if old is not None:
                self._link.withdraw(old)
            self._link.put(key, staged.heads)
        except Exception as error:  # of the program, the link or its server: this piece cannot be had
            log.warning("offer %016x failed: %s", id, error)
            self._end(id, End.FAILED, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            lease = self._leases.start(id, self._limits.lease_s)
        if lease is not None:
            call(staged.announce, dataclasses.replace(staged.offer, key=key, generation=lease.generation))

    def _free_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for lease, staged, end, reason in ended:
            try:
                if staged.key is not None:
                    self._link.withdraw(staged.key)
            except Exception:  # a server in such a state takes no new offers either; the caller is answered
                log.exception("offer %016x could not be withdrawn", lease.id)
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
