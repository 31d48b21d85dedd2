"""Waiting for arrays without being stuck.

A pull that hangs cannot be interrupted, and neither can a thread inside `block_until_ready`. So whoever decides asks
the arrays whether they are there, and a deadline is a comparison. JAX has no call-back for this. Asking often takes
time from the transfer that is asked about, asking seldom finds late; hence a second thread (`Waiter`) that may get
stuck and whose only word is "look now". What it does not say is found by looking now and then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable

import jax

SOONEST_S, LATEST_S = 2e-3, 5e-3
SHARE = 0.02  # asked again after this share of the time that it has taken so far: what is found late is 2% late


def are_ready(arrays: Iterable[jax.Array]) -> bool:
    """Whether all have arrived or failed."""
    return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]


def failure(arrays: Iterable[jax.Array]) -> Exception | None:
    """What went wrong with arrays that are ready; None: nothing, they may be given to any program."""
    try:
        jax.block_until_ready(list(arrays))
    except Exception as error:  # JaxRuntimeError, or what else a plugin raises: it belongs to these arrays alone
        return error
    return None


def ask_again_s(age_s: float) -> float:
    """Seconds until the next question about something that has been on its way for `age_s`."""
    return min(max(SHARE * age_s, SOONEST_S), LATEST_S)


class Waiter:
    """Waits for one thing after another, in a thread of its own, and calls `wake` after each.

    A `wait` looks up its arrays when its turn comes, so that nothing is kept alive that others have let go. One that
    never ends holds up the later ones: they are found by looking, as if there were no waiter.
    """

    def __init__(self, wake: Callable[[], None], name: str) -> None:
        self._wake = wake
        self._name = name
        self._turns: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wait_for(self, wait: Callable[[], object]) -> None:
        """`wake` shall be called when `wait` has come back, or raised. From any thread."""
        self._turns.put(wait)
        with self._lock:
            if self._thread is None:  # a transport that does one side's work has one such thread
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """It ends after what it waits for now; nobody waits for that."""
        self._turns.put(None)

    def _run(self) -> None:
        while (wait := self._turns.get()) is not None:
            with contextlib.suppress(Exception):  # whoever takes the arrays meets their error
                wait()
            del wait  # and with it what it knows
            self._wake()
