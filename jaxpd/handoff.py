"""A sequence's KV on its way from a prefill pool to a decode replica, page by page, while its prompt is computed.

    prefill pool's thread           transport's threads            decode pool's thread
    step k dispatched
      take_chunk: gather pages    -> cross, settle           ->     Arrivals.piece: scatter into the reserved pages
    step k + 1 dispatched ...                                      ...
    first token read: OFFERED                               ->     Arrivals.first_token
                                                                   with all pages there: decode it

The first token and the last pages come in any order. A sequence that ends on the way (aborted, or its first token was
the last) is FINISHED in the thread that had it; pieces that arrive later are dropped, and then their staging is free.
That is safe without a lock: who owns a page next has its own writes dispatched by the same decode thread, later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxpd.cache.prefix import PrefixLease
from jaxpd.device import PoolDevice
from jaxpd.errors import HandoffFailed, JaxpdError
from jaxpd.life import Stage
from jaxpd.programs import PAGE_BUCKETS
from jaxpd.sequence import Sequence, State
from meshes.transfer.in_process import Staging

LEAST_PAGES = PAGE_BUCKETS[0]  # fewer are kept for the next chunk: a piece is at least as large


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Pages `[first, first + count)` of a sequence, copied into staging."""

    first: int
    count: int
    pieces: list[Staging]
    staging_bytes: int


def take_chunk(device: PoolDevice, replica: int, seq: Sequence, lease: PrefixLease, page_bytes: int) -> Chunk | None:
    """Gathers the pages of a prompt that are full (all, after its last chunk) and have not been sent; None: not yet.

    `page_bytes` are the staging bytes that one page was charged for.
    """
    size = device.spec.page_size
    ready = -(-seq.cached // size) if not seq.prompt_left else seq.cached // size
    count = ready - seq.sent_pages
    if count <= 0 or (seq.prompt_left and count < LEAST_PAGES):
        return None
    chunk = Chunk(
        first=seq.sent_pages,
        count=count,
        pieces=device.gather(replica, lease.pages[seq.sent_pages : ready]),
        staging_bytes=min(count * page_bytes, seq.staging_bytes),
    )
    if not seq.life.first(Stage.OFFERED):
        seq.life.mark(Stage.OFFERED)
    seq.sent_pages = ready
    seq.staging_bytes -= chunk.staging_bytes
    return chunk


class Arrivals:
    """The sequences on their way to one decode pool. Everything here runs in that pool's thread."""

    def __init__(
        self,
        device: PoolDevice,
        *,
        start: Callable[[Sequence], None],
        fail: Callable[[Sequence, JaxpdError], None],
        settled: Callable[[Chunk], None],
    ) -> None:
        self._device = device
        self._start = start  # decodes it from the next step on
        self._fail = fail  # ends an OFFERED sequence
        self._settled = settled  # frees the staging of a piece
        self._live: dict[Sequence, bool] = {}  # whether its first token is out
        self.failures: dict[str, int] = {}  # sequences that could not be taken over, by reason

    def piece(self, seq: Sequence, chunk: Chunk, moved: list[Staging] | None, error: Exception | None) -> None:
        """Pages have arrived, on this pool's mesh, or failed to. Raises whatever the scatter raises."""
        self._settled(chunk)
        if seq.state is State.FINISHED:
            self._live.pop(seq, None)
            return
        self._live.setdefault(seq, False)
        if error is not None or moved is None:
            message = f"the KV hand-off failed ({type(error).__name__}); the server's log has the details"
            seq.transfer_error = seq.transfer_error or HandoffFailed("copy", message)
        elif seq.transfer_error is None:
            assert seq.decode_lease is not None, "pages were reserved before the first chunk"
            pages = seq.decode_lease.pages[chunk.first : chunk.first + chunk.count]
            self._device.scatter(seq.decode_target[1], pages, moved)
            seq.landed_pages += chunk.count
            if seq.landed_pages * self._device.spec.page_size >= seq.fill_len:
                seq.life.mark(Stage.TRANSFERRED)
        self._go_on(seq)

    def first_token(self, seq: Sequence) -> None:
        """The first token is out and did not end it: OFFERED, and from now on this thread's."""
        self._live[seq] = True
        self._go_on(seq)

    def aborted(self) -> list[Sequence]:
        """Those on their way whose abort was asked for and that are this thread's to end."""
        if not self._live:
            return []
        for seq in [s for s in self._live if s.state is State.FINISHED]:
            del self._live[seq]
        return [seq for seq, offered in self._live.items() if seq.abort_requested and offered]

    def lose(self, error: JaxpdError) -> None:
        """What has landed so far is gone: those who had some of it cannot go on."""
        for seq in list(self._live):
            seq.transfer_error = seq.transfer_error or HandoffFailed("step", error.message)
            self._go_on(seq)

    def everyone(self) -> list[Sequence]:
        """All on their way that anything has been heard of."""
        return list(self._live)

    def _go_on(self, seq: Sequence) -> None:
        if not self._live[seq]:
            return
        assert seq.decode_lease is not None
        if seq.transfer_error is None and seq.decode_lease.lost:
            message = "the decode pool lost the pages of the prompt that it had; send it again"
            seq.transfer_error = HandoffFailed("lost", message)
        if seq.transfer_error is not None:
            self._live.pop(seq, None)
            reason = seq.transfer_error.reason
            self.failures[reason] = self.failures.get(reason, 0) + 1
            self._fail(seq, seq.transfer_error)
        elif seq.landed_pages * self._device.spec.page_size >= seq.fill_len:
            self._live.pop(seq, None)
            self._start(seq)
