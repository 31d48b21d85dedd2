"""The picture of a benchmark, one PNG.

A run: latency distributions, its requests on a time line, and the rate of tokens. A search adds attainment and
latencies against the rate.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxpd.errors import FailedPrecondition
from serving.bench.measure import Latency, latency
from serving.bench.records import Record
from serving.bench.report import slo_words
from serving.bench.session import Outcome

BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#999999"  # told apart by every eye
MOST_LINES = 400  # requests on the time line; of more, every n-th
BINS = 100
SHOWN_PERCENTILE = 99.5  # where a distribution's axis ends: one stall would squeeze all the rest to a line


def draw(outcome: Outcome, path: pathlib.Path) -> None:
    """Writes the PNG. Raises FailedPrecondition where matplotlib is missing, OSError where it cannot be written."""
    figure_class = _figure_class()
    searched = outcome.goodput is not None
    figure = figure_class(figsize=(12, 12 if searched else 8), layout="constrained")
    axes = figure.subplots(3 if searched else 2, 2).ravel().tolist()
    shown = outcome.shown
    figure.suptitle(_title(outcome), fontsize=11)
    if searched:
        _attainment(axes.pop(0), outcome)
        _latency_by_rate(axes.pop(0), outcome)
    if shown is not None:
        times = [one for record in shown.trial.records if (one := latency(record)) is not None]
        slo = outcome.plan.slo
        _cdf(axes[0], times, (("TTFT", BLUE, _ttft), ("TTST", GREEN, _ttst), ("E2E", GREY, _e2e)), slo.ttft_s)
        _cdf(axes[1], times, (("TPOT", ORANGE, _tpot), ("ITL", GREY, _itl)), slo.tpot_s)
        _time_line(axes[2], shown.trial.records)
        _rates(axes[3], shown.trial.records)
    figure.savefig(path, format="png", dpi=110)


def check() -> None:
    """Raises FailedPrecondition where matplotlib is missing: before the run, not after it."""
    _figure_class()


def _title(outcome: Outcome) -> str:
    about, shown = outcome.about, outcome.shown
    lines = [f"{about.model}, {about.backend} at {about.address}"]
    if outcome.goodput is not None:
        rate = outcome.goodput.rate
        found = "below the lowest rate tried" if rate is None else f"{rate:.4g} requests/s"
        lines.append(f"goodput {found} ({slo_words(outcome.plan.slo)})")
    if shown is not None:
        s = shown.summary
        at = f"at {shown.rate:.4g} requests/s: " if shown.rate is not None else ""
        lines.append(
            f"{at}{s.answered} answered, {s.requests - s.answered} failed, {s.request_rate:.4g} requests/s, "
            f"{s.output_token_rate:.4g} output tokens/s"
        )
    return "\n".join(lines)


def _attainment(axis: Any, outcome: Outcome) -> None:
    probes = sorted(outcome.probes, key=lambda probe: probe.rate or 0.0)
    shares = [100 * (probe.summary.attainment or 0.0) for probe in probes]
    axis.plot([probe.rate for probe in probes], shares, color=GREY, linewidth=1, zorder=1)
    for enough, marker, label in ((False, "o", "whole probe"), (True, "v", "ended early")):
        some = [(probe.rate, share) for probe, share in zip(probes, shares, strict=True) if probe.enough is enough]
        if some:
            axis.scatter(*zip(*some, strict=True), color=BLUE, marker=marker, label=label, zorder=2)
    assert outcome.plan.search is not None and outcome.goodput is not None
    axis.axhline(100 * outcome.plan.search.attainment, color=RED, linestyle="--", linewidth=1, label="target")
    if outcome.goodput.rate is not None:
        axis.axvline(outcome.goodput.rate, color=GREEN, linewidth=1, label=f"goodput {outcome.goodput.rate:.4g}/s")
    axis.set(xlabel="requests/s", ylabel="attainment %", ylim=(-3, 103), title="Attainment by rate")
    axis.legend(fontsize=8)


def _latency_by_rate(axis: Any, outcome: Outcome) -> None:
    probes = [probe for probe in sorted(outcome.probes, key=lambda p: p.rate or 0.0) if probe.summary.answered]
    for name, color in (("ttft_s", BLUE), ("tpot_s", ORANGE)):
        for percentile, style in (("p50", "-"), ("p99", ":")):
            values = [1e3 * getattr(getattr(probe.summary, name), percentile) for probe in probes]
            label = f"{name[:4].upper()} {percentile}"
            axis.plot([p.rate for p in probes], values, style, color=color, marker=".", label=label)
    for value, color in ((outcome.plan.slo.ttft_s, BLUE), (outcome.plan.slo.tpot_s, ORANGE)):
        if value is not None:
            axis.axhline(1e3 * value, color=color, linestyle="--", linewidth=0.8)
    axis.set(xlabel="requests/s", ylabel="ms", yscale="log", title="Latency by rate (dashed: SLO)")
    axis.legend(fontsize=8)


def _cdf(
    axis: Any,
    times: Sequence[Latency],
    kinds: Sequence[tuple[str, str, Callable[[Latency], Iterable[float | None]]]],
    slo_s: float | None,
) -> None:
    """The first of `kinds` is what the SLO is about."""
    slo_name, slo_color, _ = kinds[0]
    names, end = [], 0.0
    for name, color, values in kinds:
        sample = np.sort([1e3 * value for one in times for value in values(one) if value is not None])
        if len(sample):
            names.append(name)
            end = max(end, float(np.percentile(sample, SHOWN_PERCENTILE)))
            axis.step(sample, 100 * np.arange(1, len(sample) + 1) / len(sample), where="post", color=color, label=name)
    if slo_s is not None:
        end = max(end, 1e3 * slo_s)
        axis.axvline(1e3 * slo_s, color=slo_color, linestyle="--", linewidth=1, label=f"{slo_name} SLO")
    if end:
        axis.set_xlim(0, 1.05 * end)
    axis.set(xlabel="ms", ylabel="% of values", ylim=(0, 101), title=f"{', '.join(names) or 'No answers'}")
    axis.grid(alpha=0.3)
    if names:
        axis.legend(fontsize=8)


def _time_line(axis: Any, records: Sequence[Record]) -> None:
    ordered = sorted(records, key=lambda record: (record.arrival_s, record.index))
    ordered = ordered[:: -(-len(ordered) // MOST_LINES) or 1]
    width = max(0.5, min(4.0, 250 / max(1, len(ordered))))
    waits, streams, failures = [], [], []
    for row, record in enumerate(ordered):
        if record.failure is not None or not record.message_s:
            failures.append((row, record.arrival_s, record.end_s))
        else:
            waits.append((row, record.arrival_s, record.message_s[0]))
            streams.append((row, record.message_s[0], record.end_s))
    for lines, color, label in (
        (waits, ORANGE, "to the first token"),
        (streams, BLUE, "to the end"),
        (failures, RED, "failed"),
    ):
        if lines:
            rows, begins, ends = zip(*lines, strict=True)
            axis.hlines(rows, begins, ends, color=color, linewidth=width, label=label)
    axis.invert_yaxis()
    axis.set(xlabel="s since the start", ylabel="request", title="Requests in order of arrival")
    if ordered:
        axis.legend(fontsize=8, loc="lower left")


def _rates(axis: Any, records: Sequence[Record]) -> None:
    end = max((record.end_s for record in records), default=0.0)
    title = {"xlabel": "s since the start", "title": "Output tokens/s, and requests under way"}
    if end <= 0:
        axis.set(**title)
        return
    edges = np.linspace(0, end, BINS + 1)
    moments = [moment for record in records for moment in record.message_s]
    counts = [count for record in records for count in _counts(record)]
    tokens, _ = np.histogram(moments, edges, weights=counts)
    axis.step(edges[:-1], tokens / (edges[1] - edges[0]), where="post", color=BLUE)
    axis.set_ylabel("output tokens/s", color=BLUE)
    axis.set(**title, ylim=(0, None))
    begun, over = np.sort([r.arrival_s for r in records]), np.sort([r.end_s for r in records])
    under_way = np.searchsorted(begun, edges, "right") - np.searchsorted(over, edges, "right")
    other = axis.twinx()
    other.step(edges, under_way, where="post", color=ORANGE, linewidth=1)
    other.set_ylabel("requests under way", color=ORANGE)
    other.set_ylim(0, None)


def _counts(record: Record) -> Sequence[float]:
    if record.message_tokens is not None:
        return record.message_tokens
    return [record.tokens / max(1, len(record.message_s))] * len(record.message_s)


def _ttft(one: Latency) -> Iterable[float | None]:
    return (one.ttft_s,)


def _ttst(one: Latency) -> Iterable[float | None]:
    return (one.ttst_s,)


def _e2e(one: Latency) -> Iterable[float | None]:
    return (one.e2e_s,)


def _tpot(one: Latency) -> Iterable[float | None]:
    return (one.tpot_s,)


def _itl(one: Latency) -> Iterable[float | None]:
    return one.itl_s or ()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found]
    except ImportError as error:
        raise FailedPrecondition(
            "--plot needs the package matplotlib, which is not installed; pip install 'jaxpd[bench]', or leave it out",
            field="plot",
        ) from error
    return Figure
