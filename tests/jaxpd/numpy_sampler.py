"""The sampler of `jaxpd.sampling` once more, plainly: one row, float64, sorting, loops; no code in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpd.request import SamplingParams


def changed_logits(
    logits_V: np.ndarray,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> np.ndarray:
    """Logits after bias, penalties and min_tokens."""
    x = logits_V.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(outputs):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(outputs):
        x[token] -= params.frequency_penalty * list(outputs).count(token) + params.presence_penalty
    if len(outputs) < params.min_tokens:
        x[[*params.stop_token_ids, *(() if params.ignore_eos else eos)]] = -np.inf
    return x


def kept_tokens(logits_V: np.ndarray, params: SamplingParams) -> list[int]:
    """The tokens that the filters leave, likeliest first; `logits_V` after `changed_logits`."""
    scaled = logits_V.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    order = sorted(range(len(p)), key=lambda token: (-scaled[token], token))
    order = [token for token in order if p[token] >= params.min_p * p.max()]
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = sum(p[order]), [], 0.0
    for token in order:
        if mass >= params.top_p * total and params.top_p < 1:
            break
        kept.append(token)
        mass += p[token]
    return kept


def probabilities(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that is drawn from; `logits_V` after `changed_logits`."""
    kept = kept_tokens(logits_V, params)
    out = np.zeros(len(logits_V))
    out[kept] = np.exp((logits_V[kept] - logits_V[kept].max()) / params.temperature)
    return out / out.sum()


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    """Natural logarithm of the probabilities of the model."""
    x = logits_V.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
