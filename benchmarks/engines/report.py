"""From raw answers to figures, ratios and tables.

`rounds` is what a run measured: [{metric: {engine: answer of its worker}}].
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

JAXPD, TENFOLD, TRANSFORMERS, LLAMA_F32, LLAMA_Q4 = NAMES = (
    "jaxpd",
    "jaxpd, 10x",
    "transformers",
    "llama.cpp f32",
    "llama.cpp Q4_1",
)
PROMPT = 512  # tokens of the long prompt
QUIET = 0.2  # cores: a measurement during which others used more is disturbed
METRICS = ("prompt", "decode", "decode512", "sixteen")
AIMS = {  # at least this many times the peer
    ("prompt", TRANSFORMERS): 1.0,
    ("decode", TRANSFORMERS): 1.5,
    ("decode512", TRANSFORMERS): 1.5,
    ("sixteen", TRANSFORMERS): 1.0,
    ("decode", LLAMA_F32): 0.8,
    ("decode512", LLAMA_F32): 0.8,
    ("sixteen", LLAMA_F32): 1.2,
}


def rate(metric: str, answer: dict[str, Any]) -> float:
    """Tokens per second."""
    count = {"prompt": PROMPT, "sixteen": answer.get("tokens")}.get(metric, answer.get("steps"))
    assert count is not None
    return float(count / answer["seconds"])


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {name: round(f(values), 4) for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def undisturbed(rounds: list[Any], metric: str, names: Sequence[str]) -> list[Any]:
    """The rounds in which others left these engines alone during `metric`; all rounds where there is no such round."""
    return [r for r in rounds if all(r[metric][name]["others"] <= QUIET for name in names)] or rounds


def summarise(rounds: list[Any], names: Sequence[str]) -> dict[str, Any]:
    """Figures, ratios to peers, and step times of the two pools, from the raw answers."""

    def figure(metric: str, name: str) -> dict[str, float]:
        return spread([rate(metric, r[metric][name]) for r in undisturbed(rounds, metric, [name])])

    def over(metric: str, peer: str) -> dict[str, float]:
        found = undisturbed(rounds, metric, [JAXPD, peer])
        return spread([rate(metric, r[metric][JAXPD]) / rate(metric, r[metric][peer]) for r in found])

    def step_ms(answer: dict[str, Any]) -> float:
        return 1e3 * float(answer.get("step_s") or answer["seconds"] / answer["steps"])

    steps = {}
    for metric in ("decode", "decode512", "sixteen"):
        found = undisturbed(rounds, metric, [JAXPD, TENFOLD])
        once, tenfold = ([step_ms(r[metric][name]) for r in found] for name in (JAXPD, TENFOLD))
        both = zip(tenfold, once, strict=True)
        steps[metric] = {"1x": spread(once), "10x": spread(tenfold), "ratio": spread([t / o for t, o in both])}
    peers = [name for name in names if name not in (JAXPD, TENFOLD)]
    measured = [r[metric][name]["others"] for r in rounds for metric in METRICS for name in names]
    return {
        "tokens_per_s": {metric: {name: figure(metric, name) for name in names} for metric in METRICS},
        "jaxpd_over_peer": {metric: {peer: over(metric, peer) for peer in peers} for metric in METRICS},
        "step_ms": steps,
        "cores_used_by_others": spread(measured),
        "disturbed": f"{sum(o > QUIET for o in measured)} of {len(measured)}",
    }


def same_text(rounds: list[Any], names: Sequence[str], decode: Callable[[list[int]], str]) -> dict[str, float]:
    """Share of the decoded text that equals jaxpd's, up to the first difference. Greedy and float32 should agree."""

    def text(answer: dict[str, Any]) -> str:
        return answer["text"] if "text" in answer else decode(answer["token_ids"])

    shares: dict[str, list[float]] = {name: [] for name in names if name != JAXPD}
    for answers in rounds:
        for metric in ("decode", "decode512"):
            mine = text(answers[metric][JAXPD])
            for name, found in shares.items():
                common = os.path.commonprefix([mine, text(answers[metric][name])])
                found.append(len(common) / max(1, len(mine)))
    return {name: round(statistics.mean(found), 3) for name, found in shares.items()}


def show(result: dict[str, Any]) -> None:
    """The tables."""
    console = Console(width=max(110, Console().width))

    def range_of(found: dict[str, float], digits: int) -> str:
        return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"

    table = Table(title=f"{result['machine']['name']}, {result['threads']} threads: tokens/s, median (range)")
    for column in ("engine", *METRICS, "peak MB", "same text"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, about in result["engines"].items():
        cells = [range_of(result["tokens_per_s"][metric][name], 1) for metric in METRICS]
        same = result["same_text_as_jaxpd"].get(name)
        table.add_row(name, *cells, f"{about['peak_bytes'] / 1e6:.0f}", "" if same is None else f"{same:.0%}")
    others = result["cores_used_by_others"]
    table.caption = (
        f"other processes used {others['median']:.2f} cores meanwhile; {result['disturbed']} measurements disturbed, "
        "which count only where there is no better one"
    )
    console.print(table)

    table = Table(title="jaxpd, times the peer")
    for column in ("metric", "peer", "ratio", "aim", ""):
        table.add_column(column, justify="left" if column in ("metric", "peer") else "right")
    for metric, peers in result["jaxpd_over_peer"].items():
        for peer, ratio in peers.items():
            aim = AIMS.get((metric, peer))
            verdict = "" if aim is None else "met" if ratio["median"] >= aim else "missed"
            table.add_row(metric, peer, range_of(ratio, 2), "" if aim is None else f">= {aim}", verdict)
    console.print(table)

    pages = {name: result["engines"][name]["pages"][1] for name in (JAXPD, TENFOLD)}
    table = Table(title=f"ms a decode step, with {pages[JAXPD]} and with {pages[TENFOLD]} pages in the decode pool")
    for column in ("metric", "1x", "10x", "10x / 1x"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, found in result["step_ms"].items():
        table.add_row(metric, range_of(found["1x"], 1), range_of(found["10x"], 1), range_of(found["ratio"], 2))
    console.print(table)

    bound = result["memory_bound_bytes"]
    table = Table(title=f"jaxpd's peak memory; the bound is {bound / 1e6:.0f} MB (2.0 x weights + page pools + 600 MB)")
    for column in ("start", "peak MB", "when ready", "ready after", ""):
        table.add_column(column, justify="left" if column == "start" else "right")
    for start, found in result["memory"].items():
        verdict = "met" if found["peak_bytes"] <= bound else "missed"
        ready = f"{found['peak_bytes_when_ready'] / 1e6:.0f}"
        table.add_row(start, f"{found['peak_bytes'] / 1e6:.0f}", ready, f"{found['ready_s']:.1f} s", verdict)
    console.print(table)
    for name, why in result["missing"].items():
        console.print(f"MISSING: {name}: {why}", style="bold red", markup=False)
