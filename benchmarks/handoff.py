"""How long does the caller wait for a reshard of KV pages, and how long does it take?

Compares plain `jax.device_put`, the planned `meshes.reshard.reshard`, and, where both sides are cut by heads,
`meshes.transfer.move.move_heads`, which is what the hand-off between two pools uses (its pieces need no joining).

    python benchmarks/handoff.py [--sizes 1 24 134] [--repeats 5] [--no-write]

Repeats of all methods are interleaved in one process, each on a source that was just computed (an array that was read
once keeps its host copy, which would flatter `device_put`). Prints medians and ratios; writes the raw times and the
machine they came from to benchmarks/results/, with a chart if matplotlib is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from meshes.devices import assign_devices, ensure_cpu_devices
from meshes.heads import head_layout
from meshes.plan import plan, sharding_cut
from meshes.reshard import reshard
from meshes.spec import parse_mesh_specs
from meshes.transfer.move import move_heads

RESULTS = pathlib.Path(__file__).parent / "results"
HEADS, PAGES = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")
CASES = {  # name: (source mesh, its cut, destination mesh, its cut)
    "8->1": ("8x1", HEADS, "1x1", HEADS),
    "8->2": ("8x1", HEADS, "2x1", HEADS),
    "2->8": ("2x1", HEADS, "8x1", HEADS),
    "8->8 heads to pages": ("8x1", HEADS, "8x1", PAGES),
}
KV_HEADS, SLOTS, LANES = 8, 16, 128
SHAPES = {1: (2, 8), 24: (5, 72), 134: (16, 128)}  # MB (10^6 bytes, float32): (layers, pages)


@dataclasses.dataclass
class Method:
    """One way to do it. `prepare` makes a fresh source, `run` starts the move and returns what to wait for."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    blocked_ms: list[float] = dataclasses.field(default_factory=list)
    total_ms: list[float] = dataclasses.field(default_factory=list)

    def once(self, record: bool) -> None:
        """Run once; the caller is blocked until `run` returns, the move is done when its result is ready."""
        source = jax.block_until_ready(self.prepare())
        time.sleep(0.01)  # let the threads that computed the source go to sleep
        start = time.perf_counter()
        result = self.run(source)
        returned = time.perf_counter()
        jax.block_until_ready(result)
        done = time.perf_counter()
        if record:
            self.blocked_ms.append((returned - start) * 1e3)
            self.total_ms.append((done - start) * 1e3)

    def medians(self) -> tuple[float, float]:
        return statistics.median(self.blocked_ms), statistics.median(self.total_ms)


@jax.jit
def fresh(array: jax.Array) -> jax.Array:
    """A copy that no host has read."""
    return array + 0


def methods(case: str, size: int) -> tuple[dict[str, Method], int, int]:
    """The ways to do one case, the bytes it moves and the pieces of its plan."""
    src_spec, src_cut, dst_spec, dst_cut = CASES[case]
    (src_mesh,), (dst_mesh,) = assign_devices(parse_mesh_specs(src_spec), parse_mesh_specs(dst_spec), jax.devices())
    layers, pages = SHAPES[size]
    shape = (layers, pages, KV_HEADS, SLOTS, LANES)
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    src, dst = NamedSharding(src_mesh, src_cut), NamedSharding(dst_mesh, dst_cut)
    array = jax.block_until_ready(jax.device_put(values, src))
    planned = functools.partial(reshard, dst=dst, crossover_bytes=0)
    np.testing.assert_array_equal(planned(fresh(array)), values)
    found = {
        "device_put": Method(lambda: fresh(array), lambda a: jax.device_put(a, dst)),
        "planned": Method(lambda: fresh(array), planned),
    }
    if src_cut == dst_cut == HEADS:
        found["move_heads"] = by_heads(values, src_mesh, dst_mesh)
    pieces = len(plan(sharding_cut(src, shape), sharding_cut(dst, shape)).pieces)
    return found, values.nbytes, pieces


def by_heads(values: np.ndarray, src_mesh: Mesh, dst_mesh: Mesh) -> Method:
    """The same KV, staged head by head as the prefill pool gathers it."""
    src, dst = (head_layout(KV_HEADS, KV_HEADS, m.devices.size) for m in (src_mesh, dst_mesh))
    by_head = np.moveaxis(values, 2, 0)
    sharding = NamedSharding(src_mesh, PartitionSpec("model"))
    staging = tuple(
        jax.device_put(by_head[[src.device_kv(d)[j] for d in range(src.tp)]], sharding)
        for j in range(src.kv_per_device)
    )
    return Method(lambda: tuple(map(fresh, staging)), lambda s: move_heads(s, src, dst, dst_mesh))


def measure(case: str, size: int, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    found, nbytes, pieces = methods(case, size)
    order = list(found.values())
    for repeat in range(repeats + 1):  # the first warms up
        for method in order[repeat % len(order) :] + order[: repeat % len(order)]:
            method.once(record=repeat > 0)
    blocked, total = found["device_put"].medians()
    row: dict[str, Any] = {"case": case, "mb": nbytes / 1e6, "pieces": pieces, "kib_per_piece": nbytes / pieces / 1024}
    for name, method in found.items():
        mine = method.medians()
        row[name] = {
            "blocked_ms": [round(t, 3) for t in method.blocked_ms],
            "total_ms": [round(t, 3) for t in method.total_ms],
            "blocked_ratio": round(blocked / mine[0], 2),
            "total_ratio": round(total / mine[1], 2),
        }
    return row


def machine() -> dict[str, Any]:
    """What the times were measured on."""
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    name = f"{os.cpu_count()}-core {model[1].strip() if model else platform.processor() or platform.machine()}"
    return {
        "name": name + (" VM" if "hypervisor" in text else ""),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
    }


def cpu_seconds() -> tuple[float, float]:
    """CPU time since some moment of (the whole machine, this process); the first is 0 where /proc/stat is not."""
    own = time.process_time()
    stat = pathlib.Path("/proc/stat")
    if not stat.exists():
        return 0.0, own
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text(encoding="utf-8").split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), own


def show(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """The table of medians."""
    table = Table(title=f"{about['name']}, jax {about['jax']}: median ms, and how many times shorter than device_put")
    table.caption = f"other processes used {about['cores_used_by_other_processes']} cores meanwhile"
    for column in ("MB", "case", "KiB a piece", "method", "caller blocked", "", "total", ""):
        table.add_column(column, justify="left" if column in ("case", "method") else "right")
    for row in rows:
        for name in ("device_put", "planned", "move_heads"):
            if name not in row:
                continue
            got, first = row[name], name == "device_put"
            table.add_row(
                f"{row['mb']:.0f}" if first else "",
                row["case"] if first else "",
                f"{row['kib_per_piece']:.0f}" if first else "",
                name,
                f"{statistics.median(got['blocked_ms']):.2f}",
                "" if first else f"{got['blocked_ratio']:.1f}x",
                f"{statistics.median(got['total_ms']):.2f}",
                "" if first else f"{got['total_ratio']:.2f}x",
            )
        table.add_section()
    Console(width=max(100, Console().width)).print(table)


def draw(rows: list[dict[str, Any]], about: dict[str, Any], path: pathlib.Path) -> bool:
    """Bars of blocked and total time; False where matplotlib is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    sizes = sorted({row["mb"] for row in rows})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(5 * len(sizes), 4.2), squeeze=False)
    styles = {"device_put": "#b0b0b0", "planned": "#2a6fbb", "move_heads": "#e07b39"}
    for axis, size in zip(axes[0], sizes, strict=True):
        mine = [row for row in rows if row["mb"] == size]
        for offset, (name, colour) in zip((-0.27, 0.0, 0.27), styles.items(), strict=True):
            at = [i + offset for i, row in enumerate(mine) if name in row]
            got = [row[name] for row in mine if name in row]
            axis.bar(at, [statistics.median(g["total_ms"]) for g in got], 0.25, color=colour, alpha=0.4)
            blocked = [statistics.median(g["blocked_ms"]) for g in got]
            axis.bar(at, blocked, 0.25, color=colour, label=name)
        axis.set_xticks(range(len(mine)), [row["case"].replace(" heads", "\nheads") for row in mine])
        axis.set_title(f"{size:.0f} MB")
        axis.set_ylabel("ms (solid: caller blocked, pale: total)")
    axes[0][0].legend()
    figure.suptitle(f"Reshard of KV pages, {about['name']}, jax {about['jax']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES), metavar="MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    ensure_cpu_devices(16)
    about = machine()
    began, (machine_before, own_before) = time.perf_counter(), cpu_seconds()
    rows = [measure(case, size, options.repeats) for size in options.sizes for case in CASES]
    machine_after, own_after = cpu_seconds()
    others = max(0.0, machine_after - machine_before - (own_after - own_before)) / (time.perf_counter() - began)
    about["cores_used_by_other_processes"] = round(others, 2)
    show(rows, about)
    if options.no_write:
        return
    RESULTS.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-")
    path = RESULTS / f"handoff-{slug}-jax-{about['jax']}.json"
    command = " ".join(["python benchmarks/handoff.py", *sys.argv[1:]])
    path.write_text(json.dumps({"command": command, "machine": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    written = [path.name] + ([path.with_suffix(".png").name] if draw(rows, about, path.with_suffix(".png")) else [])
    print(f"written to {RESULTS}: {', '.join(written)}")


if __name__ == "__main__":
    main()
