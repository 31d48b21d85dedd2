"""What share of the prompts does the prefix cache save, by the size of its pool? The policy alone, on real traces.

    python -m benchmarks.prefix_cache TRACE.jsonl... [--page-sizes 512 16] [--in-flight 1 32] [--no-write]

The traces are Mooncake's, from https://github.com/kvcache-ai/Mooncake, folder FAST25-release/traces; mooncake.py says
what is in them and how block ids become tokens. Prompts keep their full lengths; no model runs.

Requests go through one `jaxpd.cache.prefix.PrefixCache` in the order of the trace, each as in a prefill pool: acquire,
commit the prompt, release once `--in-flight` requests have come since (1: before the next comes). When there is no
room, older requests end early; a prompt larger than the pool is refused and finds nothing. The hit rate is pages found
over pages that could be found, which are the full pages before the prompt's last token.

Next to it: an infinite cache, worked out from the block ids alone, which the policy must equal in a pool that holds the
whole trace; and, for one request at a time, a pool of the same size that knows the future and evicts what is wanted
last. `all_blocks` in the results is the measure of Mooncake's paper: found over all blocks, the half-full ones too.

Three thousand requests take about 75 s of one core with both page sizes, and 5 s with `--page-sizes 512`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe, slug
from benchmarks.mooncake import BLOCK, SOURCE, Prompt, clairvoyant, infinite, infinite_blocks, read
from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixCache, PrefixLease

RESULTS = pathlib.Path(__file__).parent / "results"
SMALLEST = 1 << 16  # tokens of the smallest pool; each is twice the one before, and the last holds the whole trace


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a run through the cache found, in pages."""

    hit: int
    queried: int
    evicted: int
    refused: int  # requests


def replay(chains: Sequence[Chain], num_pages: int, in_flight: int, *, whole: bool = False) -> Counted:
    """Sends prompts through a cache of `num_pages` pages."""
    cache = PrefixCache(num_pages, in_flight, chains[0].page_size)
    running: deque[PrefixLease] = deque()
    refused = missed = 0
    for chain in chains:
        pages = -(-chain.length // chain.page_size)
        if pages > num_pages:
            refused += 1
            missed += findable(chain, whole)
            continue
        while len(running) >= in_flight:
            running.popleft().release()
        while (lease := cache.acquire(chain, pages, whole=whole)) is None:
            running.popleft().release()
        lease.commit(chain.length)
        running.append(lease)
    stats = cache.stats()
    return Counted(stats.hit, stats.queried + missed, stats.evicted, refused)


def findable(chain: Chain, whole: bool = False) -> int:
    """Pages of a prompt that a cache may save."""
    return chain.length // chain.page_size if whole else (chain.length - 1) // chain.page_size


# the questions --------------------------------------------------------------------------------------------------------


def curve(prompts: Sequence[Prompt], page_size: int, in_flight: Sequence[int]) -> dict[str, Any]:
    """Hit rates by pool size at one page size, and the infinite cache's."""
    chains = [Chain(page_size, prompt.tokens()) for prompt in prompts]
    queried = sum(map(findable, chains))
    everything = sum(-(-prompt.length // page_size) for prompt in prompts)  # no page is ever needed twice
    sizes: list[int] = []
    while (tokens := SMALLEST << len(sizes)) < everything * page_size:
        sizes.append(tokens // page_size)
    best = infinite(prompts, page_size)
    points = []
    for pages in [*sizes, everything]:
        point: dict[str, Any] = {"pool_tokens": pages * page_size, "pool_pages": pages}
        for count in in_flight:
            start = time.perf_counter()
            found = replay(chains, pages, count)
            taken = time.perf_counter() - start
            if found.queried != queried:
                raise AssertionError(f"{found.queried} pages were looked for, {queried} should have been")
            point[f"in_flight_{count}"] = {
                "hit_rate": round(found.hit / queried, 5),
                **dataclasses.asdict(found),
                "us_per_page": round(taken / queried * 1e6, 2),
            }
        if page_size == BLOCK:
            point["clairvoyant_hit_rate"] = round(clairvoyant(chains, pages) / queried, 5)
        points.append(point)
    for count in in_flight:
        hit = points[-1][f"in_flight_{count}"]["hit"]
        if hit != best:
            raise AssertionError(f"{count} in flight: {hit} pages found in a pool for everything, {best} with no end")
    return {
        "page_size": page_size,
        "queried_pages": queried,
        "infinite_hit_pages": best,
        "infinite_hit_rate": round(best / queried, 5),
        "points": points,
    }


def all_blocks(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The paper's measure: a block is a page of one token, its id, and every block of a prompt may be found."""
    blocks = sum(len(prompt.blocks) for prompt in prompts)
    found = replay([Chain(1, prompt.blocks) for prompt in prompts], blocks, 1, whole=True)
    best = infinite_blocks(prompts)
    if (found.hit, found.queried) != (best, blocks):
        raise AssertionError(f"{found.hit} of {found.queried} blocks found, an infinite cache finds {best} of {blocks}")
    return {"blocks": blocks, "hit": best, "hit_rate": round(best / blocks, 5)}


def show(name: str, result: dict[str, Any]) -> None:
    """The table of one trace."""
    every = result["all_blocks"]
    for got in result["curves"]:
        columns = [key for key in got["points"][0] if key.startswith("in_flight_")]
        table = Table(title=f"{name}, {result['requests']} requests: % of {got['page_size']}-token pages found")
        table.add_column("pool, tokens", justify="right")
        for key in columns:
            table.add_column(f"{key.removeprefix('in_flight_')} in flight", justify="right")
        table.add_column("knows the future", justify="right")
        table.add_column("refused", justify="right")
        for point in got["points"]:
            future = point.get("clairvoyant_hit_rate")
            table.add_row(
                f"{point['pool_tokens']:,}",
                *(f"{100 * point[key]['hit_rate']:.2f}" for key in columns),
                "" if future is None else f"{100 * future:.2f}",
                str(point[columns[0]]["refused"]),
            )
        table.caption = (
            f"infinite cache {100 * got['infinite_hit_rate']:.2f} (of all blocks {100 * every['hit_rate']:.2f})"
        )
        Console(width=max(100, Console().width)).print(table)


def draw(traces: dict[str, Any], title: str, path: pathlib.Path) -> bool:
    """Hit rate against pool size; False where matplotlib is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, axes = pyplot.subplots(1, len(traces), figsize=(6 * len(traces), 4.4), squeeze=False)
    for axis, (name, result) in zip(axes[0], traces.items(), strict=True):
        got = result["curves"][0]
        sizes = [point["pool_tokens"] for point in got["points"]]
        axis.axhline(100 * got["infinite_hit_rate"], color="#b0b0b0", linestyle="--", label="infinite cache")
        if "clairvoyant_hit_rate" in got["points"][0]:
            rates = [100 * point["clairvoyant_hit_rate"] for point in got["points"]]
            axis.plot(sizes, rates, color="#b0b0b0", label="knows the future, 1 in flight")
        lines = [key for key in got["points"][0] if key.startswith("in_flight_")]
        styles = zip(("#2a6fbb", "#e07b39", "#4a9c5d", "#8a5fb0"), ("-", "--", ":", "-."), strict=True)
        for key, (colour, dashes) in zip(lines, itertools.cycle(styles), strict=False):
            rates = [100 * point[key]["hit_rate"] for point in got["points"]]
            axis.plot(
                sizes, rates, f"{dashes}o", color=colour, label=f"jaxpd, {key.removeprefix('in_flight_')} in flight"
            )
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens in the pool")
        axis.set_ylabel(f"% of {got['page_size']}-token pages found")
        axis.set_title(f"{name}, {result['requests']} requests")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=2 + len(lines))
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("traces", nargs="*", type=pathlib.Path, metavar="TRACE.jsonl")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[BLOCK, 16], help="tokens; each must divide 512")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32], help="requests that hold their pages")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    if not options.traces:
        parser.error(f"no trace given; get one or more from {SOURCE}, and name their files")
    for size in options.page_sizes:
        if size < 1 or BLOCK % size:
            parser.error(f"--page-sizes: {size} does not divide {BLOCK}, the tokens of a block in the traces")
    if min(options.in_flight) < 1:
        parser.error(f"--in-flight: {min(options.in_flight)} is below 1")
    began = time.perf_counter()
    traces: dict[str, Any] = {}
    for path in options.traces:
        prompts = read(path)
        traces[path.stem] = {
            "requests": len(prompts),
            "tokens": sum(prompt.length for prompt in prompts),
            "longest_prompt": max(prompt.length for prompt in prompts),
            "all_blocks": all_blocks(prompts),
            "curves": [curve(prompts, size, options.in_flight) for size in options.page_sizes],
        }
        show(path.stem, traces[path.stem])
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s; every pool that holds a whole trace finds what an infinite cache finds")
    if options.no_write:
        return
    about = describe(("jaxpd", "numpy"))
    names = [path.name for path in options.traces]
    rest = [arg for arg in sys.argv[1:] if pathlib.Path(arg) not in options.traces]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"prefix_cache-{slug(about)}.json"
    written = {
        "command": " ".join(["python -m benchmarks.prefix_cache", *names, *rest]),
        "machine": about,
        "run_s": round(seconds, 1),
        "traces": traces,
    }
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    files = [path.name]
    if draw(
        traces, f"Prefix cache, the policy alone, on Mooncake's traces ({about['name']})", path.with_suffix(".png")
    ):
        files.append(path.with_suffix(".png").name)
    print(f"written to {RESULTS}: {', '.join(files)}")


if __name__ == "__main__":
    main()
