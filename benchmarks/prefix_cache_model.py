"""What does the prefix cache save of the time to first token? A real trace, scaled down, through the real engine.

    python -m benchmarks.prefix_cache_model TRACE.jsonl [--requests 200] [--pick conversations|first] [--quick]

The trace is one of Mooncake's (mooncake.py says where to get them). Lengths are divided by `--scale`, 32, so that a
block of 512 tokens becomes one of 16, which is exactly one page; every block gets random tokens of the model's
vocabulary from its id. In a trace's first 200 requests few conversations have come to their second turn, so that
hardly anything is found; `--pick conversations`, the default, takes the 200 requests that belong to the conversations
that begin first, in the order of the trace (a conversation: requests that have their second block in common; the
first one is a system prompt that many share).

Two engines run side by side in one process, `1x1` + `1x1` each, one without the prefix cache (cold) and one with it
(warm). Every request goes through both, one after another and in turn first, so that both see the same moments of a
noisy machine; answers have two tokens, the second of which comes from the decode mesh. TTFT is `Timings.ttft_s`, the
share found is `Usage.cached_tokens` over the prompt. Next to it: what the cache policy alone finds in a pool of that
size (`prefix_cache.replay`), and how many answers differ between the two engines, of which there should be none.

200 requests of 520 tokens take about 4 minutes on two cores, start included. `--quick` sends 12 and writes nothing
unless `--out` is given. Prompts too long for the model are left out (`--model tests/data/tiny/smollm2 --quick`).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe, slug
from benchmarks.mooncake import BLOCK, SOURCE, Prompt, conversations, read, scaled
from benchmarks.prefix_cache import replay
from jaxpd.cache.keys import Chain

RESULTS = pathlib.Path(__file__).parent / "results"
ANSWER = 2  # tokens
WARM_UP = 10**9  # ids of blocks that no trace has
MIB = 1 << 20
COLD_KV = 320 * MIB  # more than one sequence at a time never is
TIMES = ("cold_ttft", "warm_ttft", "cold_ttst", "warm_ttst")
SHARES = {"all": (0.0, 1.01), "nothing": (0.0, 1e-9), "below half": (1e-9, 0.5), "half or more": (0.5, 1.01)}


def run(model: str, prompts: Sequence[Sequence[int]], kv_memory: int) -> dict[str, Any]:
    """Sends prompts through both engines: {"rows": one a prompt, "pages": of the warm prefill pool, "policy_tokens"}.

    Times are in seconds, `kv_memory` is in bytes.
    """
    from jaxpd import LLM, SamplingParams
    from jaxpd.cli.progress import console_progress

    longest = -(-(max(map(len, prompts)) + ANSWER) // 16) * 16
    rng = np.random.default_rng(WARM_UP)
    vocabulary = max(map(max, prompts)) + 1
    warm_up = [rng.integers(0, vocabulary, min(size, longest - ANSWER)).tolist() for size in (16, 100, 600, longest)]
    common: dict[str, Any] = {"prefill_mesh": "1x1", "decode_mesh": "1x1", "max_model_len": longest, "page_size": 16}
    engines = {
        "cold": LLM(
            model, prefix_cache=False, kv_memory=min(COLD_KV, kv_memory), progress=console_progress(), **common
        ),
        "warm": LLM(model, prefix_cache=True, kv_memory=kv_memory, progress=console_progress(), **common),
    }
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    try:
        for number, prompt in enumerate([*warm_up, *prompts]):
            row: dict[str, Any] = {"prompt_tokens": len(prompt)}
            answers = {}
            for name in ("cold", "warm") if number % 2 else ("warm", "cold"):
                (done,) = engines[name].generate([prompt], params)
                if done.error is not None:
                    raise done.error
                answers[name] = done.token_ids
                row[f"{name}_ttft_s"], row[f"{name}_ttst_s"] = done.timings.ttft_s, done.timings.ttst_s
                row[f"{name}_cached_tokens"] = done.usage.cached_tokens
            row["same"] = answers["cold"] == answers["warm"]
            rows.append(row)
            if number % 20 == 19:
                print(f"{time.strftime('%H:%M:%S')} {number + 1} requests", file=sys.stderr, flush=True)
        pages = engines["warm"].engine.limits.prefill[0].num_pages
    finally:
        for engine in engines.values():
            engine.close()
    before = replay([Chain(16, prompt) for prompt in warm_up], pages, 1).hit
    found = replay([Chain(16, prompt) for prompt in (*warm_up, *prompts)], pages, 1).hit
    return {"rows": rows[len(warm_up) :], "pages": pages, "policy_tokens": 16 * (found - before)}


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By the share of the prompt that was found: requests, tokens, and TTFT and TTST of both engines in ms."""
    found: dict[str, Any] = {}
    for name, (low, high) in SHARES.items():
        mine = [row for row in rows if low <= row["warm_cached_tokens"] / row["prompt_tokens"] < high]
        if not mine:
            continue
        prompt_tokens = sum(row["prompt_tokens"] for row in mine)
        found[name] = {
            "requests": len(mine),
            "prompt_tokens": prompt_tokens,
            "cached_share": round(sum(row["warm_cached_tokens"] for row in mine) / prompt_tokens, 4),
            **{f"{key}_ms": statistics_ms([row[f"{key}_s"] for row in mine]) for key in TIMES},
            "ttft_saved": round(1 - sum(r["warm_ttft_s"] for r in mine) / sum(r["cold_ttft_s"] for r in mine), 4),
        }
    return found


def statistics_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and mean in milliseconds."""
    p50, p90 = np.percentile(seconds, (50, 90))
    return {name: round(1e3 * float(s), 1) for name, s in (("p50", p50), ("p90", p90), ("mean", np.mean(seconds)))}


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"{result['trace']} / {result['scale']}, {len(result['rows'])} requests: TTFT, ms")
    table.add_column("of the prompt found")
    for column in ("requests", "tokens each", "found", "cold p50 / p90", "mean", "warm p50 / p90", "mean", "saved"):
        table.add_column(column, justify="right")
    for name, got in result["by_share"].items():
        cells = []
        for key in ("cold_ttft_ms", "warm_ttft_ms"):
            cells += [f"{got[key]['p50']:.0f} / {got[key]['p90']:.0f}", f"{got[key]['mean']:.0f}"]
        each = f"{got['prompt_tokens'] / got['requests']:.0f}"
        saved = f"{100 * got['ttft_saved']:.0f}%"
        table.add_row(name, str(got["requests"]), each, f"{100 * got['cached_share']:.0f}%", *cells, saved)
    table.caption = (
        f"{result['cached_tokens']:,} tokens found in {result['pages']:,} pages, {result['policy_tokens']:,} by the "
        f"policy alone; {result['different']} answers differ"
    )
    Console(width=max(110, Console().width)).print(table)


def draw(result: dict[str, Any], title: str, path: pathlib.Path) -> bool:
    """TTFT against prompt length, and its distribution; False where matplotlib is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker  # type: ignore[import-not-found]

    rows = result["rows"]
    tokens = [row["prompt_tokens"] for row in rows]
    share = [100 * row["warm_cached_tokens"] / row["prompt_tokens"] for row in rows]
    cold, warm = ([1e3 * row[f"{name}_ttft_s"] for row in rows] for name in ("cold", "warm"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), width_ratios=(1.25, 1))
    left.scatter(tokens, cold, s=16, color="#bbbbbb", label="cold: no cache")
    dots = left.scatter(tokens, warm, s=22, c=share, cmap="viridis", vmin=0, vmax=100, label="warm: prefix cache")
    figure.colorbar(dots, ax=left, label="% of the prompt found")
    left.set(xscale="log", yscale="log", xlabel="tokens in the prompt", ylabel="time to first token, ms")
    left.legend(loc="upper left", frameon=False)
    high = [i for i, found in enumerate(share) if found >= 50]
    lines = [("cold", cold, "#888888", "-"), ("warm", warm, "#2a6fbb", "-")]
    if high:
        lines.append((f"cold, the {len(high)} with half or more found", [cold[i] for i in high], "#888888", "--"))
        lines.append((f"warm, the {len(high)} with half or more found", [warm[i] for i in high], "#2a6fbb", "--"))
    for label, values, colour, dashes in lines:
        at = np.arange(1, len(values) + 1) / len(values) * 100
        right.step(sorted(values), at, where="post", color=colour, linestyle=dashes, label=label)
    right.set(xscale="log", ylim=(0, 101), xlabel="time to first token, ms", ylabel="% of requests that took no longer")
    right.legend(loc="lower right", frameon=False, fontsize=9)
    for ticks in (left.xaxis, left.yaxis, right.xaxis):
        ticks.set_major_formatter(lambda value, _: f"{value:g}")
        ticks.set_minor_formatter(ticker.NullFormatter())
    for axis in (left, right):
        axis.grid(alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path, help=f"TRACE.jsonl; {SOURCE}")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, help="default 200; quick 12")
    parser.add_argument("--scale", type=int, default=32, help="lengths are divided by this; 512 / it is a block")
    parser.add_argument("--pick", choices=("conversations", "first"), default="conversations", help="which requests")
    parser.add_argument("--kv-memory", type=int, default=3 << 30, help="bytes of each warm pool (default 3 GiB)")
    parser.add_argument("--quick", action="store_true", help="few requests, nothing written: does it run?")
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder of the results (default benchmarks/results; quick none)"
    )
    options = parser.parse_args()
    if options.scale < 1 or BLOCK % options.scale:
        parser.error(f"--scale {options.scale} does not divide {BLOCK}, the tokens of a block in the traces")
    from jaxpd.checkpoints import resolve
    from jaxpd.cli.progress import console_progress

    config = resolve(options.model, progress=console_progress()).config
    count = options.requests or (12 if options.quick else 200)
    fitting = [p for p in read(options.trace) if p.length // options.scale + ANSWER <= config.max_position]
    picked: list[Prompt] = conversations(fitting, count) if options.pick == "conversations" else fitting[:count]
    began = time.monotonic()
    prompts = [scaled(prompt, options.scale, config.vocab_size) for prompt in picked]
    got = run(options.model, prompts, options.kv_memory)
    rows = got["rows"]
    about = describe(("jaxpd", "jax", "jaxlib", "numpy"))
    flags = f"--requests {count} --scale {options.scale} --pick {options.pick} --kv-memory {options.kv_memory}"
    result = {
        "command": f"python -m benchmarks.prefix_cache_model {options.trace.name} --model {options.model} {flags}",
        "machine": about,
        "run_s": round(time.monotonic() - began, 1),
        "trace": options.trace.stem,
        "scale": options.scale,
        "cached_tokens": sum(row["warm_cached_tokens"] for row in rows),
        "different": sum(not row["same"] for row in rows),
        "by_share": summarise(rows),
        **got,
    }
    show(result)
    out = options.out or (None if options.quick else RESULTS)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"prefix_cache_model-{slug(about)}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    title = f"{result['trace']}, lengths / {options.scale}, {len(rows)} requests one by one ({about['name']})"
    files = [path.name, *([path.with_suffix(".png").name] if draw(result, title, path.with_suffix(".png")) else [])]
    print(f"written to {out}: {', '.join(files)}")


if __name__ == "__main__":
    main()
