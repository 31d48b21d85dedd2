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
    sixteen    tokens/s generated for 16 requests at once, 64 tokens in and 64 out each, from the first submitted to the
               last done; transformers runs them as one static batch
    peak MB    high-water mark of the resident memory of the engine's process

Every engine is a process of its own, loaded once and warmed up; it sleeps while another is measured. A round measures
every metric on every engine in turn, starting with another engine each time; ratios are taken within a round, and
median and range over the rounds are shown. A measurement during which other processes used more than 0.2 cores is
repeated, at most twice, and if that did not help it is left out, together with what it would be divided by. After the
rounds jaxpd is started twice more, with an empty compile cache and with a full one, to see its peak memory against
2.0 x float32 weights + page pools + 600 MB.

The peers run in the interpreter that --peer-python names (default: this one). To make one, on Python 3.11 or newer:

    python -m venv peers
    peers/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    peers/bin/pip install transformers==5.24.0 xllamacpp safetensors

An engine that does not start there is reported as missing. Results go to benchmarks/results/, with the machine they
came from.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

from engines.files import write_float32_gguf, write_hf_folder  # type: ignore[import-not-found]
from engines.process import Missing, Worker  # type: ignore[import-not-found]
from engines.report import (  # type: ignore[import-not-found]
    JAXPD,
    LLAMA_F32,
    LLAMA_Q4,
    METRICS,
    PROMPT,
    QUIET,
    TENFOLD,
    TRANSFORMERS,
    rate,
    same_text,
    show,
    summarise,
)
from machine import busy_seconds, describe, slug  # type: ignore[import-not-found]

from jaxpd.checkpoints import resolve
from jaxpd.cli.progress import console_progress

HERE = pathlib.Path(__file__).parent
ROWS, SHORT = 16, 64  # requests at once and the length of their prompts
MIB = 1 << 20
KV_MEMORY = 113 * MIB  # 160 pages of SmolLM2 in float32: 2,560 tokens, and 16 requests of 64 + 64 take 2,048
CONTEXT = 2560
MAX_MODEL_LEN = 1600  # 16 rows of 100 pages: so that ten times the pages are not more than could be used


def say(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def commands(ids: list[int], number: int, tokens: int) -> dict[str, dict[str, Any]]:
    """What each metric asks of a worker in one round. Every round takes other pieces of the text."""

    def piece(start: int, length: int) -> list[int]:
        return [ids[(start + i) % len(ids)] for i in range(length)]

    at = 101 * number
    return {
        "prompt": {"do": "prefill", "prompt": piece(at, PROMPT)},
        "decode": {"do": "decode", "prompt": piece(at + 17, SHORT), "tokens": tokens},
        "decode512": {"do": "decode", "prompt": piece(at + 31, PROMPT), "tokens": tokens},
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
    result = {
        "command": " ".join(["python benchmarks/versus_cpu_engines.py", *sys.argv[1:]]).replace(
            options.peer_python, "PATH"
        ),
        "machine": about,
        "model": checkpoint.name,
        "threads": options.threads,
        "engines": engines,
        "missing": missing,
        **summarise(found, names),
        "same_text_as_jaxpd": same_text(found, names, tokenizer.decode),
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
    try:
        main()
    except Missing as died:
        raise SystemExit(str(died)) from died
