"""What one replica computes next, by mode: siblings with one signature, pure functions of the running sequences.

Each returns *batches*: programs that are dispatched one after the other, without waiting for the one before. A batch is
a list of (index into the candidates, tokens).

    stall_free    one hybrid batch: decodes first, then prompt chunks, within the budget. A decode never waits for a
                  prompt; a prompt takes what is left of the budget (SARATHI, arXiv:2308.16369; Sarathi-Serve,
                  arXiv:2403.02310). `--mode chunked`, and every prefill and decode pool, which have only one of both.
    interleaved   prompts first, decodes only while there is none: what a server does that does not chunk, the baseline.
    decoupled     a batch of decodes and a batch of prompt chunks, each a program of its own: a decode step is never as
                  long as a prompt, and no hybrid program is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A running sequence in the order of service: `prompt_left` tokens of prompt, or none and one token to decode."""

    prompt_left: int
    wants_token: bool


DECODES = Candidate(prompt_left=0, wants_token=True)
IDLE = Candidate(prompt_left=0, wants_token=False)

Batch = list[tuple[int, int]]
Policy = Callable[..., list[Batch]]


def stall_free(candidates: Sequence[Candidate], *, token_budget: int, max_rows: int, clock_s: float) -> list[Batch]:
    """At most one batch of at most `max_rows` rows and `token_budget` tokens."""
    decodes = _decodes(candidates, min(max_rows, token_budget))
    batch = decodes + _prompts(candidates, token_budget - len(decodes), max_rows - len(decodes))
    return [batch] if batch else []


def interleaved(candidates: Sequence[Candidate], *, token_budget: int, max_rows: int, clock_s: float) -> list[Batch]:
    """A batch of prompts, or of decodes when no prompt is left."""
    batch = _prompts(candidates, token_budget, max_rows) or _decodes(candidates, min(max_rows, token_budget))
    return [batch] if batch else []


def decoupled(candidates: Sequence[Candidate], *, token_budget: int, max_rows: int, clock_s: float) -> list[Batch]:
    """Decodes, and prompts, as two batches; each keeps within the bounds by itself."""
    batches = (_decodes(candidates, min(max_rows, token_budget)), _prompts(candidates, token_budget, max_rows))
    return [batch for batch in batches if batch]


POLICIES: dict[str, Policy] = {
    "disaggregated": stall_free,
    "chunked": stall_free,
    "interleaved": interleaved,
    "decoupled": decoupled,
}


def _decodes(candidates: Sequence[Candidate], most: int) -> Batch:
    return [(i, 1) for i, c in enumerate(candidates) if not c.prompt_left and c.wants_token][:most]


def _prompts(candidates: Sequence[Candidate], budget: int, max_rows: int) -> Batch:
    chosen: Batch = []
    for i, candidate in enumerate(candidates):
        if budget <= 0 or len(chosen) >= max_rows:
            break
        if candidate.prompt_left:
            tokens = min(candidate.prompt_left, budget)
            chosen.append((i, tokens))
            budget -= tokens
    return chosen
