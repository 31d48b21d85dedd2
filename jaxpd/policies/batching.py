"""What one replica computes next, by mode: siblings with one signature, pure functions of the running sequences.

They see how many sequences want a token, and how many tokens each unfinished prompt has left, both in the order of
service. Each returns *batches*: programs that are dispatched one after the other, without waiting for the one before.

    stall_free    one hybrid batch: decodes first, then prompt chunks, within the budget. A decode never waits for a
                  prompt; a prompt takes what is left of the budget (SARATHI, arXiv:2308.16369; Sarathi-Serve,
                  arXiv:2403.02310). `--mode chunked`, and every prefill and decode pool.
    interleaved   prompts first, decodes only while there is none: what a server does that does not chunk, the baseline.
    decoupled     a batch of decodes and a batch of prompt chunks, each a program of its own: a decode step is never as
                  long as a prompt, and no hybrid program is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Batch(NamedTuple):
    """One program: the first `decodes` of those that want a token, and chunks: (index of the prompt, tokens)."""

    decodes: int
    chunks: list[tuple[int, int]]


Policy = Callable[..., list[Batch]]


def stall_free(
    decodes: int, prompts: Sequence[int], *, token_budget: int, max_rows: int, clock_s: float
) -> list[Batch]:
    """At most one batch of at most `max_rows` rows and `token_budget` tokens."""
    decodes = min(decodes, max_rows, token_budget)
    return _unless_empty(Batch(decodes, _chunks(prompts, token_budget - decodes, max_rows - decodes)))


def interleaved(
    decodes: int, prompts: Sequence[int], *, token_budget: int, max_rows: int, clock_s: float
) -> list[Batch]:
    """A batch of prompts, or of decodes when no prompt is left."""
    chunks = _chunks(prompts, token_budget, max_rows)
    return _unless_empty(Batch(0 if chunks else min(decodes, max_rows, token_budget), chunks))


def decoupled(decodes: int, prompts: Sequence[int], *, token_budget: int, max_rows: int, clock_s: float) -> list[Batch]:
    """Decodes, and prompts, as two batches; each keeps within the bounds by itself."""
    own = Batch(min(decodes, max_rows, token_budget), [])
    return _unless_empty(own) + _unless_empty(Batch(0, _chunks(prompts, token_budget, max_rows)))


POLICIES: dict[str, Policy] = {
    "disaggregated": stall_free,
    "chunked": stall_free,
    "interleaved": interleaved,
    "decoupled": decoupled,
}


def _unless_empty(batch: Batch) -> list[Batch]:
    return [batch] if batch.decodes or batch.chunks else []


def _chunks(prompts: Sequence[int], budget: int, max_rows: int) -> list[tuple[int, int]]:
    chosen: list[tuple[int, int]] = []
    for i, left in enumerate(prompts):
        if budget <= 0 or len(chosen) >= max_rows:
            break
        chosen.append((i, min(left, budget)))
        budget -= chosen[-1][1]
    return chosen
