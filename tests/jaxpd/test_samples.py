"""n samples of one prompt: computed once, each with a seed of its own, each with its own end."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.engine import seed_of
from jaxpd.life import Stage
from jaxpd.request import FinishReason

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
LONG = PROMPTS["len100"]
Started = Callable[..., Any]
pytestmark = pytest.mark.heavy
PLACES: list[tuple[Any, Any, dict[str, Any]]] = [
    ("1x1", "1x1", {}),
    ("1x1", "1x1", {"prefix_cache": False}),
    (None, None, {"mode": "chunked", "mesh": "1x1", "prefix_cache": False}),
    ("2x1", "1x2", {}),
]


@pytest.mark.parametrize(("prefill", "decode", "config"), PLACES)
def test_each_sample_is_what_its_seed_gives_alone(
    prefill: Any, decode: Any, config: dict[str, Any], started: Started
) -> None:
    running = started("smollm2", prefill, decode, **config)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.2, "seed": 41, "logprobs": 1}
    running.submit("many", LONG["prompt_ids"], n=5, **options)
    running.wait()
    samples = [running.answers["many" if i == 0 else f"many/{i}"] for i in range(5)]
    for i, sample in enumerate(samples):
        alone = running.submit(f"alone{i}", LONG["prompt_ids"], **{**options, "seed": seed_of(41, i)})
        running.wait()
        assert alone.token_ids == sample.token_ids, i
        assert sample.finish.sample == i and len(sample.logprobs) == 12
    assert len({tuple(s.token_ids) for s in samples}) > 1
    running.assert_at_baseline()


@pytest.mark.parametrize(("prefill", "decode", "config"), PLACES[:3])
def test_the_prompt_is_computed_once(prefill: Any, decode: Any, config: dict[str, Any], started: Started) -> None:
    running = started("smollm2", prefill, decode, **config)
    prompt = [7, *LONG["prompt_ids"][:90]]
    running.submit("many", prompt, n=3, max_tokens=4)
    running.wait()
    lives = [running.answers[name].finish.life for name in ("many", "many/1", "many/2")]
    computed = [sum(m.tokens for m in life.moments if m.stage is Stage.CHUNK) for life in lives]
    assert computed == [91, 91 - 80, 91 - 80], "the others compute what is behind the last full page"
    assert all(running.answers[name].token_ids == running.answers["many"].token_ids for name in ("many/1", "many/2"))
    again = running.submit("again", prompt, max_tokens=4)
    running.wait()
    found = again.finish.usage.cached_tokens
    assert found == (80 if running.engine.limits.prefix_cache else 0), "without a cache nobody else finds it"


def test_greedy_samples_are_the_reference_and_end_one_by_one(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    running.submit("many", LONG["prompt_ids"], n=4, max_tokens=24)

    def on_token(event: Any) -> None:
        if event.sample == 2 and event.first_index == 3:
            running.engine.abort("many", sample=2)

    running.on_token = on_token
    running.wait()
    for name in ("many", "many/1", "many/3"):
        assert running.answers[name].token_ids == LONG["greedy_ids"][:24]
        assert running.answers[name].finish.reason is FinishReason.LENGTH
    ended = running.answers["many/2"]
    assert ended.finish.reason is FinishReason.ABORT
    assert 4 <= len(ended.token_ids) < 24 and ended.token_ids == LONG["greedy_ids"][: len(ended.token_ids)]
    running.assert_at_baseline()


def test_an_abort_reaches_samples_that_no_pool_has_yet(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    running = started("smollm2", "1x1", "1x1")
    routed: list[int] = []
    route = running.engine._mover.route

    def noted(seq: Any) -> None:
        routed.append(seq.sample)
        route(seq)

    monkeypatch.setattr(running.engine._mover, "route", noted)
    monkeypatch.setattr(running.engine, "first_token", lambda seq: None)  # the others stay where they are
    running.submit("many", LONG["prompt_ids"], n=3, max_tokens=60)
    assert running.engine.abort("many")
    running.wait()
    assert all(a.finish.reason is FinishReason.ABORT for a in running.answers.values())
    assert routed == [0]
    assert not running.engine.abort("many")
    running.assert_at_baseline()
