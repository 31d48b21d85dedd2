"""Where a prompt is cut into chunks when its KV has to cross to another mesh, and whether it should cross at all.

Chunks cross while later ones compute. With compute time p and transfer time x a chunk, n chunks are over at

    first chunk's p + (n - 1) * max(p, x) + x        (a two-stage pipeline; Splitwise, arXiv:2311.18677, by layers)

so where p >= x only the last chunk's x is exposed, and a small last chunk leaves little. It costs a step more (the step
before it is padded to its bucket and no shorter), so it pays only where the transfer that it hides takes longer.
"""

from __future__ import annotations

import dataclasses

SMALL = 4  # the last chunk is a quarter of the budget, where it pays
LOCAL_SHARE = 0.2  # of the prefill time: a hand-off that costs more is not worth it (DistServe, Mooncake: 10 to 20%)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What prefill and hand-off are measured to take; zeros until something was measured."""

    prefill_s_per_token: float = 0.0  # in a step that is full
    step_s: float = 0.0  # of a prefill step, however few its tokens
    transfer_s: float = 0.0  # setting up a hand-off
    transfer_s_per_token: float = 0.0


def next_chunk(left: int, budget: int, *, first: bool, page_size: int, costs: Costs) -> int:
    """Tokens of a prompt to compute next, of `left`, at most `budget`.

    `first`: nothing of it is computed yet. A prompt of one chunk stays one.
    """
    if left <= budget and not first:
        small = max(budget // SMALL // page_size * page_size, page_size)
        hidden = (left - small) * costs.transfer_s_per_token
        if left > small and hidden > costs.step_s + small * costs.prefill_s_per_token > 0:
            return left - small
    return min(left, budget)


def prefill_here(tokens: int, all_tokens: int, *, limit: int | None, costs: Costs) -> bool:
    """Whether the decode pool should compute a prompt itself instead of getting its KV.

    Args:
        tokens: of the prompt that no cache has.
        all_tokens: of the prompt whose KV would cross.
        limit: prompts of at most so many uncached tokens; None: by the measured costs.
    """
    if limit is not None:
        return tokens <= limit
    prefill = tokens * costs.prefill_s_per_token
    return prefill > 0 and costs.transfer_s + all_tokens * costs.transfer_s_per_token > LOCAL_SHARE * prefill
