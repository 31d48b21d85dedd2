"""What is left of the hand-off after the first token, when KV crosses in chunks of the prompt or in groups of layers?

    python -m benchmarks.handoff_overlap [--model smollm2-135m] [--prefill-mesh 1x1] [--rounds 3] [--quick]

Two questions, in one process, with the link between the meshes as fast as it is and as slow as a network (`--links`,
MB/s, 0 for full speed; the in-process transport makes it so):

    chunks   a prompt of many chunks (--prompt in --chunk tokens) through the engine: everything sent at the end, full
             pages sent after each chunk, and the same with a small last chunk (`jaxpd.policies.chunking`, forced here;
             the result says whether the policy would choose it by the costs it measured)
    layers   a prompt of one chunk (--one-chunk tokens): the forward in one program, in groups of layers that are sent
             one by one (`benchmarks.layer_groups`), and cut into chunks after all

    first token     from the request (chunks) or the first dispatch (layers) until the first token is on the host
    exposed         from then until all KV is in the decode pool and can be decoded from
    ready           first token + exposed; what counts, since pieces can make the first token later
    whole transfer  what one transfer of all the KV takes

Variants take turns within a round and are compared within it. Their first tokens must be the same and, for `layers`,
so must the KV that arrived. Both meshes are virtual CPU devices of one process: they share its cores, so a transfer at
full speed also slows the computation that hides it.

`--quick --model tests/data/tiny/smollm2` only asks whether it runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pathlib
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from benchmarks.handoff_overlap_report import CHUNKS, ONE_PIECE, SMALL_LAST, plot, table
from benchmarks.machine import busy_seconds, describe, slug

if TYPE_CHECKING:
    from jaxpd.request import FinishEvent
    from meshes.transfer.in_process import InProcessTransport

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy")
ANSWER = 4  # tokens: the second one has waited for the hand-off
CLOSE = 1e-5  # of the largest value: how far the KV of two ways to compute it may differ
MB = 1e6
Times = dict[str, float]  # milliseconds
Runs = dict[tuple[float, str], list[Times]]  # (MB/s, variant) -> one a round


def in_turns(rounds: int, links: Sequence[float], names: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Every variant on every link in each round, begun with another variant each time."""
    for r in range(rounds):
        for link in links:
            for i in range(len(names)):
                yield link, names[(i + r) % len(names)]


def rows_of(part: str, runs: Runs) -> list[dict[str, Any]]:
    """A row for each link and variant: its times round by round, {what: [ms]}."""
    return [
        {"part": part, "link_mb_s": link, "variant": name, **{k: [round(run[k], 2) for run in of] for k in of[0]}}
        for (link, name), of in runs.items()
    ]


@contextlib.contextmanager
def throttled(transport: InProcessTransport, link: float) -> Iterator[list[tuple[float, float]]]:
    """The link at so many MB/s (0: full speed); gives the (bytes, seconds) of every transfer meanwhile."""
    seen: list[tuple[float, float]] = []
    record = transport.cost.record

    def both(size: float, seconds: float) -> None:
        seen.append((size, seconds))
        record(size, seconds)

    transport.bytes_per_s = link * MB or None
    with mock.patch.object(transport.cost, "record", both):
        yield seen


@contextlib.contextmanager
def handing_off(variant: str) -> Iterator[None]:
    """The engine sends KV as a variant of the first question says."""
    from jaxpd import handoff, pool
    from jaxpd.policies.chunking import Costs, next_chunk

    pays = Costs(transfer_s_per_token=1.0) if variant == SMALL_LAST else Costs()

    def cut(left: int, budget: int, *, first: bool, page_size: int, costs: Costs) -> int:
        del costs  # what a variant does must not depend on what was measured before
        return next_chunk(left, budget, first=first, page_size=page_size, costs=pays)

    least = sys.maxsize if variant == ONE_PIECE else handoff.LEAST_PAGES
    with mock.patch.object(handoff, "LEAST_PAGES", least), mock.patch.object(pool, "next_chunk", cut):
        yield


def measure_chunks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The first question; a row for each link and variant."""
    from jaxpd.checkpoints import resolve
    from jaxpd.cli.progress import console_progress
    from jaxpd.config import EngineConfig
    from jaxpd.engine import Engine
    from jaxpd.policies.chunking import next_chunk
    from jaxpd.request import Event, Request, SamplingParams, TokensEvent
    from meshes.transfer.meter import Meter

    config = EngineConfig(
        prefill_mesh=args.prefill_mesh,
        decode_mesh="1x1",
        dtype="float32",
        max_num_seqs=1,
        max_num_batched_tokens=args.chunk,
        max_model_len=-(-(args.prompt + ANSWER) // 16) * 16,
        prefix_cache=False,
    )
    tokens: list[int] = []
    ended: queue.Queue[FinishEvent] = queue.Queue()

    def on_events(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEvent):
                tokens.extend(event.token_ids)
            else:
                ended.put(event)

    engine = Engine(resolve(args.model, progress=console_progress()), config, on_events=on_events)
    engine.start()
    prompt = prompt_of(args.prompt, engine.checkpoint.config.vocab_size)

    def send(variant: str) -> tuple[FinishEvent, list[int]]:
        tokens.clear()
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=0)
        with handing_off(variant):
            engine.submit(Request(request_id="one", prompt_ids=prompt, params=params, arrival_s=time.monotonic()))
            done = ended.get()
        if done.error is not None:
            raise done.error
        return done, list(tokens)

    names = (ONE_PIECE, CHUNKS, SMALL_LAST)
    expected = [send(name)[1] for name in names][0]  # also warms all of them up
    transport, meters = engine.transport, {link: Meter() for link in args.links}
    runs: Runs = {}
    for link, name in in_turns(args.rounds, args.links, names):
        transport.cost = meters[link]
        with throttled(transport, link) as transfers:
            done, got = send(name)
        if got != expected:
            raise SystemExit(f"{name} at {link:g} MB/s answered {got}, but {ONE_PIECE} answered {expected}")
        times = chunk_times(done, transfers)
        runs.setdefault((link, name), []).append(times)
        print(f"chunks, link {link:g}, {name}: {json.dumps(times)}", file=sys.stderr, flush=True)
    rows = rows_of("chunks", runs)
    for row in rows:
        if row["variant"] == SMALL_LAST:
            transport.cost = meters[row["link_mb_s"]]
            cut = next_chunk(args.chunk, args.chunk, first=False, page_size=config.page_size, costs=engine.costs())
            row["policy_chooses_it"] = cut < args.chunk
    engine.close()
    return rows


def chunk_times(done: FinishEvent, transfers: Sequence[tuple[float, float]]) -> Times:
    """Milliseconds, of one request; `transfers` are (bytes, seconds)."""
    timings = done.timings
    assert timings.ttft_s is not None and timings.ttst_s is not None and timings.transfer_exposed_s is not None
    return {
        "first_ms": timings.ttft_s * 1e3,
        "exposed_ms": timings.transfer_exposed_s * 1e3,
        "ready_ms": (timings.ttft_s + timings.transfer_exposed_s) * 1e3,
        "second_ms": timings.ttst_s * 1e3,
        **transfer_times(transfers),
    }


def transfer_times(transfers: Sequence[tuple[float, float]]) -> Times:
    """How many transfers (bytes, seconds), their MB and the milliseconds of the longest."""
    return {
        "transfers": len(transfers),
        "mb": sum(size for size, _ in transfers) / MB,
        "longest_ms": max(seconds for _, seconds in transfers) * 1e3,
    }


def prompt_of(length: int, vocabulary: int) -> tuple[int, ...]:
    """The same random tokens each time."""
    return tuple(np.random.default_rng(20261130).integers(0, vocabulary, length).tolist())


def measure_layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The second question; a row for each link and variant."""
    import jax

    from benchmarks.layer_groups import Setup, by_chunks, by_layers, run, true_kv
    from jaxpd.checkpoints import resolve
    from jaxpd.checkpoints.placement import load_params
    from jaxpd.cli.progress import console_progress
    from jaxpd.progress import SilentProgress
    from jaxpd.startup import use_compile_cache
    from meshes.devices import assign_devices
    from meshes.sharding import ShardingRules
    from meshes.spec import parse_mesh_specs
    from meshes.transfer.in_process import InProcessTransport

    use_compile_cache(None)
    checkpoint = resolve(args.model, progress=console_progress())
    meshes = assign_devices(parse_mesh_specs(args.prefill_mesh), parse_mesh_specs("1x1"), jax.devices())
    source, target = meshes[0][0], meshes[1][0]
    setup = Setup(
        config=checkpoint.config,
        params=load_params(
            checkpoint.source,
            checkpoint.config,
            [source],
            dtype=np.dtype("float32"),
            rules=ShardingRules(),
            progress=SilentProgress(),
        )[0],
        source=source,
        target=target,
        dtype=np.dtype("float32"),
        prompt=prompt_of(args.one_chunk, checkpoint.config.vocab_size),
        page_size=16,
    )
    found = by_chunks(setup, sorted({1, *args.cuts})) + [by_layers(setup, n) for n in args.groups if n > 1]
    variants = {variant.name: variant for variant in found}
    transport = InProcessTransport(max_staging_bytes=1 << 40)
    kv, token, differs = None, None, {}
    for name, variant in variants.items():  # warms up, and checks
        for device in (device for pair in variant.pools for device in pair):
            device.reset()  # so that KV of another variant cannot pass for its own
        got = run(setup, variant, transport)
        arrived = true_kv([target for _, target in variant.pools], setup.target_ids)
        if kv is None:
            kv, token = true_kv([source for source, _ in variant.pools], setup.source_ids), got.token
        differs[name] = float(np.abs(arrived - kv).max() / np.abs(kv).max())
        if got.token != token or not differs[name] <= CLOSE:
            raise SystemExit(
                f"{name}: first token {got.token}, expected {token}; KV differs by {differs[name]:.1e} of its largest "
                f"value, at most {CLOSE:.0e} is rounding"
            )
    runs: Runs = {}
    for link, name in in_turns(2 * args.rounds, args.links, list(variants)):  # they are short
        with throttled(transport, link) as transfers:
            got = run(setup, variants[name], transport)
        if got.token != token:
            raise SystemExit(f"{name} at {link:g} MB/s: first token {got.token}, expected {token}")
        ready_s = max(got.settled_s, got.first_s)
        times = {
            "first_ms": got.first_s * 1e3,
            "exposed_ms": (ready_s - got.first_s) * 1e3,
            "ready_ms": ready_s * 1e3,
            **transfer_times(transfers),
        }
        runs.setdefault((link, name), []).append(times)
        print(f"layers, link {link:g}, {name}: {json.dumps(times)}", file=sys.stderr, flush=True)
    transport.close()
    return [{**row, "kv_differs": differs[row["variant"]]} for row in rows_of("layers", runs)]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prefill-mesh", default="1x1", help="the decode mesh is 1x1 (default %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=("chunks", "layers"), default=["chunks", "layers"])
    parser.add_argument("--links", type=float, nargs="+", default=[0.0, 200.0, 50.0], help="MB/s, 0: full speed")
    parser.add_argument("--rounds", type=int, help="default 3; quick 1; twice as many for layers")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt in chunks (default 2048; quick 192)")
    parser.add_argument("--chunk", type=int, help="tokens a chunk (default 256; quick 64)")
    parser.add_argument("--one-chunk", type=int, help="tokens of the prompt of one chunk (default 512; quick 64)")
    parser.add_argument("--groups", type=int, nargs="+", help="layer groups (default 2 3 5 10; quick 2)")
    parser.add_argument("--cuts", type=int, nargs="+", help="chunks to cut that prompt into (default 2 4; quick 2)")
    parser.add_argument("--quick", action="store_true", help="short prompts, one round: does it run?")
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder of the results (default benchmarks/results; quick none)"
    )
    args = parser.parse_args(argv)
    full = {"rounds": 3, "prompt": 2048, "chunk": 256, "one_chunk": 512, "groups": [2, 3, 5, 10], "cuts": [2, 4]}
    quick = {"rounds": 1, "prompt": 192, "chunk": 64, "one_chunk": 64, "groups": [2], "cuts": [2]}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out = args.out or (None if args.quick else RESULTS)
    return args


def command_of(args: argparse.Namespace) -> str:
    """The command line that repeats a run, defaults written out."""
    names = ("model", "prefill_mesh", "parts", "links", "rounds", "prompt", "chunk", "one_chunk", "groups", "cuts")
    words = ["python -m benchmarks.handoff_overlap"]
    for name in names:
        value = getattr(args, name)
        shown = (
            " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value) if isinstance(value, list) else value
        )
        words.append(f"--{name.replace('_', '-')} {shown}")
    return " ".join(words)


def main() -> None:
    """Measures and writes JSON, Markdown and PNG."""
    args = arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxpd.config import EngineConfig
    from jaxpd.startup import prepare_devices

    prepare_devices(EngineConfig(prefill_mesh=args.prefill_mesh, decode_mesh="1x1"))
    measures: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
        "chunks": measure_chunks,
        "layers": measure_layers,
    }
    began, busy, own = time.monotonic(), busy_seconds(), time.process_time()
    rows: list[dict[str, Any]] = []
    for part in args.parts:
        rows += measures[part](args)
        gc.collect()  # an engine's weights and programs
    run_s = time.monotonic() - began
    others = max(busy_seconds() - busy - (time.process_time() - own), 0.0) / run_s
    about = {**describe(PACKAGES), "cores_used_by_others": round(others, 2)}
    ran = command_of(args)
    text = table(rows, about, ran)
    print(text)
    print(f"{run_s:.0f} s; other processes used {others:.1f} of {about['cores']} cores", file=sys.stderr)
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"handoff_overlap-{args.prefill_mesh}-{slug(about)}"
    result = {"command": ran, "machine": about, "run_s": round(run_s, 1), "rows": rows}
    (args.out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.out / f"{stem}.md").write_text(text, encoding="utf-8")
    plot(rows, about, args.out / f"{stem}.png")


if __name__ == "__main__":
    main()
