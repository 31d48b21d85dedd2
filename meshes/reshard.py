"""Reshard an array between meshes, asynchronously and without the host: the resharding plan, carried out.

    source shards --cut--> pieces --device_put--> pieces --join--> destination shards --device_put--> their replicas
                 (source device)          (one call)   (receiver)                       (one call)

`jax.device_put` does this by itself only where both shardings cut the array alike; otherwise it reads the whole array
into host memory while the caller waits. Steps that have nothing to do are left out: a shard that is sent whole is not
cut, a destination shard that is one piece is not joined.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from meshes.plan import Box, plan, sharding_cut

# Bytes per piece below which plain device_put is used. A piece costs the caller about 35 us to send, whatever its size.
# In benchmarks/handoff.py pieces of 16 to 360 KiB won nothing reliably, and 64 of them lost. With 2 MiB or more the
# caller mostly waits less (3x to 28x at 134 MB for 8->1, 8->2 and 2->8, two cores that were mostly taken by others),
# but on jax 0.10 the whole can take longer than device_put: see 24 MB, and 2->8.
CROSSOVER_BYTES = 1 << 20

# XLA's CPU client runs a program on the calling thread if its inputs are ready and it counts fewer than 1,000
# arithmetic operations; copies count none, so a 134 MB concatenate held the caller for 51 ms, with these 0.2 ms.
_OPERATIONS = 2048


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """A plan by device: what `reshard` does, without looking anything up twice."""

    cuts: tuple[tuple[jax.Device, tuple[Box, ...] | None], ...]  # None: the shard is sent whole
    targets: tuple[jax.Device, ...]  # of the pieces, in the order in which the cuts yield them
    joins: tuple[tuple[jax.Device, tuple[int, ...], tuple[Box, ...]], ...]  # receiver, its pieces, where they go
    fan_outs: tuple[tuple[jax.Device, jax.Device], ...]  # from, to


def reshard(array: jax.Array, dst: NamedSharding, *, crossover_bytes: int = CROSSOVER_BYTES) -> jax.Array:
    """`array` (any shape, any dtype) under the sharding `dst`, on any devices of this process; returns at once.

    Each byte crosses once. A shard that stays whole on its device is shared with the result, so do not donate either.
    The first call for a pair of shardings and a shape compiles, once per device. Where the plan's pieces are smaller
    than `crossover_bytes` on average, plain `jax.device_put` is used, by way of the host (0: never). Raises ValueError
    where `array` or `dst` has devices of another process.
    """
    if not array.is_fully_addressable or not dst.is_fully_addressable:
        raise ValueError(
            f"reshard needs all devices in this process; array: {array.sharding}, destination: {dst}. "
            "Between processes use the remote transport"
        )
    if array.size == 0 or array.sharding == dst:
        return jax.device_put(array, dst)  # nothing to move
    steps = _schedule(array.sharding, dst, array.shape)
    if array.nbytes < crossover_bytes * len(steps.targets):
        return jax.device_put(array, dst)
    shards = {s.device: s.data for s in array.addressable_shards}
    pieces: list[jax.Array] = []
    for device, boxes in steps.cuts:
        pieces.extend([shards[device]] if boxes is None else _cutter(boxes, device.platform)(shards[device]))
    landed = jax.device_put(pieces, list(steps.targets))
    parts: dict[jax.Device, jax.Array] = {}
    for device, indices, boxes in steps.joins:
        mine = [landed[i] for i in indices]
        parts[device] = mine[0] if len(mine) == 1 else _joiner(boxes, device.platform)(*mine)
    copies = jax.device_put([parts[a] for a, _ in steps.fan_outs], [b for _, b in steps.fan_outs])
    parts |= {b: copy for (_, b), copy in zip(steps.fan_outs, copies, strict=True)}
    devices = dst.addressable_devices_indices_map(array.shape)
    return jax.make_array_from_single_device_arrays(array.shape, dst, [parts[d] for d in devices])


@functools.lru_cache(maxsize=1024)
def _schedule(src: Sharding, dst: NamedSharding, shape: tuple[int, ...]) -> _Schedule:
    senders, receivers = list(src.devices_indices_map(shape)), list(dst.devices_indices_map(shape))
    steps = plan(sharding_cut(src, shape), sharding_cut(dst, shape))
    whole = tuple((0, n) for n in src.shard_shape(shape))
    cuts: list[tuple[jax.Device, tuple[Box, ...] | None]] = []
    targets: list[jax.Device] = []
    by_receiver: dict[int, list[tuple[int, Box]]] = {}
    for sender in sorted({p.src for p in steps.pieces}):
        mine = [p for p in steps.pieces if p.src == sender]
        boxes = tuple(dict.fromkeys(p.src_box for p in mine))
        if boxes == (whole,):
            cuts.extend((senders[sender], None) for _ in mine)
        else:
            cuts.append((senders[sender], tuple(p.src_box for p in mine)))
        for piece in mine:
            by_receiver.setdefault(piece.dst, []).append((len(targets), piece.dst_box))
            targets.append(receivers[piece.dst])
    joins = tuple(
        (receivers[r], tuple(i for i, _ in got), tuple(box for _, box in got)) for r, got in by_receiver.items()
    )
    fan_outs = tuple((receivers[p.src], receivers[p.dst]) for p in steps.fan_outs)
    return _Schedule(tuple(cuts), tuple(targets), joins, fan_outs)


@functools.lru_cache(maxsize=1024)
def _cutter(boxes: tuple[Box, ...], platform: str) -> Callable[[jax.Array], Sequence[jax.Array]]:
    """A program from a shard to its pieces."""

    def cut(shard: jax.Array) -> list[jax.Array]:
        return [jax.lax.slice(shard, [a for a, _ in box], [b for _, b in box]) for box in boxes]

    return _dispatched(cut, platform)


@functools.lru_cache(maxsize=1024)
def _joiner(boxes: tuple[Box, ...], platform: str) -> Callable[..., jax.Array]:
    """A program from pieces to the shard in which they lie at `boxes`, which form a grid."""

    def join(pieces: list[tuple[Box, jax.Array]], axis: int) -> jax.Array:
        if len(pieces) == 1:
            return pieces[0][1]
        starts = sorted({box[axis][0] for box, _ in pieces})
        rows = [join([(b, p) for b, p in pieces if b[axis][0] == start], axis + 1) for start in starts]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis)

    return _dispatched(lambda *pieces: join(list(zip(boxes, pieces, strict=True)), 0), platform)


def _dispatched(function: Callable, platform: str) -> Callable:
    """`function` compiled so that calling it does not wait for it (see _OPERATIONS)."""
    if platform != "cpu":
        return jax.jit(function)

    def with_operations(*arrays: jax.Array) -> tuple:
        return function(*arrays), jnp.sum(arrays[0].ravel()[:_OPERATIONS])

    program = jax.jit(with_operations)
    return lambda *arrays: program(*arrays)[0]
