"""Programs that XLA compiles in this process, told to whoever watches: a server that is warm should compile none.

    jax.monitoring --(jaxpd.startup, once a process)--> compiled --> every watcher

JAX has no way to stop listening, so that one listener is registered for the whole process and watchers come and go
here. A program that comes from the disk cache counts too: the step that needs it waits for it as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Watcher = Callable[[float], None]  # the seconds that it took

_lock = threading.Lock()
_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> Callable[[], None]:
    """Calls `watcher` after each program, in the thread that compiled it; call the result to stop that."""
    with _lock:
        _watchers.append(watcher)

    def stop() -> None:
        with _lock:
            if watcher in _watchers:
                _watchers.remove(watcher)

    return stop


def compiled(seconds: float) -> None:
    """A program was compiled, or taken from the disk cache."""
    with _lock:
        watchers = list(_watchers)
    for watcher in watchers:
        watcher(seconds)
