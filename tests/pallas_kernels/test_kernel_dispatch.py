"""The dispatcher: the first implementation that can run the call, one line in the log, clear refusals."""

from __future__ import annotations

import functools
import logging

import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import Call, Implementation, choose, target
from pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS


def only_wide_heads(call: Call) -> str | None:
    size = dict(call.shapes)["D"]
    return None if size >= 128 else f"it needs head sizes of at least 128, not {size}"


XLA = Implementation("xla", ("cpu", "gpu", "tpu"), lambda: "xla", "it runs everywhere")
TPU = Implementation("pallas_tpu", ("tpu",), lambda: "tpu", "it is the fastest on a TPU")
WIDE = Implementation("wide", ("cpu",), lambda: "wide", "it is the fastest on wide heads", only_wide_heads)


def pick(operation: str, implementations: tuple[Implementation, ...], requested: str = "auto", size: int = 64) -> str:
    return choose(operation, implementations, requested, dtype=jnp.dtype("float32"), shapes={"D": size}).name


def test_first_that_can_run_is_chosen() -> None:
    assert target()[0] == "cpu"
    assert pick("a", (TPU, XLA)) == "xla"
    assert pick("a", (WIDE, XLA), size=64) == "xla"
    assert pick("a", (WIDE, XLA), size=128) == "wide"
    assert pick("a", (WIDE, XLA), "xla", size=128) == "xla"


def test_refusals_say_why() -> None:
    with pytest.raises(ValueError, match=r"implementation='cuda' of b is unknown: use 'auto' or one of .*'pallas_tpu'"):
        pick("b", (TPU, XLA), "cuda")
    with pytest.raises(ValueError, match="implementation='pallas_tpu' of b cannot run this.*runs on tpu, not on cpu"):
        pick("b", (TPU, XLA), "pallas_tpu")
    with pytest.raises(ValueError, match="float32, D=64.*needs head sizes of at least 128, not 64"):
        pick("b", (WIDE, XLA), "wide")
    with pytest.raises(ValueError, match="cannot run"):
        pick("b", (TPU,))


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        for size in (64, 64, 80):
            pick("logged once", (TPU, XLA), size=size)
    lines = [r.getMessage() for r in caplog.records if "logged once" in r.getMessage()]
    assert len(lines) == 1
    assert "runs as xla: it runs everywhere; not pallas_tpu: it runs on tpu, not on cpu" in lines[0]


def test_the_reference_runs_everywhere() -> None:
    for platform in ("cpu", "gpu", "tpu"):
        shapes = {"T": 4, "B": 4, "N": 2, "H": 8, "K": 2, "D": 80, "S": 16, "W": 256}
        call = Call(platform, "", "bfloat16", "bfloat16", tuple(shapes.items()))
        assert "xla" in [i.name for i in IMPLEMENTATIONS if i.objection(call) is None]
        assert IMPLEMENTATIONS[0].name != "xla"


def test_interpreted_kernels_run_only_where_they_are_asked_for() -> None:
    shapes = {"T": 4, "B": 4, "N": 2, "H": 8, "K": 2, "D": 64, "S": 16, "W": 128}
    choice = functools.partial(choose, "ragged_paged_attention", IMPLEMENTATIONS, dtype="float32", shapes=shapes)
    assert choice("auto").name == "xla"
    assert choice("pallas_tpu_interpret").name == "pallas_tpu_interpret"


def test_a_name_that_an_operation_lacks_means_auto() -> None:
    assert pick("c", (XLA,), "pallas_gpu") == "xla"
