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

JAXPD, TENFOLD, SIXTYFOUR, EARLIER, TRANSFORMERS, LLAMA_F32, LLAMA_64, LLAMA_Q4 = NAMES = (
    "jaxpd",
    "jaxpd, 10x",
    "jaxpd, 64 rows",
    "jaxpd, earlier",
    "transformers",
    "llama.cpp f32",
    "llama.cpp f32 64",
    "llama.cpp Q4_1",
)
OURS = (JAXPD, TENFOLD, SIXTYFOUR, EARLIER)
PROMPT = 512  # tokens of the long prompt
QUIET = 0.2  # cores: a measurement during which others used more is disturbed
METRICS = ("prompt", "decode", "decode512", "one", "sixteen", "sixtyfour")
AT_SIXTYFOUR = (SIXTYFOUR, TRANSFORMERS, LLAMA_F32, LLAMA_64)
STEPS = ("decode", "decode512", "sixteen")  # where the two sizes of pools are compared
AIMS = {  # at least this many times the peer
    ("prompt", TRANSFORMERS): 1.0,
    ("decode", TRANSFORMERS): 1.5,
    ("decode512", TRANSFORMERS): 1.5,
    ("sixteen", TRANSFORMERS): 1.0,
    ("decode", LLAMA_F32): 0.8,
    ("decode512", LLAMA_F32): 0.8,
    ("sixteen", LLAMA_F32): 1.2,
    ("sixtyfour", LLAMA_F32): 2.0,
    ("sixtyfour", LLAMA_64): 2.0,
}


def measured(metric: str, names: Sequence[str]) -> list[str]:
    """The engines of `names` that a metric is measured on."""
    if metric == "sixtyfour":
        return [name for name in names if name in AT_SIXTYFOUR]
    return [name for name in names if name not in (SIXTYFOUR, LLAMA_64) or (metric, name) == ("sixteen", SIXTYFOUR)]


def ours(metric: str) -> str:
    """The engine that stands for jaxpd."""
    return SIXTYFOUR if metric == "sixtyfour" else JAXPD


def rate(metric: str, answer: dict[str, Any]) -> float:
    """Tokens per second."""
    count = PROMPT if metric == "prompt" else answer["tokens"] if "tokens" in answer else answer["steps"]
    return float(count / answer["seconds"])


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {name: round(f(values), 4) for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def undisturbed(rounds: list[Any], metric: str, names: Sequence[str]) -> list[Any]:
    """The rounds in which others left these engines alone during `metric`; all rounds where there is no such round."""
    return [r for r in rounds if all(r[metric][name]["others"] <= QUIET for name in names)] or rounds


def summarise(rounds: list[Any], metrics: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Figures, ratios of jaxpd to the others, and step times of the two pools, from the raw answers."""

    def figure(metric: str, name: str) -> dict[str, float]:
        return spread([rate(metric, r[metric][name]) for r in undisturbed(rounds, metric, [name])])

    def over(metric: str, peer: str) -> dict[str, float]:
        mine = ours(metric)
        found = undisturbed(rounds, metric, [mine, peer])
        return spread([rate(metric, r[metric][mine]) / rate(metric, r[metric][peer]) for r in found])

    def step_ms(answer: dict[str, Any]) -> float:
        return 1e3 * float(answer.get("step_s") or answer["seconds"] / answer["steps"])

    steps = {}
    for metric in (m for m in STEPS if m in metrics and JAXPD in names and TENFOLD in names):
        found = undisturbed(rounds, metric, [JAXPD, TENFOLD])
        once, tenfold = ([step_ms(r[metric][name]) for r in found] for name in (JAXPD, TENFOLD))
        both = zip(tenfold, once, strict=True)
        steps[metric] = {"1x": spread(once), "10x": spread(tenfold), "ratio": spread([t / o for t, o in both])}
    here = {metric: measured(metric, names) for metric in metrics}
    peers = {m: [name for name in here[m] if name not in (TENFOLD, ours(m))] for m in metrics if ours(m) in here[m]}
    others = [r[metric][name]["others"] for r in rounds for metric in metrics for name in here[metric]]
    return {
        "tokens_per_s": {metric: {name: figure(metric, name) for name in here[metric]} for metric in metrics},
        "jaxpd_over_peer": {metric: {peer: over(metric, peer) for peer in peers[metric]} for metric in peers},
        "step_ms": steps,
        "cores_used_by_others": spread(others),
        "disturbed": f"{sum(o > QUIET for o in others)} of {len(others)}",
    }


def same_text(rounds: list[Any], names: Sequence[str], decode: Callable[[list[int]], str]) -> dict[str, float]:
    """Share of the decoded text that equals jaxpd's, up to the first difference. Greedy and float32 should agree."""

    def text(answer: dict[str, Any]) -> str:
        return answer["text"] if "text" in answer else decode(answer["token_ids"])

    shares: dict[str, list[float]] = {name: [] for name in names if name != JAXPD}
    for answers in rounds:
        for metric in (m for m in ("decode", "decode512") if m in answers):
            mine = text(answers[metric][JAXPD])
            for name in (n for n in answers[metric] if n != JAXPD):
                common = os.path.commonprefix([mine, text(answers[metric][name])])
                shares[name].append(len(common) / max(1, len(mine)))
    return {name: round(statistics.mean(found), 3) for name, found in shares.items() if found}


def then_and_now(now: dict[str, Any], then: dict[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """What two results have both: (metric, what, engine, then, now), with tokens/s first, then ratios to peers."""
    rows = []
    for what, key in (("tokens/s", "tokens_per_s"), ("jaxpd / peer", "jaxpd_over_peer")):
        for metric, engines in now[key].items():
            for name, found in engines.items():
                before = then[key].get(metric, {}).get(name)
                if before is not None:
                    rows.append((metric, what, name, before["median"], found["median"]))
    return rows


def _range_of(found: dict[str, float] | None, digits: int) -> str:
    return (
        "" if found is None else f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"
    )


def compare(now: dict[str, Any], then: dict[str, Any]) -> None:
    """The table of an earlier result beside this one."""
    same = now["machine"]["name"] == then["machine"]["name"]
    table = Table(title=f"against the result of {then['machine']['date']} on {then['machine']['name']}, medians")
    for column in ("metric", "", "engine", "then", "now", "now / then"):
        table.add_column(column, justify="right" if column in ("then", "now", "now / then") else "left")
    for metric, what, name, before, found in then_and_now(now, then):
        if same or what != "tokens/s":
            table.add_row(metric, what, name, f"{before:.2f}", f"{found:.2f}", f"{found / before:.2f}")
    if not same:
        table.caption = "another machine: only ratios to the peers, measured beside jaxpd, can be compared"
    Console(width=max(110, Console().width)).print(table)


def show(result: dict[str, Any]) -> None:
    """The tables."""
    console = Console(width=max(150, Console().width))
    metrics = list(result["tokens_per_s"])
    table = Table(title=f"{result['machine']['name']}, {result['threads']} threads: tokens/s, median (range)")
    for column in ("engine", *metrics, "peak MB", "same text"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, about in result["engines"].items():
        cells = [_range_of(result["tokens_per_s"][metric].get(name), 1) for metric in metrics]
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
            table.add_row(metric, peer, _range_of(ratio, 2), "" if aim is None else f">= {aim}", verdict)
    console.print(table)

    if result["step_ms"]:
        pages = {name: result["engines"][name]["pages"][1] for name in (JAXPD, TENFOLD)}
        table = Table(title=f"ms a decode step, with {pages[JAXPD]} and with {pages[TENFOLD]} pages in the decode pool")
        for column in ("metric", "1x", "10x", "10x / 1x"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for metric, found in result["step_ms"].items():
            table.add_row(metric, _range_of(found["1x"], 1), _range_of(found["10x"], 1), _range_of(found["ratio"], 2))
        console.print(table)

    if result["memory"]:
        bound = result["memory_bound_bytes"]
        table = Table(title=f"jaxpd's peak memory; the bound is {bound / 1e6:.0f} MB (2.0 x weights + pools + 600 MB)")
        for column in ("start", "peak MB", "when ready", "ready after", ""):
            table.add_column(column, justify="left" if column == "start" else "right")
        for start, found in result["memory"].items():
            verdict = "met" if found["peak_bytes"] <= bound else "missed"
            ready = f"{found['peak_bytes_when_ready'] / 1e6:.0f}"
            table.add_row(start, f"{found['peak_bytes'] / 1e6:.0f}", ready, f"{found['ready_s']:.1f} s", verdict)
        console.print(table)
    for name, why in result["missing"].items():
        console.print(f"MISSING: {name}: {why}", style="bold red", markup=False)
