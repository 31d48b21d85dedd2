"""The data plane of the hand-off: true KV heads from one replica's devices to another's.

    staging[j]: [tp_src, L, N, S, W]        moved[j]: [tp_dst, L, N, S, W]
    slot j of every source device    --->   slot j of every destination device

The unit is one KV head of N pages over all layers, the shard [1, L, N, S, W] that lies in one piece on one device.
So a move is copies of whole device buffers and nothing else: no program, no compilation, nothing read by the host,
and the caller gets arrays that are still on their way. L layers, N pages, S slots in a page, W lanes.

Within a process `move_heads` is all of it. Between processes it happens in two halves, and the heads cross by wire:

    true_heads (source)  ->  heads [1, L, N, S, W] on any devices  ->  pulled onto receivers(...)  ->  place_heads
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshes.heads import HeadLayout
from meshes.plan import Plan, head_cut, plan
from meshes.sharding import MODEL


@functools.cache
def head_pieces(src: HeadLayout, dst: HeadLayout) -> Plan:
    """Who sends which true KV head to whom: each head crosses once, then goes to its other slots in the destination.

    The boxes of pieces have one axis, the heads (true coordinates) or the slots of a device (local ones).
    """
    return plan(head_cut(src), head_cut(dst))


def crossing_bytes(staging: tuple[jax.Array, ...], src: HeadLayout, dst: HeadLayout) -> int:
    """Bytes that `move_heads` sends from one replica to the other: every true head once, padding of pages included."""
    return len(head_pieces(src, dst).pieces) * (staging[0].nbytes // src.tp)


def move_heads(
    staging: tuple[jax.Array, ...], src: HeadLayout, dst: HeadLayout, dst_mesh: Mesh
) -> tuple[jax.Array, ...]:
    """Move the KV of some pages from a source replica to a destination replica, asynchronously.

    `staging` are `src.kv_per_device` arrays [tp_src, L, N, S, W], cut along `model` on axis 0 over the source replica's
    sub-mesh (1 x tp_src); the result are `dst.kv_per_device` arrays [tp_dst, L, N, S, W], cut likewise over `dst_mesh`
    (1 x tp_dst). Any dtype. Errors of the copies surface when the result is waited for. Where a device has one head in
    two slots the two results share a buffer, so do not donate them. Raises ValueError where arrays, layouts and mesh
    do not belong together.
    """
    _check(staging, src, dst, dst_mesh)
    steps = head_pieces(src, dst)
    shards = [{s.device: s.data for s in array.addressable_shards} for array in staging]
    senders = list(staging[0].sharding.mesh.devices.flat)  # type: ignore[attr-defined]
    targets = list(dst_mesh.devices.flat)
    crossing = [shards[piece.src_box[0][0]][senders[piece.src]] for piece in steps.pieces]
    landed = jax.device_put(crossing, [targets[piece.dst] for piece in steps.pieces])
    by_head = {piece.box[0][0]: array for piece, array in zip(steps.pieces, landed, strict=True)}
    return place_heads([by_head[head] for head in range(src.num_kv_heads)], src, dst, dst_mesh)


def true_heads(staging: tuple[jax.Array, ...], src: HeadLayout) -> list[jax.Array]:
    """The true KV heads 0, 1, ... of a staged piece, each [1, L, N, S, W] on the device that owns it; no copies.

    `staging` as for `move_heads`. Raises ValueError where arrays and layout do not belong together.
    """
    return [head for _, head in sorted(own_heads(staging, src).items())]


def own_heads(staging: tuple[jax.Array, ...], src: HeadLayout) -> dict[int, jax.Array]:
    """Those of `true_heads` that are on this process's devices, by their numbers, in order."""
    _check_staging(staging, src)
    shards = [{s.device: s.data for s in array.addressable_shards} for array in staging]
    owners = ((head, *_owner(staging, src, head)) for head in range(src.num_kv_heads))
    return {head: shards[slot][device] for head, device, slot in owners if device in shards[slot]}


def heads_by_process(staging: tuple[jax.Array, ...], src: HeadLayout) -> dict[int, tuple[int, ...]]:
    """The true KV heads that each process of `jax.distributed` owns, by its number, in order; none of no process."""
    out: dict[int, tuple[int, ...]] = {}
    for head in range(src.num_kv_heads):
        process = _owner(staging, src, head)[0].process_index
        out[process] = (*out.get(process, ()), head)
    return out


def _owner(staging: tuple[jax.Array, ...], src: HeadLayout, head: int) -> tuple[jax.Device, int]:
    """The device and the slot there that a true KV head is read from."""
    device, slot = divmod(src.owner(head), src.kv_per_device)
    return staging[0].sharding.mesh.devices.flat[device], slot  # type: ignore[attr-defined]


def receivers(src: HeadLayout, dst: HeadLayout, dst_mesh: Mesh) -> list[jax.Device]:
    """The device of the destination replica on which each true KV head is to land."""
    targets = list(dst_mesh.devices.flat)
    by_head = {piece.box[0][0]: targets[piece.dst] for piece in head_pieces(src, dst).pieces}
    return [by_head[head] for head in range(src.num_kv_heads)]


def place_heads(heads: Sequence[jax.Array], src: HeadLayout, dst: HeadLayout, dst_mesh: Mesh) -> tuple[jax.Array, ...]:
    """Copies landed heads to their other slots, asynchronously, and puts all together as `move_heads` does.

    `heads` are the true KV heads in order, [1, L, N, S, W], on the devices that `receivers` names. The result shares
    their buffers.
    """
    landing, fan_outs, sharding = _slots(src, dst, dst_mesh)
    slots = {slot: heads[head] for slot, head in landing.items()}
    if fan_outs:
        copying = [slots[source] for source, _ in fan_outs]
        copied = jax.device_put(copying, [sharding.mesh.devices.flat[device] for _, (device, _) in fan_outs])
        slots |= {slot: array for (_, slot), array in zip(fan_outs, copied, strict=True)}  # no copy on the same device
    shape = (dst.tp, *heads[0].shape[1:])
    return tuple(
        jax.make_array_from_single_device_arrays(shape, sharding, [slots[device, slot] for device in range(dst.tp)])
        for slot in range(dst.kv_per_device)
    )


_Slot = tuple[int, int]  # device of the destination, slot on it


@functools.lru_cache(maxsize=64)
def _slots(
    src: HeadLayout, dst: HeadLayout, dst_mesh: Mesh
) -> tuple[dict[_Slot, int], list[tuple[_Slot, _Slot]], NamedSharding]:
    """The slot where each true head lands, the copies to other slots, (from, to), and the sharding of the result."""
    steps = head_pieces(src, dst)
    landing = {(p.dst, p.dst_box[0][0]): p.box[0][0] for p in steps.pieces}
    fan_outs = [((p.src, p.src_box[0][0]), (p.dst, p.dst_box[0][0])) for p in steps.fan_outs]
    return landing, fan_outs, NamedSharding(dst_mesh, PartitionSpec(MODEL))


def check_layouts(src: HeadLayout, dst: HeadLayout, dst_mesh: Mesh) -> None:
    """Raises ValueError where the KV heads of one cannot become those of the other on this mesh (1 x tp)."""
    if src.num_kv_heads != dst.num_kv_heads:
        raise ValueError(f"the source has {src.num_kv_heads} KV heads, the destination {dst.num_kv_heads}")
    if dst_mesh.devices.size != dst.tp:
        raise ValueError(
            f"the destination mesh has {dst_mesh.devices.size} devices for {dst.tp}-way tensor parallelism"
        )


def _check(staging: tuple[jax.Array, ...], src: HeadLayout, dst: HeadLayout, dst_mesh: Mesh) -> None:
    check_layouts(src, dst, dst_mesh)
    _check_staging(staging, src)


def _check_staging(staging: tuple[jax.Array, ...], src: HeadLayout) -> None:
    if len(staging) != src.kv_per_device:
        raise ValueError(f"{len(staging)} staging arrays for {src.kv_per_device} KV slots per source device")
    shape = staging[0].shape
    for array in staging:
        if array.shape != shape or shape[0] != src.tp:
            raise ValueError(f"a staging array has shape {array.shape}; expected {src.tp} devices first, all alike")
        if not isinstance(array.sharding, NamedSharding) or array.sharding.shard_shape(shape)[0] != 1:
            raise ValueError(f"a staging array must be cut along {MODEL!r} on axis 0, not as {array.sharding}")
