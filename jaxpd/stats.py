"""A reading of the engine: what its requests do, what room there is, and what has happened since the start.

Two readings are equal where the same is in use; what only ever grows, or is kept while there is room, is not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from jaxpd.cache.prefix import PrefixCache, PrefixStats
from jaxpd.sequence import Sequence, State

if TYPE_CHECKING:
    from jaxpd.mover import Mover
    from jaxpd.pool import Pool

MAX_SHOWN = 64  # sequences that one reading tells of, so that it stays cheap with thousands


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """Room in one replica of one pool. `free_pages` are those that a sequence could get."""

    role: str
    pool: int
    replica: int
    free_pages: int
    num_pages: int
    free_slots: int
    num_slots: int
    pinned_pages: int = 0  # reserved for prompts that are still on their way here
    cached_pages: int = dataclasses.field(default=0, compare=False)  # of the free ones: they can still be found
    prefix: PrefixStats = dataclasses.field(default_factory=PrefixStats, compare=False)
    preempted: int = dataclasses.field(default=0, compare=False)  # sequences that had to give way, so far


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolStats:
    """One pool. Bytes are of each of its devices; `free_bytes` is None where the backend does not say (CPU)."""

    role: str
    pool: int
    waiting: int  # sequences in its queue
    weight_bytes: int
    kv_bytes: int
    free_bytes: int | None = dataclasses.field(default=None, compare=False)


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
    """Where one sequence is. `computed` tokens of its prompt are dispatched, `tokens` of its answer are known."""

    request_id: str
    sample: int
    state: str
    prompt_tokens: int
    computed: int
    tokens: int
    holds: tuple[Hold, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A reading of the engine: requests by state, free room, staged bytes.

    `crossed_bytes` and `handoff_failures` (sequences, by `HandoffFailed.reason`) count from the start on. `startup_s`
    is how long each stage of the start took, by the name that `jaxpd.progress` shows, and "start" for all of it.
    """

    states: dict[str, int]
    replicas: tuple[ReplicaStats, ...]
    staging_bytes: int
    pools: tuple[PoolStats, ...] = ()
    crossed_bytes: int = dataclasses.field(default=0, compare=False)
    handoff_failures: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False)
    startup_s: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)
    sequences: tuple[SequenceStats, ...] = ()  # the oldest MAX_SHOWN

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


def read_engine(
    states: dict[str, int],
    sequences: Seq[Sequence],
    pools: Seq[Pool],
    mover: Mover | None,
    startup_s: Mapping[str, float],
) -> EngineStats:
    """A reading of the parts of an engine; from any thread."""
    pinned = _pinned_pages(sequences)
    places = {space: (pool.role, pool.index, r) for pool in pools for r, space in enumerate(pool.spaces)}
    failures: dict[str, int] = {}
    for counted in (*(pool.handoff_failures for pool in pools), {} if mover is None else mover.failures):
        for reason, count in counted.items():
            failures[reason] = failures.get(reason, 0) + count
    return EngineStats(
        states=states,
        replicas=tuple(_read_replica(pool, r, pinned) for pool in pools for r in range(len(pool.spaces))),
        staging_bytes=0 if mover is None else mover.staging_bytes,
        pools=tuple(_read_pool(pool) for pool in pools),
        crossed_bytes=0 if mover is None else mover.crossed_bytes,
        handoff_failures=failures,
        startup_s=dict(startup_s),
        sequences=tuple(read_sequence(seq, places) for seq in sequences[:MAX_SHOWN]),
    )


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
        computed=min(cached, seq.prompt_len),
        tokens=len(seq.outputs),
        holds=tuple(holds),
    )


def _read_pool(pool: Pool) -> PoolStats:
    return PoolStats(
        role=pool.role,
        pool=pool.index,
        waiting=pool.num_waiting,
        weight_bytes=pool.device.weight_bytes,
        kv_bytes=pool.device.kv_bytes,
        free_bytes=pool.device.free_bytes,
    )


def _read_replica(pool: Pool, replica: int, pinned: Mapping[tuple[int, int], int]) -> ReplicaStats:
    space = pool.spaces[replica]
    free, cached = space.free_pages, space.evictable_pages
    return ReplicaStats(
        role=pool.role,
        pool=pool.index,
        replica=replica,
        free_pages=free + cached,
        num_pages=space.num_pages,
        free_slots=space.free_slots,
        num_slots=space.num_slots,
        pinned_pages=pinned.get((pool.index, replica), 0) if pool.role == "decode" else 0,
        cached_pages=cached,
        prefix=space.stats(),
        preempted=pool.preempted[replica],
    )


def _pinned_pages(sequences: Iterable[Sequence]) -> dict[tuple[int, int], int]:
    """(decode pool, replica) -> pages that are reserved there for prompts whose hand-off is not over, each once."""
    pinned: dict[tuple[int, int], set[int]] = {}
    for seq in sequences:
        lease = seq.decode_lease
        if seq.state in (State.PREFILLING, State.OFFERED) and lease is not None and lease is not seq.prefill_lease:
            pinned.setdefault(seq.decode_target, set()).update(lease.pages.tolist())
    return {target: len(pages) for target, pages in pinned.items()}
