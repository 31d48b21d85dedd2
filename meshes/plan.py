"""The resharding plan: which box of which device goes to which device, so that each true element crosses once.

A `Cut` says what every device holds, in the coordinates of the true array. The plan intersects two cuts:

    source cut              plan                                destination cut
    device -> boxes   --->  pieces: source device -> receiver   device -> boxes
                            fan-outs: receiver -> its replicas

Where the source holds a box several times, the piece is read from the device that has sent least so far; where the
destination wants it several times, one device receives it and copies it on, within the destination.
Pure: nothing here touches a device or an array.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jax.sharding import Sharding

from meshes.heads import HeadLayout

Box = tuple[tuple[int, int], ...]  # (start, stop) per axis


@dataclasses.dataclass(frozen=True)
class Held:
    """A box of the true array, and the index in the device's local array where it starts."""

    box: Box
    at: tuple[int, ...]

    def local(self, part: Box) -> Box:
        """`part` (within `box`, true coordinates) in the coordinates of the local array."""
        return tuple((a + p0 - b0, a + p1 - b0) for a, (b0, _), (p0, p1) in zip(self.at, self.box, part, strict=True))


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a true array of `shape` lies on devices: `held[i]` is what device i of the cut holds.

    Any two boxes are either the same (replicas) or disjoint, and together they cover the array. `ids` name the
    devices across cuts (by default none is the same in two cuts): what a device already holds it gets from itself.
    """

    shape: tuple[int, ...]
    held: tuple[tuple[Held, ...], ...]
    ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        boxes = self.boxes()
        inside = all(0 <= start < stop <= n for box in boxes for (start, stop), n in zip(box, self.shape, strict=True))
        covered = sum(map(volume, boxes))
        overlap = any(intersect(a, b) is not None for a, b in itertools.combinations(boxes, 2))
        if not inside or overlap or covered != math.prod(self.shape):
            raise ValueError(
                f"the boxes of a cut must be equal or disjoint and cover its array of shape {self.shape}, but they are "
                f"{', '.join(map(str, boxes[:8]))}{' ...' if len(boxes) > 8 else ''}"
            )

    def boxes(self) -> tuple[Box, ...]:
        """The distinct boxes, in the order of their coordinates."""
        return tuple(sorted({h.box for device in self.held for h in device}))


@dataclasses.dataclass(frozen=True)
class Piece:
    """One copy: `src_box` of device `src`'s local array becomes `dst_box` of device `dst`'s. `box`: true coordinates.

    Devices are indices into their cut; in a fan-out both belong to the destination's.
    """

    box: Box
    src: int
    src_box: Box
    dst: int
    dst_box: Box


@dataclasses.dataclass(frozen=True)
class Plan:
    """`pieces` cross from source to destination, then `fan_outs` copy whole boxes within the destination."""

    pieces: tuple[Piece, ...]
    fan_outs: tuple[Piece, ...]

    def crossing_elements(self) -> int:
        """Elements that go from source to destination: the true array's, each once."""
        return sum(volume(p.box) for p in self.pieces)

    def summary(self) -> str:
        """One line for a log."""
        sent: dict[int, int] = {}
        for piece in self.pieces:
            sent[piece.src] = sent.get(piece.src, 0) + volume(piece.box)
        copied = sum(volume(p.box) for p in self.fan_outs)
        return (
            f"{len(self.pieces)} pieces, {self.crossing_elements()} elements cross, at most {max(sent.values())} from "
            f"one of {len(sent)} devices; {len(self.fan_outs)} copies of {copied} elements within the destination"
        )


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, None if it is empty."""
    both = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def sharding_cut(sharding: Sharding, shape: tuple[int, ...]) -> Cut:
    """The cut of an array of `shape` under `sharding`; device i is the i-th key of `devices_indices_map(shape)`.

    For a NamedSharding that is the order of `mesh.devices.flat`.
    """
    held, ids = [], []
    for device, slices in sharding.devices_indices_map(shape).items():
        box = tuple(s.indices(n)[:2] for s, n in zip(slices or (), shape, strict=True))
        held.append((Held(box, (0,) * len(shape)),))
        ids.append(device.id)  # type: ignore[attr-defined]
    return Cut(shape, tuple(held), tuple(ids))


def head_cut(layout: HeadLayout, rest: Sequence[int] = (), axis: int = 0) -> Cut:
    """The cut of true KV heads under a head layout.

    The true array has the shape `rest` with the `num_kv_heads` heads inserted at `axis`; a device's local array has
    `kv_per_device` slots there. Device i is the i-th of the model axis.
    """
    before, after = tuple(rest[:axis]), tuple(rest[axis:])

    def held(head: int, slot: int) -> Held:
        box = (*((0, n) for n in before), (head, head + 1), *((0, n) for n in after))
        return Held(box, (*(0 for _ in before), slot, *(0 for _ in after)))

    devices = tuple(
        tuple(held(head, slot) for slot, head in enumerate(layout.device_kv(device))) for device in range(layout.tp)
    )
    return Cut((*before, layout.num_kv_heads, *after), devices)


def plan(src: Cut, dst: Cut) -> Plan:
    """The copies that turn `src` into `dst`, deterministically. Raises ValueError if the true shapes differ."""
    if src.shape != dst.shape:
        raise ValueError(f"the source holds an array of {src.shape}, the destination one of {dst.shape}")
    src_ids = src.ids or tuple(-1 - 2 * i for i in range(len(src.held)))  # odd and even: none is the same
    dst_ids = dst.ids or tuple(-2 - 2 * i for i in range(len(dst.held)))
    sources, sinks = _holders(src), _holders(dst)
    sent, received = [0] * len(src.held), [0] * len(dst.held)
    pieces: list[Piece] = []
    fan_outs: list[Piece] = []
    # those without a choice first, so that the others can avoid the devices they load
    for box in sorted(sinks, key=lambda b: (len(sinks[b]), b)):
        overlaps = [(s, part) for s in sources if (part := intersect(s, box)) is not None]
        overlaps.sort(key=lambda o: (len(sources[o[0]]), o[1]))
        near = {src_ids[i] for s, _ in overlaps for i, _ in sources[s]}
        receiver, slot = min(sinks[box], key=lambda d: (dst_ids[d[0]] not in near, received[d[0]], d[0]))
        for source_box, part in overlaps:
            sender, source = min(
                sources[source_box], key=lambda s: (src_ids[s[0]] != dst_ids[receiver], sent[s[0]], s[0])
            )
            if src_ids[sender] != dst_ids[receiver]:
                sent[sender] += volume(part)
                received[receiver] += volume(part)
            pieces.append(Piece(part, sender, source.local(part), receiver, slot.local(part)))
        for device, other in sinks[box]:
            if (device, other) != (receiver, slot):
                fan_outs.append(Piece(box, receiver, slot.local(box), device, other.local(box)))
    return Plan(tuple(sorted(pieces, key=_order)), tuple(sorted(fan_outs, key=_order)))


def _holders(cut: Cut) -> dict[Box, list[tuple[int, Held]]]:
    holders: dict[Box, list[tuple[int, Held]]] = {}
    for device, held in itertools.chain.from_iterable(((i, h) for h in hs) for i, hs in enumerate(cut.held)):
        holders.setdefault(held.box, []).append((device, held))
    return holders


def _order(piece: Piece) -> tuple[int, Box, int]:
    return piece.dst, piece.dst_box, piece.src
