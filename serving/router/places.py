"""Where the pools of all workers stand in one list a role, so that a router looks like a server with many pools.

A worker's pools keep their numbers while it lives and when it comes back. Those of one that is forgotten go to the next
that joins; no other pool changes its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jaxpd.stats import EngineStats, ReplicaStats


class Places(Mapping[str, tuple[str, ...]]):
    """Role -> the mesh spec of each pool: what `ServedModel.meshes` is, and grows with the workers."""

    def __init__(self) -> None:
        self._specs: dict[str, tuple[str, ...]] = {}
        self._numbers: dict[tuple[str, str, int], int] = {}  # (address, role, its own number) -> number here
        self._free: dict[str, list[int]] = {}  # by role

    def __getitem__(self, role: str) -> tuple[str, ...]:
        return self._specs[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def take(self, address: str, meshes: Mapping[str, tuple[str, ...]]) -> None:
        """A worker has joined, with these meshes."""
        for role, specs in meshes.items():
            for own, spec in enumerate(specs):
                known, free = list(self._specs.get(role, ())), self._free.setdefault(role, [])
                key = (address, role, own)
                if key not in self._numbers:
                    self._numbers[key] = free.pop() if free else len(known)
                number = self._numbers[key]
                known[number:] = [spec, *known[number + 1 :]]
                self._specs = {**self._specs, role: tuple(known)}

    def forget(self, address: str) -> None:
        """A worker does not come back."""
        for key in [key for key in self._numbers if key[0] == address]:
            self._free[key[1]].append(self._numbers.pop(key))

    def replicas(self, address: str, stats: EngineStats) -> Iterator[ReplicaStats]:
        """A worker's replicas with the numbers that their pools have here."""
        for replica in stats.replicas:
            number = self._numbers.get((address, replica.role, replica.pool))
            if number is not None:
                yield dataclasses.replace(replica, pool=number)
