"""One piece on its way to the pulling side: what is known of it, how far it is, and why it could not be had."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from meshes.transfer.link import Pull
from meshes.transfer.messages import Offer

Arrays = tuple[jax.Array, ...]
Place = Callable[[Sequence[jax.Array]], Arrays]


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


class Pulls:
    """A `Pull` of one piece, made of one from each of its sources: there when all are there."""

    def __init__(self) -> None:
        self._parts: list[tuple[tuple[int, ...], Pull]] = []

    def add(self, heads: tuple[int, ...], pull: Pull) -> None:
        """These heads come from this source."""
        self._parts.append((heads, pull))

    def settled(self) -> bool:
        """Whether all have arrived or failed."""
        return all(pull.settled() for _, pull in self._parts)

    def wait(self) -> None:
        """Blocks until they have."""
        for _, pull in self._parts:
            pull.wait()

    def take(self) -> list[jax.Array]:
        """All true KV heads in order."""
        taken = [(heads, pull.take()) for heads, pull in self._parts]
        by_head = {head: array for heads, arrays in taken for head, array in zip(heads, arrays, strict=True)}
        return [by_head[head] for head in range(len(by_head))]


class Phase(enum.Enum):
    """See `meshes.transfer.pulling`."""

    QUEUED = enum.auto()
    PULLING = enum.auto()
    ARRIVED = enum.auto()
    PLACING = enum.auto()
    HANDED_ON = enum.auto()


@dataclasses.dataclass(eq=False)
class Transfer:
    """An offer that is pulled; what changes belongs to the `PullingSide`."""

    offer: Offer
    targets: tuple[jax.Device, ...]
    place: Place
    done: Done
    nbytes: int
    limit_s: float
    ends_s: float
    phase: Phase = Phase.QUEUED
    began_s: float = 0.0
    pull: Pull | None = None
    arrays: Arrays = ()
    ending: TransferFailed | None = None

    @property
    def moving(self) -> bool:
        """Whether it is asked again and again how far it is."""
        return self.phase in (Phase.PULLING, Phase.ARRIVED, Phase.PLACING)

    def wait(self) -> None:
        """Blocks until its arrays are there. In a thread of its own: they may have been handed on meanwhile."""
        if (pull := self.pull) is not None:
            pull.wait()
        jax.block_until_ready(self.arrays)


@functools.lru_cache(maxsize=256)
def wanted(shape: tuple[int, ...], dtype: str, targets: tuple[jax.Device, ...]) -> list[jax.ShapeDtypeStruct]:
    """What is asked for; remembered, since pieces come in few shapes."""
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device)) for device in targets]


def too_late(transfer: Transfer) -> TransferFailed:
    """Its deadline has passed."""
    offer = transfer.offer
    doing = "waited for its turn" if transfer.phase is Phase.QUEUED else "was under way"
    return TransferFailed(
        Cause.DEADLINE,
        f"a piece of {offer.nbytes} bytes from {offer.address} {doing} and did not arrive within {transfer.limit_s} s "
        f"(its lease is {offer.lease_s} s)",
    )


def broken(error: Exception) -> TransferFailed:
    """Of the connection, the peer or the device."""
    failed = TransferFailed(Cause.ERROR, f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
