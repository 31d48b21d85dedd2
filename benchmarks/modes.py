"""The four modes under the same load: chats that arrive at random, and among them long prompts that disturb them.

    python -m benchmarks.modes [--model smollm2-135m] [--rates 0.5 1 2] [--requests 24] [--long-prompt 512] [--quick]

Two devices for each mode: `1x1` + `1x1` for `disaggregated`, `--mesh 2x1` for those that share one. Each mode runs in a
process of its own, warmed up by twelve requests at once; requests, arrival times and prompts are the same for all
(seeded). Every sixth request is a long prompt with a short answer, the others are chats. The prefix cache is off: no
two prompts are alike anyway.

    TTFT   arrival to first token           TTST   arrival to second token (contains the hand-off)
    ITL    gap between two tokens of one request, all requests together, the first gap (TTST - TTFT) included
    exposed transfer   decode-ready minus prefill-end; next to nothing where pages are shared

What one process hides: virtual CPU devices take turns, on the same cores. A prefill on one mesh still delays the
decodes on the other, so the gain of separate meshes does not show here, their cost (the hand-off, and half of the
devices for each role) does. On accelerators, or with a process and cores for each pool, both would run at once.

`--quick` is for the tiny model of the tests (`--model tests/data/tiny/smollm2 --quick`): does it run? Its figures mean
nothing, and it writes only where `--out` says.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from benchmarks.machine import describe, slug
from jaxpd.config import DISAGGREGATED, MODES

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy")
LONG_EVERY = 6
LONG_ANSWER = 8
CHAT_PROMPT, CHAT_ANSWER = (32, 96), (16, 32)
SHARES = (50, 90, 99)
LINES = dict(zip(MODES, (("#2a6fbb", "o"), ("#e07b39", "s"), ("#4a9c5d", "^"), ("#8a5fb0", "D")), strict=True))


def load(rate: float, requests: int, vocabulary: int, long_prompt: int) -> list[tuple[float, list[int], int]]:
    """[(arrival in seconds, prompt, tokens to answer)]: Poisson arrivals of `rate` a second."""
    rng = np.random.default_rng(20261130)  # gaps scale with the rate, all else is the same at every rate
    gaps, out = rng.exponential(1.0, requests), []
    for i in range(requests):
        long = i % LONG_EVERY == LONG_EVERY - 1
        length = long_prompt if long else int(rng.integers(*CHAT_PROMPT))
        answer = LONG_ANSWER if long else int(rng.integers(*CHAT_ANSWER))
        out.append((float(gaps[: i + 1].sum()) / rate, rng.integers(0, vocabulary, length).tolist(), answer))
    return out


def longest(long_prompt: int) -> int:
    """The model length that the load needs, in whole pages of 16 tokens."""
    return -(-max(long_prompt + LONG_ANSWER, CHAT_PROMPT[1] + CHAT_ANSWER[1]) // 16) * 16


def measure(model: str, mode: str, rates: list[float], requests: int, long_prompt: int) -> list[dict[str, Any]]:
    """Runs the load at each rate on one engine; a row for each."""
    from jaxpd.checkpoints import resolve
    from jaxpd.cli.progress import console_progress
    from jaxpd.config import EngineConfig
    from jaxpd.engine import Engine
    from jaxpd.request import Event, Request, SamplingParams, TokensEvent
    from jaxpd.startup import prepare_devices

    meshes: dict[str, Any] = {"prefill_mesh": "1x1", "decode_mesh": "1x1"} if mode == DISAGGREGATED else {"mesh": "2x1"}
    config = EngineConfig(
        mode=mode,
        max_model_len=longest(long_prompt),
        max_num_batched_tokens=128,
        prefix_cache=False,
        max_queued_requests=10_000,
        **meshes,
    )
    prepare_devices(config)
    tokens: dict[str, list[float]] = {}
    finished: dict[str, Any] = {}
    all_done = threading.Semaphore(0)

    def on_events(events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            if isinstance(event, TokensEvent):
                tokens[event.request_id] += [now] * len(event.token_ids)
            else:
                finished[event.request_id] = event
                all_done.release()

    engine = Engine(
        resolve(model, progress=console_progress()), config, on_events=on_events, progress=console_progress()
    )
    engine.start()
    vocabulary = engine.checkpoint.config.vocab_size

    def send(name: str, rate: float, requests: int) -> tuple[dict[str, float], float]:
        """Runs a load to its end: when each request came, and the seconds from the first to the last event."""
        tokens.clear()
        finished.clear()
        start = time.monotonic()
        arrivals: dict[str, float] = {}
        for i, (at, prompt, answer) in enumerate(load(rate, requests, vocabulary, long_prompt)):
            time.sleep(max(0.0, start + at - time.monotonic()))
            key = f"{name}-{i}"
            tokens[key], arrivals[key] = [], time.monotonic()
            params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=0)
            engine.submit(Request(request_id=key, prompt_ids=tuple(prompt), params=params, arrival_s=arrivals[key]))
        for _ in range(requests):
            all_done.acquire()
        return arrivals, time.monotonic() - start

    send("warm-up", 100.0, 2 * LONG_EVERY)
    rows = []
    for rate in rates:
        arrivals, wall = send(f"{rate:g}", rate, requests)
        rows.append({"mode": mode, "rate": rate, **summary(tokens, finished, arrivals, wall)})
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "errors"}), file=sys.stderr, flush=True)
    engine.close()
    return rows


def summary(
    tokens: dict[str, list[float]], finished: dict[str, Any], arrivals: dict[str, float], wall: float
) -> dict[str, Any]:
    """Percentiles in milliseconds, and tokens per second of the whole run."""
    errors = [str(event.error) for event in finished.values() if event.error is not None]
    exposed = [event.timings.transfer_exposed_s for event in finished.values()]

    def percentiles(seconds: list[float]) -> dict[str, float] | None:
        return {f"p{p}": float(np.percentile(seconds, p)) * 1e3 for p in SHARES} if seconds else None

    return {
        "ttft_ms": percentiles([times[0] - arrivals[name] for name, times in tokens.items() if times]),
        "ttst_ms": percentiles([times[1] - arrivals[name] for name, times in tokens.items() if len(times) > 1]),
        "itl_ms": percentiles([gap for times in tokens.values() for gap in np.diff(times).tolist()]),
        "exposed_transfer_ms": percentiles([s for s in exposed if s is not None and s >= 0]),
        "tokens_per_s": sum(map(len, tokens.values())) / wall,
        "errors": errors,
    }


def table(rows: list[dict[str, Any]], about: dict[str, Any], command: str) -> str:
    """Markdown."""
    names = (("TTFT", "ttft_ms"), ("TTST", "ttst_ms"), ("ITL", "itl_ms"), ("exposed transfer", "exposed_transfer_ms"))
    lines = [
        "# The modes under the same load", "",
        f"`{command}`", f"on a {about['name']}, jax {about['packages']['jax']}, {about['date']}.",
        "Virtual devices of one process take turns, so that what separate meshes gain does not show (see the script).",
        "Milliseconds, p50 / p90 / p99.", "",
        "| mode | requests/s | " + " | ".join(name for name, _ in names) + " | tokens/s |",
        "|---" * (len(names) + 3) + "|",
    ]  # fmt: skip
    for row in rows:
        cells = [" / ".join(f"{row[key][f'p{p}']:.0f}" for p in SHARES) if row[key] else "none" for _, key in names]
        lines.append(f"| {row['mode']} | {row['rate']:g} | {' | '.join(cells)} | {row['tokens_per_s']:.0f} |")
    return "\n".join([*lines, ""])


def plot(rows: list[dict[str, Any]], about: dict[str, Any], path: pathlib.Path) -> None:
    """Latency against rate, one line a mode: solid the tail, faint the median. Nothing without matplotlib."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        print("no chart: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.8))
    panels = (
        ("ttft_ms", "p90", "Time to first token"),
        ("ttst_ms", "p90", "Time to second token (with the hand-off)"),
        ("itl_ms", "p99", "Gap between tokens"),
    )
    for axis, (key, tail, title) in zip(axes, panels, strict=True):
        for mode, (colour, marker) in LINES.items():
            for share, alpha, width in (("p50", 0.35, 1.2), (tail, 1.0, 2.0)):
                mine = [(row["rate"], row[key][share]) for row in rows if row["mode"] == mode and row[key]]
                if mine:
                    label = mode if share == tail else None
                    style = {"color": colour, "marker": marker, "alpha": alpha, "linewidth": width, "label": label}
                    axis.plot(*zip(*sorted(mine), strict=True), **style)
        axis.set_title(f"{title}: {tail}, faint p50", fontsize=11)
        axis.set(xlabel="requests a second", ylabel="ms", ylim=(0, None), xticks=sorted({row["rate"] for row in rows}))
        axis.grid(alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"Chats with long prompts among them, two devices a mode ({about['name']})")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.035), ncols=len(MODES), frameon=False)
    note = (
        "Virtual devices of one process take turns: what separate meshes gain does not show here, what they cost does."
    )
    figure.text(0.5, 0.012, note, ha="center", fontsize=9, color="#555555")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second (default 0.5 1 2; quick 4 8)")
    parser.add_argument("--requests", type=int, help="at each rate (default 24; quick 12)")
    parser.add_argument("--long-prompt", type=int, help="tokens of every sixth prompt (default 512; quick 192)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--quick", action="store_true", help="few requests, short prompts: does it run?")
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder of the results (default benchmarks/results; quick none)"
    )
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rates = args.rates or ([4.0, 8.0] if args.quick else [0.5, 1.0, 2.0])
    args.requests = args.requests or (12 if args.quick else 24)
    args.long_prompt = args.long_prompt or (192 if args.quick else 512)
    args.out = args.out or (None if args.quick else RESULTS)
    return args


def main() -> None:
    """Runs each mode in a process of its own and writes JSON, Markdown and PNG."""
    args = arguments()
    if args.one is not None:
        print(json.dumps(measure(args.model, args.one, args.rates, args.requests, args.long_prompt)))
        return
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for mode in args.modes:
        command = [sys.executable, "-m", "benchmarks.modes", "--one", mode, "--model", args.model]
        command += ["--requests", str(args.requests), "--long-prompt", str(args.long_prompt)]
        command += ["--rates", *map(str, args.rates)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={"JAX_PLATFORMS": "cpu", **os.environ})
        if done.returncode:
            raise SystemExit(f"mode {mode} ended with status {done.returncode}; what it said is above")
        rows += json.loads(done.stdout)
    about = describe(PACKAGES)
    flags = f"--model {args.model} --requests {args.requests} --long-prompt {args.long_prompt}"
    ran = f"python -m benchmarks.modes {flags} --rates {' '.join(f'{rate:g}' for rate in args.rates)}"
    text = table(rows, about, ran)
    print(text)
    for row in rows:
        for error in sorted(set(row["errors"])):
            print(f"FAILED: {row['mode']} at {row['rate']:g}/s: {error}", file=sys.stderr)
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"modes-{slug(about)}"
    result = {
        "command": ran,
        "machine": about,
        "run_s": round(time.monotonic() - began, 1),
        "rows": rows,
    }
    (args.out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.out / f"{stem}.md").write_text(text, encoding="utf-8")
    plot(rows, about, args.out / f"{stem}.png")


if __name__ == "__main__":
    main()
