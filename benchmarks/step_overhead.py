"""Where the host's time goes in a decode step, and what the device would wait for: the engine, with next to no model.

    python -m benchmarks.step_overhead [--meshes 1x1 1x8] [--mode disaggregated] [--sequences 1 16 64 256]

The model has one layer of two heads (`--layers` adds parameters), so that the device has hardly anything to do and the
pool's thread sets the pace. N sequences (in all, over the replicas) decode at once; every round of the pool's loop in
which all of them are sampled is a measurement, cut at the calls that it makes:

    rows        the pool's loop, its inbox and the policy: all that the others do not name
    pack        counters and packed metadata of the step; mostly the last step's, plus one
    put         that array to the devices, where they are several (one takes it in the call of the program)
    forward     the call of the compiled program; it returns before the result is there
    sample      likewise
    read        a result that is there to NumPy
    complete    tokens into sequences, stop conditions, names of full pages
    events      one list of events a step to the listener
    wait        blocked until the device has the step before: no work of the host, and not part of `host`

`host` is the round without `wait`. On CPU the devices are threads on the same cores, and a call of `forward` blocks
until the step before is done. So the benchmark waits for that step before it lets the pool launch the next one: the
device is idle then, and what is measured is the host. What is left of the devices: with several of them the call of a
program waits until each has begun. `cpu` therefore counts what the pool's thread has run on a core
(`time.thread_time`), waiting or not; what other threads do is not in it. Medians of all rounds, and for `host` also
their tenth percentile, for machines that others use too. Microseconds; each line runs in a process of its own.

Two lengths of context, in one engine: nothing that the host does grows with the tokens that a sequence has. On CPU all
parts of a round grow alike with the time that the device was at work before it, since its threads leave other things in
the processor's caches; compare a line with one whose `wait` is as long.
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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.machine import describe, slug

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy")
HOST = ("rows", "pack", "put", "forward", "sample", "read", "complete", "events")
COLOURS = ("#8a5fb0", "#2a6fbb", "#6aa5df", "#e07b39", "#f0b37e", "#b0b0b0", "#4a9c5d", "#93c99f")
PAGE_SIZE = 16
WARM_UP = 30  # rounds that do not count
TAIL = 16  # tokens of a prompt that no other has; before them all are alike, so that prompts take no time


class Clock:
    """Time of one thread by part: what runs inside a part is not part of what is around it. Seconds, (wall, CPU)."""

    def __init__(self, outermost: str) -> None:
        self.thread: int | None = None  # the one that counts; what others call is not timed
        self.outermost = outermost
        self.reset()

    def reset(self) -> None:
        """Begins a round."""
        self._stack = [self.outermost]
        self._since = (time.perf_counter(), time.thread_time())
        self.parts: dict[str, list[float]] = {}

    def _turn(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        part = self.parts.setdefault(self._stack[-1], [0.0, 0.0])
        part[0] += now[0] - self._since[0]
        part[1] += now[1] - self._since[1]
        self._since = now

    def end(self) -> dict[str, list[float]]:
        """Ends the round and begins the next."""
        self._turn()
        parts = self.parts
        self.reset()
        return parts

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time booked under `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(*args, **kwargs)
            self._turn()
            self._stack.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._stack.pop()

        return call


def checkpoint(layers: int, positions: int) -> Any:
    """A random Llama of two heads of 8 dimensions, in memory.

    Two, since with one KV head a device XLA copies the page pool in every step on CPU (jax 0.10 and 0.12).
    """
    from jaxpd.checkpoints.source import Checkpoint
    from jaxpd.errors import NotFound
    from jaxpd.models.config import from_hf

    hidden, vocabulary = 16, 128
    config = from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": hidden,
            "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 2, "head_dim": 8,
            "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    rng = np.random.default_rng(4)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0.0, 0.2, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": matrix(hidden)}
    for i in range(layers):
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            weights[f"model.layers.{i}.{name}_proj.weight"] = matrix(hidden, hidden)
        for name in ("input", "post_attention"):
            weights[f"model.layers.{i}.{name}_layernorm.weight"] = matrix(hidden)

    class Source:
        def names(self) -> tuple[str, ...]:
            return tuple(weights)

        def shape(self, name: str) -> tuple[int, ...]:
            return weights[name].shape

        def read(self, name: str) -> np.ndarray:
            return weights[name]

        def release(self) -> None:
            """Nothing is kept."""

    def no_tokenizer() -> Any:
        raise NotFound("a random model has no tokenizer")

    return Checkpoint(f"two-heads-{layers}", pathlib.Path(), config, Source(), no_tokenizer)


def measure(mesh: str, mode: str, sequences: int, contexts: Sequence[int], rounds: int, layers: int) -> list[dict]:
    """The rows of one engine, one for each context length."""
    import jax

    from jaxpd.config import DISAGGREGATED, EngineConfig
    from jaxpd.engine import Engine
    from jaxpd.request import Event, FinishEvent, Request, SamplingParams
    from jaxpd.startup import prepare_devices

    replicas = int(mesh.split("x")[1])
    answer = WARM_UP + rounds + 2 * sequences + 32  # where one pool does both, some decode while others are prefilled
    longest = max(contexts) + TAIL + answer
    meshes: dict[str, Any] = {"prefill_mesh": "1x1", "decode_mesh": mesh} if mode == DISAGGREGATED else {"mesh": mesh}
    config = EngineConfig(
        mode=mode,
        max_model_len=longest,
        page_size=PAGE_SIZE,
        max_num_seqs=-(-sequences // replicas),
        max_num_batched_tokens=max(512, 2 * sequences),
        max_queued_requests=10_000,
        **meshes,
    )
    prepare_devices(config)
    finished = threading.Semaphore(0)
    failures: list[Any] = []

    def on_events(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, FinishEvent):
                if event.error is not None:
                    failures.append(event.error)
                finished.release()

    engine = Engine(checkpoint(layers, longest), config, on_events=on_events)
    clock = Clock("rows")
    engine.emit = clock.timed("events", engine.emit)  # type: ignore[method-assign]
    engine.start()
    pool = next(pool for pool in engine._pools if pool.role != "prefill")
    clock.thread = pool._thread.ident
    stepper = pool._stepper
    stepper._pack = clock.timed("pack", stepper._pack)  # type: ignore[method-assign]
    stepper._pack_again = clock.timed("pack", stepper._pack_again)  # type: ignore[method-assign]
    device, programs = pool.device, pool.device.programs
    device.put = clock.timed("put", device.put)  # type: ignore[method-assign]
    for name in ("forward", "sample"):
        table = getattr(programs, name)
        table.update({key: clock.timed(name, program) for key, program in table.items()})
    seen: list[dict[str, list[float]]] = []
    complete = pool._complete
    wait, read = clock.timed("wait", jax.block_until_ready), clock.timed("read", np.asarray)

    def completing(step: Any) -> None:
        if step.sampled is not None:
            read(step.sampled.tokens_B)  # the array keeps what it read, so that the pool finds it
        timed_complete(step)
        parts = clock.end()
        if len(step.sampling) == sequences:
            seen.append(parts)

    timed_complete = clock.timed("complete", complete)
    pool._complete = completing  # type: ignore[method-assign]
    launch = pool._launch

    def launching() -> list[Any]:
        if mode == DISAGGREGATED and not gate.is_set():
            if sum(map(len, pool._running)) < sequences:
                time.sleep(0.001)
                return []
            gate.set()
        if last:
            wait(last.pop())  # the device is idle from here on
        launched = launch()
        last[:] = [launched[-1].sampled.tokens_B] if launched and launched[-1].sampled else []
        return launched

    last: list[Any] = []
    gate = threading.Event()
    pool._launch = launching  # type: ignore[method-assign]
    rng = np.random.default_rng(5)

    def submit(name: str, prompt: list[int], tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
        engine.submit(Request(request_id=name, prompt_ids=tuple(prompt), params=params, arrival_s=time.monotonic()))

    rows = []
    for context in contexts:
        begin = rng.integers(0, 128, context - TAIL).tolist()
        gate.set()
        submit("first", [*begin, 1], 2)
        finished.acquire()
        gate.clear()
        seen.clear()
        for i in range(sequences):
            submit(str(i), [*begin, *rng.integers(0, 128, TAIL).tolist()], answer)
        for _ in range(sequences):
            finished.acquire()
        if failures:
            raise RuntimeError(f"a request failed: {failures[0]}")
        counted = seen[WARM_UP : WARM_UP + rounds]
        if len(counted) < rounds:
            raise RuntimeError(f"{len(counted)} rounds had all {sequences} sequences, {rounds} are needed")
        rows.append({"mesh": mesh, "mode": mode, "sequences": sequences, "context": context, **summary(counted)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    engine.close()
    return rows


def summary(rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Medians in microseconds: by part, of the host's time, of the thread's CPU time and of the whole round."""

    def median(seconds: list[float]) -> float:
        return round(float(np.median(seconds)) * 1e6, 1)

    def of(kind: int, parts: Sequence[str]) -> list[float]:
        return [sum(found[part][kind] for part in parts if part in found) for found in rounds]

    host = of(0, HOST)
    return {
        "host_us": median(host),
        "host_p10_us": round(float(np.percentile(host, 10)) * 1e6, 1),
        "host_p90_us": round(float(np.percentile(host, 90)) * 1e6, 1),
        "cpu_us": median(of(1, (*HOST, "wait"))),
        "round_us": median(of(0, (*HOST, "wait"))),
        "wait_us": median(of(0, ("wait",))),
        "wall_us": {part: median(of(0, (part,))) for part in HOST},
        "thread_cpu_us": {part: median(of(1, (part,))) for part in HOST},
        "rounds": len(rounds),
    }


# what people look at ----------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]], about: dict[str, Any], command: str) -> str:
    """Markdown."""
    lines = [
        "# Host time of a decode step", "",
        f"`{command}` on a {about['name']}, jax {about['packages']['jax']}, {about['date']}.",
        "Medians in microseconds; `host` is a round of the pool's loop without waiting for the device, `cpu` what its",
        "thread ran on a core, the parts add up to `host` (the script says what they are).", "",
        "| mode | mesh | sequences | context | **host** | p10 | cpu | " + " | ".join(HOST) + " | wait |",
        "|---|---" + "|---:" * (len(HOST) + 5) + "|",
    ]  # fmt: skip
    for row in rows:
        parts = " | ".join(f"{row['wall_us'][part]:.0f}" for part in HOST)
        lines.append(
            f"| {row['mode']} | {row['mesh']} | {row['sequences']} | {row['context']:,} | **{row['host_us']:.0f}** | "
            f"{row['host_p10_us']:.0f} | {row['cpu_us']:.0f} | {parts} | {row['wait_us']:.0f} |"
        )
    return "\n".join([*lines, ""])


def draw(rows: list[dict[str, Any]], title: str, path: pathlib.Path) -> bool:
    """A stacked bar a row, one chart a mesh; False where matplotlib is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    meshes = list(dict.fromkeys((row["mode"], row["mesh"]) for row in rows))
    figure, axes = pyplot.subplots(1, len(meshes), figsize=(6 * len(meshes), 4.8), squeeze=False)
    for axis, (mode, mesh) in zip(axes[0], meshes, strict=True):
        mine = [row for row in rows if (row["mode"], row["mesh"]) == (mode, mesh)]
        below = np.zeros(len(mine))
        for part, colour in zip(HOST, COLOURS, strict=True):
            height = np.array([row["wall_us"][part] for row in mine]) / 1e3
            axis.bar(range(len(mine)), height, bottom=below, color=colour, label=part, width=0.7)
            below += height
        axis.set_xticks(range(len(mine)), [f"{row['sequences']}\n{row['context']:,}" for row in mine])
        axis.set_xlabel("sequences, and tokens of context of each")
        axis.set_ylabel("host time of a decode step, ms")
        axis.set_title(f"{mode}, {mesh}")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=len(HOST))
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--meshes", nargs="+", default=["1x1", "1x8"], help="of the decode pool, or of the one pool")
    parser.add_argument("--mode", default="disaggregated", help="or chunked, decoupled, interleaved")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256], help="in all replicas together")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1000], help="tokens of prompt")
    parser.add_argument("--rounds", type=int, default=300, help="decode steps that count")
    parser.add_argument("--layers", type=int, default=1, help="a layer is 9 parameters of each program call")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 1 and 4 sequences, 20 steps, no files")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a process of one engine
    options = parser.parse_args()
    if min(options.contexts) <= TAIL:
        parser.error(f"--contexts: {min(options.contexts)} is not above {TAIL}")
    if options.one:
        (mesh,), (count,) = options.meshes, options.sequences
        rows = measure(mesh, options.mode, count, options.contexts, options.rounds, options.layers)
        print(json.dumps(rows))
        return
    if options.quick:
        options.meshes, options.sequences, options.rounds, options.no_write = ["1x1", "1x2"], [1, 4], 20, True
    rows = []
    for mesh in options.meshes:
        for count in options.sequences:
            args = ["--one", "--mode", options.mode, "--meshes", mesh, "--sequences", str(count)]
            args += ["--rounds", str(options.rounds), "--layers", str(options.layers)]
            args += ["--contexts", *map(str, options.contexts)]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.step_overhead", *args],
                stdout=subprocess.PIPE, check=True, text=True, env={**os.environ},
            )  # fmt: skip
            rows += json.loads(done.stdout.splitlines()[-1])
    about = describe(PACKAGES)
    command = " ".join(["python -m benchmarks.step_overhead", *sys.argv[1:]])
    text = table(rows, about, command)
    print(text)
    if options.no_write:
        return
    RESULTS.mkdir(exist_ok=True)
    suffix = "" if options.mode == "disaggregated" else f"-{options.mode}"
    suffix += "" if options.layers == 1 else f"-{options.layers}-layers"
    path = RESULTS / f"step_overhead{suffix}-{slug(about)}.json"
    written = {"command": command, "machine": about, "rows": rows}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    files = [path.name, path.with_suffix(".md").name]
    if draw(rows, f"Host time of a decode step ({about['name']})", path.with_suffix(".png")):
        files.append(path.with_suffix(".png").name)
    print(f"written to {RESULTS}: {', '.join(files)}")


if __name__ == "__main__":
    main()
