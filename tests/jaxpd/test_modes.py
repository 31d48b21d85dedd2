"""The modes that share one mesh: who joins whom, what ends there, and which flags go together.

That all modes give the reference's tokens is test_equality.py's to show.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.config import SHARED_MODES, EngineConfig
from jaxpd.errors import InvalidArgument
from jaxpd.request import FinishReason

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny"
Started = Callable[..., Any]


def prompts(model: str) -> dict[str, dict[str, Any]]:
    return {p["name"]: p for p in json.loads((TINY / model / "expected.json").read_text())["prompts"]}


@pytest.mark.parametrize("mode", SHARED_MODES)
def test_a_request_joins_others_in_the_middle(mode: str, started: Started) -> None:
    """One that decodes while another's prompt is computed, sampled too: the tokens of each alone."""
    running = started("smollm2", None, None, mode=mode, mesh="1x1", max_num_batched_tokens=64)
    cases = list(prompts("smollm2").items())
    sampled = {"max_tokens": 20, "temperature": 1.1}
    alone = []
    for i, (name, prompt) in enumerate(cases):
        alone.append(running.submit(f"{name}-alone", prompt["prompt_ids"], seed=i, **sampled))
        running.wait()
    late = []

    def on_token(event: Any) -> None:
        if event.request_id == "first" and event.first_index == 3:
            for i, (name, prompt) in enumerate(cases[1:], 1):
                late.append(running.submit(f"{name}-late", prompt["prompt_ids"], seed=i, **sampled))

    running.on_token = on_token
    first = running.submit("first", cases[0][1]["prompt_ids"], seed=0, **sampled)
    assert first.ended.wait(60)
    running.wait()
    assert [a.token_ids for a in (first, *late)] == [a.token_ids for a in alone]
    running.assert_at_baseline()


@pytest.mark.parametrize("mode", SHARED_MODES)
def test_one_token_and_an_abort_end_in_the_shared_pool(mode: str, started: Started) -> None:
    running = started("smollm2", None, None, mode=mode, mesh="1x1", max_num_batched_tokens=64)
    ids = prompts("smollm2")["len17"]["prompt_ids"]
    running.on_token = lambda event: running.engine.abort("aborted") and None
    one = running.submit("one", ids, max_tokens=1)
    aborted = running.submit("aborted", ids, max_tokens=120)
    running.wait()
    assert (one.finish.reason, len(one.token_ids)) == (FinishReason.LENGTH, 1)
    assert aborted.finish.reason is FinishReason.ABORT
    assert one.finish.timings.transfer_s is None
    running.assert_at_baseline()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "fast"}, "--mode fast must be one of disaggregated, decoupled, chunked, interleaved"),
        ({"mesh": "2x1"}, "--mesh 2x1 is for one pool.*--mode decoupled, chunked or interleaved"),
        ({"mode": "disaggregated", "mesh": "2x1"}, "--mesh 2x1 is for one pool"),
        (
            {"mode": "chunked", "decode_mesh": "2x1"},
            "--decode-mesh 2x1 is for --mode disaggregated.*give its mesh with --mesh",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        EngineConfig(**fields)


def test_one_mesh_means_one(started: Started) -> None:
    with pytest.raises(InvalidArgument, match="--mesh 2x1,2x1 names 2 meshes, need one"):
        started("smollm2", None, None, mode="chunked", mesh="2x1,2x1")
