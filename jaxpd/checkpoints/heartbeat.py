"""Signs of life for a stage whose library call says nothing until it returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from jaxpd.progress import Stage

PERIOD_S = 3.0


@contextlib.contextmanager
def heartbeat(stage: Stage) -> Iterator[None]:
    """Calls `stage.advance(0, seconds so far)` every 3 s from a thread of its own while the block runs."""
    done = threading.Event()

    def beat() -> None:
        waited = 0.0
        while not done.wait(PERIOD_S):
            waited += PERIOD_S
            stage.advance(0.0, f"{waited:.0f} s")

    thread = threading.Thread(target=beat, name="jaxpd-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
