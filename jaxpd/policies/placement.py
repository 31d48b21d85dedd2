"""Which replica takes a new sequence: the one with the best prefix, until load says otherwise.

The rule, in one unit of load:

    choose the replica that fits with the least   load - hit_value * hit_pages

so a replica with `h` pages more of the prompt is preferred until it is more than `h * hit_value` busier. Where load is
the prompt tokens that a prefill replica has yet to compute and `hit_value` the page size, the left side is (up to a
constant) the work before this request's first token: recomputing a prefix elsewhere against waiting for it here. A
prefix that everybody wants is so computed a second time exactly when the queue for it costs as much, and then there are
two replicas that have it. In a decode pool a hit saves room and transfer, not compute: load in sequences, and
`hit_value` the sequences that one page not sent is worth (0: the least loaded).

The caller charges a sequence to its replica's load when it places it, not when it runs, or a burst piles up in one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """One replica as a new sequence finds it; `Match` of its prefix cache says the first three."""

    hit_pages: int  # pages of the prompt that it has
    room: int  # pages that it could give besides
    free_slots: int
    load: float  # work in it or on its way there
    last_chosen: int  # number of the placement that chose it last, 0 before the first


def prefer_prefix(places: Sequence[Place], pages: int, *, hit_value: float) -> int | None:
    """The index of the replica for a sequence of `pages` pages, hit included; None: no replica has room now.

    Ties go to the longer hit, and then to the replica that was chosen longest ago, so that an idle pool fills all its
    caches and not the first one over and over.
    """
    if hit_value < 0:
        raise ValueError(f"hit_value is {hit_value}, it must not be negative")
    fitting = [i for i, p in enumerate(places) if pages - p.hit_pages <= p.room and p.free_slots > 0]
    return min(fitting, key=lambda i: _rank(places[i], hit_value), default=None)


def _rank(place: Place, hit_value: float) -> tuple[float, int, int]:
    return place.load - hit_value * place.hit_pages, -place.hit_pages, place.last_chosen
