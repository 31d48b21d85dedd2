"""The offering side's book of leases: what is staged, for how long, and that each piece is freed exactly once.

    grant --> (waiting until computed) --> start --> [lease runs] --> end --> free    by ack, refusal, abort or expiry
                                             ^            |
                                             +-- start ---+                           again: the next generation

Pure: the clock is given, nothing is moved here. `end` answers with the lease once and with None ever after, so whatever
comes twice, or too late, or about an earlier generation, changes nothing. The bytes count until `free`.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from meshes.transfer.messages import KEY_BITS


@dataclasses.dataclass(frozen=True)
class Lease:
    """What is known about one staged piece."""

    id: int
    nbytes: int
    generation: int = 0  # 0: not offered yet
    ends_s: float | None = None  # on the book's clock; None: it does not run yet


def draw_id() -> int:
    """64 random bits."""
    return secrets.randbits(KEY_BITS)


class Leases:
    """Live leases, bounded in number and bytes. Not thread-safe."""

    def __init__(
        self, max_bytes: int, max_count: int, *, clock: Callable[[], float], draw: Callable[[], int] = draw_id
    ) -> None:
        self.max_bytes = max_bytes
        self.max_count = max_count
        self.used_bytes = 0
        self._clock = clock
        self._draw = draw
        self._live: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, nbytes: int) -> Lease | None:
        """A new id for `nbytes`; None where a bound would be exceeded. A piece above the bound may go alone."""
        if self.used_bytes and (len(self._live) >= self.max_count or self.used_bytes + nbytes > self.max_bytes):
            return None
        while (id := self._draw()) in self._live:
            pass
        lease = self._live[id] = Lease(id, nbytes)
        self.used_bytes += nbytes
        return lease

    def start(self, id: int, duration_s: float) -> Lease | None:
        """The lease runs from now on, in its next generation; None if it has ended."""
        if (lease := self._live.get(id)) is None:
            return None
        lease = dataclasses.replace(lease, generation=lease.generation + 1, ends_s=self._clock() + duration_s)
        self._live[id] = lease
        return lease

    def end(self, id: int, generation: int | None = None) -> Lease | None:
        """Ends it (if it is of this generation); None: there is nothing to end."""
        lease = self._live.get(id)
        if lease is None or generation not in (None, lease.generation):
            return None
        return self._live.pop(id)

    def free(self, lease: Lease) -> None:
        """The memory of an ended lease is free."""
        self.used_bytes -= lease.nbytes

    def expired(self) -> list[Lease]:
        """Those whose time is up, still to be ended."""
        now = self._clock()
        return [lease for lease in self._live.values() if lease.ends_s is not None and lease.ends_s <= now]

    def next_end_s(self) -> float | None:
        """When the next one expires; None: none runs."""
        return min((lease.ends_s for lease in self._live.values() if lease.ends_s is not None), default=None)

    def ids(self) -> list[int]:
        """All that live."""
        return list(self._live)
