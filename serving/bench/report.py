"""What a person reads at the end, and the JSON with everything in it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import re
from typing import Any

from jaxpd.version import __version__
from serving.bench.measure import Slo, Spread, Summary
from serving.bench.session import Outcome, Probe
from serving.bench.workload import Workload

FORMAT = 1  # of the JSON; raised when a reader has to change
LATE_LAG_S = 0.01  # a loop this late (p99) shows in the latencies
_ROWS = (
    ("TTFT", "ttft_s"),
    ("TTST", "ttst_s"),
    ("TPOT", "tpot_s"),
    ("ITL", "itl_s"),
    ("E2E", "e2e_s"),
    ("message gap", "gaps_s"),
)


FEW = 20  # requests of a probe that decide little


def text(outcome: Outcome) -> str:
    """The report, for a terminal."""
    about, shown = outcome.about, outcome.shown
    lines = ["", f"{about.backend} at {about.address}, model {about.model}"]
    if outcome.stopped:
        lines.append("stopped by Ctrl-C: this is what there was until then")
    if outcome.goodput is not None:
        lines += ["", *_goodput_lines(outcome)]
    if shown is not None:
        if outcome.goodput is not None:
            lines += ["", f"The run at {shown.rate:.4g} requests/s:"]
        lines += _run_lines(outcome, shown)
    return "\n".join(lines)


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Configuration, machine, summaries and every request, without the API key. Times in seconds."""
    plan, found = outcome.plan, outcome.goodput
    return {
        "format": FORMAT,
        "jaxpd": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "config": {
            "target": plan.target.config(),
            "workload": _workload(plan.workload),
            "arrivals": _plain(plan.arrivals),
            "slo": _plain(plan.slo),
            "search": _plain(plan.search) if plan.search is not None else None,
            "warmup": plan.warm_up,
        },
        "server": _plain(outcome.about),
        "stopped": outcome.stopped,
        "goodput": _plain(found) if found is not None else None,
        "probes": [
            {
                "rate": probe.rate,
                "cut_short": probe.enough,
                "started": probe.trial.wall_start,
                "summary": _plain(probe.summary),
                "requests": [_plain(record) for record in sorted(probe.trial.records, key=lambda r: r.index)],
            }
            for probe in outcome.probes
        ],
    }


def write_json(outcome: Outcome, path: pathlib.Path) -> None:
    """Writes `to_json` to `path`. Raises OSError."""
    path.write_text(json.dumps(to_json(outcome), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Where the client ran."""
    info = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8")) if info.exists() else None
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def slo_words(slo: Slo) -> str:
    """ "TTFT <= 200 ms and TPOT <= 20 ms"."""
    parts = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
    return " and ".join(f"{name} <= {1e3 * value:g} ms" for name, value in parts if value is not None)


def _goodput_lines(outcome: Outcome) -> list[str]:
    search, found = outcome.plan.search, outcome.goodput
    assert search is not None and found is not None
    target = f"{100 * search.attainment:g} % of requests with {slo_words(outcome.plan.slo)}"
    if found.rate is None:
        answer = f"below {search.min_rate:g} requests/s, the lowest rate tried (--min-rate)"
    elif found.above is None:
        answer = f"{found.rate:.4g} requests/s or more" + (" (--max-rate ended the search)" if found.complete else "")
    else:
        answer = f"{found.rate:.4g} requests/s; {found.above:.4g} missed"
    lines = [
        f"goodput {answer}",
        f"        for {target}",
        "",
        "  requests/s  attainment  TTFT p50/p99 ms  TPOT p50/p99 ms",
    ]
    for probe in sorted(outcome.probes, key=lambda p: p.rate or 0.0):
        summary = probe.summary
        share = _share(summary.attainment) + ("*" if probe.enough else " ")
        lines.append(
            f"  {probe.rate:>10.4g} {share:>11}  {_ms(summary.ttft_s.p50):>7} /{_ms(summary.ttft_s.p99):>6}"
            f"  {_ms(summary.tpot_s.p50):>7} /{_ms(summary.tpot_s.p99):>6}"
        )
    if any(probe.enough for probe in outcome.probes):
        lines.append("  * ended as soon as the target was out of reach")
    missed = next((probe.summary.requests for probe in outcome.probes if probe.rate == found.above), FEW)
    if missed < FEW:
        lines.append(
            f"note: {missed} requests decided that {found.above:.4g} requests/s are too many; a longer probe is surer "
            "(--duration, --num-requests), or a higher --min-rate"
        )
    return lines


def _run_lines(outcome: Outcome, probe: Probe) -> list[str]:
    s = probe.summary
    lines = [
        f"requests  {s.answered} answered, {s.requests - s.answered} failed"
        + (f" ({', '.join(f'{kind}: {count}' for kind, count in s.failures.items())})" if s.failures else "")
        + (f", {s.cut_off} cut off" if s.cut_off else ""),
        f"time      {s.duration_s:.2f} s: {s.request_rate:.4g} requests/s, {s.output_token_rate:.4g} output tokens/s, "
        f"{s.total_token_rate:.4g} tokens/s in all",
        f"load      {_load_words(outcome, probe)}",
        f"tokens    asked for {_tokens(s.asked_input)} + {_tokens(s.asked_output)} a request; answered "
        f"{_tokens(s.prompt_tokens)}{f' ({_tokens(s.cached_tokens)} cached)' if s.cached_tokens else ''} + "
        f"{_tokens(s.completion_tokens)}" + f"; {s.tokens_per_message:.2f} a message",
    ]
    if s.attainment is not None:
        rate = s.met / s.duration_s if s.duration_s > 0 else 0.0
        lines.append(
            f"SLO       {slo_words(s.slo)}: {_share(s.attainment)} of {s.requests} requests, {rate:.4g} requests/s"
        )
    if s.answered:
        lines += ["", f"  {'ms':<12}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max"))]
        lines += [_spread_line(name, getattr(s, field)) for name, field in _ROWS]
    lines += ["", *_client_lines(s), *(f"note: {note}" for note in [*outcome.about.notes, *_notes(s)])]
    return lines


def _load_words(outcome: Outcome, probe: Probe) -> str:
    arrivals, offered = outcome.plan.arrivals, probe.summary.offered_rate
    cap = f", at most {arrivals.concurrency} at a time" if arrivals.concurrency is not None else ""
    sent = f" ({offered:.4g} sent)" if offered is not None else ""
    if probe.rate is not None:
        shape = {1.0: "Poisson", math.inf: "regular"}.get(arrivals.burstiness, f"gamma {arrivals.burstiness:g}")
        return f"{probe.rate:.4g} requests/s{sent}, {shape} arrivals{cap}"
    if outcome.plan.workload.timed(arrivals):
        return f"the trace's arrivals at {outcome.plan.workload.trace_speed:g} times their speed{sent}{cap}"
    if arrivals.concurrency is not None:
        return f"{arrivals.concurrency} at a time, each followed by the next"
    return "all at once"


def _client_lines(s: Summary) -> list[str]:
    late = f"; requests left {_ms(s.late_s.p50)} ms late (p50), {_ms(s.late_s.p99)} ms (p99)" if s.late_s.count else ""
    return [f"client    loop lag {_ms(s.lag_s.p50)} ms (p50), {_ms(s.lag_s.p99)} ms (p99){late}"]


def _notes(s: Summary) -> list[str]:
    notes = []
    if s.lag_s.count and s.lag_s.p99 > LATE_LAG_S:
        notes.append(
            f"this client's loop was {_ms(s.lag_s.p99)} ms late (p99): the client, or the machine that it shares, was "
            "a bottleneck, and part of the latencies is its own"
        )
    if s.without_itl:
        notes.append(f"ITL leaves {s.without_itl} answers out, whose messages do not say how many tokens they hold")
    if s.in_one_message:
        notes.append(f"{s.in_one_message} answers of several tokens came as one message, which makes their TPOT 0")
    if s.answered and abs(s.completion_tokens - s.asked_output) > 0.05 * s.asked_output:
        notes.append("answers are not as long as asked for; --ignore-eos makes them so, where the server knows it")
    return notes


def _spread_line(name: str, spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return f"  {name:<12}" + "".join(f"{_ms(value):>10}" for value in values)


def _ms(seconds: float) -> str:
    """ "0.42", "12.3", "1234"; "-" for nan."""
    value = 1e3 * seconds
    return "-" if math.isnan(value) else f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _tokens(count: float | None) -> str:
    return "?" if count is None else f"{count:.1f}".removesuffix(".0")


def _workload(workload: Workload) -> dict[str, Any]:
    values = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    trace = values.pop("trace")
    values |= {"input_len": str(workload.input_len), "output_len": str(workload.output_len)}
    return {**values, "trace": None if trace is None else {"kind": trace.kind, "requests": len(trace.rows)}}


def _plain(value: Any) -> Any:
    """Dataclasses as objects; what JSON has no number for (nan, inf) as null and "inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf"
    return value
