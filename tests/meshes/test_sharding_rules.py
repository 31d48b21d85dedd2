"""Sharding rules, and a replica's view of an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshes.devices import assign_devices
from meshes.sharding import DATA, MODEL, ShardingRules, replica_mesh, replica_view, shards_of, with_replica
from meshes.spec import MeshSpec


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return assign_devices((MeshSpec(2, 3),), (), jax.devices())[0][0]


@pytest.fixture
def pages(mesh: jax.sharding.Mesh) -> jax.Array:
    """[R=3, 4, K=2, 5] cut along both axes of the mesh."""
    values = np.arange(3 * 4 * 2 * 5, dtype=np.float32).reshape(3, 4, 2, 5)
    return jax.device_put(values, ShardingRules().sharding(mesh, ("replica", None, "kv_slots", None)))


def test_logical_axes_become_mesh_axes() -> None:
    rules = ShardingRules()
    assert rules.spec(("embed", "heads")) == PartitionSpec(None, MODEL)
    assert rules.spec(("replica", None, "kv_slots")) == PartitionSpec(DATA, None, MODEL)
    assert ShardingRules(vocab=None).spec(("vocab", "embed")) == PartitionSpec(None, None)


def test_two_axes_on_one_mesh_axis_show_both() -> None:
    with pytest.raises(ValueError, match="heads.*ffn"):
        ShardingRules().spec(("heads", "ffn"))


def test_a_view_is_the_replicas_part_and_moves_nothing(mesh: jax.sharding.Mesh, pages: jax.Array) -> None:
    shards = shards_of(pages)
    pointers = {device: shard.unsafe_buffer_pointer() for device, shard in shards.items()}
    for replica in range(3):
        view = replica_view(pages, shards, mesh, replica)
        np.testing.assert_array_equal(view, np.asarray(pages)[replica : replica + 1])
        assert list(replica_mesh(mesh, replica).devices.flat) == list(mesh.devices[replica])
        for shard in view.addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == pointers[shard.device]


def test_one_replica_is_updated_in_place_without_the_others(mesh: jax.sharding.Mesh, pages: jax.Array) -> None:
    before = np.array(pages)
    pages = pages + 0  # what device_put made of host memory may share it, and then donation copies
    shards = shards_of(pages)
    pointers = [s.unsafe_buffer_pointer() for s in shards.values()]
    add = jax.jit(lambda a: a + jnp.float32(100), donate_argnums=0)
    updated = with_replica(pages, shards, add(replica_view(pages, shards, mesh, 1)))
    before[1] += 100
    np.testing.assert_array_equal(updated, before)
    assert isinstance(updated.sharding, NamedSharding) and updated.sharding == pages.sharding
    assert [s.unsafe_buffer_pointer() for s in shards_of(updated).values()] == pointers
