"""Are the GPU kernels right, and how near are they to what the GPU can do? About 8 minutes on one Hopper GPU.

    python3 benchmarks/gpu_suite.py [--minutes 8] [--parts NAME ...] [--out DIR]
    python3 benchmarks/gpu_suite.py --smoke        the same on CPU with tiny shapes: does every part run to its end?

It needs jax (with CUDA), numpy and ml_dtypes, and flax for the model; torch and matplotlib are used where they are. The
repository need not be installed. The parts, the most important first:

    chip              name; copy bandwidth (bytes read and written) and bf16 matmul rate, which all shares are of
    page_checks       gather, scatter and write of pages, byte for byte
    attention_checks  attention against the float64 oracle
    decode, prefill   our attention at 64 sequences x 8k (share of the copy bandwidth) and at 8k tokens (of the matmul
                      rate, causal operations counted)
    pages             staging of a hand-off, share of the copy bandwidth
    model             Llama-3.1-8B shapes, random weights: prompt and decode tokens/s through jaxpd's programs
    peers             the same attention by jax.nn (cuDNN and XLA) and by our XLA reference
    torch             the same by torch
    model_xla         the model again with the XLA reference, and whether both agree

Each part is a process with its own time: one that fails, hangs or takes the GPU down with it costs the others nothing,
and the rows that it had found stay. Times are medians over samples, each of enough calls to hide their dispatch, after
warming up. gpu_suite.json is rewritten after every part, gpu_suite.png drawn at the end, both in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gpu.bench import Bench, DispatchLog  # type: ignore[import-not-found]  # noqa: E402
from gpu.chart import draw  # type: ignore[import-not-found]  # noqa: E402
from machine import describe  # type: ignore[import-not-found]  # noqa: E402

SECONDS = {  # a part's time, starting and compiling included
    "chip": 40, "page_checks": 60, "attention_checks": 100, "decode": 50, "prefill": 50, "pages": 60, "model": 150,
    "peers": 70, "torch": 40, "model_xla": 150,
}  # fmt: skip
GRACE_S = 10  # beyond it, for a part to notice that its time is over
WITHOUT_JAX = ("torch",)
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "flax", "torch", "nvidia-cudnn-cu13")


def run_part(bench: Bench) -> None:
    """Finds what the part's name stands for and runs it. Imports are here, so that a part is free of the others'."""
    log = DispatchLog()
    match bench.name:
        case "chip":
            from gpu import chip  # type: ignore[import-not-found]

            chip.run(bench)
        case "page_checks" | "attention_checks":
            from gpu import checks

            (checks.pages if bench.name == "page_checks" else checks.attention)(bench)
        case "decode" | "prefill" | "peers":
            from gpu import attention

            getattr(attention, bench.name)(bench)
        case "pages":
            from gpu import pages

            pages.run(bench)
        case "model" | "model_xla":
            from gpu import model

            model.run(bench, "auto" if bench.name == "model" else "xla")
        case "torch":
            from gpu import with_torch

            with_torch.run(bench)
    if log.lines:
        bench.row(dispatch=sorted(set(log.lines)))


def child(options: argparse.Namespace) -> None:
    """One part, in this process."""
    if options.smoke and options.part not in WITHOUT_JAX:
        import jax

        jax.config.update("jax_platforms", "cpu")
        # On CPU the parts compile the same programs again and again.
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(options.rows).parent / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    known = json.loads(options.known)
    bench = Bench(options.part, pathlib.Path(options.rows), options.seconds, known, options.smoke)
    try:
        run_part(bench)
    except Exception as error:
        bench.row(error=f"{type(error).__name__}: {error}"[:500], traceback=traceback.format_exc()[-4000:])
        raise SystemExit(1) from error


def isolated(options: argparse.Namespace, name: str, rows: pathlib.Path, seconds: float, known: dict) -> str:
    """Runs a part in a process of its own; "done", or what became of it."""
    command = [sys.executable, str(HERE / "gpu_suite.py"), "--part", name, "--rows", str(rows)]
    command += ["--seconds", str(seconds), "--known", json.dumps(known)] + ["--smoke"] * options.smoke
    # Not all of the memory, and not at once: a library beside JAX needs some, and a part that died gives its back late.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.88", "TF_CPP_MIN_LOG_LEVEL": "1", **os.environ}
    if options.smoke:
        environment["JAX_PLATFORMS"] = "cpu"
    process = subprocess.Popen(command, env=environment)
    try:
        code = process.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"stopped after {seconds + GRACE_S:.0f} s"
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        raise
    return "done" if code == 0 else f"ended with status {code}"


def in_this_process(options: argparse.Namespace, name: str, rows: pathlib.Path, seconds: float, known: dict) -> str:
    """Runs a part here: a smoke run has no GPU to lose, and starting JAX ten times would be most of its time."""
    options.part, options.rows, options.seconds, options.known = name, str(rows), seconds, json.dumps(known)
    try:
        child(options)
    except SystemExit as ended:
        return f"ended with status {ended.code}"
    return "done"


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a part; the last may be cut off if it was stopped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    """How many checks passed, and each of our figures beside its aim."""
    rows = [row for part in parts.values() for row in part["rows"]]
    checks = [row for row in rows if "ok" in row]

    def best(key: str, **wanted: Any) -> float | None:
        found = [r[key] for r in rows if key in r and all(r.get(k) == v for k, v in wanted.items())]
        return max((f for f in found if f is not None), default=None)

    return {
        "checks": len(checks),
        "checks_failed": [row for row in checks if not row["ok"]],
        "errors": sum("error" in row for row in rows),
        "refused": sum("refused" in row for row in rows),
        "decode share of copy bandwidth (aim 0.85)": best("share_of_copy", op="decode", who="pallas_gpu"),
        "prefill share of matmul rate (aim 0.60)": best("share_of_matmul", op="prefill", who="pallas_gpu"),
        "gather share of copy bandwidth (aim 0.85)": best("share_of_copy", op="gather", who="pallas_gpu"),
        "scatter share of copy bandwidth (aim 0.85)": best("share_of_copy", op="scatter", who="pallas_gpu"),
    }


def suite(options: argparse.Namespace, out: pathlib.Path) -> dict[str, Any]:
    """All parts, with the result written after each."""
    began = time.monotonic()
    result: dict[str, Any] = {
        "command": " ".join(["python3 benchmarks/gpu_suite.py", *sys.argv[1:]]),
        "machine": describe(PACKAGES),
        "measured": {},
        "summary": {},
        "parts": {},
    }
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        for number, name in enumerate(options.parts):
            seconds = min(SECONDS[name], 60 * options.minutes - (time.monotonic() - began) - GRACE_S)
            print(f"{time.strftime('%H:%M:%S')} {name}, at most {seconds:.0f} s", flush=True)
            start, rows = time.monotonic(), pathlib.Path(folder) / f"{name}.jsonl"
            if seconds < 5:
                status = "not run: the time of the suite was over"
            else:
                # The first part of a smoke run too: this way of running one is to be seen working.
                runner = in_this_process if options.smoke and number else isolated
                status = runner(options, name, rows, seconds, result["measured"])
            took = round(time.monotonic() - start, 1)
            result["parts"][name] = {"status": status, "seconds": took, "rows": read(rows)}
            print(f"{time.strftime('%H:%M:%S')} {name}: {status}, {took:.0f} s", flush=True)
            for row in result["parts"][name]["rows"]:
                for key in ("copy_bytes_per_s", "matmul_flops_per_s"):
                    if name == "chip" and key in row:
                        result["measured"][key] = row[key]
                if name == "chip" and "device" in row:
                    result["machine"]["accelerator"] = row["device"]
            result["summary"] = summary(result["parts"])
            result["seconds"] = round(time.monotonic() - began, 1)
            write(result, out)
    return result


def write(result: dict[str, Any], out: pathlib.Path) -> None:
    """Through another file, so that there is always a whole one."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu_suite.json"
    path.with_suffix(".part").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".part").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole suite")
    parser.add_argument("--parts", nargs="+", choices=list(SECONDS), default=list(SECONDS), metavar="NAME")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on CPU")
    parser.add_argument("--out", type=pathlib.Path, help="folder (default: benchmarks/results, or a temporary one)")
    for name in ("part", "rows", "seconds", "known"):  # a part's process is started with these
        parser.add_argument(f"--{name}", type=float if name == "seconds" else str, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        child(options)
        sys.stdout.flush()
        os._exit(0)  # a program that is still being compiled, too late, is not waited for
    out = options.out or (pathlib.Path(tempfile.mkdtemp(prefix="gpu-suite-")) if options.smoke else HERE / "results")
    result = suite(options, out)
    drawn = draw(result, out / "gpu_suite.png")
    print(json.dumps(result["summary"], indent=1))
    print(f"written to {out}: gpu_suite.json{', gpu_suite.png' if drawn else ' (no matplotlib, no PNG)'}")
    failed = {name: part["status"] for name, part in result["parts"].items() if part["status"] != "done"}
    # Anything but a clean smoke run is a fault of this repository; with a GPU the result itself says what failed.
    if options.smoke and (failed or result["summary"]["errors"] or result["summary"]["checks_failed"]):
        raise SystemExit(f"a smoke run is to end without a failure: {failed}")


if __name__ == "__main__":
    main()
