"""Random requests for a tiny model, and what the NumPy decoder and sampler say about their answers.

Seeded sampling is judged to the token: the noise of a draw is a pure function of seed, output index and token id, so
the oracle adds the engine's own noise (`jaxpd.sampling.gumbel_noise`) to scores of its own. Where float32 and float64,
or two batches, may rightly differ, there is more than one `possible_tokens`.

Dimension key: T positions, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpd.request import SamplingParams
from jaxpd.sampling import gumbel_noise
from tests.jaxpd import numpy_sampler as plain

DATA = pathlib.Path(__file__).parent.parent / "data"
MODEL = "smollm2"
VOCAB, EOS = 291, (283,)
MARGIN = 1e-4  # nearer than that, float32 and float64 may choose differently
LONGEST_PROMPT, MOST_TOKENS = 64, 14


@functools.cache
def decoder() -> Callable[[tuple[int, ...]], np.ndarray]:
    """token ids -> float64 logits [T, V] of the tiny model, kept for whoever asks again."""
    spec = importlib.util.spec_from_file_location("numpy_decoder", DATA / "numpy_decoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config, weights = module.load(DATA / "tiny" / MODEL)
    return functools.lru_cache(maxsize=1000)(lambda token_ids: module.forward(config, weights, token_ids))


def random_request(seed: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt and options, each on or off by chance; half are greedy, and a third of the prompts begin alike."""
    rng = np.random.default_rng(seed)

    def maybe(value: Any, off: Any, chance: float = 0.5) -> Any:
        return value if rng.random() < chance else off

    prompt = rng.choice(EOS[0], int(rng.integers(2, 45))).tolist()
    options = {
        "max_tokens": int(rng.integers(1, MOST_TOKENS)),
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
    options["min_tokens"] = maybe(int(rng.integers(0, options["max_tokens"] + 1)), 0)
    options["stop_token_ids"] = maybe(tuple(rng.choice(VOCAB, 30, replace=False).tolist()), (), 0.3)
    options["ignore_eos"] = maybe(True, False)
    start = np.random.default_rng(rng.integers(3)).choice(EOS[0], 20).tolist()
    return maybe([*start, *prompt], prompt, 1 / 3), options


def params_of(options: dict[str, Any]) -> SamplingParams:
    """The parameters that the engine's tests send: EOS is ignored unless it is said otherwise."""
    return SamplingParams(**{"ignore_eos": True, "seed": 0, **options})


def possible_tokens(
    model_V: np.ndarray, params: SamplingParams, *, prompt: Sequence[int], outputs: Sequence[int]
) -> set[int]:
    """The next tokens that are right for these logits of the model: one, unless a choice is nearer than `MARGIN`.

    The choice is by the largest score: changed logits, or where sampled changed logits / temperature + noise of what
    the filters keep. It is near where two scores are, or where a token is at the edge of what is kept.
    """
    changed_V = plain.changed_logits(model_V, params, prompt=prompt, outputs=outputs, eos=EOS)
    if params.temperature == 0:
        return set(np.flatnonzero(changed_V > changed_V.max() - MARGIN).tolist())
    scores_V = changed_V / params.temperature + noise(params.seed or 0, len(outputs), len(model_V))
    surely, perhaps = kept(changed_V / params.temperature, params)
    return {token for token in perhaps if scores_V[token] > scores_V[surely].max() - MARGIN}


def kept(scaled_V: np.ndarray, params: SamplingParams) -> tuple[list[int], list[int]]:
    """The tokens that the filters keep whatever the rounding, and those that they may keep; both likeliest first."""
    order = sorted(range(len(scaled_V)), key=lambda token: (-scaled_V[token], token))
    sorted_V = scaled_V[order]
    p_V = np.exp(sorted_V - sorted_V[0])
    before_V = np.cumsum(p_V) - p_V  # what comes before a token
    counts = []
    for slack in (-MARGIN, MARGIN):  # lengths of the beginning that is kept
        count = int(np.sum(sorted_V - sorted_V[0] >= np.log(params.min_p) - slack)) if params.min_p else len(order)
        count = max(min(count, params.top_k or count), 1)
        if params.top_p < 1:
            total = before_V[count - 1] + p_V[count - 1]
            count = min(count, int(np.sum(before_V < (params.top_p + slack) * total)))
        counts.append(max(count, 1))
    surely = [t for t in order[: counts[0]] if counts[0] == len(order) or scaled_V[t] > sorted_V[counts[0]] + MARGIN]
    perhaps = [t for t in order if scaled_V[t] > sorted_V[counts[1] - 1] - MARGIN]
    return surely or order[:1], perhaps


def noise(seed: int, output_index: int, vocab: int) -> np.ndarray:
    """The engine's noise [V] of one draw."""
    return np.asarray(_noise(vocab)(np.uint32(seed), np.uint32(output_index)))


@functools.cache
def _noise(vocab: int) -> Callable[..., jax.Array]:
    return jax.jit(lambda seed, index: gumbel_noise(seed, index, jnp.arange(vocab)))


def check(prompt: list[int], options: dict[str, Any], answer: Any) -> None:
    """Each token of an answer against the NumPy decoder and sampler, given the tokens before it."""
    params = params_of(options)
    tokens = answer.token_ids
    logits_TV = decoder()((*prompt, *tokens))
    assert len(answer.logprobs) == (0 if params.logprobs is None else len(tokens))
    for i, token in enumerate(tokens):
        model_V = logits_TV[len(prompt) + i - 1]
        assert token in possible_tokens(model_V, params, prompt=prompt, outputs=tokens[:i]), (i, params)
        if params.logprobs is not None:
            want_V, got = plain.log_softmax(model_V), answer.logprobs[i]
            assert got.logprob == pytest.approx(want_V[token], abs=1e-4)
            assert len(got.top) == params.logprobs
            np.testing.assert_allclose(
                [p for _, p in got.top], np.sort(want_V)[::-1][: params.logprobs], rtol=0, atol=1e-4
            )
            for top, logprob in got.top:
                assert logprob == pytest.approx(want_V[top], abs=1e-4)
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    assert not ending & set(tokens[:-1]), "it went on after its end"
    assert len(tokens) == params.max_tokens or tokens[-1] in ending
