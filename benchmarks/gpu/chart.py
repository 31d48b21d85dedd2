"""Four panels: shares of the ceilings for attention and page movement, and the model's tokens a second."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

COLOURS = {"pallas_gpu": "#2a6fbb", "auto": "#2a6fbb", "xla": "#b0b0b0"}
AIMS = {"decode": 0.85, "prefill": 0.60, "pages": 0.85}


def draw(result: dict[str, Any], path: pathlib.Path) -> bool:
    """Writes the PNG; False where matplotlib is missing or there is nothing to draw."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        plt = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    figure, axes = plt.subplots(2, 2, figsize=(13, 8))
    attention = [r for r in rows if "bytes_per_s" in r or "flops_per_s" in r]
    bars(
        axes[0][0], "decode attention", "share of copy bandwidth", AIMS["decode"],
        [(label(r), r["share_of_copy"], r["who"]) for r in attention if r.get("op") == "decode" and "who" in r],
    )  # fmt: skip
    bars(
        axes[0][1], "prefill attention", "share of bf16 matmul rate", AIMS["prefill"],
        [(label(r), r["share_of_matmul"], r["who"]) for r in attention if r.get("op") == "prefill" and "who" in r],
    )  # fmt: skip
    bars(
        axes[1][0], "pages moved", "share of copy bandwidth", AIMS["pages"],
        [(f"{r['op']} {r['who']}\n{r['shape']}", r["share_of_copy"], r["who"])
         for r in rows if r.get("op") in ("gather", "scatter") and "share_of_copy" in r],
    )  # fmt: skip
    bars(
        axes[1][1], "Llama-3.1-8B shape", "decode: share of the bandwidth limit; prompt: of the matmul rate", None,
        [(model_label(r), r.get("share_of_limit", r.get("share_of_matmul")), r["kernels"])
         for r in rows if "tokens_per_s" in r],
    )  # fmt: skip
    name = result["machine"].get("accelerator") or result["machine"]["name"]
    figure.suptitle(f"jaxpd on {name}, jax {result['machine']['packages']['jax']}, {result['machine']['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def label(row: dict[str, Any]) -> str:
    pages = f", pages of {row['page_size']}" if "page_size" in row else ""
    return row["who"].replace("scaled_dot_product_attention", "SDPA").replace("dot_product_attention", "dpa") + pages


def model_label(row: dict[str, Any]) -> str:
    what = f"decode {row['sequences']}" if row["op"] == "decode" else f"prompt, chunks of {row['chunk']}"
    return f"{what} {row['kernels']}: {row['tokens_per_s']:,.0f} tokens/s"


def bars(axis: Any, title: str, unit: str, aim: float | None, found: list[tuple[str, float | None, str]]) -> None:
    found = [bar for bar in found if bar[1] is not None][::-1]
    axis.barh(range(len(found)), [b[1] for b in found], color=[COLOURS.get(b[2], "#e07b39") for b in found])
    axis.set_yticks(range(len(found)), [b[0] for b in found], fontsize=7)
    if aim is not None:
        axis.axvline(aim, color="black", linestyle=":", linewidth=1)
    axis.set_title(title)
    axis.set_xlabel(unit)
