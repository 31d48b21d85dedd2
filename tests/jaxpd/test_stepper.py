"""A step made from the last one is what it would be made anew."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxpd.stepper import Stepper

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
Started = Callable[..., Any]
pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    ("prefill", "decode", "config"),
    [("2x1", "1x2", {}), (None, None, {"mode": "chunked", "mesh": "1x1"}), ("1x1", "1x1", {"reserve_tokens": 1})],
)
def test_the_next_step_of_the_same_sequences_is_the_last_plus_one(
    prefill: Any, decode: Any, config: dict[str, Any], started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against `_pack`, which makes every row anew, with penalties, seeds, and pages that are taken on the way."""
    running = started("smollm2", prefill, decode, **config)
    again = Stepper._pack_again
    compared: list[int] = []

    def both(self: Stepper, last: Any) -> Any:
        before = [(seq, seq.cached, seq.sampled) for decodes in last.decodes for seq in decodes]
        shape, packed, sampling = again(self, last)
        after = [(seq.cached, seq.sampled) for seq, _, _ in before]
        for seq, cached, sampled in before:
            seq.cached, seq.sampled = cached, sampled
        from jaxpd.stepper import Work

        want_shape, want, want_sampling = self._pack([Work(decodes) for decodes in last.decodes])
        assert (shape, sampling) == (want_shape, want_sampling)
        assert [(seq.cached, seq.sampled) for seq, _, _ in before] == after
        start, length = shape.fields()["token_ids"]
        known = want[:, start : start + length] >= 0  # read back by now: the device knows the same
        packed = packed.copy()
        packed[:, start : start + length][known] = want[:, start : start + length][known]
        np.testing.assert_array_equal(packed, want)
        compared.append(len(before))
        return want_shape, want, want_sampling

    monkeypatch.setattr(Stepper, "_pack_again", both)
    cases = list(PROMPTS.items())[:4]
    for i, (name, prompt) in enumerate(cases):
        options: dict[str, Any] = {"presence_penalty": 0.0} if i % 2 else {"temperature": 0.0}
        running.submit(name, prompt["prompt_ids"], max_tokens=24, seed=i, **options)
    running.submit("loud", [5, 6], max_tokens=40, temperature=1.0, seed=2**32 - 1, repetition_penalty=1.2, logprobs=1)
    running.wait()
    for name, prompt in cases:
        assert running.answers[name].token_ids == prompt["greedy_ids"][:24]
    assert len(compared) > 10 and max(compared) > 1
    running.assert_at_baseline()
