"""The virtual devices that a process makes on CPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(("config", "least"), [("role='prefill', mesh='1x1'", 2), ("role='decode', mesh='1x3'", 4)])
def test_a_worker_that_hands_over_has_threads_beside_those_that_compute(config: str, least: int) -> None:
    code = (
        "import jax\njax.config.update('jax_platforms', 'cpu')\n"
        "from jaxpd.config import EngineConfig\nfrom jaxpd.startup import prepare_devices\n"
        f"prepare_devices(EngineConfig({config}))\nprint(jax.device_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least
