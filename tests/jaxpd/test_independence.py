"""A request's answer does not depend on what else runs: 200 random ones, all together and then one after another.

Alone means on the same engine, so that the prefix cache is warm then, and slots have been used by others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.jaxpd.random_requests import (
    LONGEST_PROMPT,
    MODEL,
    check,
    decoder,
    params_of,
    possible_tokens,
    random_request,
)

Started = Callable[..., Any]
pytestmark = pytest.mark.heavy
REQUESTS = 200
MOST_EXCUSED = 4  # of them: a choice nearer than the margin is rare
WAYS: dict[str, tuple[str | None, str | None, dict[str, Any]]] = {
    "disaggregated": ("2x1", "1x2", {}),
    "chunked": (None, None, {"mode": "chunked", "mesh": "1x2"}),
    "decoupled": (None, None, {"mode": "decoupled", "mesh": "2x1", "prefix_cache": False}),
}


@pytest.mark.parametrize("way", WAYS)
def test_alone_and_together_are_the_same(way: str, started: Started) -> None:
    """Log probabilities to 1e-4; tokens equal, or a choice that was nearer than the margin says why not."""
    prefill, decode, config = WAYS[way]
    running = started(MODEL, prefill, decode, max_num_seqs=8, **config)
    requests = {f"r{seed}": random_request(seed) for seed in range(REQUESTS)}
    together = {name: running.submit(name, prompt, **options) for name, (prompt, options) in requests.items()}
    running.wait()
    hits = excused = 0
    for name, (prompt, options) in requests.items():
        alone = running.submit(f"{name}-alone", prompt, **options)
        assert alone.ended.wait(30), f"{name} got no answer"
        hits += alone.finish.usage.cached_tokens > 0
        excused += not agree(prompt, options, alone, together[name])
    assert excused <= MOST_EXCUSED
    assert (hits > REQUESTS // 10) == config.get("prefix_cache", True)  # it was warm, or it was off
    for name, (prompt, options) in requests.items():
        check(prompt, options, together[name])
    running.assert_at_baseline()


def agree(prompt: list[int], options: dict[str, Any], one: Any, other: Any) -> bool:
    """Whether the tokens of two answers are the same; where they part the choice was near, or this raises."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b), len(one.token_ids)
    )
    for a, b in zip(one.logprobs[:same], other.logprobs[:same], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], rtol=0, atol=1e-4)
    if one.token_ids == other.token_ids:
        assert (one.finish.reason, one.finish.stop_token_id) == (other.finish.reason, other.finish.stop_token_id)
        return True
    assert same < min(len(one.token_ids), len(other.token_ids)), "one goes on where the other ends"
    before = one.token_ids[:same]
    model_V = decoder()((*prompt, *before))[-1]
    possible = possible_tokens(model_V, params_of(options), prompt=prompt, outputs=before)
    assert {one.token_ids[same], other.token_ids[same]} <= possible, f"token {same} differs, and nothing was near"
    return False


def test_the_requests_use_every_option_and_every_way_to_end() -> None:
    """What the test above stands on: options by the dozen, and choices that are seldom near."""
    requests = [random_request(seed) for seed in range(REQUESTS)]
    assert all(2 <= len(prompt) <= LONGEST_PROMPT for prompt, _ in requests)
    off = params_of({"ignore_eos": False})
    for field in requests[0][1]:
        used = sum(getattr(params_of(options), field) != getattr(off, field) for _, options in requests)
        assert used >= REQUESTS // 8, field
    starts = [tuple(prompt[:16]) for prompt, _ in requests]
    assert sum(starts.count(start) > 1 for start in starts) >= REQUESTS // 5
    sampled = [(prompt, params_of(options)) for prompt, options in requests if options["temperature"]]
    near = 0
    for prompt, params in sampled[:40]:
        near += len(possible_tokens(decoder()(tuple(prompt))[-1], params, prompt=prompt, outputs=())) > 1
    assert near <= 2
