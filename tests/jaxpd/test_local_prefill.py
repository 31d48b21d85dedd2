"""Prompts that the decode pool computes itself: when, and that nobody can tell by the tokens."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.config import EngineConfig
from jaxpd.errors import InvalidArgument
from jaxpd.policies.chunking import Costs, next_chunk, prefill_here

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
Started = Callable[..., Any]
pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(("prefill", "decode"), [("1x1", "1x1"), ("2x1", "1x2"), ("1x1,2x1", "1x2,3x1")])
def test_short_prompts_are_computed_where_they_decode(prefill: str, decode: str, started: Started) -> None:
    running = started("smollm2", prefill, decode, local_prefill="20", prefix_cache=False)
    for name, prompt in PROMPTS.items():
        running.submit(name, prompt["prompt_ids"], max_tokens=24)
    running.wait()
    local = set()
    for name, prompt in PROMPTS.items():
        assert running.answers[name].token_ids == prompt["greedy_ids"][:24], name
        if running.answers[name].finish.timings.transfer_s is None:
            local.add(name)
    assert local == {name for name, prompt in PROMPTS.items() if len(prompt["prompt_ids"]) <= 20}
    assert local and len(local) < len(PROMPTS)
    running.assert_at_baseline()


def test_what_the_caches_have_does_not_count(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1", local_prefill="20")
    prompt = PROMPTS["len100"]["prompt_ids"]
    cold = running.submit("cold", prompt, max_tokens=4)
    running.wait()
    warm = running.submit("warm", prompt, max_tokens=4)
    running.wait()
    assert cold.finish.timings.transfer_s is not None and warm.finish.timings.transfer_s is None
    assert cold.token_ids == warm.token_ids and warm.finish.usage.cached_tokens == 96
    running.assert_at_baseline()


@pytest.mark.parametrize("asked", ["auto", "1"])
def test_auto_runs_and_gives_the_reference(asked: str, started: Started) -> None:
    running = started("smollm2", "1x1", "1x1", local_prefill=asked)
    for round_ in range(2):
        for name, prompt in PROMPTS.items():
            running.submit(f"{name}{round_}", prompt["prompt_ids"], max_tokens=8)
        running.wait()
    for name, prompt in PROMPTS.items():
        for round_ in range(2):
            assert running.answers[f"{name}{round_}"].token_ids == prompt["greedy_ids"][:8]
    running.assert_at_baseline()


def test_the_rule() -> None:
    slow_link = Costs(prefill_s_per_token=1e-3, step_s=0.01, transfer_s=0.0, transfer_s_per_token=0.3e-3)
    fast_link = Costs(prefill_s_per_token=1e-3, step_s=0.01, transfer_s=0.01, transfer_s_per_token=0.1e-3)
    assert prefill_here(100, 100, limit=None, costs=slow_link)
    assert prefill_here(90, 90, limit=None, costs=fast_link), "setting up costs more than a fifth of 90 ms"
    assert not prefill_here(110, 110, limit=None, costs=fast_link)
    assert prefill_here(10, 1000, limit=None, costs=fast_link), "a cached prompt still has to cross"
    assert not prefill_here(100, 100, limit=None, costs=Costs()), "nothing is known yet"
    assert prefill_here(20, 500, limit=20, costs=Costs()) and not prefill_here(21, 500, limit=20, costs=Costs())
    assert not prefill_here(1, 1, limit=0, costs=slow_link)


def test_the_last_chunk_is_small_where_that_hides_more_than_it_costs() -> None:
    def cut(tokens: int, budget: int, costs: Costs) -> list[int]:
        chunks: list[int] = []
        while sum(chunks) < tokens:
            left = tokens - sum(chunks)
            chunks.append(next_chunk(left, budget, first=not chunks, page_size=16, costs=costs))
        return chunks

    slow = Costs(prefill_s_per_token=1e-3, step_s=0.02, transfer_s_per_token=1e-3)
    fast = Costs(prefill_s_per_token=1e-3, step_s=0.02, transfer_s_per_token=1e-5)
    assert cut(1024, 256, fast) == [256] * 4
    assert cut(1024, 256, slow) == [256, 256, 256, 192, 64]
    assert cut(256, 256, slow) == [256], "one chunk stays one"
    assert cut(300, 256, slow) == [256, 44]
    assert cut(330, 256, slow) == [256, 74], "10 tokens less to hide are not worth a step"
    assert cut(1024, 256, Costs()) == [256] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_prefill": "often"}, "--local-prefill often must be never, auto, or the most tokens"),
        ({"local_prefill": "0"}, "--local-prefill 0 must be"),
        ({"local_prefill": "64", "mode": "chunked"}, "--local-prefill 64 is for --mode disaggregated"),
        ({"reserve_tokens": 0}, "--reserve-tokens 0 must be at least 1"),
        ({"step_timeout_s": 0.0}, "--step-timeout 0.0 must be above 0"),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        EngineConfig(**fields)
