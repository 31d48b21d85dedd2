"""What goes into the next step of one replica: decodes first, then prompt chunks, within the token budget.

One function serves every role: a prefill pool has no decodes, a decode pool no prompts, and a mixed pool gets the
stall-free batch of SARATHI (decodes never wait for a prompt; a prompt takes what is left of the budget).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A running sequence in arrival order: `prompt_left` tokens of prompt, or none left and one token to decode."""

    prompt_left: int
    wants_token: bool


def stall_free(candidates: Sequence[Candidate], *, token_budget: int, max_rows: int) -> list[tuple[int, int]]:
    """[(index into candidates, tokens)] of the next step, at most `max_rows` rows and `token_budget` tokens."""
    decodes = [(i, 1) for i, c in enumerate(candidates) if not c.prompt_left and c.wants_token]
    chosen = decodes[: min(max_rows, token_budget)]
    left = token_budget - len(chosen)
    for i, candidate in enumerate(candidates):
        if left <= 0 or len(chosen) >= max_rows:
            break
        if candidate.prompt_left:
            tokens = min(candidate.prompt_left, left)
            chosen.append((i, tokens))
            left -= tokens
    return chosen
