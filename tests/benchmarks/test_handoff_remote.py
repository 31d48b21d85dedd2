"""benchmarks/handoff_remote.py runs to its end and writes what it measured."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.heavy
def test_a_small_run(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.handoff_remote", "--sizes", "1", "--meshes", "2x1:4x1", "--total", "3"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--output", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert row["meshes"] == "2x1->4x1" and row["pieces"] == 3
    assert set(row["gb_s"]) == {"remote", "transfer", "tcp"} and min(row["gb_s"].values()) > 0
    assert len(row["shares_of_transfer"]) == 1
    assert "| 2x1->4x1 | 1.0 | 3 |" in output.with_suffix(".md").read_text(encoding="utf-8")
