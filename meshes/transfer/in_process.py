"""The `in_process` transport: both meshes live in this JAX process, and KV goes from device to device.

    offer(pieces) --[worker thread: reshard, wait until settled]--> done(arrays) or done(error)

An offer hands over staging arrays, which nobody changes any more. A worker thread sends their shards along the
resharding plan and waits until every piece has arrived; only then is `done` called, since an array that is unready or
failed would take the whole page pool with it when it meets a donating program. The sum of staged bytes is bounded:
bytes are charged before a prompt starts and given back as its pieces settle, or once they never will be offered.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import Mesh

from meshes.heads import HeadLayout
from meshes.transfer.meter import Meter
from meshes.transfer.move import crossing_bytes, move_heads

Staging = tuple[jax.Array, ...]  # per KV slot of a device: [tp, L, N, S, W]
Done = Callable[[list[Staging] | None, Exception | None], None]


class StagingBound:
    """A bound on the bytes that are staged at once. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._used = 0

    def charge(self, count: int) -> bool:
        """Takes `count` bytes unless they exceed the bound. A single offer above the bound may go alone."""
        with self._lock:
            if self._used and self._used + count > self.limit:
                return False
            self._used += count
            return True

    def give_back(self, count: int) -> None:
        """Returns bytes taken by `charge`."""
        with self._lock:
            self._used -= count

    @property
    def used(self) -> int:
        """Bytes charged now."""
        with self._lock:
            return self._used


class InProcessTransport:
    """Moves staged KV between meshes of this process.

    `bytes_per_s` makes it as slow as a network link of that bandwidth, for experiments and tests: offers then pass one
    after the other, each after the time that its bytes take.
    """

    def __init__(self, max_staging_bytes: int, *, workers: int = 4, bytes_per_s: float | None = None) -> None:
        self.staging = StagingBound(max_staging_bytes)
        self.bytes_per_s = bytes_per_s
        self.cost = Meter()  # of offers, in bytes
        self._counting = threading.Lock()
        self._crossed = 0
        self._link = threading.Lock()
        self._link_free_s = 0.0
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="jaxpd-handoff")

    def offer(self, pieces: Sequence[Staging], src: HeadLayout, dst: HeadLayout, dst_mesh: Mesh, done: Done) -> int:
        """Starts moving `pieces` (each some pages of all layers) to `dst_mesh` (1 x tp); returns the transfer's id.

        `done` is called once, from another thread, with the settled arrays of each piece or the error.
        """

        def run() -> None:
            try:
                jax.block_until_ready(pieces)  # what the prefill step still takes is not the link's time
                start = time.monotonic()
                moved = [move_heads(piece, src, dst, dst_mesh) for piece in pieces]
                jax.block_until_ready(moved)
                size = sum(array.nbytes for piece in pieces for array in piece)
                self.cost.record(size, self._pass_link(start, size))
                self._count(sum(crossing_bytes(piece, src, dst) for piece in pieces))
            except Exception as error:  # whatever the runtime raises belongs to this transfer alone
                done(None, error)
            else:
                done(moved, None)

        self._executor.submit(run)
        return secrets.randbits(64)

    @property
    def crossed_bytes(self) -> int:
        """Bytes that have crossed from mesh to mesh since the start, without copies inside the destination."""
        with self._counting:
            return self._crossed

    def close(self) -> None:
        """Waits for transfers under way and ends the threads."""
        self._executor.shutdown(wait=True)

    def _count(self, crossed: int) -> None:
        with self._counting:
            self._crossed += crossed

    def _pass_link(self, start_s: float, size: int) -> float:
        """Waits as long as a slow link takes; returns the seconds that the offer itself took, without its turn."""
        if self.bytes_per_s is not None:
            with self._link:
                begins_s = max(self._link_free_s, start_s)
                self._link_free_s = ends_s = begins_s + size / self.bytes_per_s
            time.sleep(max(ends_s - time.monotonic(), 0.0))
            start_s = begins_s
        return time.monotonic() - start_s
