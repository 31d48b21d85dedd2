"""A covering selection: few cases in which every pair of parameter values that can meet does meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    """Every two of its values, with their names."""
    return set(itertools.combinations(case.items(), 2))


def covering(
    parameters: Mapping[str, Sequence[Any]],
    *,
    allowed: Callable[[Case], bool] = lambda case: True,
    wanted: Callable[[Pair], bool] = lambda pair: True,
) -> list[Case]:
    """Cases that hold every wanted pair that any allowed case holds, chosen one by one for the most new pairs.

    The same parameters give the same cases in the same order.
    """
    product = (dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values()))
    candidates = [(case, {pair for pair in pairs_of(case) if wanted(pair)}) for case in product if allowed(case)]
    missing = set().union(*(pairs for _, pairs in candidates))
    chosen = []
    while missing:
        best, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(best)
        missing -= pairs
    return chosen
