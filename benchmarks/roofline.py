"""How far the compiled `forward` of known models is from the least that any program must move and compute, per chip.

    make roofline        (the environment of `make aot`; about ten minutes)

Nothing runs here: programs are compiled for chips that are not there, and read. Of each step

    bytes   what the program moves to and from HBM (`hbm.py`) + pages that the kernels move. The formula of the latter
            is held to the DMAs that the interpreter executes, here and in tests/pallas_kernels/test_dma_bytes.py.
    FLOPs   XLA's count without the kernels + the products that the kernels compute, masked ones too

against the ideal of one device:

    bytes   (weights that are multiplied + live KV of the true heads) / devices of the model axis, each once
    FLOPs   2 x weights of the layers x tokens + 2 x output projection x rows + 4 x pairs of tokens x head size x heads

A decode step has all rows of its bucket live at CONTEXT tokens; a prefill step one prompt that fills the bucket. The
bound of a step is max(bytes / bandwidth, FLOPs / peak). Layers are unrolled: there is no scan to multiply out; the loop
over a data replica's step runs once at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

import numpy as np

from benchmarks.aot_forward import PAGE_SIZE, ForwardCase, cases, model_config
from benchmarks.aot_table import table
from benchmarks.dma_count import counting_dmas
from benchmarks.hbm import hbm_bytes
from benchmarks.machine import describe
from jaxpd.models.config import ModelConfig
from jaxpd.models.decoder import abstract_params
from meshes.chips import Chip, find_chip
from pallas_kernels.batch import lanes
from pallas_kernels.ragged_paged_attention import tpu
from pallas_kernels.ragged_paged_attention.random_batch import Shape, random_case
from pallas_kernels.ragged_paged_attention.tpu_blocks import (
    Blocks,
    Sizes,
    choose_blocks,
    full_batch,
    kv_bytes_read,
    pairs_seen,
)
from pallas_kernels.tpu_pages import GROUP
from pallas_kernels.write_pages.tpu import dma_bytes

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "libtpu")
CONTEXT = 1024
ITEMSIZE = 2  # bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One program against its ideal. Bytes and FLOPs of one device."""

    case: ForwardCase
    ideal_bytes: dict[str, float]
    bytes: dict[str, float]
    ideal_flops: float
    flops: float
    xla_bytes_accessed: float

    @property
    def byte_ratio(self) -> float:
        """Bytes over ideal."""
        return sum(self.bytes.values()) / sum(self.ideal_bytes.values())

    @property
    def flop_ratio(self) -> float:
        """FLOPs over ideal."""
        return self.flops / self.ideal_flops

    def seconds(self, chip: Chip, *, ideal: bool) -> tuple[float, float]:
        """(memory, compute) seconds at the chip's peaks."""
        moved = self.ideal_bytes if ideal else self.bytes
        return sum(moved.values()) / chip.hbm_bandwidth, (self.ideal_flops if ideal else self.flops) / chip.peak_bf16


def lengths_and_contexts(case: ForwardCase) -> tuple[np.ndarray, np.ndarray]:
    """Query lengths and contexts of the live rows that a step is counted for."""
    if case.role == "decode":
        context = min(CONTEXT, case.shape.table * PAGE_SIZE)
        return np.ones(case.shape.rows, int), np.full(case.shape.rows, context)
    return np.array([case.shape.tokens]), np.array([case.shape.tokens])


def windows(config: ModelConfig) -> list[int | None]:
    """The sliding window of each layer."""
    return [config.sliding_window if local else None for local in config.local_layers]


def measure(case: ForwardCase) -> Step:
    """Compiles a case and counts."""
    program = case.compile()
    text, cost = program.as_text(), program.cost_analysis()
    config, spec = model_config(case.model), case.spec
    tp, heads, D = spec.layout.tp, spec.layout.heads, config.head_dim
    pool_bytes = math.prod(spec.pages_shape[1:]) * ITEMSIZE // tp
    sizes = Sizes(
        T=case.shape.tokens, B=case.shape.rows, N=case.shape.table, K=heads.kv_per_device, G=heads.group, D=D,
        S=PAGE_SIZE, W=lanes(D), pool_bytes=ITEMSIZE, query_bytes=ITEMSIZE,
    )  # fmt: skip
    blocks = choose_blocks(sizes, find_chip(case.chip).device_kind)
    assert blocks is not None
    lengths, contexts = lengths_and_contexts(case)
    group_bytes = sizes.K * GROUP * sizes.W * ITEMSIZE
    kernel_reads = sum(kv_bytes_read(sizes, blocks, lengths, contexts, w) for w in windows(config))
    estimates = sum(tpu.cost_estimate(sizes, blocks, w).flops for w in windows(config))

    embed = config.vocab_size * config.hidden_size
    multiplied = config.num_parameters() - (0 if config.tie_embeddings else embed)
    pairs = sum(pairs_seen(lengths, contexts, w) for w in windows(config))
    live = sum(int(np.minimum(contexts, w or contexts).sum()) for w in windows(config))
    device_weights = sum(p.size for path, p in abstract_params(config, tp, spec.dtype)[1].items()
                         if config.tie_embeddings or path != "embed") * ITEMSIZE / tp  # fmt: skip
    moved = hbm_bytes(text, pool_bytes)
    weights_moved = sum(moved.get(kind, 0) for kind in ("matmul", "slice-start", "copy-start"))
    return Step(
        case=case,
        ideal_bytes={
            "weights": multiplied * ITEMSIZE / tp,
            "live KV": live * config.num_kv_heads * 2 * D * ITEMSIZE / tp,
        },
        bytes={
            "weights as they are laid out": device_weights,
            "moved with or beside them": weights_moved - device_weights,
            "other arrays in HBM": sum(moved.values()) - weights_moved,
            "pages read": kernel_reads,
            "pages written": config.num_layers * dma_bytes(case.shape.tokens, case.shape.rows, group_bytes),
        },
        ideal_flops=(2 * (multiplied - embed) * case.shape.tokens + 2 * embed * len(lengths)
                     + 4 * pairs * D * config.num_heads) / tp,
        flops=cost["flops"] - estimates + sum(computed(sizes, blocks, lengths, contexts, w) for w in windows(config)),
        xla_bytes_accessed=cost["bytes accessed"],
    )  # fmt: skip


def computed(sizes: Sizes, blocks: Blocks, lengths: np.ndarray, contexts: np.ndarray, window: int | None) -> int:
    """FLOPs of the matrix products of one call of the attention kernel: whole blocks, whatever is masked in them."""
    X, total = blocks.pages * sizes.S, 0
    for length, context in zip(map(int, lengths), map(int, contexts), strict=True):
        for done in range(0, length, blocks.query_tokens):
            first = context - length + done
            end = min(first + blocks.query_tokens, context)
            begin = 0 if window is None else max(0, first - window + 1) // sizes.S
            num_blocks = -(-(-(-end // sizes.S) - begin) // blocks.pages)
            total += num_blocks * 2 * blocks.rows * X * (sizes.key_lanes + sizes.value_lanes) * sizes.K
    return total


def check_dmas() -> list[dict[str, Any]]:
    """Small calls of the kernel in the interpreter: bytes of their DMAs against the formula and the cost estimate."""
    rows = []
    for shape, blocks in (
        (Shape(4, 4, 2, 4, 128, page_size=16, table=6, dtype="bfloat16"), Blocks(1, 16, 4, 2, 3, 1)),
        (Shape(64, 2, 1, 4, 128, page_size=16, table=6, dtype="bfloat16"), Blocks(16, 4, 1, 2, 3, 1)),
    ):
        sizes = Sizes(shape.tokens, shape.rows, shape.table, shape.kv_slots, shape.group, shape.head_dim,
                      shape.page_size, lanes(shape.head_dim), ITEMSIZE, ITEMSIZE)  # fmt: skip
        lengths, contexts = full_batch(sizes)
        case = random_case(shape, lengths.tolist(), contexts.tolist(), seed=0)
        with counting_dmas() as dmas:
            tpu.ragged_paged_attention(
                case.q_THD, case.pages_LPKSW, case.layer, case.batch,
                scale=1.0, sliding_window=None, soft_cap=None, sinks_H=None, interpret=True, blocks=blocks,
            ).block_until_ready()  # fmt: skip
        formula = kv_bytes_read(sizes, blocks, lengths, contexts, None)
        estimate = tpu.cost_estimate(sizes, blocks, None).bytes_accessed
        rows.append({"call": str(shape), "dmas": dmas.count, "dma_bytes": dmas.num_bytes, "formula": formula,
                     "estimate": estimate, "queries_and_results": estimate - formula})  # fmt: skip
        print(rows[-1], flush=True)
        if dmas.num_bytes != formula:
            raise SystemExit(f"{shape}: {dmas.num_bytes} bytes of DMAs, but the formula says {formula}")
    return rows


def row(step: Step) -> dict[str, Any]:
    """For JSON."""
    chip, case = find_chip(step.case.chip), step.case
    memory, compute = step.seconds(chip, ideal=False)
    ideal_memory, ideal_compute = step.seconds(chip, ideal=True)
    return {
        "model": case.model, "chip": case.chip, "mesh": str(case.mesh), "bucket": str(case.shape),
        "bytes": step.bytes, "ideal_bytes": step.ideal_bytes, "byte_ratio": step.byte_ratio,
        "flops": step.flops, "ideal_flops": step.ideal_flops, "flop_ratio": step.flop_ratio,
        "memory_s": memory, "compute_s": compute, "bound_s": max(memory, compute),
        "ideal_bound_s": max(ideal_memory, ideal_compute), "xla_bytes_accessed": step.xla_bytes_accessed,
    }  # fmt: skip


def markdown(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table for people."""
    header = ["model", "chip", "mesh", "bucket", "GB", "x ideal", "TFLOP", "x ideal", "limit", "bound ms", "ideal ms",
              "where the bytes beyond the ideal go (MB)"]  # fmt: skip
    lines = []
    for r in rows:
        ideal, moved = r["ideal_bytes"], r["bytes"]
        rest = {
            "padded weights": moved["weights as they are laid out"] - ideal["weights"],
            "beside the weights": moved["moved with or beside them"],
            "other arrays": moved["other arrays in HBM"],
            "pages beyond live KV": moved["pages read"] - ideal["live KV"],
            "pages written": moved["pages written"],
        }
        lines.append([
            r["model"], r["chip"], r["mesh"], r["bucket"], f"{sum(moved.values()) / 1e9:.3f}", f"{r['byte_ratio']:.2f}",
            f"{r['flops'] / 1e12:.4f}", f"{r['flop_ratio']:.2f}",
            "memory" if r["memory_s"] > r["compute_s"] else "compute", f"{r['bound_s'] * 1e3:.3f}",
            f"{r['ideal_bound_s'] * 1e3:.3f}",
            ", ".join(f"{name} {value / 1e6:.1f}" for name, value in rest.items() if abs(value) >= 5e4),
        ])  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return "\n".join([
        "# Roofline of the compiled `forward`", "",
        f"Counted from programs compiled on a {about['name']} ({versions}, {about['date']})",
        f"by `benchmarks/roofline.py`; nothing ran on a TPU. Decode: every row at {CONTEXT} tokens. Prefill: one",
        "prompt that fills the bucket. Figures of one device. The bound is what the chip's peaks allow for these bytes",
        "and FLOPs, not a measured time.", "",
        *table(header, lines), "",
    ])  # fmt: skip


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Bars of both ratios; nothing where matplotlib is not installed."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        print("no chart: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4))
    for axis, phase, ratio, what in (
        (axes[0], "decode", "byte_ratio", "bytes"),
        (axes[1], "prefill", "flop_ratio", "FLOPs"),
    ):
        mine = [r for r in rows if r["bucket"].startswith(phase)]
        axis.barh([f"{r['model']} {r['chip']} {r['mesh']}" for r in mine], [r[ratio] for r in mine], color="#4477aa")
        axis.axvline(1, color="black", linewidth=1)
        axis.axvline(1.1, color="#cc3311", linestyle="--", linewidth=1)
        axis.set_title(f"{phase}: {what} over the ideal (dashed: 1.10)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Writes JSON, Markdown and PNG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--chips", nargs="*", help="only these")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    checked = check_dmas()
    todo = [
        case for case in cases()
        if case.layers == model_config(case.model).num_layers and case.model in (args.models or [case.model])
        and case.chip in (args.chips or [case.chip])
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(todo, 1):
        rows.append(row(measure(case)))
        last = rows[-1]
        print(
            f"{number}/{len(todo)} {case}: bytes {last['byte_ratio']:.3f}x, FLOPs {last['flop_ratio']:.3f}x", flush=True
        )
    about = describe(PACKAGES)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "roofline.json").write_text(
        json.dumps({"machine": about, "dmas": checked, "steps": rows}, indent=1) + "\n"
    )
    (args.out / "roofline.md").write_text(markdown(rows, about))
    plot(rows, args.out / "roofline.png")


if __name__ == "__main__":
    main()
