"""torch's scaled_dot_product_attention on the same shapes, keys and values side by side."""

from __future__ import annotations

import importlib
from typing import Any

from .attention import Shape, decode_shape, prefill_shape, record
from .bench import Bench


def run(bench: Bench) -> None:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        bench.row(who="torch", skipped=f"torch does not import: {error}")
        return
    if not (bench.smoke or torch.cuda.is_available()):
        bench.row(who="torch", skipped="this torch sees no GPU")
        return
    for shape in (decode_shape(bench), prefill_shape(bench)):
        with bench.attempt(op="decode" if shape.tokens == 1 else "prefill", who="torch"):
            measure(bench, torch, shape)


def measure(bench: Bench, torch: Any, shape: Shape) -> None:
    place = {"dtype": torch.bfloat16, "device": "cpu" if bench.smoke else "cuda"}
    q = torch.randn(shape.rows, shape.heads, shape.tokens, shape.dim, **place)
    k, v = (torch.randn(shape.rows, shape.kv_heads, shape.context, shape.dim, **place) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> Any:
        with torch.no_grad():
            return attend(q, k, v, is_causal=shape.tokens > 1, enable_gqa=True)

    wait = (lambda _: None) if bench.smoke else (lambda _: torch.cuda.synchronize())
    record(bench, shape, f"torch {torch.__version__} scaled_dot_product_attention", call, wait)
