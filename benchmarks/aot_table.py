"""What compiles for chips that are not there: kernels over a grid of shapes, and the whole `forward` of known models.

    make aot                                        compiles everything, checks it and writes the table
    python -m benchmarks.aot_table build/aot.json   writes the table from what the tests of tests/aot left behind

Writes JSON and Markdown to benchmarks/results/. Ends with 1 where something failed. Needs the environment of
`make aot`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from typing import Any

from benchmarks.machine import describe
from meshes.chips import CHIPS

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
KIB, MIB = 1 << 10, 1 << 20


def kernel_cell(row: dict[str, Any]) -> str:
    """One case in a few characters."""
    if row["status"] != "compiled":
        return {"absent": "XLA", "refused": "refused"}.get(row["status"], "**FAILED**")
    if row["vmem_bytes"] is not None:
        return f"{row['vmem_bytes'] / MIB:.1f}"
    if row["registers"] is not None:
        spilled = f", spills {row['spilled_bytes']}" if row["spilled_bytes"] else ""
        return f"{row['shared_memory_bytes'] / KIB:.0f} / {row['registers']}{spilled}"
    return "compiled"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows]]


def why(reason: str) -> str:
    """Of a refusal only the kernel's own reason, which the table's shape and chip stand beside; else the first line."""
    own = re.search(r"pallas_\w+: (.*?)(?:; not |; use '|$)", reason, re.DOTALL)
    return own[1] if own else reason.partition("\n")[0]


def kernel_lines(kernels: list[dict[str, Any]]) -> list[str]:
    """A table for each operation and phase: shapes down, chips across."""
    lines: list[str] = []
    for operation, phase in dict.fromkeys((row["operation"], row["phase"]) for row in kernels):
        mine = [row for row in kernels if (row["operation"], row["phase"]) == (operation, phase)]
        cells = {(row["shape"], row["chip"]): kernel_cell(row) for row in mine}
        chips = [chip for chip in CHIPS if any(row["chip"] == chip for row in mine)]
        lines += ["", f"### {operation}{f', {phase}' if phase else ''}", ""]
        shapes = dict.fromkeys(row["shape"] for row in mine)
        lines += table(["shape", *chips], [[s, *(cells.get((s, chip), "") for chip in chips)] for s in shapes])
        refused: dict[str, list[str]] = {}
        for row in mine:
            if row["status"] in ("refused", "failed"):
                refused.setdefault(why(row["reason"]), []).append(row["chip"])
        lines += [""] + [f"- refused on {', '.join(dict.fromkeys(on))}: {reason}" for reason, on in refused.items()]
    return lines


def forward_lines(forwards: list[dict[str, Any]]) -> list[str]:
    """One table: model, mesh and bucket down."""
    header = ["model", "chip", "mesh", "bucket", "layers", "kernels", "VMEM MiB", "pool MiB", "copies of the pool",
              "temporary MiB", "allowed MiB", "seconds"]  # fmt: skip
    rows = [
        [r["model"], r["chip"], r["mesh"], r["bucket"], str(r["layers"]), str(r["kernels"]),
         f"{r['vmem_bytes'] / MIB:.1f}", f"{r['pool_bytes'] / MIB:.0f}", str(r["pool_copies"]),
         f"{r['temporary_bytes'] / MIB:.2f}", f"{r['activation_bytes'] / MIB:.1f}", f"{r['seconds']:.0f}"]
        for r in forwards
    ]  # fmt: skip
    return table(header, rows)


def main() -> int:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compiled", type=pathlib.Path, help="what the tests left behind (--aot-json)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--note", default="", help="what else a reader must know of this run")
    args = parser.parse_args()
    found = json.loads(args.compiled.read_text(encoding="utf-8"))
    about = describe(PACKAGES)
    order = {chip: i for i, chip in enumerate(CHIPS)}
    kernels = sorted(found["kernels"], key=lambda row: order[row["chip"]])
    count = {status: sum(row["status"] == status for row in kernels) for status in
             ("compiled", "refused", "absent", "failed")}  # fmt: skip
    versions = ", ".join(f"{package} {version}" for package, version in about["packages"].items() if version)
    lines = [
        "# Compiled for hardware that is not there",
        "",
        f"`make aot`, {about['date']}, on a {about['name']} without an accelerator. {versions}.",
        "Nothing here has run on such hardware.",
        *(["", args.note] if args.note else []),
        "",
        f"Kernel calls: {', '.join(f'{number} {status}' for status, number in count.items())}. On TPUs the figure is "
        "the VMEM in MiB that the compiler gave the kernel, on GPUs the shared memory of a block in KiB / registers of "
        'a thread, and the bytes that a thread spills. "XLA": there is no kernel, the XLA path runs. D head size, K KV '
        "slots, G query heads a slot, S slots in a page.",
        *kernel_lines(kernels),
        "",
        "## The whole forward",
        "",
        "bfloat16, pages of 64; figures are of one device. Temporary memory is HBM beside arguments and results; what "
        "is allowed is `jaxpd/activations.py`.",
        "",
        *forward_lines(found["forwards"]),
        "",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"aot-jax-{about['packages']['jax']}"
    (args.out / f"{stem}.md").write_text("\n".join(lines), encoding="utf-8")
    (args.out / f"{stem}.json").write_text(
        json.dumps({"about": about, "note": args.note, **found}, indent=1) + "\n", encoding="utf-8"
    )
    print(f"{args.out / stem}.md: {', '.join(f'{number} {status}' for status, number in count.items())}")
    return 1 if count["failed"] or any(row["pool_copies"] for row in found["forwards"]) else 0


if __name__ == "__main__":
    sys.exit(main())
