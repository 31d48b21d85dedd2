"""In which order waiting requests are tried, who may pass whom, and who gives way when pages run out.

The order is by class first (a lower `priority` is served earlier), then by arrival. A request that does not fit now may
be passed by later ones that do: a huge prompt does not hold up small ones. But each lets only so many pass; from then
on nothing behind it is admitted, what runs ends, and the room that becomes free is its own: it does not starve either.

When a sequence needs a page and there is none, the one that is last in this order gives way: the youngest of the least
urgent class. It loses the least work, and the oldest always goes on, so that something always finishes.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_PASSED = 32  # requests that may overtake one that waits for room
LOOK_AHEAD = 16  # waiting requests that are tried at once; each try asks every replica's prefix cache

Rank = tuple[int, float]  # (priority, arrival in seconds): sorts into the order of service


def candidates(passed: Sequence[int], *, most_passed: int = MOST_PASSED, look_ahead: int = LOOK_AHEAD) -> int:
    """How many of the waiting requests may be tried, from the first on.

    `passed[i]` is how many requests have overtaken the i-th one. The first that has let `most_passed` pass is the last
    to be tried.
    """
    for i, count in enumerate(passed[:look_ahead]):
        if count >= most_passed:
            return i + 1
    return min(len(passed), look_ahead)


def victim(ranks: Sequence[Rank]) -> int:
    """Index of the running sequence that gives way. Raises ValueError when there is none."""
    return max(range(len(ranks)), key=lambda i: ranks[i])
