"""Sharding rules: logical axis names -> mesh axes, in one place.

Arrays are described by logical names (`("embed", "heads")`); a pool's `ShardingRules` turn them into a PartitionSpec.
Two logical axes of one array on the same mesh axis are an error that shows both.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA = "data"
MODEL = "model"


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which mesh axis each logical axis is cut along; None is replicated."""

    embed: str | None = None
    heads: str | None = MODEL  # fused query, key and value slots, device by device
    ffn: str | None = MODEL
    vocab: str | None = MODEL
    kv_slots: str | None = MODEL
    replica: str | None = DATA

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions carry the logical names `axes`."""
        physical = tuple(None if a is None else getattr(self, a) for a in axes)
        used = [p for p in physical if p is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {axes} map to {physical}: a mesh axis can cut only one dimension")
        return PartitionSpec(*physical)

    def sharding(self, mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
        """NamedSharding on `mesh`."""
        return NamedSharding(mesh, self.spec(axes))


def replica_mesh(mesh: Mesh, replica: int) -> Mesh:
    """The sub-mesh (1 x tp) of one data replica."""
    return Mesh(mesh.devices[replica : replica + 1], mesh.axis_names, axis_types=mesh.axis_types)


Shards = dict[jax.Device, jax.Array]


def shards_of(array: jax.Array) -> Shards:
    """The single-device arrays of a global array. Take them before one is donated: the whole is deleted with a part."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def replica_view(array: jax.Array, shards: Shards, mesh: Mesh, replica: int) -> jax.Array:
    """One replica's slice [1, ...] of an array cut along `data` on axis 0, as an array on that replica's sub-mesh.

    `shards` are `shards_of(array)`: where a mesh lies in several processes, each has its own. No data moves: the view
    shares the shards, so donating it consumes them.
    """
    sub = replica_mesh(mesh, replica)
    sharding = NamedSharding(sub, array.sharding.spec)  # type: ignore[attr-defined]
    parts = [shards[device] for device in sub.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays((1, *array.shape[1:]), sharding, parts)


def with_replica(array: jax.Array, shards: Shards, part: jax.Array) -> jax.Array:
    """`array` (of which `shards` were taken) with one replica's shards replaced by those of `part`; no data moves."""
    parts = list((shards | shards_of(part)).values())
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def is_shared(mesh: Mesh) -> bool:
    """Whether the mesh lies in several processes (`jax.distributed`)."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def is_here(mesh: Mesh) -> bool:
    """Whether any device of the mesh is this process's."""
    here = jax.process_index()
    return any(device.process_index == here for device in mesh.devices.flat)


def to_devices(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array under a sharding; where that is of several processes, each gives the same array and puts its part.

    `jax.device_put` would compare the arrays of all processes, which is a collective each time.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
