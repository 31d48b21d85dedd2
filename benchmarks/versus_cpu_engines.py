"""How fast is jaxpd on a CPU, next to transformers and llama.cpp, and how much memory does it take?

    python benchmarks/versus_cpu_engines.py --peer-python PATH [--rounds 5] [--threads 2] [--quick] [--no-write]

One model (SmolLM2-135M), the same prompts, greedy, on `--threads` cores, in one run:

    jaxpd            float32, `1x1` prefill mesh and `1x1` decode mesh, through `jaxpd.LLM`
    jaxpd, 10x       the same with ten times the pages: a step must not cost more
    transformers     float32, from the dequantised weights
    llama.cpp f32    a float32 GGUF that this script writes by dequantising the Q4_1 file, KV in float16 (its default)
    llama.cpp Q4_1   the file as it is: a quarter of the bytes to read, other arithmetic (it quantises activations)

What is measured; benchmarks/engines/with_*.py say for each engine what exactly is timed:

    prompt     tokens/s of one prompt of 512 tokens, up to its first token
    decode     tokens/s of one request between its first and its last of 64 tokens, after a prompt of 64
    decode512  the same after a prompt of 512
    sixteen    tokens/s generated for 16 requests at once, 64 tokens in and 64 out each, from the first submitted to the last
               done; transformers runs them as one static batch
    peak MB    high-water mark of the resident memory of the engine's process

Every engine is a process of its own, loaded once and warmed up; it sleeps while another is measured. A round measures every
metric on every engine in turn, starting with another engine each time; ratios are taken within a round, and median and range
over the rounds are shown. A measurement during which other processes used more than 0.2 cores is repeated (at most
twice) and the quietest one kept. After the rounds jaxpd is started twice more, with an empty compile cache and with a full
one, to see its peak memory against 2.0 x float32 weights + page pools + 600 MB.

The peers run in the interpreter that --peer-python names (default: this one). To make one, on Python 3.11 or newer:

    python -m venv peers
    peers/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    peers/bin/pip install transformers==5.24.0 xllamacpp safetensors

An engine that it cannot import is reported as missing. Results go to benchmarks/results/, with the machine they came from.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from engines.files import write_float32_gguf, write_hf_folder  # type: ignore[import-not-found]
from machine import busy_seconds, describe, slug  # type: ignore[import-not-found]
from rich.console import Console
from rich.table import Table

from jaxpd.checkpoints import resolve
from jaxpd.cli.progress import console_progress

HERE = pathlib.Path(__file__).parent
JAXPD, TENFOLD, TRANSFORMERS, LLAMA_F32, LLAMA_Q4 = NAMES = (
    "jaxpd",
    "jaxpd, 10x",
    "transformers",
    "llama.cpp f32",
    "llama.cpp Q4_1",
)
METRICS = ("prompt", "decode", "decode512", "sixteen")
AIMS = {  # at least this many times the peer
    ("prompt", TRANSFORMERS): 1.0,
    ("decode", TRANSFORMERS): 1.5,
    ("decode512", TRANSFORMERS): 1.5,
    ("sixteen", TRANSFORMERS): 1.0,
    ("decode", LLAMA_F32): 0.8,
    ("decode512", LLAMA_F32): 0.8,
    ("sixteen", LLAMA_F32): 1.2,
}
ROWS, LONG, SHORT = 16, 512, 64  # requests at once, prompt lengths
MIB = 1 << 20
KV_MEMORY = 113 * MIB  # 160 pages of SmolLM2 in float32: 2,560 tokens, and 16 requests of 64 + 64 take 2,048
CONTEXT = 2560
MAX_MODEL_LEN = 1600  # 16 rows of 100 pages: so that ten times the pages are not more than could be used
QUIET = 0.2  # cores used by others


class Missing(Exception):
    """An engine that does not start; the text says why."""


class Worker:
    """One engine's process; see engines/worker.py for what it is told."""

    def __init__(self, name: str, python: str, module: str, options: dict[str, Any], logs: pathlib.Path) -> None:
        self.name = name
        self.log = logs / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        command = [python, str(HERE / "engines" / "worker.py"), module, json.dumps(options)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.about = self._read()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Has the worker do one thing."""
        print(json.dumps(command), file=self._pipe(self.process.stdin), flush=True)
        return self._read()

    def close(self) -> None:
        """Lets the process end."""
        self._pipe(self.process.stdin).close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self.process.stdout).readline()
        if not line:
            self.process.wait()
            said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise Missing(f"{self.name} ended with status {self.process.returncode}: {' | '.join(said[-3:])}")
        found: dict[str, Any] = json.loads(line)
        return found

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def say(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def commands(ids: list[int], number: int, tokens: int) -> dict[str, dict[str, Any]]:
    """What each metric asks of a worker in one round. Every round takes other pieces of the text."""

    def piece(start: int, length: int) -> list[int]:
        return [ids[(start + i) % len(ids)] for i in range(length)]

    at = 101 * number
    return {
        "prompt": {"do": "prefill", "prompt": piece(at, LONG)},
        "decode": {"do": "decode", "prompt": piece(at + 17, SHORT), "tokens": tokens},
        "decode512": {"do": "decode", "prompt": piece(at + 31, LONG), "tokens": tokens},
        "sixteen": {"do": "batch", "prompts": [piece(at + 71 * i, SHORT) for i in range(ROWS)], "tokens": tokens},
    }


def measure(worker: Worker, command: dict[str, Any], attempts: int) -> dict[str, Any]:
    """The worker's answer, and how many cores others used meanwhile. The quietest of several attempts if need be."""
    best: dict[str, Any] = {}
    for _ in range(attempts):
        time.sleep(0.2)  # threads of the engine before stop spinning
        start, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        answer = worker.ask(**command)
        wall = time.perf_counter() - start
        others = (busy_seconds() - busy - answer["cpu_s"] - (time.process_time() - own)) / wall
        answer["others"] = round(max(0.0, others), 2)
        if not best or answer["others"] < best["others"]:
            best = answer
        if best["others"] <= QUIET:
            break
    return best


def rate(metric: str, answer: dict[str, Any]) -> float:
    """Tokens per second."""
    count = {"prompt": LONG, "sixteen": answer.get("tokens")}.get(metric, answer.get("steps"))
    assert count is not None
    return float(count / answer["seconds"])


def run_rounds(workers: dict[str, Worker], ids: list[int], rounds: int, tokens: int, attempts: int) -> list[Any]:
    """rounds x metrics x engines: [{metric: {engine: answer}}]. The first, short one warms up and is dropped."""
    found: list[Any] = []
    for number in range(rounds + 1):
        asked = commands(ids, number, tokens if number else 4)
        answers: dict[str, dict[str, Any]] = {metric: {} for metric in METRICS}
        for metric in METRICS:
            order = list(workers)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                answers[metric][name] = measure(workers[name], asked[metric], attempts if number else 1)
            rates = (f"{name} {rate(metric, answers[metric][name]):.1f}" for name in order)
            say(f"{f'round {number} of {rounds}' if number else 'warming up'}, {metric}: " + ", ".join(rates))
        found.append(answers)
    return found[1:]


def memory_of_starts(options: dict[str, Any], ids: list[int], tokens: int, logs: pathlib.Path) -> dict[str, Any]:
    """jaxpd's peak memory in a process that compiles everything, and in one that finds everything compiled."""
    found = {}
    for start in ("cold", "warm"):
        say(f"starting jaxpd with a {start} compile cache")
        worker = Worker(JAXPD, sys.executable, "with_jaxpd", options, logs)
        for command in commands(ids, 0, tokens).values():
            answer = worker.ask(**command)
        worker.close()
        found[start] = {
            "peak_bytes": answer["peak_bytes"],
            "peak_bytes_when_ready": worker.about["peak_bytes"],
            "ready_s": round(worker.about["ready_s"], 1),
        }
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {name: round(f(values), 4) for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def summarise(rounds: list[Any], names: list[str]) -> dict[str, Any]:
    """Figures, ratios to peers, and step times of the two pools, from the raw answers."""
    figures = {m: {n: spread([rate(m, r[m][n]) for r in rounds]) for n in names} for m in METRICS}
    ratios = {
        metric: {
            name: spread([rate(metric, r[metric][JAXPD]) / rate(metric, r[metric][name]) for r in rounds])
            for name in names
            if name not in (JAXPD, TENFOLD)
        }
        for metric in METRICS
    }

    def step_ms(answer: dict[str, Any]) -> float:
        return 1e3 * float(answer.get("step_s") or answer["seconds"] / answer["steps"])

    steps = {}
    for metric in ("decode", "decode512", "sixteen"):
        once = [step_ms(r[metric][JAXPD]) for r in rounds]
        tenfold = [step_ms(r[metric][TENFOLD]) for r in rounds]
        both = zip(tenfold, once, strict=True)
        steps[metric] = {"1x": spread(once), "10x": spread(tenfold), "ratio": spread([t / o for t, o in both])}
    return {"tokens_per_s": figures, "jaxpd_over_peer": ratios, "step_ms": steps}


def same_text(rounds: list[Any], names: list[str], decode: Any) -> dict[str, float]:
    """Share of the decoded text that equals jaxpd's, up to the first difference. Greedy and float32 should agree."""

    def text(answer: dict[str, Any]) -> str:
        return answer["text"] if "text" in answer else decode(answer["token_ids"])

    shares: dict[str, list[float]] = {name: [] for name in names if name != JAXPD}
    for answers in rounds:
        for metric in ("decode", "decode512"):
            mine = text(answers[metric][JAXPD])
            for name, found in shares.items():
                common = os.path.commonprefix([mine, text(answers[metric][name])])
                found.append(len(common) / max(1, len(mine)))
    return {name: round(statistics.mean(found), 3) for name, found in shares.items()}


def show(result: dict[str, Any]) -> None:
    """The tables."""
    console = Console(width=max(110, Console().width))

    def range_of(found: dict[str, float], digits: int) -> str:
        return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"

    table = Table(title=f"{result['machine']['name']}, {result['threads']} threads: tokens/s, median (range)")
    for column in ("engine", *METRICS, "peak MB", "same text"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, about in result["engines"].items():
        cells = [range_of(result["tokens_per_s"][metric][name], 1) for metric in METRICS]
        same = result["same_text_as_jaxpd"].get(name)
        table.add_row(name, *cells, f"{about['peak_bytes'] / 1e6:.0f}", "" if same is None else f"{same:.0%}")
    table.caption = f"other processes used {result['cores_used_by_others']['median']:.2f} cores meanwhile"
    console.print(table)

    table = Table(title="jaxpd, times the peer")
    for column in ("metric", "peer", "ratio", "aim", ""):
        table.add_column(column, justify="left" if column in ("metric", "peer") else "right")
    for metric, peers in result["jaxpd_over_peer"].items():
        for peer, ratio in peers.items():
            aim = AIMS.get((metric, peer))
            verdict = "" if aim is None else "met" if ratio["median"] >= aim else "missed"
            table.add_row(metric, peer, range_of(ratio, 2), "" if aim is None else f">= {aim}", verdict)
    console.print(table)

    pages = {name: result["engines"][name]["pages"][1] for name in (JAXPD, TENFOLD)}
    table = Table(title=f"ms a decode step, with {pages[JAXPD]} and with {pages[TENFOLD]} pages in the decode pool")
    for column in ("metric", "1x", "10x", "10x / 1x"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, found in result["step_ms"].items():
        table.add_row(metric, range_of(found["1x"], 1), range_of(found["10x"], 1), range_of(found["ratio"], 2))
    console.print(table)

    bound = result["memory_bound_bytes"]
    table = Table(title=f"jaxpd's peak memory; the bound is {bound / 1e6:.0f} MB (2.0 x weights + page pools + 600 MB)")
    for column in ("start", "peak MB", "when ready", "ready after", ""):
        table.add_column(column, justify="left" if column == "start" else "right")
    for start, found in result["memory"].items():
        verdict = "met" if found["peak_bytes"] <= bound else "missed"
        ready = f"{found['peak_bytes_when_ready'] / 1e6:.0f}"
        table.add_row(start, f"{found['peak_bytes'] / 1e6:.0f}", ready, f"{found['ready_s']:.1f} s", verdict)
    console.print(table)
    for name, why in result["missing"].items():
        console.print(f"MISSING: {name}: {why}", style="bold red", markup=False)


def start_all(options: argparse.Namespace, checkpoint: Any, folder: pathlib.Path) -> tuple[dict[str, Worker], dict]:
    """(workers that started, {name: why} of those that did not)."""
    say("writing the weights for the peers")
    float32, hf = folder / "float32.gguf", folder / "hf"
    write_float32_gguf(checkpoint.path, float32)
    write_hf_folder(checkpoint, hf)
    common = {"threads": options.threads, "rows": ROWS}
    mine = common | {"model": options.model, "max_model_len": MAX_MODEL_LEN, "compile_cache": options.compile_cache}
    llama, peer = common | {"context": CONTEXT}, options.peer_python
    plans: dict[str, tuple[str, str, dict[str, Any]]] = {
        JAXPD: (sys.executable, "with_jaxpd", mine | {"kv_memory": KV_MEMORY}),
        TENFOLD: (sys.executable, "with_jaxpd", mine | {"kv_memory": 10 * KV_MEMORY}),
        TRANSFORMERS: (peer, "with_transformers", common | {"folder": str(hf)}),
        LLAMA_F32: (peer, "with_llama_cpp", llama | {"file": str(float32)}),
        LLAMA_Q4: (peer, "with_llama_cpp", llama | {"file": str(checkpoint.path)}),
    }
    workers: dict[str, Worker] = {}
    missing: dict[str, str] = {}
    for name, (python, module, given) in plans.items():
        say(f"starting {name}")
        try:
            workers[name] = Worker(name, python, module, given, folder)
            say(f"{name} is ready after {workers[name].about['ready_s']:.1f} s")
        except (Missing, OSError) as error:
            if name in (JAXPD, TENFOLD):
                raise SystemExit(str(error)) from error
            missing[name] = str(error)
            say(f"MISSING: {name}: {error}")
    return workers, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="interpreter of the peers")
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name or a GGUF file of a plain Llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile-cache", metavar="DIR", help="jaxpd's, for the rounds (default: the user's)")
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens and no cold start: does it run?")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    rounds, tokens = (1, 8) if options.quick else (options.rounds, 64)
    checkpoint = resolve(options.model, progress=console_progress())
    tokenizer = checkpoint.tokenizer()
    ids = tokenizer.encode((HERE.parent / "LICENSE").read_text(encoding="utf-8"), add_special_tokens=False)
    about = describe(("jaxpd", "jax", "jaxlib", "numpy", "gguf"))
    with tempfile.TemporaryDirectory(prefix="jaxpd-versus-") as temporary:
        folder = pathlib.Path(temporary)
        workers, missing = start_all(options, checkpoint, folder)
        try:
            found = run_rounds(workers, ids, rounds, tokens, 1 if options.quick else 3)
            engines = {n: {**w.about, "peak_bytes": w.ask(do="memory")["peak_bytes"]} for n, w in workers.items()}
        finally:
            for worker in workers.values():
                worker.close()
        mine = engines[JAXPD]
        memory = {
            "during the rounds": {
                "peak_bytes": mine["peak_bytes"],
                "peak_bytes_when_ready": workers[JAXPD].about["peak_bytes"],
                "ready_s": mine["ready_s"],
            }
        }
        if not options.quick:
            start = {"threads": options.threads, "rows": ROWS, "model": options.model, "max_model_len": MAX_MODEL_LEN}
            start |= {"kv_memory": KV_MEMORY, "compile_cache": str(folder / "xla")}
            memory |= memory_of_starts(start, ids, tokens, folder)
    names = list(engines)
    others = [answer["others"] for r in found for metric in METRICS for answer in r[metric].values()]
    result = {
        "command": " ".join(["python benchmarks/versus_cpu_engines.py", *sys.argv[1:]]),
        "machine": about,
        "model": checkpoint.name,
        "threads": options.threads,
        "engines": engines,
        "missing": missing,
        **summarise(found, names),
        "same_text_as_jaxpd": same_text(found, names, tokenizer.decode),
        "cores_used_by_others": spread(others),
        "memory_bound_bytes": 2 * mine["weight_bytes"] + mine["pool_bytes"] + 600_000_000,
        "memory": memory,
        "rounds": [
            {m: {n: {k: v for k, v in a.items() if k not in ("token_ids", "text")} for n, a in r[m].items()} for m in r}
            for r in found
        ],
    }
    show(result)
    if options.no_write or options.quick:
        return
    path = HERE / "results" / f"versus_cpu_engines-{slug(about)}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
