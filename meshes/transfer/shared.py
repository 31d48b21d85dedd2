"""The offering side of a worker that is several processes: a piece lies in all of them, and is offered as one.

    first process                                              other processes (their own transports)
    offer_piece: its own heads, as ever             offer -->  their heads of the same piece
      its own can be pulled                         <-- ready  address and key
      all can: announce one Offer, `elsewhere` names the others
    ack, refuse, abort                              end   -->  withdrawn
    all are freed: done                             <-- freed

A part that ends by itself (its lease, a failure) ends the whole. The processes live and die together, so nothing here
waits with a deadline for one of the others: who watches them ends the worker.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Protocol

import jax

from meshes.heads import HeadLayout
from meshes.transfer.leases import draw_id
from meshes.transfer.link import Link
from meshes.transfer.messages import Ack, Offer, Refuse, Revoke, Source
from meshes.transfer.move import heads_by_process, own_heads
from meshes.transfer.offering import Announce, Done, End, OfferingSide, OfferLimits, Released, call


class Elsewhere(Protocol):
    """The same transport in the other processes. Nothing blocks; their answers come by `ready` and `freed`."""

    def offer(self, staging: tuple[jax.Array, ...], id: int) -> None:
        """All offer their heads of a piece under this id, if they have any."""

    def end(self, id: int, end: End, reason: str) -> None:
        """It is over."""

    def close(self) -> None:
        """All is over."""


@dataclasses.dataclass(eq=False)
class _Whole:
    """A piece in all its parts, by process."""

    heads: dict[int, tuple[int, ...]]
    layout: HeadLayout
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    announce: Announce
    done: Done
    own: int | None = None  # the id of this process's part
    ready: dict[int, Source] = dataclasses.field(default_factory=dict)
    freed: set[int] = dataclasses.field(default_factory=set)
    announced: bool = False
    end: tuple[End, str] | None = None


class SharedOffering(OfferingSide):
    """See the module docstring. What `OfferingSide` does for one piece this does for the whole, under an id of its own.

    `ends` counts this process's parts; a piece is offered in one generation.
    """

    def __init__(
        self,
        link: Link,
        limits: OfferLimits,
        elsewhere: Elsewhere,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        wait_for: Callable[[Callable[[], object]], None] = lambda wait: None,
        process: int | None = None,
    ) -> None:
        super().__init__(link, limits, clock=clock, wake=wake, wait_for=wait_for)
        self._elsewhere = elsewhere
        self._process = jax.process_index() if process is None else process
        self._address = link.address
        self._lease_s = limits.lease_s
        self._book = threading.Lock()
        self._wholes: dict[int, _Whole] = {}

    def offer_piece(
        self, staging: tuple[jax.Array, ...], layout: HeadLayout, announce: Announce, done: Done
    ) -> int | None:
        """As `RemoteTransport.offer`: a staged piece of which this process may have some heads, all, or none."""
        tp, *rest = staging[0].shape
        size = staging[0].nbytes // tp
        heads, mine = heads_by_process(staging, layout), own_heads(staging, layout)
        whole = _Whole(
            heads,
            layout,
            (1, *rest),
            str(staging[0].dtype),
            nbytes=len(staging) * tp * size,
            announce=announce,
            done=done,
        )
        id = draw_id()
        with self._book:
            if self._closed:  # `close` ends what is in the book when it comes here
                raise RuntimeError("the transport is closed")
            if mine:
                here, shards = self._process, sum(len(array.addressable_shards) for array in staging)
                whole.own = self.offer(
                    list(mine.values()),
                    layout,
                    shards * size,
                    lambda offer: self.ready(id, here, offer.address, offer.key),
                    lambda end: self.freed(id, here, end.end, end.reason),
                )
                if whole.own is None:
                    return None
            self._wholes[id] = whole
        self._elsewhere.offer(staging, id)
        return id

    def ready(self, id: int, process: int, address: str, key: int) -> None:
        """A process's heads can be pulled."""
        with self._book:
            whole = self._wholes.get(id)
            if whole is None or whole.end is not None or process not in whole.heads:
                return
            whole.ready[process] = Source(address, key, whole.heads[process])
            if whole.announced or len(whole.ready) < len(whole.heads):
                return
            whole.announced = True
            mine = whole.ready.get(self._process)
            others = tuple(source for process, source in sorted(whole.ready.items()) if process != self._process)
        offer = Offer(
            id=id,
            generation=1,
            key=mine.key if mine else 0,
            address=self._address,
            layout=whole.layout,
            shape=whole.shape,
            dtype=whole.dtype,
            lease_s=self._lease_s,
            elsewhere=others,
        )
        call(whole.announce, offer)

    def freed(self, id: int, process: int, end: End, reason: str) -> None:
        """A process's part is over, by itself or since it was told."""
        self._end_whole(id, end, reason)
        with self._book:
            whole = self._wholes.get(id)
            if whole is None:
                return
            whole.freed.add(process)
            if not whole.freed >= set(whole.heads):
                return
            del self._wholes[id]
        self._over(id, whole)

    def ack(self, ack: Ack) -> bool:
        """The peer has all of it; as `OfferingSide.ack`."""
        return self._end_whole(ack.id, End.ACKED, "acknowledged", ack.generation) is not None

    def refuse(self, refuse: Refuse) -> bool:
        """The peer does not want it; as `ack`."""
        return self._end_whole(refuse.id, End.REFUSED, refuse.reason, refuse.generation) is not None

    def abort(self, id: int) -> Revoke | None:
        """This side takes it back; as `OfferingSide.abort`."""
        reason = "aborted by the prefill side"
        whole = self._end_whole(id, End.ABORTED, reason)
        return None if whole is None else Revoke(id, int(whole.announced), reason)

    def again(self, id: int) -> bool:
        """A piece that lies in several processes is not offered again: False, as for one that is gone."""
        return False

    def close(self) -> None:
        """Ends all offers, here and elsewhere. Idempotent; as `OfferingSide.close`."""
        super().close()
        self._elsewhere.close()
        with self._book:
            wholes, self._wholes = self._wholes, {}
        for id, whole in wholes.items():
            whole.end = whole.end or (End.CLOSED, "the prefill side was closed")
            self._over(id, whole)

    def _end_whole(self, id: int, end: End, reason: str, generation: int | None = None) -> _Whole | None:
        """Ends it in all processes; None: it was over, or another generation is meant."""
        with self._book:
            whole = self._wholes.get(id)
            if whole is None or whole.end is not None or generation not in (None, int(whole.announced)):
                return None
            whole.end = (end, reason)
            own = whole.own
        if own is not None:
            self._end(own, end, reason)  # nothing, where this part is the one that has ended
        self._elsewhere.end(id, end, reason)
        return whole

    def _over(self, id: int, whole: _Whole) -> None:
        assert whole.end is not None
        call(whole.done, Released(id, int(whole.announced), whole.nbytes, *whole.end))
