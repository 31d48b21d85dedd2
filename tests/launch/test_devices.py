"""Devices are handed out once, come back, and are named as the runtimes want it."""

from __future__ import annotations

import pytest

from serving.launch import devices


def test_each_process_gets_its_own_and_gives_them_back() -> None:
    inventory = devices.Inventory({"GPU": ("0", "1", "2", "3")})
    assert inventory.take("a", {"GPU": 2, "CPU": 1}) == {"GPU": ["0", "1"]}
    assert inventory.take("b", {"GPU": 2}) == {"GPU": ["2", "3"]}
    assert inventory.take("c", {"GPU": 1}) is None
    inventory.give_back("a")
    inventory.give_back("a")
    assert inventory.take("c", {"GPU": 1}) == {"GPU": ["0"]}
    assert inventory.take("d", {"GPU": 2}) is None
    assert inventory.take("e", {"CPU": 64}) == {}


def test_variables_by_accelerator() -> None:
    assert devices.environment_for({}, "cpu") == {"JAX_PLATFORMS": "cpu"}
    assert devices.environment_for({"GPU": ["2", "3"]}, "gpu") == {"CUDA_VISIBLE_DEVICES": "2,3"}
    two = devices.environment_for({"TPU": ["0", "1"]}, "tpu")
    assert two["TPU_VISIBLE_CHIPS"] == "0,1" and two["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1"
    assert devices.environment_for({}, "gpu") == {}  # Ray has set them already


def test_what_was_given_to_this_process_is_all_it_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "")
    assert devices.devices_here() == {"GPU": ("4", "5")}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.devices_here() == {}
