"""Pages and slots: one owner each, freed once, from any thread."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpd.cache.pages import Lease, ReplicaSpace


def test_a_lease_takes_pages_and_a_slot_and_gives_them_back_once() -> None:
    space = ReplicaSpace(10, 2)
    lease = space.reserve(4)
    assert lease is not None
    assert (space.free_pages, space.free_slots) == (6, 1)
    lease.release()
    lease.release()
    assert (space.free_pages, space.free_slots) == (10, 2)


def test_what_does_not_fit_takes_nothing() -> None:
    space = ReplicaSpace(4, 1)
    assert space.reserve(5) is None
    assert space.reserve(4) is not None
    assert space.reserve(0) is None  # no slot left
    assert (space.free_pages, space.free_slots) == (0, 0)


@given(st.lists(st.integers(-8, 12), max_size=60))
def test_every_page_has_one_owner(steps: list[int]) -> None:
    """Positive: reserve so many pages; negative: release the n-th lease again, held or not."""
    space, held = ReplicaSpace(24, 4), list[Lease]()
    for step in steps:
        if step >= 0 and (lease := space.reserve(step)) is not None:
            held.append(lease)
        elif step < 0 and held:
            held[-step % len(held)].release()
        live = [lease for lease in held if not lease.released]
        owned = np.concatenate([lease.pages for lease in live]) if live else np.empty(0, int)
        assert len(set(owned.tolist())) == len(owned) == 24 - space.free_pages
        assert len({lease.slot for lease in live}) == len(live) == 4 - space.free_slots


def test_racing_releases_free_once() -> None:
    space = ReplicaSpace(8, 8)
    for _ in range(200):
        lease = space.reserve(3)
        assert lease is not None
        threads = [threading.Thread(target=lease.release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (space.free_pages, space.free_slots) == (8, 8)
