"""Which waiting request may start, and where: no reservation in the decode pool, no prefill.

Requests are admitted in arrival order; the first that does not fit holds back those behind it, so that a long prompt
is never starved by short ones. A request that fits an empty replica is always admitted in the end, since running
sequences end, what they leave in a prefix cache is evicted, and nothing else takes pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpd.policies.placement import Place, prefer_prefix

# What a page that need not cross is worth in a decode pool, in sequences of imbalance: a guess, not measured. With
# pages of 16 tokens a replica that has 256 of the prompt's is preferred while it serves one sequence more than another.
DECODE_HIT_VALUE = 1 / 16


@dataclasses.dataclass(frozen=True)
class Need:
    """Pages one request takes in each role, hits included, and what staging a page takes."""

    prefill_pages: int
    decode_pages: int
    prompt_pages: int  # those that cross, but for what the decode replica has
    staged_page_bytes: int


@dataclasses.dataclass(frozen=True)
class Admission:
    """Where a request goes, and the staging that it is charged for."""

    prefill: int  # index of the replica
    decode: int
    staging_bytes: int


def admit(
    need: Need,
    prefill: Sequence[Place],
    decode: Sequence[Place],
    *,
    prefill_hit_value: float,
    staging_free: int,
    staging_in_use: int,
) -> Admission | None:
    """Replicas for the oldest waiting request, or None: it waits.

    `prefill_hit_value`: what a page that need not be computed is worth, in the unit of the prefill places' load. The
    staging bound never blocks the only hand-off there is, so that one request can always run.
    """
    source = prefer_prefix(prefill, need.prefill_pages, hit_value=prefill_hit_value)
    target = prefer_prefix(decode, need.decode_pages, hit_value=DECODE_HIT_VALUE)
    if source is None or target is None:
        return None
    staged = max(need.prompt_pages - decode[target].hit_pages, 0) * need.staged_page_bytes
    if staged > staging_free and staging_in_use > 0:
        return None
    return Admission(source, target, staged)
