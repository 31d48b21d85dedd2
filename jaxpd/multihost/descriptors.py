"""What leader and followers say to each other: one frozen object a message, and its bytes.

A message is the length of a JSON header in four bytes, the header (kind and fields) and the bytes of its arrays, one
after the other. Nothing in it is code, and reading one makes nothing but these objects.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np

from jaxpd.batch import Row

_HEADER = struct.Struct("<I")


# the leader, at the start and at the end ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a follower needs to make the leader's programs; it has the model, the mesh and its own flags itself."""

    version: str  # of jaxpd
    model: str  # fingerprint of the checkpoint, to compare
    role: str
    mesh: tuple[int, int]  # tp, dp
    dtype: str
    kernels: str
    num_pages: int  # of a replica
    page_size: int
    num_slots: int
    shapes: tuple[tuple[int, int, int], ...]  # of `jaxpd.batch.BatchShape`


@dataclasses.dataclass(frozen=True)
class Begin:
    """All are ready; from now on `silence_s` seconds of silence mean that the other end is gone."""

    silence_s: float


@dataclasses.dataclass(frozen=True)
class Goodbye:
    """The worker ends, as it was asked to."""


# the leader, the calls of a `jaxpd.device.PoolDevice` -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Forward and sample of one batch."""

    shape: tuple[int, int, int]
    packed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """Forward alone; its `Sample` comes, in the order of the forwards."""

    shape: tuple[int, int, int]
    packed: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """What follows the oldest forward that has not been sampled."""

    mask_RBW: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A chunk of a prompt and its log probabilities. The row's fields as in `jaxpd.batch.Row`."""

    replica: int
    token_ids: np.ndarray
    context_len: int
    pages: np.ndarray
    slot: int
    targets: np.ndarray

    @property
    def row(self) -> Row:
        """It samples nothing."""
        return Row(self.token_ids, self.context_len, self.pages, self.slot, output_index=0, seed=0, temperature=0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class SetSlot:
    """A sequence's options into its slot."""

    replica: int
    slot: int
    options_K: np.ndarray
    counts_V: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """Pages of a replica into staging: pieces `first`, `first + 1` ..., each kept until `OfferPiece` or `DropPiece`."""

    first: int
    replica: int
    page_ids: np.ndarray


# the leader, offers of pieces (jaxpd/multihost/offers.py) -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OpenTransport:
    """A transfer server for one peer; the limits of its offers, and the streams that all have."""

    transport: int
    streams: int
    max_bytes: int
    max_count: int
    lease_s: float


@dataclasses.dataclass(frozen=True)
class CloseTransport:
    """The peer is gone: all offers to it end."""

    transport: int


@dataclasses.dataclass(frozen=True)
class OfferPiece:
    """Offer your heads of a piece, under the leader's number `offer`."""

    transport: int
    piece: int
    offer: int


@dataclasses.dataclass(frozen=True)
class EndOffer:
    """It is over: `end` is one of `meshes.transfer.offering.End`."""

    transport: int
    offer: int
    end: str
    reason: str


@dataclasses.dataclass(frozen=True)
class DropPiece:
    """Nobody will offer it."""

    piece: int


# a follower -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ready:
    """Programs and weights are there."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """It cannot go on; `reason` is one line for a person."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Offered:
    """Its heads of a piece can be pulled."""

    transport: int
    offer: int
    key: int = dataclasses.field(repr=False)
    address: str


@dataclasses.dataclass(frozen=True)
class Freed:
    """Its part of an offer is over; the words of `meshes.transfer.offering.Released`."""

    transport: int
    offer: int
    end: str
    reason: str


Descriptor = (
    Setup
    | Begin
    | Goodbye
    | Step
    | Forward
    | Sample
    | Score
    | SetSlot
    | Gather
    | OpenTransport
    | CloseTransport
    | OfferPiece
    | EndOffer
    | DropPiece
    | Ready
    | Failed
    | Offered
    | Freed
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in Descriptor.__args__}  # type: ignore[attr-defined]


def encode(descriptor: Descriptor) -> bytes:
    """Its bytes."""
    arrays: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.tobytes())
            return {"dtype": value.dtype.str, "shape": value.shape}
        return value

    fields = [plain(getattr(descriptor, field.name)) for field in dataclasses.fields(descriptor)]
    header = json.dumps([type(descriptor).__name__, fields], separators=(",", ":")).encode()
    return b"".join((_HEADER.pack(len(header)), header, *arrays))


def decode(message: bytes) -> Descriptor:
    """The inverse of `encode`. Raises ValueError for anything else."""
    try:
        (length,) = _HEADER.unpack_from(message)
        at = _HEADER.size + length
        kind, fields = json.loads(message[_HEADER.size : at])
        values = []
        for field in fields:
            if isinstance(field, dict):
                dtype, shape = np.dtype(field["dtype"]), tuple(field["shape"])
                count = int(np.prod(shape))
                field = np.frombuffer(message, dtype, count, at).reshape(shape)
                at += count * dtype.itemsize
            values.append(_tuples(field))
        found = _KINDS[kind](*values)
    except (struct.error, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{len(message)} bytes are no descriptor: {type(error).__name__}: {error}") from error
    if at != len(message):
        raise ValueError(f"a {kind} of {at} bytes came in {len(message)}")
    return found


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
