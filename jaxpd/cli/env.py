"""`jaxpd env`: what to paste into a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Annotated, Any

import typer

from jaxpd.cli.render import amount, rows
from jaxpd.version import __version__

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "orbax-checkpoint",
    "numpy",
    "ml_dtypes",
    "grpcio",
    "protobuf",
    "gguf",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "typer",
    "libtpu",
    "jax-cuda13-plugin",
)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show versions and devices: what to paste into a bug report."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = {"jaxpd": facts["jaxpd"], "python": facts["python"], "platform": facts["platform"]}
    table |= {"cpu": f"{facts['cpu_cores']} cores"}
    if facts["memory_bytes"] is not None:
        table["memory"] = amount(facts["memory_bytes"], "bytes")
    table |= {name: version or "not installed" for name, version in facts["packages"].items()}
    table["backend"] = facts["backend"] if facts["backend"] is not None else f"failed: {facts['backend_error']}"
    for device in facts["devices"]:
        limit = device["memory_bytes"]
        table[f"device {device['id']}"] = device["kind"] + (f", {amount(limit, 'bytes')}" if limit is not None else "")
    print("Paste this into a bug report:\n", file=sys.stderr)
    print("\n".join(rows(table)))


def collect() -> dict[str, Any]:
    """All facts. A backend that does not start is one of them, not an error: that is when they are needed."""
    facts: dict[str, Any] = {
        "jaxpd": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backend": None,
        "backend_error": None,
        "devices": [],
    }
    try:
        import jax

        facts["backend"] = jax.default_backend()
        facts["devices"] = [
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            }
            for device in jax.devices()
        ]
    except Exception as error:  # whatever a broken driver raises
        facts["backend_error"] = f"{type(error).__name__}: {error}"
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows, and not everywhere else
        return None
