"""From mesh specs to meshes on disjoint devices.

On CPU the devices are virtual and made on demand, but only before JAX's backend starts; on accelerators there is what
there is, and a mesh that was left out takes what remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from meshes.sharding import DATA, MODEL
from meshes.spec import MeshSpec, format_mesh_specs

MAX_CPU_DEVICES = 256  # virtual ones share the same cores; more is a typing slip, not a wish


def total_devices(*pools: Iterable[MeshSpec]) -> int:
    """Devices that all the given pools need together."""
    return sum(spec.num_devices for specs in pools for spec in specs)


def default_specs(
    prefill: tuple[MeshSpec, ...] | None,
    decode: tuple[MeshSpec, ...] | None,
    *,
    platform: str,
    available: int,
    weights_fit_one_device: bool,
) -> tuple[tuple[MeshSpec, ...], tuple[MeshSpec, ...]]:
    """(prefill, decode) specs with those left out (None) filled in.

    On CPU a missing one is `1x1`. On accelerators it takes the M of the `available` devices that the other leaves:
    `1xM` if the weights fit one device, else `Mx1`; with both missing, prefill takes half of them as one
    tensor-parallel group. Raises ValueError naming `--mode decoupled` where nothing is left.
    """
    if prefill is not None and decode is not None:
        return prefill, decode
    if platform == "cpu":
        one = (MeshSpec(1, 1),)
        return prefill or one, decode or one
    if prefill is None and decode is None and available >= 2:
        prefill = (MeshSpec(available // 2, 1),)
    taken = total_devices(prefill or (), decode or ())
    left = available - taken
    if left < 1 or not taken:
        missing = "--prefill-mesh" if prefill is None else "--decode-mesh"
        raise ValueError(
            f"no device is left for {missing}: there {_are(available, platform)}, the other mesh takes {taken or 1}. "
            "Make that one smaller, or share one mesh between prefill and decode with --mode decoupled"
        )
    rest = (MeshSpec(1, left) if weights_fit_one_device else MeshSpec(left, 1),)
    return prefill or rest, decode or rest


def ensure_cpu_devices(count: int) -> None:
    """Make sure that the CPU backend has at least `count` virtual devices; nothing on other platforms.

    Before JAX's backend starts this sets `jax_num_cpu_devices` (never lowering it, and to MAX_CPU_DEVICES at most:
    `assign_devices` then says what is missing). Raises RuntimeError if the backend already runs with fewer devices.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms and platforms.split(",")[0] != "cpu":
        return
    count = min(count, MAX_CPU_DEVICES)
    if jax.config.jax_num_cpu_devices >= count:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend runs, and its number of devices is fixed
        if jax.default_backend() != "cpu":
            return
        there = jax.device_count()
        if there < count:
            raise RuntimeError(
                f"the meshes need {count} CPU devices and JAX already runs with {there}: call "
                f'jax.config.update("jax_num_cpu_devices", {count}) before the first use of JAX in this process '
                "(in a notebook: restart the kernel), or make the meshes smaller"
            ) from None


def assign_devices(
    prefill: tuple[MeshSpec, ...], decode: tuple[MeshSpec, ...], devices: Sequence[jax.Device]
) -> tuple[list[Mesh], list[Mesh]]:
    """Meshes of the prefill and the decode pools on disjoint devices, taken in order.

    Each mesh has devices [dp, tp] with the axes (`data`, `model`), both Auto: one replica's devices are neighbours.
    Raises ValueError if there are too few devices.
    """
    needed = total_devices(prefill, decode)
    if needed > len(devices):
        platform = devices[0].platform if devices else "any"
        raise ValueError(
            f"--prefill-mesh {format_mesh_specs(prefill)} and --decode-mesh {format_mesh_specs(decode)} need "
            f"{total_devices(prefill)} + {total_devices(decode)} = {needed} devices and there "
            f"{_are(len(devices), platform)}. Make the meshes smaller, or share one with --mode decoupled"
        )
    left = iter(devices)
    return [_build(spec, left) for spec in prefill], [_build(spec, left) for spec in decode]


def shared_mesh(spec: MeshSpec | None, devices: Sequence[jax.Device], *, weights_fit_one_device: bool) -> Mesh:
    """The mesh of one pool that prefills and decodes.

    Left out (None) it is `1x1` on CPU, else all M devices: `1xM` if the weights fit one, else `Mx1`. Raises ValueError
    if there are too few devices.
    """
    if spec is None:
        count = 1 if devices[0].platform == "cpu" else len(devices)
        spec = MeshSpec(1, count) if weights_fit_one_device else MeshSpec(count, 1)
    if spec.num_devices > len(devices):
        raise ValueError(
            f"--mesh {spec} needs {spec.num_devices} devices and there {_are(len(devices), devices[0].platform)}. Make "
            "the mesh smaller"
        )
    return _build(spec, iter(devices))


def _build(spec: MeshSpec, left: Iterator[jax.Device]) -> Mesh:
    grid = np.empty((spec.dp, spec.tp), dtype=object)
    for index in np.ndindex(grid.shape):
        grid[index] = next(left)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def _are(count: int, platform: str) -> str:
    return f"{'is' if count == 1 else 'are'} {count} {platform} device{'s' * (count != 1)}"
