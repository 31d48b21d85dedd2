"""A reading of the engine: what its requests do, and what room there is."""

from __future__ import annotations

import dataclasses

from jaxpd.sequence import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """Room in one replica of one pool."""

    role: str
    pool: int
    replica: int
    free_pages: int
    num_pages: int
    free_slots: int
    num_slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A reading of the engine: requests by state, free room, staged bytes."""

    states: dict[str, int]
    replicas: tuple[ReplicaStats, ...]
    staging_bytes: int

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
