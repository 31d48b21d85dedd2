"""From records to numbers: latencies of one answer, their spread over a run, and how many met the SLO.

TTFT and TTST are the times from arrival to the first and to the second token, E2E that to the end of the answer.
TPOT = (last - first token time) / (tokens - 1). ITL: see `serving.bench`. Attainment is the share of all requests,
failures included, that meet TTFT and TPOT.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from serving.bench.records import Record
from serving.bench.run import Trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Of one answer, in seconds. None where it does not exist (one token has no TPOT) or is not known."""

    ttft_s: float
    ttst_s: float | None
    tpot_s: float | None
    e2e_s: float
    itl_s: tuple[float, ...] | None  # one a token after the first; None: the server did not say what a message held
    gaps_s: tuple[float, ...]  # between messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slo:
    """What an answer has to keep, in seconds; None asks nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, record: Record) -> bool:
        """Whether it came, and came in time. An answer of one token has no TPOT to keep."""
        times = latency(record)
        if times is None or (self.ttft_s is not None and times.ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or times.tpot_s is None or times.tpot_s <= self.tpot_s

    @property
    def given(self) -> bool:
        """Whether it asks for anything."""
        return self.ttft_s is not None or self.tpot_s is not None


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and percentiles of `count` values (0: all of them are nan)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in numbers. Times in seconds, rates a second; token means are over the answers."""

    requests: int  # answers and failures
    answered: int
    failures: dict[str, int]  # kind -> count
    cut_off: int
    duration_s: float  # first arrival to the end of the last answer
    offered_rate: float | None  # requests that were sent each second, while it was sending
    request_rate: float  # answers
    output_token_rate: float
    total_token_rate: float
    asked_input: float | None
    asked_output: float
    prompt_tokens: float | None  # by usage
    completion_tokens: float
    cached_tokens: float | None
    tokens_per_message: float
    without_itl: int  # answers whose messages did not say what they held
    in_one_message: int  # answers of several tokens that came as one message: their TPOT is 0
    ttft_s: Spread
    ttst_s: Spread
    tpot_s: Spread
    itl_s: Spread
    e2e_s: Spread
    gaps_s: Spread
    lag_s: Spread  # of the client's loop
    late_s: Spread  # calls that left after they were due
    slo: Slo
    met: int
    attainment: float | None  # None: no SLO, or no requests


def latency(record: Record) -> Latency | None:
    """None for a failure."""
    times = record.message_s
    if record.failure is not None or not times:
        return None
    counts = record.message_tokens
    tokens = record.tokens
    if counts is not None:
        reached = itertools.accumulate(counts)
        second = next((when for when, count in zip(times, reached, strict=True) if count >= 2), None)
    else:  # no earlier than this, and no later if the first message held one token
        second = times[1] if len(times) > 1 else None
    gaps = tuple(after - before for before, after in itertools.pairwise(times))
    return Latency(
        ttft_s=times[0] - record.arrival_s,
        ttst_s=None if second is None else second - record.arrival_s,
        tpot_s=(times[-1] - times[0]) / (tokens - 1) if tokens > 1 else None,
        e2e_s=record.end_s - record.arrival_s,
        itl_s=None if counts is None else _itl(times, counts),
        gaps_s=gaps,
    )


def _itl(times: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    """The gap before each message, shared by its tokens. One without new tokens leaves its gap to the next."""
    gaps, before = [0.0] * (counts[0] - 1), times[0]
    for when, count in zip(times[1:], counts[1:], strict=True):
        if count:
            gaps += [(when - before) / count] * count
            before = when
    return tuple(gaps)


def spread(values: Iterable[float]) -> Spread:
    """Percentiles by linear interpolation."""
    array = np.fromiter(values, float)
    if not len(array):
        return Spread(0, *[float("nan")] * 5)
    p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
    return Spread(len(array), float(array.mean()), p50, p90, p99, float(array.max()))


def summarize(trial: Trial, slo: Slo = Slo()) -> Summary:
    """What the table shows of a run."""
    records = trial.records
    pairs = [(record, times) for record in records if (times := latency(record)) is not None]
    good, all_times = [record for record, _ in pairs], [times for _, times in pairs]
    begin = min((record.arrival_s for record in records), default=0.0)
    duration = max((record.end_s for record in records), default=0.0) - begin
    per_second = 1 / duration if duration > 0 else 0.0
    sent = sorted(record.sent_s for record in records)
    sending = sent[-1] - sent[0] if sent else 0.0
    output = sum(record.tokens for record in good)
    prompts = [record.prompt_tokens for record in good if record.prompt_tokens is not None]
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    lengths = [record.input_len for record in records if record.input_len]
    met = sum(map(slo.met, records))
    return Summary(
        requests=len(records),
        answered=len(good),
        failures=dict(collections.Counter(r.failure.kind for r in records if r.failure is not None).most_common()),
        cut_off=trial.cut_off,
        duration_s=duration,
        offered_rate=(len(sent) - 1) / sending if sending > 0 else None,
        request_rate=len(good) * per_second,
        output_token_rate=output * per_second,
        total_token_rate=(output + sum(prompts)) * per_second,
        asked_input=_mean(lengths),
        asked_output=_mean([record.output_len for record in records]) or 0.0,
        prompt_tokens=_mean(prompts),
        completion_tokens=_mean([record.tokens for record in good]) or 0.0,
        cached_tokens=_mean(cached),
        tokens_per_message=output / max(1, sum(len(record.message_s) for record in good)),
        without_itl=sum(times.itl_s is None for times in all_times),
        in_one_message=sum(len(record.message_s) == 1 and record.tokens > 1 for record in good),
        ttft_s=spread(times.ttft_s for times in all_times),
        ttst_s=spread(times.ttst_s for times in all_times if times.ttst_s is not None),
        tpot_s=spread(times.tpot_s for times in all_times if times.tpot_s is not None),
        itl_s=spread(gap for times in all_times for gap in times.itl_s or ()),
        e2e_s=spread(times.e2e_s for times in all_times),
        gaps_s=spread(gap for times in all_times for gap in times.gaps_s),
        lag_s=spread(trial.lag_s),
        late_s=spread(record.sent_s - record.due_s for record in records if record.due_s is not None),
        slo=slo,
        met=met,
        attainment=met / len(records) if records and slo.given else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
