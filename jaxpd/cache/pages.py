"""Who owns which page: one allocator per replica, every page free or with exactly one owner.

A `Lease` is pages plus, in a pool that decodes, a slot (one of `--max-num-seqs` rows). It is released once, from any
thread; a second release does nothing, so that the races of abort and finish are harmless.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np


class ReplicaSpace:
    """Pages and slots of one replica of one pool. Thread-safe."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.num_pages = num_pages
        self.num_slots = num_slots
        self._lock = threading.Lock()
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def reserve(self, pages: int) -> Lease | None:
        """A lease on `pages` pages and one slot, or None when there is no room now."""
        with self._lock:
            if len(self._free_pages) < pages or not self._free_slots:
                return None
            taken = [self._free_pages.pop() for _ in range(pages)]
            return Lease(self, np.asarray(taken, np.int32), self._free_slots.pop())

    def _give_back(self, lease: Lease) -> None:
        with self._lock:
            if lease.released:
                return
            lease.released = True
            self._free_pages.extend(int(p) for p in lease.pages)
            self._free_slots.append(lease.slot)

    @property
    def free_pages(self) -> int:
        """Pages without an owner."""
        with self._lock:
            return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        """Slots without an owner."""
        with self._lock:
            return len(self._free_slots)


@dataclasses.dataclass(eq=False)
class Lease:
    """Ownership of pages and a slot by one sequence."""

    space: ReplicaSpace
    pages: np.ndarray  # int32 page ids in the order of the sequence's tokens
    slot: int
    released: bool = False

    def release(self) -> None:
        """Gives everything back, the first time it is called."""
        self.space._give_back(self)
