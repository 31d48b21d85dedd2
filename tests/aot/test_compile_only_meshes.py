"""Meshes of devices that are not there: as large as asked, and programs traced for them know their chip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.chips import CHIPS, find_chip
from meshes.spec import MeshSpec
from meshes.topology import compile_only_mesh, compiling_for
from pallas_kernels.dispatch import target

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("chip", CHIPS)
def test_one_device_is_what_it_says(chip: str) -> None:
    device = compile_only_mesh(chip, MeshSpec(1, 1)).devices[0, 0]
    assert (device.platform, device.device_kind) == (find_chip(chip).platform, find_chip(chip).device_kind)
    with compiling_for(chip):
        assert target() == (find_chip(chip).platform, find_chip(chip).device_kind)
    assert target()[0] == "cpu"


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.platform == "tpu"])
@pytest.mark.parametrize("spec", [MeshSpec(8, 1), MeshSpec(2, 4), MeshSpec(3, 1), MeshSpec(16, 2)], ids=str)
def test_a_program_inside_shard_map_knows_its_chip(chip: str, spec: MeshSpec) -> None:
    mesh = compile_only_mesh(chip, spec)
    assert mesh.devices.shape == (spec.dp, spec.tp)
    seen = []

    def local(x: jax.Array) -> jax.Array:
        def body(_: int, x: jax.Array) -> jax.Array:
            seen.append(target())
            return jax.lax.psum(x, "model")

        return jax.lax.fori_loop(0, 2, body, x)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    x = jax.ShapeDtypeStruct((spec.dp, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(mapped).lower(x).compile()
    assert set(seen) == {("tpu", find_chip(chip).device_kind)}
    assert compiled.memory_analysis() is not None


def test_what_there_is_no_topology_for_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh 512x1 needs 512 devices, need at most 256 on v5e"):
        compile_only_mesh("v5e", MeshSpec(512, 1))
    with pytest.raises(ValueError, match="mesh 2x1 needs 2 devices, need 1 on H200"):
        compile_only_mesh("H200", MeshSpec(2, 1))
