"""Sampling options through the engine: prefill, hand-off and decode give what the NumPy decoder and sampler give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.errors import InvalidArgument
from tests.jaxpd.random_requests import EOS, VOCAB, check, random_request

Started = Callable[..., Any]
MESHES = [("1x1", "1x1"), ("2x1", "1x2")]


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
