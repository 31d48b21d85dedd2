"""Which routing policy serves a trace best? The router's policies under synthetic workers, hours of traffic in seconds.

    python -m benchmarks.routing TRACE.jsonl [--prefill 8] [--decode 4] [--rate 0.25,0.5] [--output FOLDER]
    python -m benchmarks.routing --conversations 2000            (made up: chats with shared system prompts)

The trace is one of Mooncake's (mooncake.py says where to get them), with arrival times, lengths and block ids. `--rate`
multiplies its rate; each value is a table. The same policy chooses both legs. What a worker takes is
`jaxpd.routing.synthetic.Speeds`; `jaxpd/routing/simulation.py` says what is left out. The times are therefore not those
of any machine: the order of the policies is what can be learned.

`met` is the share of all requests that meet TTFT and TPOT, refusals are misses; `of accepted` leaves those out.
`busiest` and `idlest` are the seconds that a prefill replica computed over the mean of all. Only `ttft_estimate`
refuses, and what it refuses first are the longest prompts: its TTFT is over the others, so compare `met`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.mooncake import BLOCK, SOURCE
from jaxpd.errors import JaxpdError
from jaxpd.policies.routing import POLICIES
from jaxpd.routing.loads import Arrival, conversations, of_blocks
from jaxpd.routing.simulation import simulate
from jaxpd.routing.synthetic import Cluster, Slo, Summary, summarise
from serving.bench.traces import read_trace

RESULTS = pathlib.Path(__file__).parent / "results"
TIMES = ("TTFT mean", "p50", "p99", "TPOT p99")
COLUMNS = ("policy", "met", "of accepted", "refused", *TIMES, "found", "busiest", "idlest")


def load(path: pathlib.Path | None, count: int, rate: float) -> list[Arrival]:
    """The requests. Raises SystemExit where the file is no such trace."""
    if path is None:
        return conversations(count, rate=4.0 * rate)
    try:
        trace = read_trace(path)
    except JaxpdError as error:
        raise SystemExit(f"{error.message}; Mooncake's traces are at {SOURCE}") from error
    rows = [(row.at_s or 0.0, row.input_len, row.output_len, row.blocks) for row in trace.rows]
    if not any(blocks for *_, blocks in rows):
        raise SystemExit(f"{path} has no block ids, so it says nothing about prefixes; Mooncake's do, see {SOURCE}")
    return of_blocks(rows[: count or None], page_size=BLOCK, rate=rate)


def run(arrivals: Sequence[Arrival], cluster: Cluster, slo: Slo, policies: Sequence[str], seed: int) -> dict[str, Any]:
    """Each policy's `Summary` as a dictionary, and the seconds that its simulation took."""
    found: dict[str, Any] = {}
    for policy in policies:
        began = time.perf_counter()
        result = simulate(arrivals, cluster, prefill=policy, decode=policy, slo=slo, seed=seed)
        summary = dataclasses.asdict(summarise(result, slo))
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in summary.items()}
        found[policy] = {**rounded, "run_s": round(time.perf_counter() - began, 2)}
    return found


def rows(found: dict[str, Any]) -> list[list[str]]:
    """A table's rows, as text."""
    names = {field.name for field in dataclasses.fields(Summary)}
    table = []
    for policy, numbers in found.items():
        s = Summary(**{name: numbers[name] for name in names})
        table.append(
            [
                policy,
                f"{100 * s.attainment:.1f}%",
                f"{100 * s.kept:.1f}%",
                f"{100 * s.refused / s.requests:.1f}%",
                f"{s.ttft_mean_s:.2f}",
                f"{s.ttft_p50_s:.2f}",
                f"{s.ttft_p99_s:.2f}",
                f"{1000 * s.tpot_p99_s:.0f} ms",
                f"{100 * s.hit_rate:.1f}%",
                f"{s.imbalance:.2f}",
                f"{s.idlest:.2f}",
            ]
        )
    return table


def markdown(result: dict[str, Any]) -> str:
    """The tables with what they were made by."""
    lines = [f"# Routing policies: {result['trace']}", "", f"`{result['command']}`", ""]
    for one in result["rates"].values():
        lines += [f"## {one['title']}", "", "| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * 10 + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows(one["policies"])]
        lines += [""]
    return "\n".join([*lines, "TTFT in seconds. Simulated: the order can be learned from it, not the times.", ""])


def show(one: dict[str, Any]) -> None:
    """One table on the terminal."""
    table = Table(title=one["title"])
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows(one["policies"]):
        table.add_row(*row)
    Console(width=max(120, Console().width)).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path, nargs="?", help=f"TRACE.jsonl; {SOURCE}")
    parser.add_argument("--conversations", type=int, default=0, metavar="N", help="N made-up requests, without a trace")
    parser.add_argument("--requests", type=int, default=0, help="the first so many of the trace (default all)")
    parser.add_argument("--prefill", type=int, default=8, help="prefill workers")
    parser.add_argument("--decode", type=int, default=4, help="decode workers")
    parser.add_argument("--replicas", type=int, default=1, help="data replicas of each worker")
    parser.add_argument("--pages", type=int, default=Cluster.pages, help=f"of {BLOCK} tokens, in each replica's pool")
    parser.add_argument("--rate", default="1", help="factors of the trace's rate, by commas (default 1)")
    parser.add_argument("--ttft", type=float, default=10.0, help="promised, in seconds (default 10)")
    parser.add_argument("--tpot", type=float, default=0.1, help="promised, in seconds (default 0.1)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="by commas (default all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, help="folder for a .json and a .md (default: only shown)")
    options = parser.parse_args(arguments)
    if (options.trace is None) == (options.conversations == 0):
        parser.error("give either a TRACE.jsonl or --conversations N")
    policies = options.policies.split(",")
    if unknown := set(policies) - set(POLICIES):
        parser.error(f"--policies {', '.join(sorted(unknown))} do not exist; there are {', '.join(POLICIES)}")
    try:
        rates = [float(rate) for rate in options.rate.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        parser.error(f"--rate {options.rate} must be numbers above 0, by commas")
    if min(options.prefill, options.decode, options.replicas, options.pages) < 1:
        parser.error("--prefill, --decode, --replicas and --pages must each be at least 1")
    cluster = Cluster(prefill=options.prefill, decode=options.decode, replicas=options.replicas, pages=options.pages)
    slo = Slo(options.ttft, options.tpot)
    name = options.trace.stem if options.trace else "conversations"
    source = options.trace.name if options.trace else f"--conversations {options.conversations}"
    flags = f"--prefill {options.prefill} --decode {options.decode} --replicas {options.replicas}"
    flags += f" --pages {options.pages} --rate {options.rate} --ttft {options.ttft:g} --tpot {options.tpot:g}"
    flags += f" --seed {options.seed}" + (f" --requests {options.requests}" if options.requests else "")
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.routing {source} {flags}",
        "machine": describe(("jaxpd",)),
        "trace": name,
        "cluster": dataclasses.asdict(cluster),
        "rates": {},
    }
    for rate in rates:
        arrivals = load(options.trace, options.requests or options.conversations, rate)
        a_second = len(arrivals) / max(arrivals[-1].at_s, 1e-9)
        tokens = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
        title = (
            f"rate {rate:g}: {len(arrivals)} requests of {tokens:.0f} tokens, {a_second:.2f} a second, to "
            f"{options.prefill}P{options.decode}D; TTFT {options.ttft:g} s, TPOT {1000 * options.tpot:g} ms"
        )
        one = {"title": title, "policies": run(arrivals, cluster, slo, policies, options.seed)}
        result["rates"][f"{rate:g}"] = one
        show(one)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"routing-{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
        print(f"written to {options.output}: {path.name}, {path.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
