"""Meshes of devices that are not there: programs compile for them to the end, and nothing can run.

    mesh = compile_only_mesh("v5e", MeshSpec(8, 1))
    compiled = jax.jit(step).lower(*shapes_with_shardings_on(mesh)).compile()

Inside `shard_map` over such a mesh a kernel sees which chip it is for. Outside of it nothing says so: lower a bare
kernel under `compiling_for(chip)`.

TPUs need the package libtpu, GPUs JAX's CUDA plugin: the extra `aot`, in an environment of its own (`make aot`), for
both try to start where JAX is used otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import threading

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from meshes.chips import Chip, find_chip
from meshes.devices import assign_devices
from meshes.spec import MeshSpec

_ENVIRONMENT = {  # read by libtpu as it is loaded
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks a metadata server that only Google's machines have
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process at a time: a lock for the TPU, of which there is none
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def compile_only_mesh(chip: str, spec: MeshSpec) -> Mesh:
    """A mesh like that of a pool, [dp, tp] with the axes (`data`, `model`), of devices that only compile.

    Raises ValueError for a chip that is not known or has no topology as large, RuntimeError where the package that
    compiles for it is not installed.
    """
    described = find_chip(chip)
    devices = _tpu_devices(described, spec) if described.platform == "tpu" else _gpu_devices(described, spec)
    return assign_devices((spec,), (), devices[: spec.num_devices])[0][0]


def compiling_for(target: str | Mesh) -> contextlib.AbstractContextManager[object]:
    """While this is open, what is traced is for that chip (or the chip of a compile-only mesh).

    With a chip, one device is meant: `shard_map` over a larger mesh needs the mesh, or no such context at all.
    """
    mesh = compile_only_mesh(target, MeshSpec(1, 1)) if isinstance(target, str) else target
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _tpu_devices(chip: Chip, spec: MeshSpec) -> tuple[jax.Device, ...]:
    _need("libtpu", chip)
    for count, name in chip.topologies:
        if count >= spec.num_devices:
            return _topology("tpu", f"{chip.name}:{name}", "")
    raise ValueError(
        f"mesh {spec} needs {spec.num_devices} devices, need at most {chip.topologies[-1][0]} on {chip.name}"
    )


def _gpu_devices(chip: Chip, spec: MeshSpec) -> tuple[jax.Device, ...]:
    _need("jax_plugins.xla_cuda13", chip)
    if spec.num_devices != 1:
        raise ValueError(f"mesh {spec} needs {spec.num_devices} devices, need 1 on {chip.name}: more are not described")
    return _topology("cuda", "1x1x1", chip.gpu_target)


def _need(module: str, chip: Chip) -> None:
    parent = module.partition(".")[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(module) is None:
        raise RuntimeError(
            f"compiling for {chip.name} needs the Python package {module}, which is not installed: run `make aot`, or "
            "pip install 'jaxpd[aot]' into an environment of its own (Python >= 3.12)"
        )


_starting = threading.Lock()  # two threads must not load libtpu or the plugin at once


def _topology(platform: str, name: str, target: str) -> tuple[jax.Device, ...]:
    with _starting:
        return _load(platform, name, target)


@functools.cache
def _load(platform: str, name: str, target: str) -> tuple[jax.Device, ...]:
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")  # with its library here, JAX would look for the TPU or GPU itself
    if platform == "tpu":
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    _ptxas_on_path()
    return tuple(topologies.get_topology_desc(platform="cuda", topology=name, target_config=target).devices)


def _ptxas_on_path() -> None:
    """Puts the folder of the package nvidia-cuda-nvcc first on PATH: its `ptxas` fits the plugin."""
    nvidia = importlib.util.find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or ()) if nvidia else ():
        for ptxas in sorted(pathlib.Path(place).glob("*/bin/ptxas")):
            os.environ["PATH"] = f"{ptxas.parent}{os.pathsep}{os.environ.get('PATH', '')}"
            return
