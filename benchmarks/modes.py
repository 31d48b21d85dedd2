"""The four modes under the same load: chats that arrive at random, and among them long prompts that disturb them.

    python -m benchmarks.modes [--model smollm2-135m] [--rates 0.5 1 2] [--requests 24]

Two devices for each mode: `1x1` + `1x1` for `disaggregated`, `--mesh 2x1` for those that share one. Each mode runs in a
process of its own; requests, arrival times and prompts are the same for all (seeded). Every sixth request is a long
prompt with a short answer, the others are chats. The prefix cache is off: no two prompts are alike anyway.

    TTFT   arrival to first token           TTST   arrival to second token (contains the hand-off)
    ITL    gap between two tokens of one request, all requests together, the first gap (TTST - TTFT) included
    exposed transfer   decode-ready minus prefill-end; none where pages are shared

What virtual CPU devices hide: in one process they take turns, so a prefill of one mesh still delays the decodes of the
other; the gain of separate meshes does not show here, their cost does. On accelerators both run at once.
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
LONG_PROMPT, LONG_ANSWER = 512, 8
CHAT_PROMPT, CHAT_ANSWER = (32, 96), (16, 32)
SHARES = (50, 90, 99)


def load(rate: float, requests: int, vocabulary: int) -> list[tuple[float, list[int], int]]:
    """[(arrival in seconds, prompt, tokens to answer)]: Poisson arrivals of `rate` a second."""
    rng = np.random.default_rng(20261130)  # gaps scale with the rate, all else is the same at every rate
    gaps, out = rng.exponential(1.0, requests), []
    for i in range(requests):
        long = i % LONG_EVERY == LONG_EVERY - 1
        length = LONG_PROMPT if long else int(rng.integers(*CHAT_PROMPT))
        answer = LONG_ANSWER if long else int(rng.integers(*CHAT_ANSWER))
        out.append((float(gaps[: i + 1].sum()) / rate, rng.integers(0, vocabulary, length).tolist(), answer))
    return out


def measure(model: str, mode: str, rates: list[float], requests: int) -> list[dict[str, Any]]:
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
        max_model_len=1024,
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
    rows = []
    for rate in rates:
        tokens.clear()
        finished.clear()
        start = time.monotonic()
        arrivals: dict[str, float] = {}
        for i, (at, prompt, answer) in enumerate(load(rate, requests, vocabulary)):
            time.sleep(max(0.0, start + at - time.monotonic()))
            name = f"{rate}-{i}"
            tokens[name], arrivals[name] = [], time.monotonic()
            params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=0)
            engine.submit(Request(request_id=name, prompt_ids=tuple(prompt), params=params, arrival_s=arrivals[name]))
        for _ in range(requests):
            all_done.acquire()
        wall = time.monotonic() - start
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


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Markdown."""
    names = (("TTFT", "ttft_ms"), ("TTST", "ttst_ms"), ("ITL", "itl_ms"), ("exposed transfer", "exposed_transfer_ms"))
    lines = [
        "# The modes under the same load", "",
        f"`python -m benchmarks.modes` on a {about['name']}, jax {about['packages']['jax']}, {about['date']}. Two",
        "virtual devices in one process take turns, so that what separate meshes gain does not show (see the script).",
        "Milliseconds, p50 / p90 / p99.", "",
        "| mode | requests/s | " + " | ".join(name for name, _ in names) + " | tokens/s |",
        "|---" * (len(names) + 3) + "|",
    ]  # fmt: skip
    for row in rows:
        cells = [" / ".join(f"{row[key][f'p{p}']:.0f}" for p in SHARES) if row[key] else "none" for _, key in names]
        lines.append(f"| {row['mode']} | {row['rate']:g} | {' | '.join(cells)} | {row['tokens_per_s']:.0f} |")
    return "\n".join([*lines, ""])


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Latency against rate, one line a mode; nothing where matplotlib is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        print("no chart: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4))
    for axis, (key, share, title) in zip(
        axes, (("ttft_ms", "p90", "TTFT"), ("ttst_ms", "p90", "TTST"), ("itl_ms", "p99", "ITL")), strict=True
    ):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            mine = [row for row in rows if row["mode"] == mode]
            axis.plot([r["rate"] for r in mine], [r[key][share] for r in mine], marker="o", label=mode)
        axis.set(title=f"{title} {share}", xlabel="requests/s", ylabel="ms", ylim=(0, None))
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs each mode in a process of its own and writes JSON, Markdown and PNG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=24, help="at each rate")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.model, args.one, args.rates, args.requests)))
        return
    rows: list[dict[str, Any]] = []
    for mode in args.modes:
        command = [sys.executable, "-m", "benchmarks.modes", "--one", mode, "--model", args.model]
        command += ["--requests", str(args.requests), "--rates", *map(str, args.rates)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env={"JAX_PLATFORMS": "cpu", **os.environ}
        )
        rows += json.loads(done.stdout)
    about = describe(PACKAGES)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"modes-{slug(about)}"
    stem.with_suffix(".json").write_text(
        json.dumps({"machine": about, "requests": args.requests, "rows": rows}, indent=1) + "\n"
    )
    stem.with_suffix(".md").write_text(table(rows, about))
    plot(rows, stem.with_suffix(".png"))
    print(table(rows, about))


if __name__ == "__main__":
    main()
