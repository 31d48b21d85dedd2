"""The chips: their figures agree with jax's own where it has any, and asking for one that cannot be says why."""

from __future__ import annotations

import importlib.util

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from meshes.chips import CHIPS, find_chip
from meshes.spec import MeshSpec
from meshes.topology import compile_only_mesh

TPUS = [chip for chip in CHIPS.values() if chip.platform == "tpu"]


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_figures_of_tpus_are_those_that_jax_knows(chip) -> None:  # type: ignore[no-untyped-def]
    device = AbstractDevice(device_kind=chip.device_kind, num_cores=chip.cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        try:
            info = pltpu.get_tpu_info()
        except ValueError as error:
            pytest.skip(str(error))  # an older jax does not know the chip
    assert info.num_cores == chip.cores
    assert info.vmem_capacity_bytes == chip.vmem_bytes
    # jax counts per core; its bandwidth of v5p is 11% below Google's page
    assert info.bf16_ops_per_second * info.num_cores == pytest.approx(chip.peak_bf16, rel=0.01)
    assert info.hbm_capacity_bytes * info.num_cores == pytest.approx(chip.hbm_bytes, rel=0.02)
    assert info.mem_bw_bytes_per_second * info.num_cores == pytest.approx(chip.hbm_bandwidth, rel=0.12)


def test_every_chip_says_what_its_platform_needs() -> None:
    for name, chip in CHIPS.items():
        assert chip.name == name
        tpu = chip.platform == "tpu"
        assert bool(chip.vmem_bytes) == bool(chip.topologies) == tpu
        assert bool(chip.shared_memory_bytes) == bool(chip.registers) == bool(chip.gpu_target) == (not tpu)
        assert [count for count, _ in chip.topologies] == sorted(count for count, _ in chip.topologies)
        assert not chip.gpu_target or f'"{chip.device_kind}"' in chip.gpu_target


def test_an_unknown_chip_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match='chip "v9" is not known: use one of v5e, v5p, v6e, tpu7x, H100, H200'):
        find_chip("v9")
    with pytest.raises(ValueError, match="v9"):
        compile_only_mesh("v9", MeshSpec(1, 1))


@pytest.mark.parametrize(("chip", "package"), [("v5e", "libtpu"), ("H200", "jax_plugins.xla_cuda13")])
def test_a_missing_compiler_is_named_with_the_cure(chip: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=rf"{chip} needs the Python package {package}.*make aot.*jaxpd\[aot\]"):
        compile_only_mesh(chip, MeshSpec(1, 1))
