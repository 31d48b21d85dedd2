"""The leader's side: its device, which tells the followers what to do, and their watch.

    meet --> prepare (Setup) --> [followers compile and load] --> wait_ready --> calls, offers ... --> close (Goodbye)
                 |                                                                   |
                 +------- a follower is lost or has failed, or a step here ----------+--> broken: `on_broken`, once

Broken is for good: the processes have no longer made the same calls, or one of them will never make them.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxpd.batch import BatchShape, Row, pack
from jaxpd.checkpoints.fingerprint import fingerprint
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.device import Forwarded, PoolDevice
from jaxpd.errors import JaxpdError, Unavailable
from jaxpd.multihost.channel import Channel
from jaxpd.multihost.descriptors import (
    Begin,
    CloseTransport,
    Descriptor,
    DropPiece,
    EndOffer,
    Failed,
    Forward,
    Freed,
    Gather,
    Goodbye,
    Offered,
    OfferPiece,
    OpenTransport,
    Ready,
    Sample,
    Score,
    SetSlot,
    Setup,
    Step,
    decode,
    encode,
)
from jaxpd.multihost.watch import SILENCE_S, Watched
from jaxpd.programs import Programs, ProgramSpec
from jaxpd.sampling import Logprobs, Sampled
from jaxpd.version import __version__
from meshes.sharding import DATA, MODEL
from meshes.transfer.in_process import Staging
from meshes.transfer.link import Link
from meshes.transfer.offering import End, OfferLimits
from meshes.transfer.pulling import PullLimits
from meshes.transfer.remote import RemoteTransport
from meshes.transfer.shared import SharedOffering

log = logging.getLogger(__name__)

GOODBYE_S = 5.0


class Followers:
    """All followers of a worker, as its leader sees them. From any thread.

    `on_broken` is called once, from a thread of its own, with one line for a person: nothing can be computed any more.
    """

    def __init__(
        self, channels: dict[int, Channel], *, on_broken: Callable[[str], None], silence_s: float = SILENCE_S
    ) -> None:
        self._silence_s = silence_s
        self.on_broken = on_broken
        self.broken: str | None = None
        self._closing = False
        self._news = threading.Condition()
        self._ready: set[int] = set()
        self._gone: set[int] = set()
        self._pieces = 0
        self._dropped: collections.deque[int] = collections.deque()
        self._transports: dict[int, SharedOffering] = {}
        self._last_transport = 0
        self._links = {process: self._watched(process, channel) for process, channel in channels.items()}
        for link in self._links.values():
            link.start()

    def _watched(self, process: int, channel: Channel) -> Watched:
        return Watched(
            f"process {process}",
            channel,
            on_message=lambda message: self._on_message(process, message),
            on_end=lambda reason: self._on_end(process, reason),
        )

    # at the start and at the end ----------------------------------------------------------------------------------

    def prepare(self, spec: ProgramSpec, role: str, checkpoint: Checkpoint) -> None:
        """The followers begin to make the programs of `spec`, and to load their weights of the same checkpoint."""
        self.send(
            Setup(
                version=__version__,
                model=fingerprint(checkpoint),
                role=role,
                mesh=(spec.mesh.shape[MODEL], spec.mesh.shape[DATA]),
                dtype=str(np.dtype(spec.dtype)),
                kernels=spec.kernels,
                num_pages=spec.num_pages,
                page_size=spec.page_size,
                num_slots=spec.num_slots,
                shapes=tuple(dataclasses.astuple(shape) for shape in spec.shapes),
            )
        )

    def wait_ready(self) -> None:
        """Waits until all have programs and weights. Raises Unavailable when one of them has failed or is gone."""
        with self._news:
            self._news.wait_for(lambda: self.broken is not None or self._ready >= set(self._links))
        if self.broken is not None:
            raise Unavailable(f"this worker cannot start: {self.broken}")

    def device(self, spec: ProgramSpec, params: dict[str, jax.Array], programs: Programs) -> LeaderDevice:
        """The device of the pool, once all are ready."""
        self.wait_ready()
        device = LeaderDevice(spec, params, programs, self)
        self.send(Begin(self._silence_s))
        for link in self._links.values():
            link.expect(self._silence_s)
        return device

    def close(self) -> None:
        """The followers end. Idempotent; call it when the engine is closed, and end the process then."""
        with self._news:
            if self._closing:
                return
            self._closing = True
        self.send(Goodbye())
        with self._news:
            self._news.wait_for(lambda: self._gone >= set(self._links), GOODBYE_S)
        for link in self._links.values():
            link.close()

    def declare_broken(self, reason: str) -> None:
        """Something has failed for good. The first reason counts."""
        with self._news:
            if self.broken is not None or self._closing:
                return
            self.broken = reason
            self._news.notify_all()
        log.error("this worker of several processes is broken: %s", reason)
        threading.Thread(target=self.on_broken, args=(reason,), name="jaxpd-broken", daemon=True).start()

    # calls --------------------------------------------------------------------------------------------------------

    def send(self, descriptor: Descriptor) -> None:
        """Sends it to all. What one thread sends arrives in its order."""
        message = encode(descriptor)
        for link in self._links.values():
            link.send(message)

    def hold(self, pieces: list[Staging], first: int) -> list[Staging]:
        """Staged pieces under the numbers by which the followers have theirs."""
        return [_Held(piece, first + i, self._dropped) for i, piece in enumerate(pieces)]

    def number_pieces(self, count: int) -> int:
        """The first of so many numbers for pieces that are about to be gathered. The pool's thread; drops old ones."""
        while self._dropped:
            self.send(DropPiece(self._dropped.popleft()))
        self._pieces += count
        return self._pieces - count

    # hand-offs ----------------------------------------------------------------------------------------------------

    def transport(self, link: Link, offers: OfferLimits, pulls: PullLimits, *, streams: int) -> RemoteTransport:
        """`RemoteTransport(link, offers, pulls)` for one peer, where every process offers its own shards.

        `link` is this process's; the others make theirs, with as many streams.
        """
        with self._news:
            self._last_transport += 1
            number = self._last_transport
        self.send(OpenTransport(number, streams, offers.max_bytes, offers.max_count, offers.lease_s))
        transport = RemoteTransport(link, offers, pulls, elsewhere=_Elsewhere(self, number))
        assert isinstance(transport.offering, SharedOffering)
        self._transports[number] = transport.offering
        return transport

    def forget_transport(self, number: int) -> None:
        """It is closed here."""
        if self._transports.pop(number, None) is not None:
            self.send(CloseTransport(number))

    # the followers' words -----------------------------------------------------------------------------------------

    def _on_message(self, process: int, message: bytes) -> None:
        match decode(message):
            case Ready():
                with self._news:
                    self._ready.add(process)
                    self._news.notify_all()
            case Failed(reason):
                self.declare_broken(f"process {process} has failed: {reason}")
            case Offered(transport, offer, key, address):
                if (side := self._transports.get(transport)) is not None:
                    side.ready(offer, process, address, key)
            case Freed(transport, offer, end, reason):
                if (side := self._transports.get(transport)) is not None:
                    side.freed(offer, process, End(end), reason)
            case other:
                raise ValueError(f"a follower sent a {type(other).__name__}")

    def _on_end(self, process: int, reason: str) -> None:
        with self._news:
            self._gone.add(process)
            self._news.notify_all()
        self.declare_broken(f"process {process} is lost: {reason}")


class LeaderDevice(PoolDevice):
    """A pool's device of which a part is in other processes: each call is sent to them, and then made here.

    Owned by the pool's thread, as `PoolDevice`.
    """

    def __init__(
        self, spec: ProgramSpec, params: dict[str, jax.Array], programs: Programs, followers: Followers
    ) -> None:
        self._followers = followers
        self._started = False
        self._unsampled: collections.deque[Forwarded] = collections.deque()
        super().__init__(spec, params, programs)
        self._started = True

    def reset(self) -> None:
        """At the start, new pages. Later it means that a step has failed here: the processes cannot go on together."""
        if not self._started:
            super().reset()
            return
        self._followers.declare_broken("a step has failed, or taken longer than --step-timeout; see the log")

    def explained(self, error: Exception) -> JaxpdError | None:
        """Whatever has failed, this worker will start again, and others can serve the request."""
        why = self._followers.broken or f"a step that all processes make together has failed ({type(error).__name__})"
        return Unavailable(f"the request is given up: {why}")

    def step(self, shape: BatchShape, batch: Sequence[Sequence[Row]] | np.ndarray) -> Sampled:
        packed = batch if isinstance(batch, np.ndarray) else pack(shape, batch)
        self._followers.send(Step(_plain(shape), packed))
        return super().sample(super().forward(shape, packed))

    def forward(self, shape: BatchShape, batch: Sequence[Sequence[Row]] | np.ndarray) -> Forwarded:
        packed = batch if isinstance(batch, np.ndarray) else pack(shape, batch)
        self._followers.send(Forward(_plain(shape), packed))
        forwarded = super().forward(shape, packed)
        self._unsampled.append(forwarded)
        return forwarded

    def sample(self, batch: Forwarded, mask_RBW: np.ndarray | None = None) -> Sampled:
        assert self._unsampled.popleft() is batch, "followers sample in the order of the forwards"
        self._followers.send(Sample(mask_RBW))
        return super().sample(batch, mask_RBW)

    def score(self, replica: int, row: Row, targets: Sequence[int]) -> Logprobs:
        ids, wanted = np.asarray(row.token_ids, np.int32), np.asarray(targets, np.int32)
        self._followers.send(Score(replica, ids, row.context_len, np.asarray(row.pages), row.slot, wanted))
        return super().score(replica, row, targets)

    def set_slot(self, replica: int, slot: int, options_K: np.ndarray, counts_V: np.ndarray | None) -> None:
        self._followers.send(SetSlot(replica, slot, np.asarray(options_K, np.int32), counts_V))
        super().set_slot(replica, slot, options_K, counts_V)

    def gather(self, replica: int, page_ids: np.ndarray) -> list[Staging]:
        first = self._followers.number_pieces(len(self._pieces(page_ids, filler=0)))
        self._followers.send(Gather(first, replica, np.asarray(page_ids, np.int32)))
        return self._followers.hold(super().gather(replica, page_ids), first)

    def scatter(self, replica: int, page_ids: np.ndarray, pieces: Sequence[Staging]) -> None:
        raise NotImplementedError("a decode pool lies in one process (joining.check)")


class _Held(tuple[jax.Array, ...]):
    """A staged piece of which the followers keep their part until it is offered, or nobody has this any more."""

    number: int
    dropping: weakref.finalize

    def __new__(cls, arrays: Iterable[jax.Array], number: int, dropped: collections.deque[int]) -> _Held:
        held = super().__new__(cls, arrays)
        held.number = number
        # An attribute is watched, since a tuple cannot be. The collector may call this in any thread, in the middle of
        # anything: it does no more than to append.
        held._token = _Token()  # type: ignore[attr-defined]
        held.dropping = weakref.finalize(held._token, dropped.append, number)  # type: ignore[attr-defined]
        return held


class _Token:
    """Lives as long as what has it."""


class _Elsewhere:
    """See `meshes.transfer.shared.Elsewhere`."""

    def __init__(self, followers: Followers, transport: int) -> None:
        self._followers = followers
        self._transport = transport

    def offer(self, staging: tuple[jax.Array, ...], id: int) -> None:
        assert isinstance(staging, _Held), "a piece comes from the leader's device"
        staging.dropping.detach()
        self._followers.send(OfferPiece(self._transport, staging.number, id))

    def end(self, id: int, end: End, reason: str) -> None:
        self._followers.send(EndOffer(self._transport, id, end.value, reason))

    def close(self) -> None:
        self._followers.forget_transport(self._transport)


def _plain(shape: BatchShape) -> tuple[int, int, int]:
    return shape.tokens, shape.rows, shape.table
