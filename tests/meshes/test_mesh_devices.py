"""Devices for meshes: disjoint, in order, and a clear error where they do not suffice."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from meshes.devices import (
    MAX_CPU_DEVICES,
    assign_devices,
    default_specs,
    ensure_cpu_devices,
    shared_mesh,
    total_devices,
)
from meshes.spec import MeshSpec, parse_mesh_specs


def test_meshes_are_disjoint_and_in_order() -> None:
    prefill, decode = assign_devices(parse_mesh_specs("3x1,2x2"), parse_mesh_specs("1x4,1x1"), jax.devices())
    assert [m.devices.shape for m in prefill] == [(1, 3), (2, 2)]  # [dp, tp]
    assert [m.devices.shape for m in decode] == [(4, 1), (1, 1)]
    used = [d for m in prefill + decode for d in m.devices.flat]
    assert used == jax.devices()[:12]
    for mesh in prefill + decode:
        assert mesh.axis_names == ("data", "model")
        assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_too_few_devices_says_how_many_are_needed_and_there() -> None:
    with pytest.raises(ValueError) as error:
        assign_devices(parse_mesh_specs("8x1"), parse_mesh_specs("1x8"), jax.devices()[:9])
    for part in ("--prefill-mesh 8x1", "--decode-mesh 1x8", "8 + 8 = 16", "9 cpu devices", "--mode decoupled"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="there are 0 "):
        assign_devices(parse_mesh_specs("1x1"), (), [])


@pytest.mark.parametrize(
    ("prefill", "decode", "available", "fits", "expected"),
    [
        ("4x1", "1x2", 8, True, ("4x1", "1x2")),
        ("4x1", None, 8, True, ("4x1", "1x4")),
        ("4x1", None, 8, False, ("4x1", "4x1")),
        ("2x1,2x1", None, 5, True, ("2x1,2x1", "1x1")),
        (None, "1x4", 6, True, ("1x2", "1x4")),
        (None, "1x4", 6, False, ("2x1", "1x4")),
        (None, None, 8, True, ("4x1", "1x4")),
        (None, None, 3, False, ("1x1", "2x1")),
    ],
)
def test_a_left_out_mesh_takes_what_remains(
    prefill: str | None, decode: str | None, available: int, fits: bool, expected: tuple[str, str]
) -> None:
    got = default_specs(
        parse_mesh_specs(prefill) if prefill else None,
        parse_mesh_specs(decode) if decode else None,
        platform="tpu",
        available=available,
        weights_fit_one_device=fits,
    )
    assert got == (parse_mesh_specs(expected[0]), parse_mesh_specs(expected[1]))


@pytest.mark.parametrize(
    ("prefill", "decode", "available", "missing"),
    [
        ("8x1", None, 8, "--decode-mesh"),
        ("9x1", None, 8, "--decode-mesh"),
        (None, "1x8", 8, "--prefill-mesh"),
        (None, None, 1, "--prefill-mesh"),
    ],
)
def test_nothing_left_names_the_other_mode(
    prefill: str | None, decode: str | None, available: int, missing: str
) -> None:
    with pytest.raises(ValueError, match="--mode decoupled") as error:
        default_specs(
            parse_mesh_specs(prefill) if prefill else None,
            parse_mesh_specs(decode) if decode else None,
            platform="gpu",
            available=available,
            weights_fit_one_device=True,
        )
    assert f"no device is left for {missing}" in str(error.value) and f" {available} gpu device" in str(error.value)


def test_on_cpu_a_left_out_mesh_is_one_device() -> None:
    one, eight = (MeshSpec(1, 1),), (MeshSpec(8, 1),)

    def on_cpu(prefill: tuple[MeshSpec, ...] | None, decode: tuple[MeshSpec, ...] | None) -> object:
        return default_specs(prefill, decode, platform="cpu", available=1, weights_fit_one_device=False)

    assert on_cpu(eight, None) == (eight, one)
    assert on_cpu(None, eight) == (one, eight)
    assert on_cpu(None, None) == (one, one)
    assert total_devices(eight, one) == 9


def test_a_running_backend_is_not_asked_for_what_it_has() -> None:
    ensure_cpu_devices(jax.device_count())


def test_a_running_backend_with_too_few_devices_names_the_cure() -> None:
    there = jax.device_count()
    with pytest.raises(RuntimeError) as error:
        ensure_cpu_devices(there + 1)
    message = str(error.value)
    assert f"need {there + 1} CPU devices" in message and f"already runs with {there}" in message
    assert f'jax.config.update("jax_num_cpu_devices", {there + 1})' in message


@pytest.mark.parametrize(
    ("before", "asked", "expected"), [("", 5, 5), ('"jax_num_cpu_devices", 7', 5, 7), ("", 10**6, MAX_CPU_DEVICES)]
)
def test_devices_are_made_before_the_backend_starts(before: str, asked: int, expected: int) -> None:
    code = (
        'import jax; jax.config.update("jax_platforms", "cpu")\n'
        + (f"jax.config.update({before})\n" if before else "")
        + f"from meshes.devices import ensure_cpu_devices\nensure_cpu_devices({asked})\nprint(jax.device_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(expected), done.stderr


def test_other_platforms_are_left_alone() -> None:
    code = (
        'import jax; jax.config.update("jax_platforms", "tpu,cpu")\n'
        "from meshes.devices import ensure_cpu_devices\nensure_cpu_devices(5)\nprint(jax.config.jax_num_cpu_devices)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "-1", done.stderr


def test_a_shared_mesh_takes_what_there_is() -> None:
    devices = jax.devices()[:4]
    assert dict(shared_mesh(None, devices, weights_fit_one_device=True).shape) == {"data": 1, "model": 1}
    mesh = shared_mesh(MeshSpec(2, 2), devices, weights_fit_one_device=True)
    assert [d.id for d in mesh.devices.flat] == [d.id for d in devices]
    with pytest.raises(ValueError, match="--mesh 8x1 needs 8 devices and there are 4 cpu devices"):
        shared_mesh(MeshSpec(8, 1), devices, weights_fit_one_device=True)
