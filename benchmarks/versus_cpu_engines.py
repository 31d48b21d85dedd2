"""How fast is jaxpd on a CPU, next to transformers and llama.cpp, and how much memory does it take?

    python benchmarks/versus_cpu_engines.py --peer-python PATH [--rounds 3] [--metrics M...] [--earlier CHECKOUT]
        [--against FILE.json] [--no-starts] [--threads 2] [--quick] [--no-write]

One model (SmolLM2-135M), the same prompts, greedy, on `--threads` cores, in one run:

    jaxpd               float32, `1x1` prefill mesh and `1x1` decode mesh, through `jaxpd.LLM`, 16 sequences at once
    jaxpd, 10x          the same with ten times the pages: a step must not cost more
    jaxpd, 64 rows      the same with 64 sequences at once and four times the pages
    jaxpd, earlier      jaxpd as in the checkout that `--earlier` names, 16 sequences: has anything become slower?
    transformers        float32, from the dequantised weights
    llama.cpp f32       a float32 GGUF that this script writes by dequantising the Q4_1 file, KV in float16 (its
                        default), 16 slots: 64 requests queue for them
    llama.cpp f32 64    the same with 64 slots: which of the two is better at 64 requests depends on the machine
    llama.cpp Q4_1      the file as it is: a quarter of the bytes to read, other arithmetic (it quantises activations)

What is measured; benchmarks/engines/with_*.py say for each engine what exactly is timed:

    prompt     tokens/s of one prompt of 512 tokens, up to its first token
    decode     tokens/s of one request between its first and its last of 64 tokens, after a prompt of 64
    decode512  the same after a prompt of 512
    one        tokens/s generated for one request, 64 tokens in and 64 out, from submitted to done
    sixteen    the same for 16 requests at once, until the last is done; transformers runs them as one static batch
    sixtyfour  the same for 64 requests at once

`jaxpd` and `jaxpd, 10x` are left out of `sixtyfour` and `jaxpd, 64 rows` stands for jaxpd there; it runs `sixteen` too,
which shows what the larger limits cost, and nothing else. So the figures up to 16 come from the engine, the pages and
the memory that earlier results came from.

Every engine is a process of its own, loaded once and warmed up; it sleeps while another is measured. A round measures
every metric on every engine in turn, starting with another engine each time; ratios are taken within a round, and
median and range over the rounds are shown. A measurement during which other processes used more than 0.2 cores is
repeated, at most twice, and if that did not help it is left out, together with what it would be divided by. After the
rounds jaxpd is started twice more, with an empty compile cache and with a full one, to see its peak memory against
2.0 x float32 weights + page pools + 600 MB (`--no-starts`: not). At the end the figures stand beside those of
`--against`, by default an earlier result of this script on this machine, else on another: there only the ratios to the
peers can be compared.

Three rounds of everything take about 12 minutes on two cores, of which 3 are starts; `--metrics one sixteen sixtyfour
--no-starts` takes about 9.

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
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from engines.files import write_float32_gguf, write_hf_folder  # type: ignore[import-not-found]
from engines.process import Missing, Worker  # type: ignore[import-not-found]
from engines.report import (  # type: ignore[import-not-found]
    EARLIER,
    JAXPD,
    LLAMA_64,
    LLAMA_F32,
    LLAMA_Q4,
    METRICS,
    OURS,
    PROMPT,
    QUIET,
    SIXTYFOUR,
    TENFOLD,
    TRANSFORMERS,
    compare,
    measured,
    rate,
    same_text,
    show,
    summarise,
)
from machine import busy_seconds, describe, slug  # type: ignore[import-not-found]

from jaxpd.checkpoints import resolve
from jaxpd.cli.progress import console_progress

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
ROWS, MANY, SHORT = 16, 64, 64  # requests at once, of most engines and of two, and the length of their prompts
MIB = 1 << 20
KV_MEMORY = 113 * MIB  # 160 pages of SmolLM2 in float32: 2,560 tokens, and 16 requests of 64 + 64 take 2,048
CONTEXT = 2560  # tokens of all slots together, for 16 requests
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
        "one": {"do": "batch", "prompts": [piece(at + 53, SHORT)], "tokens": tokens},
        "sixteen": {"do": "batch", "prompts": [piece(at + 71 * i, SHORT) for i in range(ROWS)], "tokens": tokens},
        "sixtyfour": {"do": "batch", "prompts": [piece(at + 71 * i, SHORT) for i in range(MANY)], "tokens": tokens},
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


def run_rounds(
    workers: dict[str, Worker], metrics: list[str], ids: list[int], rounds: int, tokens: int, attempts: int
) -> list[Any]:
    """rounds x metrics x engines: [{metric: {engine: answer}}]. The first, short one warms up and is dropped."""
    found: list[Any] = []
    for number in range(rounds + 1):
        asked = commands(ids, number, tokens if number else 4)
        answers: dict[str, dict[str, Any]] = {metric: {} for metric in metrics}
        for metric in metrics:
            order = measured(metric, list(workers))
            turn = number % len(order)
            order = order[turn:] + order[:turn]
            for name in order:
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
        for metric, command in commands(ids, 0, tokens).items():
            if measured(metric, [JAXPD]):
                answer = worker.ask(**command)
        worker.close()
        found[start] = {
            "peak_bytes": answer["peak_bytes"],
            "peak_bytes_when_ready": worker.about["peak_bytes"],
            "ready_s": round(worker.about["ready_s"], 1),
        }
    return found


def plans(options: argparse.Namespace, checkpoint: Any, folder: pathlib.Path) -> dict[str, tuple[Any, ...]]:
    """Engine -> (interpreter, module, what it is given, PYTHONPATH or None), of the engines that the metrics need."""
    float32, hf, peer, this = folder / "float32.gguf", folder / "hf", options.peer_python, sys.executable
    common = {"threads": options.threads, "rows": ROWS}
    mine = common | {"model": options.model, "max_model_len": MAX_MODEL_LEN, "kv_memory": KV_MEMORY}
    mine |= {"compile_cache": options.compile_cache}
    llama = common | {"context": CONTEXT, "file": str(float32)}
    many = {"rows": MANY, "context": CONTEXT * MANY // ROWS}
    found: dict[str, tuple[Any, ...]] = {
        JAXPD: (this, "with_jaxpd", mine, None),
        TENFOLD: (this, "with_jaxpd", mine | {"kv_memory": 10 * KV_MEMORY}, None),
        SIXTYFOUR: (this, "with_jaxpd", mine | {"rows": MANY, "kv_memory": KV_MEMORY * MANY // ROWS}, None),
        EARLIER: (this, "with_jaxpd", mine, options.earlier),
        TRANSFORMERS: (peer, "with_transformers", common | {"folder": str(hf)}, None),
        LLAMA_F32: (peer, "with_llama_cpp", llama, None),
        LLAMA_64: (peer, "with_llama_cpp", llama | many, None),
        LLAMA_Q4: (peer, "with_llama_cpp", llama | {"file": str(checkpoint.path)}, None),
    }
    if options.earlier is None:
        del found[EARLIER]
    return {name: plan for name, plan in found.items() if any(measured(m, [name]) for m in options.metrics)}


def start_all(options: argparse.Namespace, checkpoint: Any, folder: pathlib.Path) -> tuple[dict[str, Worker], dict]:
    """(workers that started, {name: why} of those that did not)."""
    say("writing the weights for the peers")
    write_float32_gguf(checkpoint.path, folder / "float32.gguf")
    write_hf_folder(checkpoint, folder / "hf")
    workers: dict[str, Worker] = {}
    missing: dict[str, str] = {}
    for name, (python, module, given, path) in plans(options, checkpoint, folder).items():
        say(f"starting {name}")
        try:
            workers[name] = Worker(name, python, module, given, folder, path)
            say(f"{name} is ready after {workers[name].about['ready_s']:.1f} s")
        except (Missing, OSError) as error:
            if name in OURS:
                raise SystemExit(str(error)) from error
            missing[name] = str(error)
            say(f"MISSING: {name}: {error}")
    return workers, missing


def earlier_result(options: argparse.Namespace, about: dict[str, Any]) -> dict[str, Any] | None:
    """The result to compare with: the one asked for, else this machine's, else any other; None where there is none."""
    own = RESULTS / f"versus_cpu_engines-{slug(about)}.json"
    others = sorted(RESULTS.glob("versus_cpu_engines-*.json"))
    path = options.against or (own if own.exists() else others[0] if others else None)
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="interpreter of the peers")
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name or a GGUF file of a plain Llama")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=list(METRICS), help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--earlier", metavar="DIR", type=os.path.abspath, help="checkout of jaxpd to measure as well")
    parser.add_argument("--against", metavar="FILE", type=pathlib.Path, help="JSON of an earlier run to compare with")
    parser.add_argument("--compile-cache", metavar="DIR", help="jaxpd's, for the rounds (default: the user's)")
    parser.add_argument("--no-starts", action="store_true", help="no cold and warm start, that is no peak memory there")
    parser.add_argument("--quick", action="store_true", help="one round of 8 tokens and no starts: does it run?")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    metrics = [metric for metric in METRICS if metric in options.metrics]
    rounds, tokens = (1, 8) if options.quick else (options.rounds, 64)
    checkpoint = resolve(options.model, progress=console_progress())
    tokenizer = checkpoint.tokenizer()
    ids = tokenizer.encode((HERE.parent / "LICENSE").read_text(encoding="utf-8"), add_special_tokens=False)
    about = describe(("jaxpd", "jax", "jaxlib", "numpy", "gguf"))
    before = earlier_result(options, about)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxpd-versus-") as temporary:
        folder = pathlib.Path(temporary)
        workers, missing = start_all(options, checkpoint, folder)
        try:
            found = run_rounds(workers, metrics, ids, rounds, tokens, 1 if options.quick else 3)
            engines = {n: {**w.about, "peak_bytes": w.ask(do="memory")["peak_bytes"]} for n, w in workers.items()}
        finally:
            for worker in workers.values():
                worker.close()
        memory = {}
        if (mine := engines.get(JAXPD)) is not None:
            memory["during the rounds"] = {
                "peak_bytes": mine["peak_bytes"],
                "peak_bytes_when_ready": workers[JAXPD].about["peak_bytes"],
                "ready_s": mine["ready_s"],
            }
            if not options.quick and not options.no_starts:
                start = plans(options, checkpoint, folder)[JAXPD][2] | {"compile_cache": str(folder / "xla")}
                memory |= memory_of_starts(start, ids, tokens, folder)
    names = list(engines)
    hidden = {options.peer_python: "PATH", **({options.earlier: "DIR"} if options.earlier else {})}
    result = {
        "command": " ".join(["python benchmarks/versus_cpu_engines.py", *(hidden.get(a, a) for a in sys.argv[1:])]),
        "machine": about,
        "run_s": round(time.monotonic() - began),
        "model": checkpoint.name,
        "threads": options.threads,
        "engines": engines,
        "missing": missing,
        **summarise(found, metrics, names),
        "same_text_as_jaxpd": same_text(found, names, tokenizer.decode),
        "memory_bound_bytes": mine and 2 * mine["weight_bytes"] + mine["pool_bytes"] + 600_000_000,
        "memory": memory,
        "rounds": [
            {m: {n: {k: v for k, v in a.items() if k not in ("token_ids", "text")} for n, a in r[m].items()} for m in r}
            for r in found
        ],
    }
    show(result)
    if before is not None:
        compare(result, before)
    if options.no_write or options.quick:
        return
    path = RESULTS / f"versus_cpu_engines-{slug(about)}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    try:
        main()
    except Missing as died:
        raise SystemExit(str(died)) from died
