"""The arithmetic of benchmarks/isolation.py: what chats felt while prompts arrived, from what `bench serve` wrote down.

A run of chats is one closed loop from beginning to end. Prompts come in windows of it, each at its own rate, and a
window without any is `idle`. What belongs to a window:

    gaps between tokens       those of chats that began in it, stalls that end behind it included
    TTFT, TTST, attainment    of chats and prompts that arrived in it

All times here are seconds since the epoch, so that two processes' clocks mean the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.bench.measure import Slo, latency, spread, summarize
from serving.bench.records import Failure, Record
from serving.bench.run import Trial

QUANTILES = (*range(0, 100, 2), 99, 99.5, 99.9, 100)  # of the gaps, for the picture
GOOD = 0.9  # attainment


@dataclasses.dataclass(frozen=True)
class Window:
    """Prompts arrived at `rate` a second (0: none) from `begin_s` to `end_s`, exclusive."""

    rate: float
    begin_s: float
    end_s: float


def records_of(result: dict[str, Any]) -> list[Record]:
    """The requests of the one run in a JSON of `jaxpd bench serve`, in epoch seconds."""
    (probe,) = result["probes"]
    start = probe["started"]
    out = []
    for row in probe["requests"]:
        failure = row["failure"]
        known = row["message_tokens"]
        moved: dict[str, Any] = {
            "due_s": None if row["due_s"] is None else row["due_s"] + start,
            "sent_s": row["sent_s"] + start,
            "end_s": row["end_s"] + start,
            "message_s": tuple(moment + start for moment in row["message_s"]),
            "message_tokens": None if known is None else tuple(known),
            "failure": None if failure is None else Failure(**failure),
        }
        out.append(Record(**row | moved))
    return out


def gaps_in(records: Sequence[Record], window: Window) -> list[float]:
    """Seconds between tokens, of the gaps that began in the window."""
    out: list[float] = []
    for record in records:
        times, counts = record.message_s, record.message_tokens
        if record.failure is not None or counts is None:
            continue
        first = next((i for i, moment in enumerate(times) if moment >= window.begin_s), len(times))
        after = next((i for i, moment in enumerate(times) if moment >= window.end_s), len(times) - 1)
        if first > after or times[first] >= window.end_s:
            continue
        inside = dataclasses.replace(
            record,
            message_s=times[first : after + 1],
            message_tokens=(1, *counts[first + 1 : after + 1]),  # those of the first came before the window, or with it
        )
        found = latency(inside)
        assert found is not None and found.itl_s is not None
        out += found.itl_s
    return out


def arrived_in(records: Sequence[Record], window: Window) -> list[Record]:
    """The requests that arrived in the window."""
    return [record for record in records if window.begin_s <= record.arrival_s < window.end_s]


def row(
    chats: Sequence[Record], prompts: Sequence[Record], window: Window, *, chat_slo: Slo, prompt_slo: Slo
) -> dict[str, Any]:
    """What one window brought, in milliseconds. `prompts` are all that were sent in it. Token gaps are of chats."""
    gaps = gaps_in(chats, window)
    some = arrived_in(chats, window)
    met = sum(map(chat_slo.met, some)) + sum(map(prompt_slo.met, prompts))
    asked = len(some) + len(prompts)
    tokens = sum(
        count
        for record in chats
        for moment, count in zip(record.message_s, record.message_tokens or (), strict=False)
        if window.begin_s <= moment < window.end_s
    )
    return {
        "rate": window.rate,
        "seconds": round(window.end_s - window.begin_s, 3),
        "itl_ms": _shares(gaps) | {"max": _ms(max(gaps, default=math.nan))},
        "gaps": len(gaps),
        "gap_quantiles_ms": [_ms(value) for value in np.percentile(gaps, QUANTILES)] if gaps else [],
        "chat_tokens_per_s": round(tokens / (window.end_s - window.begin_s), 2),
        "chats": _of_requests(some, chat_slo),
        "prompts": _of_requests(prompts, prompt_slo),
        "attainment": round(met / asked, 4) if asked else None,
    }


def _of_requests(records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    summary = summarize(Trial(records=tuple(records), cut_off=0, stopped=False, lag_s=(), wall_start=0.0), slo)
    times = [one for record in records if (one := latency(record)) is not None]
    return {
        "requests": len(records),
        "failed": len(records) - summary.answered,
        "failures": summary.failures,
        "ttft_ms": _shares([one.ttft_s for one in times]),
        "ttst_ms": _shares([one.ttst_s for one in times if one.ttst_s is not None]),
        "second_ms": _shares([one.ttst_s - one.ttft_s for one in times if one.ttst_s is not None]),
        "tpot_ms": _shares([one.tpot_s for one in times if one.tpot_s is not None]),
        "attainment": None if summary.attainment is None else round(summary.attainment, 4),
    }


def _shares(seconds: Sequence[float]) -> dict[str, float | None]:
    found = spread(seconds)
    return {"p50": _ms(found.p50), "p99": _ms(found.p99)}


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds * 1e3, 2)


def over_rounds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each setup and rate, in the order of the first round: medians over the rounds, value by value."""
    keys = list(dict.fromkeys((row["setup"], row["rate"]) for row in rows))
    return [median_row([row for row in rows if (row["setup"], row["rate"]) == key]) for key in keys]


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of numbers, sums of counts; what a row has in words is that of the first."""
    out: dict[str, Any] = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if isinstance(first, dict):
            out[key] = median_row(values) if key != "failures" else _added(values)
        elif key in ("requests", "failed", "gaps"):
            out[key] = sum(values)
        elif isinstance(first, str) or key in ("rate", "round"):
            out[key] = first
        elif isinstance(first, list):
            out[key] = [statistics.median(some) for some in zip(*filter(None, values), strict=True)]
        else:
            known = [value for value in values if value is not None]
            out[key] = round(statistics.median(known), 4) if known else None
    return out


def _added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    kinds = dict.fromkeys(itertools.chain.from_iterable(counts))
    return {kind: sum(count.get(kind, 0) for count in counts) for kind in kinds}


def goodput(rows: Sequence[dict[str, Any]], setup: str) -> tuple[float | None, bool]:
    """The highest rate of prompts that was tried and, like all lower ones, had an attainment of `GOOD`, and whether a
    higher one missed it. None: not even idle.
    """
    best: float | None = None
    for found in sorted((row for row in rows if row["setup"] == setup), key=lambda row: row["rate"]):
        if found["attainment"] is None or found["attainment"] < GOOD:
            return best, True
        best = found["rate"]
    return best, False


def verdicts(rows: Sequence[dict[str, Any]], isolated: str, baseline: str) -> list[dict[str, Any]]:
    """For each loaded rate: p99 of the gaps of `isolated` as a multiple of its own idle, and that of `baseline` as a
    multiple of it.
    """

    def p99(setup: str, rate: float) -> float | None:
        return next((r["itl_ms"]["p99"] for r in rows if (r["setup"], r["rate"]) == (setup, rate)), None)

    out = []
    idle = p99(isolated, 0)
    for rate in sorted({row["rate"] for row in rows} - {0}):
        mine, other = p99(isolated, rate), p99(baseline, rate)
        out.append(
            {
                "rate": rate,
                "of_idle": None if mine is None or not idle else round(mine / idle, 3),
                "baseline_over_isolated": None if not mine or other is None else round(other / mine, 3),
            }
        )
    return out
