"""Shared memory and registers of Mosaic GPU kernels, from what the compiler writes down about them.

XLA's text of a GPU program says nothing about either. Mosaic GPU, asked by an environment variable of its own, leaves
the module (with the shared memory of the launch) and what `ptxas -v` said in a folder; we read and empty it.
"""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
import threading
from collections.abc import Callable

import jax

_WHERE = "MOSAIC_GPU_DUMP_TO"
_one_at_a_time = threading.Lock()  # files in the folder do not say which thread's program they are of
_known: dict[tuple[str, ...], dict[str, int]] = {}  # by the kernels' hashes: a kernel met again is not compiled again


def compile_for_gpu(lower: Callable[[], jax.stages.Lowered]) -> tuple[str, dict[str, int]]:
    """(optimised HLO, resources) of a program: the most that a kernel in it takes, by the names of `Outcome`'s fields.

    `lower` runs in here, since lowering writes files too. The resources are empty where Mosaic GPU wrote nothing.
    """
    with _one_at_a_time, tempfile.TemporaryDirectory() as folder:
        before = os.environ.get(_WHERE)
        os.environ[_WHERE] = folder
        try:
            text = lower().compile().as_text() or ""
        finally:
            os.environ.pop(_WHERE)
            if before is not None:
                os.environ[_WHERE] = before
        kernels = tuple(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text))
        found = _read(pathlib.Path(folder))
        if found:
            _known[kernels] = found
        return text, _known.get(kernels, {})


def _read(folder: pathlib.Path) -> dict[str, int]:
    """The largest figures of all kernels whose files are in the folder."""
    found: dict[str, int] = {}
    for path in folder.glob("*.ptxas"):
        said = path.read_text(encoding="utf-8", errors="replace")
        modules = sorted(folder.glob(f"{path.stem}.*layout_inference.txt")) or sorted(folder.glob(f"{path.stem}.*"))
        module = modules[0].read_text(encoding="utf-8", errors="replace")
        launched = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", module)
        fixed = re.findall(r"(\d+) bytes smem", said)
        figures = {
            "registers": max(map(int, re.findall(r"Used (\d+) registers", said)), default=0),
            "spilled_bytes": max(map(int, re.findall(r"(\d+) bytes spill stores", said)), default=0),
            "shared_memory_bytes": max(map(int, launched), default=0) + max(map(int, fixed), default=0),
        }
        found = {key: max(value, found.get(key, 0)) for key, value in figures.items()}
    return found
