"""benchmarks/handoff_remote.py runs to its end and writes what it measured; the arithmetic of what is exposed."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.handoff_exposed import exposed_row
from benchmarks.handoff_remote_report import exposed_table
from jaxpd.request import Timings

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.heavy
def test_a_small_run(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.handoff_remote", "--sizes", "1", "--meshes", "2x1:4x1", "--total", "3"]
    done = subprocess.run(
        [*command, "--prompts", "--repeats", "1", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert row["meshes"] == "2x1->4x1" and row["pieces"] == 3
    assert set(row["gb_s"]) == {"remote", "transfer", "tcp"} and min(row["gb_s"].values()) > 0
    assert len(row["shares_of_transfer"]) == 1
    assert "| 2x1->4x1 | 1.0 | 3 |" in output.with_suffix(".md").read_text(encoding="utf-8")


def timings(exposed_s: float | None, ttst_s: float = 2.0) -> Timings:
    return Timings(ttft_s=1.5, ttst_s=ttst_s, transfer_s=0.5, transfer_exposed_s=exposed_s)


def test_the_exposed_share_is_of_each_request_and_never_below_zero() -> None:
    row = exposed_row(512, [timings(0.2), timings(-0.01), timings(0.1, ttst_s=1.0)])
    assert row["exposed_shares"] == [0.1, 0.0, 0.1] and row["exposed_share"] == 0.1
    assert row["exposed_ms"] == 100 and row["ttst_ms"] == 2000 and row["transfer_ms"] == 500
    assert exposed_table("a/model", [row])[-1] == "| 512 | 1500 | 2000 | 500 | 100.0 | 10.0 % (0.0 to 10.0 %) |"


def test_a_request_that_was_not_handed_over_is_no_figure() -> None:
    with pytest.raises(AssertionError, match="not handed over"):
        exposed_row(512, [timings(None)])


@pytest.mark.heavy
def test_prompts_through_workers(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.handoff_remote", "--sizes", "--prompts", "64", "160"]
    done = subprocess.run(
        [*command, "--model", "tests/data/tiny/smollm2", "--prompt-repeats", "2", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text(encoding="utf-8"))["exposed"]
    assert [(row["prompt"], row["requests"]) for row in rows] == [(64, 2), (160, 2)]
    for row in rows:
        assert 0 < row["ttft_ms"] < row["ttst_ms"] and 0 <= row["exposed_share"] < 1
    assert "| 160 |" in output.with_suffix(".md").read_text(encoding="utf-8")
