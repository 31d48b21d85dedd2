"""The prefix cache: what it finds, shares, keeps and evicts; by example."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxpd.cache.keys import KEY_BYTES, Chain
from jaxpd.cache.prefix import PrefixCache, PrefixLease, PrefixStats

PAGE = 4


def tokens(*pages: int, tail: int = 1) -> list[int]:
    """A prompt of full pages, page `i` filled with its number, and `tail` tokens behind."""
    return [page for page in pages for _ in range(PAGE)] + [99] * tail


def chain(*pages: int, tail: int = 1, salt: str = "") -> Chain:
    return Chain(PAGE, tokens(*pages, tail=tail), salt=salt)


def cache(num_pages: int = 8, num_slots: int = 8) -> PrefixCache:
    return PrefixCache(num_pages, num_slots, PAGE)


def take(space: PrefixCache, prompt: Chain, pages: int | None = None, *, whole: bool = False) -> PrefixLease:
    lease = space.acquire(prompt, -(-prompt.length // PAGE) if pages is None else pages, whole=whole)
    assert lease is not None
    return lease


def serve(space: PrefixCache, prompt: Chain) -> PrefixLease:
    """A sequence from its start to its end: everything committed and released."""
    lease = take(space, prompt)
    lease.commit(prompt.length)
    lease.release()
    return lease


# keys -----------------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_all_tokens_before_on_salt_and_on_page_size() -> None:
    base = chain(1, 2, 3)
    assert len(base.keys) == 3 and all(len(key) == KEY_BYTES for key in base.keys)
    other = chain(7, 2, 3)
    assert not set(base.keys) & set(other.keys)
    assert chain(1, 2, 4).keys[:2] == base.keys[:2] and chain(1, 2, 4).keys[2] != base.keys[2]
    assert not set(base.keys) & set(chain(1, 2, 3, salt="a").keys)
    assert not set(chain(1, 2, 3, salt="b").keys) & set(chain(1, 2, 3, salt="a").keys)
    assert not set(Chain(2, [1] * 8).keys) & set(Chain(4, [1] * 8).keys)


def test_the_same_page_twice_in_a_row_has_two_keys() -> None:
    assert len(set(chain(5, 5, 5).keys)) == 3


@pytest.mark.parametrize("cut", range(10))
def test_keys_do_not_depend_on_how_the_tokens_arrived(cut: int) -> None:
    ids = list(range(1, 11))
    grown = Chain(PAGE, ids[:cut])
    grown.extend(np.asarray(ids[cut:], np.int64))
    at_once = Chain(PAGE, ids)
    assert (grown.keys, grown.length) == (at_once.keys, 10)
    grown.extend([11, 12])
    assert grown.keys[:2] == at_once.keys and grown.keys == Chain(PAGE, range(1, 13)).keys


# finding --------------------------------------------------------------------------------------------------------------


def test_a_prompt_finds_what_an_earlier_one_left() -> None:
    space = cache()
    first = serve(space, chain(1, 2, 3))
    assert first.hit_pages == 0
    np.testing.assert_array_equal(space.match(chain(1, 2, 9)).pages, first.pages[:2])
    lease = take(space, chain(1, 2, 9))
    assert (lease.hit_pages, lease.hit_tokens) == (2, 2 * PAGE)
    np.testing.assert_array_equal(lease.pages[:2], first.pages[:2])
    assert not set(lease.pages[2:].tolist()) & set(first.pages[:2].tolist())
    assert space.stats() == PrefixStats(queried=6, hit=2, evicted=0)


def test_nothing_is_found_before_it_is_committed_and_only_full_pages_are() -> None:
    space = cache()
    lease = take(space, chain(1, 2, tail=3))
    assert len(space.match(chain(1, 2)).pages) == 0
    lease.commit(PAGE - 1)
    assert len(space.match(chain(1, 2)).pages) == 0
    lease.commit(2 * PAGE - 1)
    assert len(space.match(chain(1, 2)).pages) == 1
    lease.commit(2 * PAGE + 3)
    assert len(space.match(chain(1, 2)).pages) == 2
    assert len(space.snapshot().findable) == 2


@pytest.mark.parametrize(("tail", "hit"), [(0, 2), (1, 3), (3, 3)])
def test_the_last_token_is_always_left_to_compute(tail: int, hit: int) -> None:
    space = cache()
    serve(space, chain(1, 2, 3))
    prompt = chain(1, 2, 3, tail=tail)
    assert len(space.match(prompt).pages) == take(space, prompt).hit_pages == hit


def test_a_pool_that_computes_nothing_may_have_a_whole_prompt() -> None:
    space = cache()
    serve(space, chain(1, 2, 3))
    prompt = chain(1, 2, 3, tail=0)
    assert len(space.match(prompt, whole=True).pages) == take(space, prompt, whole=True).hit_pages == 3


def test_match_changes_nothing() -> None:
    space = cache(4)
    serve(space, chain(1))
    serve(space, chain(2))
    before = space.snapshot()
    space.match(chain(1))
    assert space.snapshot() == before and space.stats().hit == 0


def test_tenants_share_only_with_themselves() -> None:
    space = cache(16)
    serve(space, chain(1, 2, salt="a"))
    assert len(space.match(chain(1, 2)).pages) == len(space.match(chain(1, 2, salt="b")).pages) == 0
    assert len(space.match(chain(1, 2, salt="a")).pages) == 2


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    space = cache(16)
    turn = chain(1, tail=2)
    lease = take(space, turn, 4)
    lease.commit(turn.length)
    turn.extend([7] * 7)
    lease.commit(turn.length)
    lease.release()
    assert len(space.match(Chain(PAGE, tokens(1, tail=2) + [7] * 7 + [8] * 3)).pages) == 3


def test_tokens_that_are_not_known_yet_are_committed_later() -> None:
    """The KV of a decode step is dispatched before its token is read back."""
    space = cache()
    turn = chain(1, tail=3)
    lease = take(space, turn, 3)
    lease.commit(turn.length + 1)
    assert len(space.snapshot().findable) == 1
    turn.extend([5])
    lease.commit(turn.length + 1)
    assert len(space.snapshot().findable) == 2


# sharing --------------------------------------------------------------------------------------------------------------


def test_running_sequences_share_pages_and_the_last_to_leave_frees_them() -> None:
    space = cache()
    first = take(space, chain(1, 2, 3))
    first.commit(3 * PAGE)
    second = take(space, chain(1, 2, 4))
    assert [space.snapshot().refs[int(p)] for p in first.pages] == [2, 2, 1, 1]
    first.release()
    assert (space.free_pages, space.evictable_pages) == (8 - 4 - 1, 1)
    second.release()
    assert (space.free_pages, space.evictable_pages) == (5, 3)


def test_the_same_page_computed_twice_is_kept_once() -> None:
    space = cache()
    first, second = take(space, chain(1, 2)), take(space, chain(1, 3))  # neither finds the other's
    first.commit(2 * PAGE)
    pages = second.pages.copy()
    second.commit(2 * PAGE)
    np.testing.assert_array_equal(second.pages, pages)  # a page table never changes under a running sequence
    first.release()
    assert space.evictable_pages == 1  # the common page is held by the second as well: its child is behind it
    second.release()
    assert (space.free_pages, space.evictable_pages) == (5, 3)
    np.testing.assert_array_equal(space.match(chain(1, 3)).pages, [first.pages[0], second.pages[1]])


# eviction -------------------------------------------------------------------------------------------------------------


def test_free_pages_go_first_then_the_least_recently_released_from_the_end_of_its_chain() -> None:
    space = cache(7)
    old, new = serve(space, chain(1, 2, 3)), serve(space, chain(4, 5, 6))
    assert space.snapshot().evictable == (*old.pages[2::-1].tolist(), *new.pages[2::-1].tolist())
    held = take(space, chain(9), 3)
    assert space.stats().evicted == 2
    assert len(space.match(chain(1, 2, 3)).pages) == 1 and len(space.match(chain(4, 5, 6)).pages) == 3
    held.release()
    assert space.free_pages == 3


def test_use_makes_a_prefix_young_again() -> None:
    space = cache(4)
    serve(space, chain(1))
    serve(space, chain(2))
    serve(space, chain(1))
    take(space, Chain(PAGE, [5]), 3)
    assert len(space.match(chain(1)).pages) == 1 and len(space.match(chain(2)).pages) == 0


def test_pages_in_use_are_never_evicted_and_what_does_not_fit_changes_nothing() -> None:
    space = cache(6)
    running = take(space, chain(1, 2))
    running.commit(2 * PAGE)
    serve(space, chain(7, 8))
    before, stats = space.snapshot(), space.stats()
    assert space.acquire(chain(3, 4, 5), 4) is None
    assert space.acquire(chain(7, 8, 9, 10), 4 + 2) is None  # its own hit does not count as room
    assert not running.grow(4)
    assert (space.snapshot(), space.stats()) == (before, stats)
    assert running.grow(3) and len(running.pages) == 6
    assert len(space.match(chain(1, 2)).pages) == 2


def test_a_hit_makes_room_where_there_is_none() -> None:
    space = cache(4)
    first = take(space, chain(1, 2))
    first.commit(2 * PAGE)
    assert space.acquire(chain(8, 9), 3) is None
    assert space.match(chain(1, 2)).room == 1
    assert take(space, chain(1, 2)).hit_pages == 2


def test_no_slot_no_lease() -> None:
    space = cache(8, 1)
    held = take(space, chain(1))
    assert space.match(chain(2)).free_slots == 0 and space.acquire(chain(2), 2) is None
    held.release()
    assert take(space, chain(2)).slot == held.slot


def test_a_release_counts_once_even_when_racing() -> None:
    space = cache()
    for _ in range(100):
        leases = [take(space, chain(1, 2)) for _ in range(2)]
        leases[0].commit(2 * PAGE)
        threads = [threading.Thread(target=lease.release) for lease in leases for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert space.free_pages + space.evictable_pages == space.num_pages and space.free_slots == space.num_slots


def test_a_commit_after_the_release_does_nothing() -> None:
    space = cache()
    lease = take(space, chain(1, 2))
    lease.release()
    lease.commit(2 * PAGE)
    assert not lease.grow(1)
    assert space.free_pages == 8 and not space.snapshot().findable


def test_forgotten_contents_are_never_found_again() -> None:
    space = cache()
    serve(space, chain(8, 9))
    running = take(space, chain(1, 2, 3))
    running.commit(2 * PAGE)
    sharing = take(space, chain(1, 2, 4))
    space.forget()
    assert not space.snapshot().findable and space.evictable_pages == 0
    running.commit(3 * PAGE)  # its parents are not findable: neither is it
    assert not space.snapshot().findable
    running.release()
    assert [space.snapshot().refs[int(p)] for p in sharing.pages] == [1] * 4
    sharing.release()
    assert space.free_pages == 8


def test_mistakes_of_the_caller_are_named() -> None:
    space = cache()
    with pytest.raises(ValueError, match=r"pages of 8 tokens.*pages of 4"):
        space.match(Chain(8, [1]))
    lease = take(space, chain(1, 2, 3), 2)
    with pytest.raises(ValueError, match="commit of 12 tokens"):
        lease.commit(3 * PAGE)
    with pytest.raises(ValueError, match="page_size is 0"):
        Chain(0)
