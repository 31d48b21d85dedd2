"""A reading of the engine: what its requests do, and what room there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxpd.sequence import Sequence, State

if TYPE_CHECKING:
    from jaxpd.cache.prefix import PrefixCache

MAX_SHOWN = 64  # sequences that one reading tells of, so that it stays cheap with thousands


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """Room in one replica of one pool. Of `free_pages`, `cached_pages` still hold what the prefix cache can find."""

    role: str
    pool: int
    replica: int
    free_pages: int
    num_pages: int
    free_slots: int
    num_slots: int
    # Not compared: an engine that has answered everything is as free as a new one, and remembers more.
    cached_pages: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold:
    """Pages that a sequence has in one replica of a pool; `filled` of them have KV in them, or on its way."""

    role: str
    pool: int
    replica: int
    pages: int
    filled: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceStats:
    """Where one sequence is. `computed` tokens of its prompt are dispatched, `tokens` of its answer were read."""

    request_id: str
    sample: int
    state: str
    prompt_tokens: int
    computed: int
    tokens: int
    holds: tuple[Hold, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A reading of the engine: requests by state, free room, staged bytes, and the oldest MAX_SHOWN sequences."""

    states: dict[str, int]
    replicas: tuple[ReplicaStats, ...]
    staging_bytes: int
    sequences: tuple[SequenceStats, ...] = ()

    @property
    def live(self) -> int:
        """Requests that are not finished."""
        return sum(self.states.values())

    @property
    def queued(self) -> int:
        """Requests that wait for a reservation."""
        return self.states.get(State.QUEUED.value, 0)

    @property
    def running(self) -> int:
        """Requests that are past the queue."""
        return self.live - self.queued


def read_sequence(seq: Sequence, places: Mapping[PrefixCache, tuple[str, int, int]]) -> SequenceStats:
    """What a sequence does just now, while its pool's thread goes on with it; `places` says whose pages are whose."""
    state, cached, page_size = seq.state, seq.cached, seq.chain.page_size
    decoding = state is State.DECODING
    holds = []
    for lease in dict.fromkeys((seq.prefill_lease, seq.decode_lease)):  # once, where both are the same
        if lease is None or lease.released or lease.cache not in places:
            continue
        role, pool, replica = places[lease.cache]
        computes = lease is seq.prefill_lease or decoding
        filled = -(-cached // page_size) if computes else seq.landed_pages
        pages = len(lease.pages)
        holds.append(Hold(role=role, pool=pool, replica=replica, pages=pages, filled=min(filled, pages)))
    return SequenceStats(
        request_id=seq.request_id,
        sample=seq.sample,
        state=state.value,
        prompt_tokens=seq.prompt_len,
        computed=seq.prompt_len if seq.outputs else min(cached, seq.prompt_len),
        tokens=len(seq.outputs),
        holds=tuple(holds),
    )
