"""The thread that waits: it says when to look, holds nothing, and may be stuck."""

from __future__ import annotations

import queue
import threading
import time
import weakref

from meshes.transfer.settle import LATEST_S, SOONEST_S, Waiter, ask_again_s

PATIENCE_S = 30.0


class Thing:
    """Something that can be held."""

    def wait(self) -> None:
        """There at once."""


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def until_ended(name: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while threads(name):
        assert time.monotonic() < end_s, f"{name} does not end"
        time.sleep(0.001)


def test_it_wakes_after_each_in_their_order_errors_included() -> None:
    woken: queue.Queue[str] = queue.Queue()
    done: list[int] = []
    waiter = Waiter(lambda: woken.put(f"after {done}"), "test-waiter-order")

    def fail() -> None:
        done.append(2)
        raise RuntimeError("Connection closed")

    assert threads("test-waiter-order") == 0, "no thread where there is nothing to wait for"
    waiter.wait_for(lambda: done.append(1))
    assert woken.get(timeout=PATIENCE_S) == "after [1]"
    waiter.wait_for(fail)
    assert woken.get(timeout=PATIENCE_S) == "after [1, 2]"
    waiter.wait_for(lambda: done.append(3))
    assert woken.get(timeout=PATIENCE_S) == "after [1, 2, 3]"
    assert threads("test-waiter-order") == 1
    waiter.close()
    until_ended("test-waiter-order")


def test_it_keeps_nothing_alive_when_it_has_waited() -> None:
    woken = threading.Semaphore(0)
    waiter = Waiter(woken.release, "test-waiter-alive")
    thing = Thing()
    gone = weakref.ref(thing)
    waiter.wait_for(thing.wait)
    assert woken.acquire(timeout=PATIENCE_S)
    del thing
    assert gone() is None
    waiter.close()


def test_a_wait_without_end_holds_up_the_later_ones_and_nobody_else() -> None:
    woken, never = threading.Semaphore(0), threading.Event()
    waiter = Waiter(woken.release, "test-waiter-stuck")
    waiter.wait_for(lambda: never.wait(PATIENCE_S))
    waiter.wait_for(lambda: None)
    waiter.close()  # comes back at once
    assert not woken.acquire(timeout=0.05)
    never.set()
    assert woken.acquire(timeout=PATIENCE_S) and woken.acquire(timeout=PATIENCE_S)
    until_ended("test-waiter-stuck")


def test_without_it_one_looks_now_and_then() -> None:
    assert ask_again_s(0.0) == SOONEST_S and ask_again_s(100.0) == LATEST_S
    assert SOONEST_S < ask_again_s(0.15) < LATEST_S
