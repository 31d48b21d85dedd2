"""Which replica takes a sequence: the best prefix, until load says otherwise."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixCache
from jaxpd.policies.placement import Place, prefer_prefix

PAGE = 16


def place(hit: int = 0, load: float = 0, *, room: int = 100, slots: int = 4, last: int = 0) -> Place:
    return Place(hit_pages=hit, room=room, free_slots=slots, load=load, last_chosen=last)


def test_the_best_prefix_wins_until_its_queue_costs_more_than_it_saves() -> None:
    assert prefer_prefix([place(0), place(4, load=4 * PAGE - 1)], 10, hit_value=PAGE) == 1
    assert prefer_prefix([place(0), place(4, load=4 * PAGE)], 10, hit_value=PAGE) == 1
    assert prefer_prefix([place(0), place(4, load=4 * PAGE + 1)], 10, hit_value=PAGE) == 0


def test_without_a_value_of_hits_the_least_loaded_wins() -> None:
    assert prefer_prefix([place(9, load=2), place(0, load=1)], 10, hit_value=0) == 1
    assert prefer_prefix([place(0, load=1), place(9, load=1)], 10, hit_value=0) == 1


def test_ties_go_to_the_one_chosen_longest_ago() -> None:
    assert prefer_prefix([place(last=3), place(last=1), place(last=2)], 1, hit_value=PAGE) == 1


def test_a_hit_counts_as_room_and_no_room_means_waiting() -> None:
    assert prefer_prefix([place(room=9), place(3, load=999, room=7)], 10, hit_value=PAGE) == 1
    assert prefer_prefix([place(room=9), place(3, room=6)], 10, hit_value=PAGE) is None
    assert prefer_prefix([place(slots=0)], 1, hit_value=PAGE) is None
    assert prefer_prefix([], 1, hit_value=PAGE) is None


def test_a_negative_value_is_refused() -> None:
    with pytest.raises(ValueError, match="hit_value is -1"):
        prefer_prefix([place()], 1, hit_value=-1)


PLACES = st.lists(
    st.builds(
        Place,
        hit_pages=st.integers(0, 8),
        room=st.integers(0, 12),
        free_slots=st.integers(0, 2),
        load=st.integers(0, 200),
        last_chosen=st.integers(0, 9),
    ),
    max_size=6,
)


@given(PLACES, st.integers(8, 16), st.integers(0, 32))
def test_the_choice_fits_and_no_other_that_fits_is_better_in_both(places: list[Place], pages: int, value: int) -> None:
    chosen = prefer_prefix(places, pages, hit_value=value)
    fitting = [p for p in places if pages - p.hit_pages <= p.room and p.free_slots]
    if chosen is None:
        assert not fitting
        return
    best = places[chosen]
    assert best in fitting
    for other in fitting:
        assert not (other.load < best.load and other.hit_pages >= best.hit_pages)
        assert not (other.load <= best.load and other.hit_pages > best.hit_pages)
        assert best.load - other.load <= value * (best.hit_pages - other.hit_pages)


class Replicas:
    """Prefill replicas with real caches that place prompts by the rule; a prompt computes when `run` is called."""

    def __init__(self, count: int) -> None:
        self.caches = [PrefixCache(200, 200, PAGE) for _ in range(count)]
        self.places = [place() for _ in self.caches]
        self.chosen: list[int] = []
        self.hits = 0

    def send(self, tokens: list[int], *, run: bool) -> None:
        chain = Chain(PAGE, tokens)
        pages = -(-len(tokens) // PAGE)
        matches = [cache.match(chain) for cache in self.caches]
        self.places = [
            dataclasses.replace(p, hit_pages=len(m.pages), room=m.room, free_slots=m.free_slots)
            for p, m in zip(self.places, matches, strict=True)
        ]
        index = prefer_prefix(self.places, pages, hit_value=PAGE)
        assert index is not None
        self.chosen.append(index)
        lease = self.caches[index].acquire(chain, pages)
        assert lease is not None
        self.hits += lease.hit_pages
        lease.commit(len(tokens))
        lease.release()
        waits = 0 if run else len(tokens) - lease.hit_tokens
        place = self.places[index]
        self.places[index] = dataclasses.replace(place, load=place.load + waits, last_chosen=len(self.chosen))


def test_an_idle_pool_fills_all_its_caches() -> None:
    replicas = Replicas(4)
    for number in range(16):
        replicas.send([number] * 40, run=True)
    assert [replicas.chosen.count(i) for i in range(4)] == [4] * 4


def test_an_idle_pool_sends_a_conversation_to_where_it_was() -> None:
    replicas = Replicas(4)
    for turn in range(1, 6):
        for user in range(4):
            replicas.send([user] * (40 * turn), run=True)
    assert replicas.chosen == [0, 1, 2, 3] * 5
    assert replicas.hits == 4 * sum((40 * turn) // PAGE for turn in range(1, 5))


def test_a_burst_with_one_hot_prefix_spreads_and_computes_it_once_a_replica_at_most() -> None:
    replicas = Replicas(4)
    hot, own = 10 * PAGE, 40
    for number in range(200):
        replicas.send([1] * hot + [2 + number] * own, run=False)
    loads = [p.load for p in replicas.places]
    assert max(loads) - min(loads) <= hot + own
    assert sum(loads) == 4 * hot + 200 * own
