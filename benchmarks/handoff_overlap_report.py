"""The table and the chart of `benchmarks.handoff_overlap`, from rows of times round by round."""

from __future__ import annotations

import pathlib
import statistics
import sys
from typing import Any

ONE_PIECE, CHUNKS, SMALL_LAST = "in one piece at the end", "chunks", "chunks, small last"
ONE_PROGRAM = "one program"
BASE = {"chunks": ONE_PIECE, "layers": ONE_PROGRAM}  # what the others of a part are compared with
TITLES = {"chunks": "A prompt of many chunks, through the engine", "layers": "A prompt of one chunk"}
LEAST_ROUNDS = 3
LATER, EXPOSED = "#b9b9b9", "#2a6fbb"
Row = dict[str, Any]


def link_name(link: float) -> str:
    """MB/s in words."""
    return f"{link:g} MB/s" if link else "full speed"


def against(row: Row, base: Row) -> list[float]:
    """Milliseconds, round by round, that a row is ready later than its baseline was (negative: sooner)."""
    return [mine - other for mine, other in zip(row["ready_ms"], base["ready_ms"], strict=True)]


def spread(values: list[float], *, sign: bool = False) -> str:
    """Median and range."""
    form = "{:+.0f}" if sign else "{:.0f}"
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def groups_of(rows: list[Row]) -> list[tuple[str, float, Row, list[Row]]]:
    """(part, link, its baseline, all its rows) in the order of the rows."""
    keys = dict.fromkeys((row["part"], row["link_mb_s"]) for row in rows)
    out = []
    for part, link in keys:
        mine = [row for row in rows if (row["part"], row["link_mb_s"]) == (part, link)]
        mine.sort(key=lambda row: row["variant"] != BASE[part])
        out.append((part, link, mine[0], mine))
    return out


def verdict(row: Row, base: Row) -> str:
    """Whether it is ready sooner ("wins") or later ("loses") than the baseline in every round, of three at least."""
    differences = against(row, base)
    if len(differences) < LEAST_ROUNDS:
        return "too few rounds"
    return "wins" if max(differences) < 0 else "loses" if min(differences) > 0 else "no difference seen"


def small_last(row: Row, chunks: Row) -> str:
    """What the small last chunk adds to chunks, and whether the policy would have asked for it."""
    chosen = "the policy chooses it" if row["policy_chooses_it"] else "the policy does not choose it"
    return f"; against chunks {spread(against(row, chunks), sign=True)}: {verdict(row, chunks)}; {chosen}"


def table(rows: list[Row], about: dict[str, Any], command: str) -> str:
    """Markdown."""
    lines = [
        "# What is left of the hand-off after the first token", "",
        f"`{command}`", f"on a {about['name']}, jax {about['packages']['jax']}, {about['date']}; "
        f"other processes used {about['cores_used_by_others']:.1f} cores meanwhile.",
        "Milliseconds, median (range) over the rounds. Ready: first token + exposed; compared within each round, and",
        "`wins` or `loses` only where every round says so.",
    ]  # fmt: skip
    part = ""
    for of, link, base, mine in groups_of(rows):
        if of != part:
            part, second = of, "second_ms" in base
            lines += ["", f"## {TITLES[part]}: {base['mb'][0]:.1f} MB of KV", ""]
            head = ["link", "variant", "transfers", "first token", "exposed", "ready", "ready, against the first"]
            head += ["", *(["second token"] if second else [])]
            lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in mine:
            first = row is base
            compared = ["", ""] if first else [spread(against(row, base), sign=True), verdict(row, base)]
            if row["variant"] == SMALL_LAST:
                compared[1] += small_last(row, next(other for other in mine if other["variant"] == CHUNKS))
            whole = f"{link_name(link)}, whole transfer {statistics.median(base['longest_ms']):.0f}" if first else ""
            cells = [whole, row["variant"], f"{row['transfers'][0]}"]
            cells += [spread(row[key]) for key in ("first_ms", "exposed_ms", "ready_ms")] + compared
            cells += [spread(row["second_ms"])] if second else []
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def plot(rows: list[Row], about: dict[str, Any], path: pathlib.Path) -> None:
    """A bar a variant, from the baseline's first token on: grey what its own comes later, blue what is exposed.

    Nothing without matplotlib.
    """
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        print("no chart: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    panels = groups_of(rows)
    parts = list(dict.fromkeys(part for part, *_ in panels))
    columns = max(sum(of == part for of, *_ in panels) for part in parts)
    tallest = {part: max(len(mine) for of, _, _, mine in panels if of == part) for part in parts}
    figure, axes = pyplot.subplots(
        len(parts),
        columns,
        figsize=(4.6 * columns, 1.6 + sum(0.42 * n + 1.0 for n in tallest.values())),
        height_ratios=list(tallest.values()),
        squeeze=False,
    )
    for i, part in enumerate(parts):
        for j, (_, link, base, mine) in enumerate(panel for panel in panels if panel[0] == part):
            _panel(axes[i][j], base, mine, names=j == 0)
            axes[i][j].set_title(f"{link_name(link)} (whole transfer {statistics.median(base['longest_ms']):.0f} ms)")
    for i, part in enumerate(parts):
        axes[i][0].set_ylabel(TITLES[part].replace(", ", ",\n"), fontsize=9)
    figure.suptitle(f"When can decoding begin? {about['name']}")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (LATER, EXPOSED)]
    labels = ["first token later than the top bar's (left of 0: sooner)", "exposed transfer"]
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.03), ncols=2, frameon=False)
    note = "Numbers: exposed, and in brackets how much later than in the top bar decoding can begin. Lines: all rounds."
    figure.text(0.5, 0.012, note, ha="center", fontsize=9, color="#555555")
    figure.tight_layout(rect=(0, 0.075, 1, 1))
    figure.savefig(path, dpi=120)


def _panel(axis: Any, base: Row, mine: list[Row], *, names: bool) -> None:
    start = statistics.median(base["first_ms"])
    for y, row in enumerate(mine):
        later = statistics.median(m - b for m, b in zip(row["first_ms"], base["first_ms"], strict=True))
        exposed = statistics.median(row["exposed_ms"])
        axis.barh(y, later, 0.62, color=LATER)
        axis.barh(y, exposed, 0.62, left=later, color=EXPOSED)
        ready = [r - b for r, b in zip(row["ready_ms"], base["first_ms"], strict=True)]
        axis.hlines(y, min(ready), max(ready), color="#222222", linewidth=1.2)
        label = f"{exposed:.0f}" if row is base else f"{exposed:.0f} ({statistics.median(against(row, base)):+.0f})"
        end = max(later + exposed, max(ready), 0.0)
        axis.annotate(label, (end, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.axvline(0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(mine)), [row["variant"] for row in mine] if names else [""] * len(mine), fontsize=8)
    axis.invert_yaxis()
    axis.use_sticky_edges = False
    axis.margins(x=0.28, y=0.03)
    axis.set_xlabel(f"ms from the top bar's first token on (at {start:,.0f} ms)", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
