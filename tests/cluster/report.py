"""`python -m tests.cluster.report build/failures.json [build/soak.json]`: docs/failures.md from what runs measured."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import sys
from typing import Any

from tests.cluster.matrix import CELLS, FAULTS, LEFT, STAGES, Bound, Cell, Senseless, playable

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "failures.md"
HEAD = """# What happens when something fails

(Written by `make failures`; change tests/cluster/report.py, not this page.)

Two prefill workers (2x1), two decode workers (1x1) and a router, each a process of its own on one machine, serve the
tiny model of the tests. A request is held in a stage, with two others beside it, and something goes wrong. In every
cell:

- the client has its answer within the bound, counted from the fault;
- pages, slots and staging of the workers that are left are back to what they were before, within the same bound from
  the moment when the others have ended too;
- the tokens of the other requests are the oracle's, also where their worker was killed;
- the next request is served while the fault is still there.

An answer is all tokens that the request asked for, each of them the oracle's, unless the row says something else: where
a worker was lost the router has sent the request elsewhere, or gone on behind the tokens that the client had. The
bounds are 5 s, and 15 s where a process is stopped or a link is slow: a process that is stopped says nothing, and is
given up after 5 s of silence (`--heartbeat-timeout`).
"""


def machine() -> str:
    """What the figures come from."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    import jax

    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, jax {jax.__version__}"


def page(result: dict[str, Any], soak: dict[str, Any] | None = None) -> str:
    """The whole of it, as Markdown."""
    played = {(cell["fault"], cell["stage"]): cell for cell in result["cells"]}
    reasons: list[str] = []
    lines = [HEAD, "## Seconds from the fault to the answer", ""]
    lines += ["(Where the client has left: until nothing is in use. Where there was no room: from when there is.)", ""]
    lines += ["| | " + " | ".join(STAGES) + " |", "|---|" + "---|" * len(STAGES)]
    for fault, row in CELLS.items():
        cells = [_shown(cell, played.get((fault, stage)), reasons) for stage, cell in row.items()]
        lines.append(f"| **{fault}** | " + " | ".join(cells) + " |")
    good = [cell for cell in played.values() if cell["outcome"] == "passed"]
    lines += ["", f"{len(good)} of {len(playable())} cells passed, {_span(result['seconds'])} in all."]
    if good:
        lines += [
            f"Slowest: {_slowest(good, 'answer_s')} to an answer,",
            f"{_slowest(good, 'baseline_s')} to nothing in use,",
            f"{_slowest(good, 'next_s')} to the answer to the next request.",
        ]
    lines += ["", f"`make failures` on {result['machine']}.", ""]
    lines += ["Cells that make no sense:", "", *(f"{i}. {reason}." for i, reason in enumerate(reasons, 1)), ""]
    lines += ["## Stages", "", *(f"- **{stage}**: {text}." for stage, text in STAGES.items()), ""]
    lines += ["## Faults", ""]
    for fault, text in FAULTS.items():
        answers = {_answer(cell): None for cell in CELLS[fault].values() if isinstance(cell, Bound)}
        lines.append(f"- **{fault}**: {text}.")
        lines.append(f"  The client gets {'; or '.join(answers)}.")
    if soak is not None:
        lines += ["", *_soak(soak)]
    return "\n".join(lines) + "\n"


def _soak(soak: dict[str, Any]) -> list[str]:
    counts, answer_s = soak["counts"], soak["answer_s"]
    rows = {
        "requests, half of them greedy, half with random options": soak["requests"],
        "clients that left in the middle": counts["left"],
        "prefill workers killed": counts.get("killed prefill", 0),
        "decode workers killed": counts.get("killed decode", 0),
        "requests that ran at a kill": counts["running at a kill"],
        "times that a request went on elsewhere": soak["moved to another worker"],
        "answers whose every token was the oracle's": counts["greedy"] + counts["sampled"],
        "errors": sum(count for what, count in counts.items() if what.startswith("error")),
        "seconds to an answer, p50": f"{answer_s['p50']:.2f}",
        "seconds to an answer, p99": f"{answer_s['p99']:.2f}",
        "seconds to an answer, most": f"{answer_s['max']:.2f}",
    }
    return [
        "## Soak",
        "",
        "Two workers of each role, sixteen requests at once; one worker is killed every 200 requests and comes back.",
        "At the end nothing is in use.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in rows.items()),
        "",
        f"`make soak` on {soak['machine']}, {_span(soak['seconds'])}.",
    ]


def _answer(cell: Bound) -> str:
    return f"{cell.answer}, within {cell.seconds:g} s"


def _shown(cell: Cell, played: dict[str, Any] | None, reasons: list[str]) -> str:
    if isinstance(cell, Senseless):
        if cell.reason not in reasons:
            reasons.append(cell.reason)
        return f"({reasons.index(cell.reason) + 1})"
    if played is None:
        return "not run"
    shown = "baseline_s" if cell is LEFT else "answer_s"
    return f"{played[shown]:.1f}" if played["outcome"] == "passed" else "**failed**"


def _slowest(cells: list[dict[str, Any]], what: str) -> str:
    worst = max(cells, key=lambda cell: float(cell[what]))
    return f"{worst[what]:.1f} s ({worst['fault']}, {worst['stage']})"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def main(failures: str, soak: str = "") -> None:
    """Writes the page."""
    results = [json.loads(pathlib.Path(path).read_text(encoding="utf-8")) for path in (failures, soak) if path]
    PAGE.write_text(page(*results), encoding="utf-8")
    print(f"{PAGE} is written")


if __name__ == "__main__":
    main(*sys.argv[1:])
