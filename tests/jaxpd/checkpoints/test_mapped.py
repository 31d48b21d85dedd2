"""Pages of mapped files are given back, and the views on them go on reading the file."""

from __future__ import annotations

import mmap
import pathlib
import re
import sys

import numpy as np
import pytest

from jaxpd.checkpoints.mapped import give_back_pages


def resident_kb(path: pathlib.Path) -> int:
    """Kilobytes of `path` that are mapped into this process and in memory."""
    total, ours = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_pages_go_and_views_stay(tmp_path: pathlib.Path) -> None:
    values = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32)
    path = tmp_path / "weights.bin"
    path.write_bytes(values.tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint8)[:].view(np.float32).reshape(1000, 1000)
    assert view.sum() == values.sum() and resident_kb(path) > 3000
    give_back_pages([view[10:20], view, values])
    assert resident_kb(path) == 0
    np.testing.assert_array_equal(view, values)
