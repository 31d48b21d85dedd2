"""Log probabilities of the prompt, against the NumPy decoder, wherever it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.jaxpd import numpy_sampler as plain
from tests.jaxpd.random_requests import decoder as _decoder

Started = Callable[..., Any]
pytestmark = pytest.mark.heavy
PLACES: list[tuple[Any, Any, dict[str, Any]]] = [
    ("1x1", "1x1", {}),
    ("2x1", "1x2", {}),
    ("1x1", "1x1", {"local_prefill": "64"}),
    (None, None, {"mode": "chunked", "mesh": "2x1"}),
    (None, None, {"mode": "decoupled", "mesh": "1x1"}),
]


@pytest.mark.parametrize(("prefill", "decode", "config"), PLACES)
def test_they_are_the_models(prefill: Any, decode: Any, config: dict[str, Any], started: Started) -> None:
    running = started("smollm2", prefill, decode, **config)
    rng = np.random.default_rng(5)
    prompts = {f"len{n}": rng.integers(0, 283, n).tolist() for n in (1, 2, 17, 64, 65, 130)}
    for warm in range(2):
        for name, prompt in prompts.items():
            running.submit(f"{name}-{warm}", prompt, max_tokens=3, logprobs=0, prompt_logprobs=4)
            running.submit(f"{name}-{warm}-beside", prompt, max_tokens=3, logprobs=0)
        running.wait()
    for name, prompt in prompts.items():
        want_TV = _decoder()(tuple(prompt))
        for warm in range(2):
            got, beside = running.answers[f"{name}-{warm}"], running.answers[f"{name}-{warm}-beside"]
            assert got.finish.usage.cached_tokens == 0 and beside.prompt_logprobs is None
            assert got.token_ids == beside.token_ids
            assert got.prompt_logprobs is not None and len(got.prompt_logprobs) == len(prompt) - 1
            for i, entry in enumerate(got.prompt_logprobs):
                want_V = plain.log_softmax(want_TV[i])
                assert entry.logprob == pytest.approx(want_V[prompt[i + 1]], abs=1e-4), (name, i)
                np.testing.assert_allclose([p for _, p in entry.top], np.sort(want_V)[::-1][:4], rtol=0, atol=1e-4)
                for token, logprob in entry.top:
                    assert logprob == pytest.approx(want_V[token], abs=1e-4)
    running.assert_at_baseline()


def test_zero_asks_for_the_tokens_own(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    answer = running.submit("zero", [5, 6, 7], max_tokens=2, prompt_logprobs=0, n=2)
    running.wait()
    assert answer.prompt_logprobs is not None
    assert [entry.top for entry in answer.prompt_logprobs] == [(), ()]
    assert running.answers["zero/1"].prompt_logprobs is None, "they come with sample 0"
