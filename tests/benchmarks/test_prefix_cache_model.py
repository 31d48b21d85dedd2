"""How a trace is scaled down and picked from, and the figures of both engines; no engine runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.mooncake import BLOCK, Prompt, conversations, infinite, scaled
from benchmarks.prefix_cache import replay
from benchmarks.prefix_cache_model import summarise
from jaxpd.cache.keys import Chain

SYSTEM = 7
TRACE = [
    Prompt(2 * BLOCK, (SYSTEM, 10)),
    Prompt(BLOCK + 100, (SYSTEM, 20)),
    Prompt(3 * BLOCK, (SYSTEM, 10, 11)),
    Prompt(40, (30,)),
    Prompt(2 * BLOCK + 31, (SYSTEM, 20, 21)),
    Prompt(3 * BLOCK + 320, (SYSTEM, 10, 11, 12)),
]


def test_a_block_becomes_a_page_and_equal_blocks_stay_equal() -> None:
    made = [scaled(prompt, 32, 291) for prompt in TRACE]
    assert [len(ids) for ids in made] == [32, 19, 48, 1, 32, 58]
    assert all(0 <= token < 291 for ids in made for token in ids)
    assert made[2][:32] == made[0] and made[5][:48] == made[2]
    assert made[1][:16] == made[0][:16] and made[1][16:] == made[4][16:19] != made[0][16:19]


def test_the_scaled_trace_has_the_hits_of_the_whole_one() -> None:
    whole = [Chain(BLOCK, prompt.tokens()) for prompt in TRACE]
    small = [Chain(16, scaled(prompt, 32, 49152)) for prompt in TRACE]
    assert replay(whole, 100, 1).hit == infinite(TRACE, BLOCK) == 7
    assert replay(small, 100, 1).hit == 7


def test_conversations_that_begin_first_are_taken_whole() -> None:
    assert conversations(TRACE, 3) == [TRACE[0], TRACE[2], TRACE[5]]
    assert conversations(TRACE, 5) == [TRACE[0], TRACE[1], TRACE[2], TRACE[4], TRACE[5]]
    assert conversations(TRACE, 100) == TRACE
    assert conversations(TRACE, 2) == [TRACE[0], TRACE[2]]


def row(prompt: int, cached: int, cold: float, warm: float) -> dict[str, Any]:
    times = {"cold_ttft_s": cold, "warm_ttft_s": warm, "cold_ttst_s": 2 * cold, "warm_ttst_s": 2 * warm}
    return {"prompt_tokens": prompt, "warm_cached_tokens": cached, **times}


def test_figures_by_the_share_found() -> None:
    found = summarise([row(100, 0, 1.0, 1.0), row(100, 48, 1.0, 0.5), row(200, 192, 2.0, 0.5), row(32, 16, 0.5, 0.2)])
    assert {name: got["requests"] for name, got in found.items()} == {
        "all": 4, "nothing": 1, "below half": 1, "half or more": 2,
    }  # fmt: skip
    assert found["half or more"]["cached_share"] == pytest.approx(208 / 232, abs=1e-4)
    assert found["half or more"]["ttft_saved"] == pytest.approx(1 - 0.7 / 2.5)
    assert found["below half"]["warm_ttft_ms"] == {"p50": 500, "p90": 500, "mean": 500}
    assert found["nothing"]["cold_ttst_ms"]["mean"] == 2000
    assert "nothing" not in summarise([row(100, 96, 1.0, 0.1)])
