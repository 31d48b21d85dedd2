"""A benchmark from start to end: connect, warm up, one run or a search for goodput, and what came of it.

connect -> open -> lengths of texts -> check limits -> warm up -> run            -> Outcome
                                                              \\-> find(run ...) -> Outcome
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator

from jaxpd.errors import FailedPrecondition, InvalidArgument
from jaxpd.progress import Progress, Stage
from serving.bench import goodput
from serving.bench.arrivals import Arrivals
from serving.bench.goodput import Goodput, Search
from serving.bench.measure import Slo, Summary, summarize
from serving.bench.records import About, Backend, Record
from serving.bench.run import Job, Trial, raise_file_limit, run
from serving.bench.target import Target, connect
from serving.bench.traces import Trace
from serving.bench.workload import Workload, calls, number_of_calls, warm_up_calls

SHOW_EVERY_S = 0.5
DEFAULT_PROBE_S = 30.0
_CHARACTERS_A_TOKEN = 4  # of English, where a server has no /tokenize
_WARM_SALT = 2**30
SAMPLE = 1000  # calls whose length is checked where their number is not known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the flags say. Raises InvalidArgument for what does not go together."""

    target: Target
    workload: Workload = Workload()
    arrivals: Arrivals = Arrivals()
    slo: Slo = Slo()
    search: Search | None = None
    warm_up: int = 1

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise InvalidArgument(f"--warmup {self.warm_up} must be 0 or more requests", field="warmup")
        for flag, seconds in (("--slo-ttft", self.slo.ttft_s), ("--slo-tpot", self.slo.tpot_s)):
            if seconds is not None and not 0 < seconds < math.inf:
                raise InvalidArgument(f"{flag} {seconds:g}s must be above 0", field=flag[2:].replace("-", "_"))
        if self.search is not None:
            if not self.slo.given:
                raise InvalidArgument(
                    "--find-goodput needs an SLO to keep: --slo-ttft TIME, --slo-tpot TIME or both, such as 200ms",
                    field="find_goodput",
                )
            if self.arrivals.rate is not None:
                raise InvalidArgument(
                    f"--find-goodput tries rates of its own, and --request-rate {self.arrivals.rate:g} sets one; leave "
                    "it out, or bound the search by --min-rate and --max-rate",
                    field="request_rate",
                )
        number_of_calls(self.workload, self.arrivals)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """One run. `rate` is what was asked for, if one was; `enough`: ended early, as the target was out of reach."""

    rate: float | None
    trial: Trial
    summary: Summary
    enough: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a benchmark; `probes` has one entry but for a search. `stopped`: by Ctrl-C, with what there was."""

    plan: Plan
    about: About
    probes: tuple[Probe, ...]
    goodput: Goodput | None
    stopped: bool

    @property
    def shown(self) -> Probe | None:
        """The run to show in full: the one at the goodput; without any, the last."""
        at = [p for p in self.probes if self.goodput is not None and p.rate == self.goodput.rate]
        return next(reversed(at or self.probes), None)


async def measure(plan: Plan, progress: Progress, stop: asyncio.Event) -> Outcome:
    """Runs the benchmark. Raises JaxpdError where the server cannot be measured at all."""
    raise_file_limit()
    backend = connect(plan.target)
    try:
        synthetic = plan.workload.trace is None or plan.workload.trace.kind != "sharegpt"
        with progress.stage(f"asking {plan.target.address}"):
            about = await backend.open(synthetic=synthetic or plan.warm_up > 0)
        plan, notes = await _with_text_lengths(plan, backend)
        about = dataclasses.replace(about, notes=(*about.notes, *notes))
        _check_limit(plan, about)
        await _warm_up(plan, backend, progress, stop)
        if plan.search is None:
            probe = await _probe(plan, plan.arrivals, backend, progress, stop, turn=0)
            return Outcome(plan=plan, about=about, probes=(probe,), goodput=None, stopped=stop.is_set())
        return await _search(plan, plan.search, about, backend, progress, stop)
    finally:
        await backend.close()


async def _search(
    plan: Plan, search: Search, about: About, backend: Backend, progress: Progress, stop: asyncio.Event
) -> Outcome:
    probes: list[Probe] = []

    async def attainment_at(rate: float) -> float | None:
        arrivals = dataclasses.replace(plan.arrivals, rate=rate)
        if arrivals.duration_s is None and arrivals.num_requests is None:
            arrivals = dataclasses.replace(arrivals, duration_s=DEFAULT_PROBE_S)
        if stop.is_set():
            return None
        probe = await _probe(plan, arrivals, backend, progress, stop, turn=len(probes), target=search.attainment)
        probes.append(probe)
        attained = probe.summary.attainment
        progress.note(
            f"    {rate:.4g} requests/s: attainment {_percent(attained)}"
            f"{' or less, cut short' if probe.enough else ''} ({probe.summary.requests} requests)"
        )
        return None if stop.is_set() else attained

    found = await goodput.find(attainment_at, search)
    return Outcome(plan=plan, about=about, probes=tuple(probes), goodput=found, stopped=stop.is_set())


async def _probe(
    plan: Plan,
    arrivals: Arrivals,
    backend: Backend,
    progress: Progress,
    stop: asyncio.Event,
    *,
    turn: int,
    target: float | None = None,
) -> Probe:
    """One run; with a `target`, until it is certain that the attainment will be below it."""
    count = number_of_calls(plan.workload, arrivals)
    made = (
        Job(call, backend.prepare(call, seed=plan.workload.seed, salt=turn))
        for call in calls(plan.workload, arrivals, turn=turn)
    )
    jobs = list(made) if count is not None else made
    rate = arrivals.rate if arrivals.by_clock else None
    missed, enough = 0, False
    ending = asyncio.Event()

    def look(record: Record) -> None:
        nonlocal missed, enough
        show(record)
        missed += not plan.slo.met(record)
        if target is not None and count is not None and missed > count * (1 - target) + 1e-9 and not ending.is_set():
            enough = True
            ending.set()

    async def pass_on() -> None:
        await stop.wait()
        ending.set()

    name = "sending requests" if rate is None else f"sending {rate:.4g} requests/s"
    passing = asyncio.create_task(pass_on())
    try:
        with progress.stage(name, total=count, unit="requests") as stage, _shown(stage, plan.slo) as show:
            trial = await run(
                jobs,
                backend,
                concurrency=arrivals.concurrency,
                duration_s=arrivals.duration_s,
                stop=ending,
                on_record=look,
            )
    finally:
        passing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await passing
    return Probe(rate=rate, trial=trial, summary=summarize(trial, plan.slo), enough=enough)


@contextlib.contextmanager
def _shown(stage: Stage, slo: Slo) -> Iterator[Callable[[Record], None]]:
    """Tells the stage now and then how far it is: each answer for itself would be the client's main work."""
    waiting, failed, last_s = 0, 0, time.perf_counter()

    def tell() -> None:
        nonlocal waiting, last_s
        stage.advance(waiting, f"{failed} failed" if failed else "")
        waiting, last_s = 0, time.perf_counter()

    def show(record: Record) -> None:
        nonlocal waiting, failed
        waiting += 1
        failed += record.failure is not None
        if time.perf_counter() - last_s >= SHOW_EVERY_S:
            tell()

    yield show
    if waiting:
        tell()


async def _warm_up(plan: Plan, backend: Backend, progress: Progress, stop: asyncio.Event) -> None:
    """Calls that are not counted: connections, compiled programs. Raises FailedPrecondition if all of them fail."""
    if not plan.warm_up:
        return
    made = warm_up_calls(plan.workload, plan.warm_up)
    jobs = [Job(call, backend.prepare(call, seed=plan.workload.seed, salt=_WARM_SALT)) for call in made]
    with progress.stage("warming up", total=len(jobs), unit="requests") as stage:
        trial = await run(jobs, backend, concurrency=plan.arrivals.concurrency, stop=stop)
        stage.advance(len(jobs))
    failures = [record.failure for record in trial.records if record.failure is not None]
    if failures and len(failures) == len(jobs):
        raise FailedPrecondition(
            f"all {len(jobs)} warm-up requests failed, the first by {failures[0].kind}: {failures[0].message}; "
            "--warmup 0 measures all the same",
            field="warmup",
        )


async def _with_text_lengths(plan: Plan, backend: Backend) -> tuple[Plan, list[str]]:
    """A trace of texts gets its lengths in tokens: by the server, else its answers' by a rule of thumb."""
    trace = plan.workload.trace
    if trace is None or trace.kind != "sharegpt":
        return plan, []
    rows = trace.rows
    if plan.search is None:
        rows = rows[: number_of_calls(plan.workload, plan.arrivals)]
    asked, made = [row.prompt or "" for row in rows], [row.answer or "" for row in rows]
    counts = await backend.count_tokens(asked + made)
    if counts is None:
        notes = [f"no /tokenize: an answer of the trace was taken for a token each {_CHARACTERS_A_TOKEN} characters"]
        inputs, outputs = [0] * len(rows), [math.ceil(len(text) / _CHARACTERS_A_TOKEN) for text in made]
    else:
        notes, inputs, outputs = [], counts[: len(rows)], counts[len(rows) :]
    rows = tuple(
        dataclasses.replace(row, input_len=i, output_len=max(1, o))
        for row, i, o in zip(rows, inputs, outputs, strict=True)
    )
    workload = dataclasses.replace(plan.workload, trace=Trace(trace.kind, rows))
    return dataclasses.replace(plan, workload=workload), notes


def _check_limit(plan: Plan, about: About) -> None:
    """Raises InvalidArgument where requests ask for more than the model takes: the server would refuse them."""
    limit = about.max_model_len
    if limit is None:
        return
    arrivals, trace = plan.arrivals, plan.workload.trace
    if plan.search is not None and arrivals.num_requests is None:
        arrivals = Arrivals(num_requests=SAMPLE if trace is None else len(trace.rows))
    count = number_of_calls(plan.workload, arrivals)
    some = list(itertools.islice(calls(plan.workload, arrivals), SAMPLE if count is None else count))
    long = [call for call in some if call.input_len + call.output_len > limit]
    if long:
        worst = max(long, key=lambda call: call.input_len + call.output_len)
        cure = "--length-scale, such as 0.1," if trace is not None else "--input-len or --output-len"
        raise InvalidArgument(
            f"{len(long)} of {len(some)} requests are longer than {about.model} takes: up to {worst.input_len} + "
            f"{worst.output_len} tokens, and its limit is {limit}; shorten them by {cure} or serve it with a larger "
            "--max-model-len",
            field="length_scale" if trace is not None else "input_len",
        )


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"
