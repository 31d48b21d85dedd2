"""`jaxpd bench serve`: flags to a plan, the run, the report. What it does stands in `serving.bench`."""

from __future__ import annotations

import asyncio
import pathlib
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from jaxpd.cli import bench_flags as flags
from jaxpd.cli import connection
from jaxpd.cli.progress import console_progress
from jaxpd.errors import InvalidArgument

if TYPE_CHECKING:
    from serving.bench.session import Outcome, Plan

SERVER = "Which server"
LOAD = "When requests come"
PROMPTS = "What they ask for"
GOAL = "What is good enough"
OUTPUT = "Output"

INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, help="Measure a server.")


@app.callback()
def _bench() -> None:
    """Measure a server."""


@app.command()
def serve(
    backend: Annotated[
        str,
        typer.Option(
            metavar="openai-chat|openai-completions|grpc", help="What the server speaks.", rich_help_panel=SERVER
        ),
    ] = "openai-chat",
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where an OpenAI server is, with or without /v1.",
            show_default=flags.DEFAULT_URL,
            rich_help_panel=SERVER,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where a jaxpd server is, for --backend grpc.",
            show_default=flags.DEFAULT_SERVER,
            rich_help_panel=SERVER,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model to ask for.",
            show_default="the first that the server lists",
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_key: connection.ApiKey = None,
    api_key_file: connection.ApiKeyFile = None,
    tls: connection.Tls = False,
    ssl_ca_certs: connection.SslCaCerts = None,
    ssl_certfile: connection.SslCertfile = None,
    ssl_keyfile: connection.SslKeyfile = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest that a request may take.", rich_help_panel=SERVER)
    ] = 600.0,
    request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Requests a second; inf sends all at once.",
            show_default="the trace's times, else inf",
            rich_help_panel=LOAD,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            metavar="SHAPE",
            help="Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts, inf is regular.",
            rich_help_panel=LOAD,
        ),
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most requests under way. Without a rate: always so many, each followed by the next.",
            show_default="no limit",
            rich_help_panel=LOAD,
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Requests of a run, or of a probe.",
            show_default="100; all of a trace that has times",
            rich_help_panel=LOAD,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long to send, in a run or in a probe.",
            show_default="until --num-requests; 30 for a probe",
            rich_help_panel=LOAD,
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option(metavar="N", help="Requests before it, which do not count.", rich_help_panel=LOAD)
    ] = 1,
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Arrivals and lengths from Mooncake JSONL or Azure CSV, or prompts from ShareGPT JSON.",
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    trace_speed: Annotated[
        float, typer.Option(metavar="X", help="Play the trace X times as fast.", rich_help_panel=PROMPTS)
    ] = 1.0,
    length_scale: Annotated[
        float,
        typer.Option(metavar="X", help="Multiply the trace's prompt and answer lengths.", rich_help_panel=PROMPTS),
    ] = 1.0,
    input_len: Annotated[
        str,
        typer.Option(
            metavar="LENGTH",
            help="Tokens of a prompt: a number, uniform:LOW:HIGH, normal:MEAN:STD or lognormal:MEAN:STD.",
            rich_help_panel=PROMPTS,
        ),
    ] = "256",
    output_len: Annotated[
        str,
        typer.Option(metavar="LENGTH", help="Most tokens of an answer, in the same way.", rich_help_panel=PROMPTS),
    ] = "64",
    shared_prefix_len: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Tokens before --input-len that prompts share.", rich_help_panel=PROMPTS),
    ] = 0,
    num_prefixes: Annotated[
        int, typer.Option(metavar="N", help="How many such prefixes there are.", rich_help_panel=PROMPTS)
    ] = 1,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Ask for answers of exactly --output-len tokens.", rich_help_panel=PROMPTS),
    ] = False,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Of sampling; 0 is greedy.", rich_help_panel=PROMPTS)
    ] = 0.0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draw prompts of token ids below N (not for chat).",
            show_default="what the server tells",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="{...}",
            help="JSON object whose keys go into every OpenAI request.",
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="S", help="Of arrivals, lengths and prompts.", rich_help_panel=PROMPTS)
    ] = 0,
    slo_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest time to the first token, such as 200ms or 1.5s.",
            show_default=False,
            rich_help_panel=GOAL,
        ),
    ] = None,
    slo_tpot: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest time per token after it, such as 20ms.",
            show_default=False,
            rich_help_panel=GOAL,
        ),
    ] = None,
    find_goodput: Annotated[
        bool,
        typer.Option(
            "--find-goodput", help="Search the highest rate that keeps the SLO, by bisection.", rich_help_panel=GOAL
        ),
    ] = False,
    attainment: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of all requests that must keep the SLO; failures miss it.",
            rich_help_panel=GOAL,
        ),
    ] = 0.9,
    min_rate: Annotated[float, typer.Option(metavar="R", help="Where the search begins.", rich_help_panel=GOAL)] = 1.0,
    max_rate: Annotated[
        float, typer.Option(metavar="R", help="Where it ends at the latest.", rich_help_panel=GOAL)
    ] = 1024.0,
    precision: Annotated[
        float,
        typer.Option(metavar="SHARE", help="How much of the goodput may stay unknown.", rich_help_panel=GOAL),
    ] = 0.05,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write configuration, machine, summary and every request.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Draw latencies, requests on a time line and, with --find-goodput, attainment by rate.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Send requests to a server as many users would, and say how long they waited."""
    from serving.bench import plots, report
    from serving.bench.arrivals import Arrivals
    from serving.bench.goodput import Search
    from serving.bench.lengths import parse_lengths
    from serving.bench.measure import Slo
    from serving.bench.session import Plan
    from serving.bench.target import Target
    from serving.bench.traces import read_trace
    from serving.bench.workload import Workload

    target = Target(
        backend=backend,
        address=flags.address(backend, base_url, server),
        model=model,
        api_key=connection.read_api_key(api_key, api_key_file),
        tls=tls,
        ssl_ca_certs=ssl_ca_certs,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        timeout_s=timeout,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra_body=flags.extra_body(extra_body),
        vocab_size=vocab_size,
    )
    plan = Plan(
        target=target,
        workload=Workload(
            input_len=parse_lengths(input_len, flag="--input-len"),
            output_len=parse_lengths(output_len, flag="--output-len"),
            shared_prefix_len=shared_prefix_len,
            num_prefixes=num_prefixes,
            trace=None if trace is None else read_trace(trace),
            trace_speed=trace_speed,
            length_scale=length_scale,
            seed=seed,
        ),
        arrivals=Arrivals(
            rate=request_rate,
            burstiness=burstiness,
            concurrency=concurrency,
            num_requests=num_requests,
            duration_s=duration,
        ),
        slo=Slo(
            ttft_s=None if slo_ttft is None else flags.parse_time(slo_ttft, flag="--slo-ttft"),
            tpot_s=None if slo_tpot is None else flags.parse_time(slo_tpot, flag="--slo-tpot"),
        ),
        search=Search(attainment=attainment, min_rate=min_rate, max_rate=max_rate, precision=precision)
        if find_goodput
        else None,
        warm_up=warmup,
    )
    for flag, path in (("--output", output), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgument(f"{flag} {path}: there is no folder {path.parent}; make it first", field=flag[2:])
    if plot is not None:
        plots.check()
    outcome = asyncio.run(_measure(plan))
    print(report.text(outcome), flush=True)
    if output is not None:
        report.write_json(outcome, output)
        print(f"written to {output}", file=sys.stderr)
    if plot is not None:
        plots.draw(outcome, plot)
        print(f"drawn in {plot}", file=sys.stderr)
    if outcome.stopped:
        raise typer.Exit(INTERRUPTED)
    if not any(probe.summary.answered for probe in outcome.probes):
        failures = [r.failure for probe in outcome.probes for r in probe.trial.records if r.failure is not None]
        why = f", the first by {failures[0].kind}: {failures[0].message}" if failures else ""
        print(f"jaxpd: all requests failed{why}", file=sys.stderr)
        raise typer.Exit(1)


async def _measure(plan: Plan) -> Outcome:
    """The benchmark; the first Ctrl-C ends it with a report, the second at once."""
    from serving.bench.session import measure

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupted() -> None:
        print("stopping; Ctrl-C again ends it without a report", file=sys.stderr, flush=True)
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        return await measure(plan, console_progress(), stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
