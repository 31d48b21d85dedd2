"""What a benchmark ran on: the machine in words and numbers, and how busy others kept it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any


def describe(packages: Sequence[str]) -> dict[str, Any]:
    """Name, cores, memory (bytes), Python, the versions of `packages` (None: not installed) and today's date."""
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = f"{cores}-core {model[1].strip() if model else platform.processor() or platform.machine()}"
    return {
        "name": name + (" VM" if "hypervisor" in text else ""),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in packages},
        "date": datetime.date.today().isoformat(),
    }


def slug(about: dict[str, Any]) -> str:
    """The machine's name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-")


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it started; 0 where it does not say (no /proc)."""
    stat = pathlib.Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text(encoding="utf-8").split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
