"""`jaxpd env`: complete, and never in the way of a bug report."""

from __future__ import annotations

import json
import sys

import jax
import pytest
from typer.testing import CliRunner

from jaxpd.cli import env, main
from jaxpd.version import __version__


def test_json_has_versions_and_devices() -> None:
    result = CliRunner().invoke(main.app, ["env", "--json"])
    facts = json.loads(result.stdout)
    assert result.exit_code == 0
    assert facts["jaxpd"] == __version__
    assert facts["packages"]["jax"] == jax.__version__
    assert {"jax", "jaxlib", "flax", "grpcio"} <= facts["packages"].keys()
    assert facts["backend"] == jax.default_backend()
    assert len(facts["devices"]) == len(jax.devices())
    assert facts["cpu_cores"] >= 1 and facts["memory_bytes"] > 2**20


def test_the_table_has_the_same_facts() -> None:
    result = CliRunner().invoke(main.app, ["env"])
    assert result.exit_code == 0
    assert "bug report" in result.stderr
    for fact in (__version__, jax.__version__, sys.executable, "libtpu", "not installed", "device 0"):
        assert fact in result.stdout


def test_a_backend_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("no driver")

    monkeypatch.setattr(jax, "default_backend", broken)
    facts = env.collect()
    assert facts["backend"] is None and facts["backend_error"] == "RuntimeError: no driver"
    assert "failed: RuntimeError: no driver" in CliRunner().invoke(main.app, ["env"]).stdout
