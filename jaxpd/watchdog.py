"""Reports a device step that does not end, and answers the requests that wait for it.

A step that hangs (a collective that misses a peer, a driver fault) holds its pool's thread, and nothing can end it from
outside. After `timeout_s` its pool is given up: the log gets the stacks of all threads and what the pool had in hand,
every request in it is answered with an error, and nothing new is sent there. If the step ends after all, the pool
starts afresh with an empty cache.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from jaxpd.pool import Pool

log = logging.getLogger(__name__)


class Watchdog:
    """A thread that looks at pools; `give_up` is called once for each step that takes too long."""

    def __init__(self, pools: Sequence[Pool], timeout_s: float, give_up: Callable[[Pool, float], None]) -> None:
        self._pools = list(pools)
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxpd-watchdog", daemon=True)

    def start(self) -> None:
        """Starts looking."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(min(self._timeout_s / 4, 5.0)):
            for pool in self._pools:
                since = pool.busy_since
                if since is None or pool.given_up or time.monotonic() - since < self._timeout_s:
                    continue
                pool.given_up = True
                seconds = time.monotonic() - since
                log.error(
                    "a step of the %s pool %d on %s has not ended for %.1f s (--step-timeout %g); it has %s\n%s",
                    pool.role,
                    pool.index,
                    ", ".join(map(str, pool.device.spec.mesh.devices.flat)),
                    seconds,
                    self._timeout_s,
                    ", ".join(f"{s.request_id} ({s.state.value}, {s.cached} tokens)" for s in pool.everyone()),
                    stacks(),
                )
                self._give_up(pool, seconds)


def stacks() -> str:
    """What every thread is doing, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
