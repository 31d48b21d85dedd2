"""benchmarks/gpu_suite.py runs to its end on CPU, one part in a process of its own, and writes what it promises."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy  # compiles the whole suite

ROOT = pathlib.Path(__file__).parent.parent.parent
SUITE = ROOT / "benchmarks" / "gpu_suite.py"


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SUITE), *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=280)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def test_every_part_runs_to_its_end(tmp_path: pathlib.Path) -> None:
    run("--smoke", "--out", tmp_path)
    result = json.loads((tmp_path / "gpu_suite.json").read_text(encoding="utf-8"))
    assert {part["status"] for part in result["parts"].values()} == {"done"}
    assert all(part["rows"] for part in result["parts"].values())
    assert result["summary"]["checks"] >= 6
    assert not result["summary"]["checks_failed"] and not result["summary"]["errors"]
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    assert {"decode", "prefill", "gather", "scatter", "prompt"} <= {row.get("op") for row in rows}
    assert all(row["time"]["min_s"] <= row["time"]["median_s"] <= row["time"]["max_s"] for row in rows if "time" in row)


def test_parts_without_time_are_left_out_and_the_result_says_so(tmp_path: pathlib.Path) -> None:
    run("--smoke", "--minutes", 0.1, "--parts", "chip", "pages", "--out", tmp_path, code=1)
    result = json.loads((tmp_path / "gpu_suite.json").read_text(encoding="utf-8"))
    assert {part["status"] for part in result["parts"].values()} == {"not run: the time of the suite was over"}
