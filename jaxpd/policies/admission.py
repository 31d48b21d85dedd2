"""Which waiting request may start, and where: no reservation in the decode pool, no prefill.

Requests are admitted in arrival order; the first that does not fit holds back those behind it, so that a long prompt
is never starved by short ones. A request that fits an empty replica is always admitted in the end, since running
sequences end and nothing else takes pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Room:
    """What one replica has free. `load` is the number of sequences it serves already."""

    free_pages: int
    free_slots: int
    load: int


@dataclasses.dataclass(frozen=True)
class Need:
    """Pages one request takes in each role, and its staging bytes."""

    prefill_pages: int
    decode_pages: int
    staging_bytes: int


def choose_replica(rooms: Sequence[Room], pages: int) -> int | None:
    """The least loaded replica with room for `pages` and a slot; ties go to more free pages, then to the first."""
    fitting = [i for i, room in enumerate(rooms) if room.free_pages >= pages and room.free_slots > 0]
    return min(fitting, key=lambda i: (rooms[i].load, -rooms[i].free_pages, i), default=None)


def admit(
    need: Need, prefill: Sequence[Room], decode: Sequence[Room], *, staging_free: int, staging_in_use: int
) -> tuple[int, int] | None:
    """(prefill replica, decode replica) for the oldest waiting request, or None: it waits.

    The staging bound never blocks the only hand-off there is, so that one request can always run.
    """
    if need.staging_bytes > staging_free and staging_in_use > 0:
        return None
    source = choose_replica(prefill, need.prefill_pages)
    target = choose_replica(decode, need.decode_pages)
    return None if source is None or target is None else (source, target)
