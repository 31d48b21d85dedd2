"""When pages run out the youngest gives way, is computed again from its tokens, and its client notices nothing."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.life import Stage

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
Started = Callable[..., Any]
pytestmark = pytest.mark.heavy
PLACES: list[dict[str, Any]] = [
    {"prefill": "1x1", "decode": "1x1"},
    {"prefill": "2x1", "decode": "1x2"},
    {"prefill": None, "decode": None, "mode": "chunked", "mesh": "1x1"},
    {"prefill": None, "decode": None, "mode": "decoupled", "mesh": "1x1"},
    {"prefill": None, "decode": None, "mode": "interleaved", "mesh": "1x1"},
]


def tight(started: Started, place: dict[str, Any], **config: Any) -> Any:
    """An engine whose replicas hold 13 pages: one longest sequence and a little."""
    running = started("smollm2", reserve_tokens=1, kv_memory=kv_bytes(started, place, 13), **place, **config)
    assert {replica.num_pages for replica in running.engine.stats().replicas} == {13}
    return running


def kv_bytes(started: Started, place: dict[str, Any], pages: int) -> int:
    """Memory for so many pages a device (meshes with more than one device a replica hold smaller shares)."""
    limits = started("smollm2", **place).engine.limits
    assert len({pool.page_bytes for pool in limits.pools}) == 1, "this test wants pages of one size"
    return pages * limits.pools[0].page_bytes


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("place", [PLACES[0], *PLACES[2:]], ids=lambda p: p.get("mode", "disaggregated"))
def test_tokens_are_the_same_when_sequences_give_way(place: dict[str, Any], cache: bool, started: Started) -> None:
    running = tight(started, place, prefix_cache=cache)
    cases = list(PROMPTS.items())
    for round_ in range(2):
        for name, prompt in cases:
            running.submit(f"{name}-{round_}", prompt["prompt_ids"], max_tokens=24)
    running.wait()
    for round_ in range(2):
        for name, prompt in cases:
            assert running.answers[f"{name}-{round_}"].token_ids == prompt["greedy_ids"][:24], name
    assert sum(a.finish.life.count(Stage.PREEMPTED) for a in running.answers.values()) > 0
    running.assert_at_baseline()


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]], ids=lambda p: p.get("mode", "disaggregated"))
def test_sampling_with_penalties_goes_on_where_it_was(place: dict[str, Any], started: Started) -> None:
    roomy, cramped = started("smollm2", **place), tight(started, place)
    options: dict[str, Any] = {
        "max_tokens": 100, "temperature": 0.9, "top_k": 40, "presence_penalty": 0.7, "repetition_penalty": 1.2,
        "logprobs": 2,
    }  # fmt: skip
    for running in (roomy, cramped):
        for i in range(4):
            running.submit(f"r{i}", [i + 3] * 9, seed=i, **options)
        running.wait()
    assert sum(a.finish.life.count(Stage.PREEMPTED) for a in cramped.answers.values()) > 0
    assert not any(a.finish.life.count(Stage.PREEMPTED) for a in roomy.answers.values())
    for i in range(4):
        one, other = roomy.answers[f"r{i}"], cramped.answers[f"r{i}"]
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    cramped.assert_at_baseline()


def test_the_youngest_of_the_least_urgent_class_gives_way(started: Started) -> None:
    running = tight(started, PLACES[2])
    urgent = running.submit("urgent", [5] * 9, max_tokens=120, priority=-2)
    for i in range(3):
        running.submit(f"r{i}", [i + 3] * 9, max_tokens=120)
    late = running.submit("late", [9] * 9, max_tokens=120, priority=-1)
    running.wait()
    counts = {name: a.finish.life.count(Stage.PREEMPTED) for name, a in running.answers.items()}
    assert counts["urgent"] == 0 and counts["late"] <= counts["r0"] <= counts["r1"] <= counts["r2"], counts
    assert counts["r2"] > 0, counts
    assert len(urgent.token_ids) == len(late.token_ids) == 120
    running.assert_at_baseline()


def test_an_abort_reaches_a_sequence_that_gave_way(started: Started) -> None:
    running = tight(started, PLACES[0])
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        running.submit(name, [i + 3] * 9, max_tokens=120)

    def on_token(event: Any) -> None:
        waiting = [s for pool in running.engine._mover.reservations.decode for s in pool._waiting]
        for seq in waiting:
            running.engine.abort(seq.request_id)

    running.on_token = on_token
    running.wait()
    reasons = [running.answers[name].finish.reason.value for name in names]
    assert "abort" in reasons and "length" in reasons
    running.assert_at_baseline()
