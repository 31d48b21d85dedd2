"""Sampling options through the engine: prefill, hand-off and decode give what the NumPy decoder and sampler give."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.request import SamplingParams
from tests.jaxpd import numpy_sampler as plain

DATA = pathlib.Path(__file__).parent.parent / "data"
FOLDER = DATA / "tiny" / "smollm2"
VOCAB, EOS = 291, (283,)
Started = Callable[..., Any]
MESHES = [("1x1", "1x1"), ("2x1", "1x2")]
MARGIN = 1e-4  # nearer than that, float32 and float64 may choose differently


@functools.cache
def _decoder() -> Callable[[tuple[int, ...]], np.ndarray]:
    spec = importlib.util.spec_from_file_location("numpy_decoder", DATA / "numpy_decoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config, weights = module.load(FOLDER)
    return lambda token_ids: module.forward(config, weights, token_ids)


def random_request(seed: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt and options, each on or off by chance; half of the requests are greedy."""
    rng = np.random.default_rng(seed)

    def maybe(value: Any, off: Any, chance: float = 0.5) -> Any:
        return value if rng.random() < chance else off

    prompt = rng.choice(EOS[0], int(rng.integers(2, 45))).tolist()
    return prompt, {
        "max_tokens": int(rng.integers(1, 14)),
        "temperature": maybe(float(rng.uniform(0.3, 1.5)), 0.0),
        "top_k": maybe(int(rng.integers(1, 40)), 0),
        "top_p": maybe(float(rng.uniform(0.2, 1.0)), 1.0),
        "min_p": maybe(float(rng.uniform(0.0, 0.3)), 0.0),
        "repetition_penalty": maybe(float(rng.uniform(0.8, 1.8)), 1.0),
        "presence_penalty": maybe(float(rng.uniform(-1, 2)), 0.0),
        "frequency_penalty": maybe(float(rng.uniform(-1, 2)), 0.0),
        "logit_bias": maybe(dict(zip(prompt, rng.uniform(-3, 3, len(prompt)).tolist(), strict=True)), {}),
        "logprobs": maybe(int(rng.integers(0, 21)), None),
        "seed": seed,
    }


def check(prompt: list[int], options: dict[str, Any], answer: Any) -> None:
    """Each token of an answer against the NumPy decoder and sampler, given the tokens before it."""
    params = SamplingParams(**{"ignore_eos": True, **options})
    tokens = answer.token_ids
    logits_TV = _decoder()((*prompt, *tokens))
    assert len(answer.logprobs) == (0 if params.logprobs is None else len(tokens))
    for i, token in enumerate(tokens):
        model_V = logits_TV[len(prompt) + i - 1]
        changed_V = plain.changed_logits(model_V, params, prompt=prompt, outputs=tokens[:i], eos=EOS)
        if params.temperature == 0:
            assert changed_V[token] > changed_V.max() - MARGIN, (i, params)
        else:
            kept = plain.kept_tokens(changed_V, params)
            last = changed_V[kept].min() / params.temperature
            assert token in kept or changed_V[token] / params.temperature > last - MARGIN, (i, params)
        if params.logprobs is not None:
            want_V, got = plain.log_softmax(model_V), answer.logprobs[i]
            assert got.logprob == pytest.approx(want_V[token], abs=1e-4)
            assert len(got.top) == params.logprobs
            np.testing.assert_allclose(
                [p for _, p in got.top], np.sort(want_V)[::-1][: params.logprobs], rtol=0, atol=1e-4
            )
            for top, logprob in got.top:
                assert logprob == pytest.approx(want_V[top], abs=1e-4)


@pytest.mark.parametrize(("prefill", "decode"), MESHES)
def test_random_requests_equal_the_plain_sampler_alone_and_together(
    prefill: str, decode: str, started: Started
) -> None:
    running = started("smollm2", prefill, decode)
    requests = {f"r{seed}": random_request(seed) for seed in range(24)}
    together = {name: running.submit(name, prompt, **options) for name, (prompt, options) in requests.items()}
    running.wait()
    for name, (prompt, options) in requests.items():
        check(prompt, options, together[name])
    for name, (prompt, options) in list(requests.items())[:10]:
        alone = running.submit(f"{name}-alone", prompt, **options)
        running.wait()
        assert alone.token_ids == together[name].token_ids
        for one, other in zip(alone.logprobs, together[name].logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    running.assert_at_baseline()


def test_a_plain_request_gets_the_same_beside_one_with_options(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    prompt = [5, 6, 7, 8]
    alone = [running.submit(f"alone{t}", prompt, max_tokens=12, temperature=t, seed=3) for t in (0.0, 1.0)]
    running.wait()
    assert all(not answer.logprobs for answer in alone)
    beside = [running.submit(f"beside{t}", prompt, max_tokens=12, temperature=t, seed=3) for t in (0.0, 1.0)]
    running.submit("loud", prompt, max_tokens=14, top_k=3, temperature=1.0, repetition_penalty=1.4, logprobs=2)
    running.wait()
    assert [a.token_ids for a in alone] == [a.token_ids for a in beside]
    assert all(not answer.logprobs for answer in beside)


def test_a_slot_forgets_the_request_before(started: Started) -> None:
    """Four slots, twelve requests one after another: options and counts of a slot's last user are gone."""
    running = started("smollm2", "1x1", "1x1")
    for i in range(12):
        prompt, options = random_request(100 + i // 2)
        options |= {"presence_penalty": 1.5} if i % 2 else {"logit_bias": {}, "repetition_penalty": 1.7}
        answer = running.submit(f"r{i}", prompt, **options)
        running.wait()
        check(prompt, options, answer)


@pytest.mark.parametrize(("prefill", "decode"), MESHES)
@pytest.mark.parametrize("how", ["eos", "stop_token"])
def test_min_tokens_holds_the_end_off_and_then_lets_it_come(
    how: str, prefill: str, decode: str, started: Started
) -> None:
    running = started("smollm2", prefill, decode)
    end = EOS[0] if how == "eos" else 17
    ending: dict[str, Any] = {"ignore_eos": False} if how == "eos" else {"stop_token_ids": (17,)}
    for least in (0, 1, 2, 5):
        answer = running.submit(
            f"{how}{least}", [1, 2, 3], max_tokens=9, min_tokens=least, logit_bias={end: 100.0}, **ending
        )
        running.wait()
        assert answer.finish.stop_token_id == end and answer.token_ids.index(end) == len(answer.token_ids) - 1 == least
    ignored = running.submit("ignored", [1, 2, 3], max_tokens=3, min_tokens=3, logit_bias={EOS[0]: 100.0})
    running.wait()
    assert ignored.token_ids == [EOS[0]] * 3, "an EOS that ends nothing is not held off"


def test_options_without_room_on_the_device_are_refused_at_once(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    with pytest.raises(InvalidArgument, match="min_tokens=1 with 200 tokens that end the answer"):
        running.submit("many", [1], max_tokens=2, min_tokens=1, stop_token_ids=tuple(range(200)))
    with pytest.raises(InvalidArgument, match="logit_bias holds token 291, which is outside the vocabulary 0..290"):
        running.submit("outside", [1], max_tokens=2, logit_bias={VOCAB: 1.0})
    running.assert_at_baseline()
