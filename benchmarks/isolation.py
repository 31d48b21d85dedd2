"""The experiment of the whole idea: chats decode while long prompts arrive. Who keeps them apart, at what cost?

    python -m benchmarks.isolation [--rates 0.1 0.2 0.3] [--rounds 3] [--window 40] [--setups separate chunked ...]

All setups have the same two cores, the same model, limits and router, which the same load comes through:

    separate      a prefill worker pinned to core 0, a decode worker pinned to core 1
    decoupled, chunked, interleaved
                  one mixed worker on both cores, in that mode

A round starts each setup anew, in an order that rotates; in each, `--chats` streams decode without a break (a closed
loop of `jaxpd bench serve`), first alone (`idle`), then while another `jaxpd bench serve` sends prompts of `--prompt`
tokens, Poisson, at each of the rates for `--window` seconds. Prompts that are still waiting when a window ends are
waited for before the next begins. Figures are medians over the rounds, by value; benchmarks/isolation_load.py says what
counts.

Router and load generator run on core 0 (`--front-cores`), the workers at niceness 5 (`--nice`): what carries tokens
takes little and must not wait behind a prompt that computes for seconds, and the decode worker has its core for itself.
In the mixed setups router and load generator may use both cores, as the worker does. The prefix cache is off: no two
prompts are alike.

The goodput here is the highest rate of prompts that was tried and at which, as at all lower ones, 90 % of all requests,
chats and prompts, kept their SLO (--chat-slo, --prompt-slo).

The first run compiles (minutes); `--warm` does that and no more. `--quick` is a smoke run of the tiny model of the
tests: its figures mean nothing, and it writes only where `--out` says.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from benchmarks.cluster import CONTROL, GRPC, Bench, Process
from benchmarks.isolation_load import Window, arrived_in, over_rounds, records_of, row
from benchmarks.isolation_report import draw, table
from benchmarks.machine import busy_seconds, describe, slug
from jaxpd.cli.bench_flags import parse_time
from serving.bench.measure import Slo

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "grpcio")
SEPARATE = "separate"
MIXED = ("decoupled", "chunked", "interleaved")
SETUPS = (SEPARATE, *MIXED)
SETTLE_S = 5.0  # from the first chat to the first window: all of them decode by then
A_TOKEN_S = 0.08  # of a chat, at least: how long they go on behind the last window
PATIENCE_S = 900.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent. Lengths in tokens, times in seconds."""

    chats: int
    chat_prompt: str
    chat_answer: str  # of different lengths, so that chats do not end, and begin, all at once
    prompt: int
    prompt_answer: int
    rates: tuple[float, ...]
    idle_s: float
    window_s: float
    chat_slo: tuple[str, str]  # TTFT and TPOT, as `bench serve` takes them
    prompt_slo: tuple[str, str]

    @property
    def max_model_len(self) -> int:
        """In whole pages of 16 tokens."""
        longest_chat = int(self.chat_prompt.rpartition(":")[2]) + self.longest_answer
        return -(-max(self.prompt + self.prompt_answer, longest_chat) // 16) * 16

    @property
    def longest_answer(self) -> int:
        """Of a chat."""
        return int(self.chat_answer.rpartition(":")[2])

    @property
    def slots(self) -> int:
        """Sequences at once: all chats, and as many prompts that have come to their answer."""
        return 2 * self.chats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Which cores are whose."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    front: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Of a mixed worker."""
        return tuple(sorted({*self.prefill, *self.decode}))


def slo(words: tuple[str, str]) -> Slo:
    """What `bench serve` makes of the same words."""
    return Slo(ttft_s=parse_time(words[0], flag="--slo-ttft"), tpot_s=parse_time(words[1], flag="--slo-tpot"))


class Setup(contextlib.ExitStack):
    """The processes of one setup, ready; they end with it."""

    def __init__(self, name: str, args: argparse.Namespace, load: Load, machine: Machine, logs: pathlib.Path) -> None:
        super().__init__()
        self.name = name
        flags = ["--max-model-len", str(load.max_model_len), "--max-num-seqs", str(load.slots), "--no-prefix-cache"]
        flags += ["--max-num-batched-tokens", str(args.chunk), "--max-queued-requests", "10000"]

        def worker(role: str, cores: tuple[int, ...], *more: str) -> Process:
            command = ["worker", role, args.model, "--listen", "127.0.0.1:0", "--mesh", "1x1", *flags, *more]
            started = Process(f"{name} {role} worker", command, logs, cores=cores, nice=args.nice)
            return self.enter_context(started)

        if name == SEPARATE:
            workers = {"prefill": worker("prefill", machine.prefill), "decode": worker("decode", machine.decode)}
            self.front_cores = machine.front
        else:
            workers = {"mixed": worker("mixed", machine.all, "--mode", name)}
            self.front_cores = machine.all
        for process in workers.values():
            process.wait_ready()
        router = ["router", "--listen", "127.0.0.1:0", "--grpc-port", "0", "--no-http"]
        router += [word for role, process in workers.items() for word in (f"--{role}", process.control)]
        front = Process(f"{name} router", router, logs, cores=self.front_cores, says=(CONTROL, GRPC))
        self.router = self.enter_context(front)
        self.router.wait_ready()
        self.address = self.router.said[GRPC]
        self.processes = {**workers, "router": self.router}


def run_setup(setup: Setup, load: Load, seed: int, logs: pathlib.Path) -> list[dict[str, Any]]:
    """One round of one setup: a row for idle and one for each rate."""
    chat_flags = ["--concurrency", str(load.chats), "--duration", "86400", "--warmup", str(load.chats)]
    chat_flags += ["--input-len", load.chat_prompt, "--output-len", load.chat_answer, "--seed", str(seed)]
    prompt_flags = ["--input-len", str(load.prompt), "--output-len", str(load.prompt_answer), "--warmup", "0"]
    # One long prompt, so that nothing is run for the first time in a window.
    once = Bench("once", setup.address, [*prompt_flags, "--num-requests", "1"], logs, cores=setup.front_cores)
    once.result(PATIENCE_S)
    chats = Bench("chats", setup.address, chat_flags, logs, cores=setup.front_cores)
    chats.wait_begun(PATIENCE_S)
    time.sleep(SETTLE_S)
    windows: list[Window] = []
    prompts: list[dict[str, Any] | None] = []
    about: list[dict[str, Any]] = []
    for rate in (0.0, *load.rates):
        with _used(setup, chats) as used:
            if rate == 0:
                began = time.time()
                time.sleep(load.idle_s)
                windows.append(Window(0.0, began, time.time()))
                prompts.append(None)
            else:
                flags = [*prompt_flags, "--request-rate", f"{rate:g}", "--duration", f"{load.window_s:g}"]
                flags += ["--seed", str(seed), "--slo-ttft", load.prompt_slo[0], "--slo-tpot", load.prompt_slo[1]]
                sent = Bench(f"prompts-{rate:g}", setup.address, flags, logs, cores=setup.front_cores)
                answered = sent.result(load.window_s + PATIENCE_S)
                (probe,) = answered["probes"]
                windows.append(Window(rate, probe["started"], probe["started"] + load.window_s))
                time.sleep(max(0.0, windows[-1].end_s - time.time()))  # where all was answered before
                prompts.append(answered)
        about.append(used)
        if chats.ended:
            raise SystemExit("the chats ended before their time; see " + str(logs))
    time.sleep(min(60.0, max(5.0, A_TOKEN_S * load.longest_answer)))  # what their end cuts off began behind the windows
    chats.interrupt()
    records = records_of(chats.result(PATIENCE_S))
    first = min((record.message_s[0] for record in records if record.message_s), default=windows[0].end_s)
    if first > windows[0].begin_s:
        raise SystemExit(f"no chat had begun to answer {SETTLE_S} s after the start; is the machine busy?")
    rows = []
    for window, result, used in zip(windows, prompts, about, strict=True):
        sent_in = [] if result is None else records_of(result)
        made = row(records, sent_in, window, chat_slo=slo(load.chat_slo), prompt_slo=slo(load.prompt_slo))
        rows.append({"setup": setup.name, **made, **used, "chats_arrived": len(arrived_in(records, window))})
    return rows


@contextlib.contextmanager
def _used(setup: Setup, chats: Bench) -> Any:
    """How many cores each process used meanwhile, and all that are not ours."""
    out: dict[str, Any] = {"load_average": round(os.getloadavg()[0], 2)}

    def now() -> dict[str, float]:
        own = {name: process.cpu_s() for name, process in setup.processes.items()} | {"chats": chats.cpu_s()}
        return own | {"all": busy_seconds()}

    before, began = now(), time.monotonic()
    yield out
    seconds, after = time.monotonic() - began, now()
    cores = {name: (after[name] - before[name]) / seconds for name in before}
    others = cores.pop("all") - sum(cores.values())
    out["cores_used"] = {name: round(value, 3) for name, value in cores.items()} | {"others": round(others, 3)}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default smollm2-135m; quick the tiny one of the tests")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--rates", type=float, nargs="+", help="prompts a second, beside none")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--window", type=float, help="seconds of each rate")
    parser.add_argument("--idle", type=float, help="seconds without prompts")
    parser.add_argument("--chats", type=int, help="streams that decode")
    parser.add_argument("--prompt", type=int, help="tokens of a long prompt")
    parser.add_argument("--chunk", type=int, default=128, help="--max-num-batched-tokens of all workers")
    parser.add_argument("--chat-slo", nargs=2, default=["2s", "100ms"], metavar=("TTFT", "TPOT"))
    parser.add_argument("--prompt-slo", nargs=2, default=["10s", "500ms"], metavar=("TTFT", "TPOT"))
    parser.add_argument("--prefill-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--decode-cores", type=int, nargs="+", default=[1])
    parser.add_argument("--front-cores", type=int, nargs="+", default=[0], help="of router and load, in `separate`")
    parser.add_argument("--nice", type=int, default=5, help="of the workers")
    parser.add_argument("--warm", action="store_true", help="start each setup once, so that all is compiled, and end")
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the results (default benchmarks/results)")
    args = parser.parse_args()
    quick: dict[str, Any] = {"model": "tests/data/tiny/smollm2", "rates": [2.0], "rounds": 1, "window": 3.0}
    quick |= {"idle": 2.0, "chats": 3, "prompt": 192}
    full: dict[str, Any] = {"model": "smollm2-135m", "rates": [0.1, 0.2, 0.3], "rounds": 3, "window": 40.0}
    full |= {"idle": 20.0, "chats": 8, "prompt": 2048}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.out is None and not args.quick:
        args.out = RESULTS
    have = os.sched_getaffinity(0)
    for flag in ("prefill_cores", "decode_cores", "front_cores"):
        if not set(getattr(args, flag)) <= have:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)}: this process may use {sorted(have)}")
    return args


def load_of(args: argparse.Namespace) -> Load:
    """What the flags ask for."""
    return Load(
        chats=args.chats,
        chat_prompt="uniform:16:32" if args.quick else "uniform:32:96",
        chat_answer="uniform:32:48" if args.quick else "uniform:192:320",
        prompt=args.prompt,
        prompt_answer=4 if args.quick else 16,
        rates=tuple(args.rates),
        idle_s=args.idle,
        window_s=args.window,
        chat_slo=tuple(args.chat_slo),
        prompt_slo=tuple(args.prompt_slo),
    )


def say(words: str, began: float) -> None:
    """Progress, on stderr."""
    print(f"[{time.monotonic() - began:5.0f} s] {words}", file=sys.stderr, flush=True)


def main() -> None:
    """Runs the rounds and writes JSON, a table and a picture."""
    args = arguments()
    load = load_of(args)
    machine = Machine(prefill=tuple(args.prefill_cores), decode=tuple(args.decode_cores), front=tuple(args.front_cores))
    began = time.monotonic()
    start_load = os.getloadavg()
    spreads: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="isolation-") as folder:
        logs = pathlib.Path(folder)
        if args.warm:
            for name in args.setups:
                say(f"{name}: starting, and compiling what is not in the compile cache", began)
                with Setup(name, args, load, machine, logs):
                    pass
            say("all is compiled", began)
            return
        for turn in range(args.rounds):
            at = turn % len(args.setups)
            for name in [*args.setups[at:], *args.setups[:at]]:
                say(f"round {turn + 1}/{args.rounds}, {name}: starting", began)
                with Setup(name, args, load, machine, logs) as setup:
                    say(f"round {turn + 1}/{args.rounds}, {name}: measuring", began)
                    for found in run_setup(setup, load, turn, logs):
                        rows.append({"round": turn + 1, **found})
                        itl, prompts = found["itl_ms"], found["prompts"]["ttft_ms"]
                        say(
                            f"    {found['rate']:g}/s: ITL p50 {itl['p50']} p99 {itl['p99']} max {itl['max']} ms, "
                            f"prompts' TTFT p50 {prompts['p50']} ms, attainment {found['attainment']}",
                            began,
                        )
                    spreads[name] = {role: process.spread() for role, process in setup.processes.items()}
    about = describe(PACKAGES) | {"load_average_at_start": [round(value, 2) for value in start_load]}
    result = {
        "command": " ".join(["python -m benchmarks.isolation", *sys.argv[1:]]),
        "machine": about,
        "load": dataclasses.asdict(load),
        "cores": dataclasses.asdict(machine),
        "chunk": args.chunk,
        "threads": spreads,
        "run_s": round(time.monotonic() - began, 1),
        "medians": over_rounds(rows),
        "rounds": rows,
    }
    text = table(result)
    print(text)
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"isolation-{slug(about)}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(result, stem)


if __name__ == "__main__":
    main()
