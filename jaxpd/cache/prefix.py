"""The prefix cache of one replica: full pages are found by their contents, shared, and kept while there is room.

The life of one page (refs: how many leases hold it; key: under which it is found, see keys.py):

                acquire, grow                commit, its contents are new
      FREE --------------------> OWNED ---------------------------------> SHARED <---------+
    refs 0, no key            refs >= 1, no key                         refs >= 1, key     | acquire of a prompt that
       ^  ^                        |                                       |               | starts with it, or commit
       |  |   last release         |                         last release  |               | of the same contents
       |  +------------------------+                                       v               |
       +------------------------------------------------------------- EVICTABLE -----------+
              evicted for another sequence, least recently released     refs 0, key

`forget` takes all keys away: EVICTABLE pages become FREE, SHARED ones OWNED (by more than one lease, perhaps).

Invariants (tests/jaxpd/test_prefix_cache_model.py compares every state with a naive model's):

1. Every page is in one state; free + in use + evictable = num_pages. A page with refs > 0 is never evicted.
2. A page with a key is full and nobody writes to it: a lease writes only behind its hit and what it has committed.
3. Who holds a page of a chain holds the findable pages of all its parents. When two sequences have computed the same
   page, the second keeps its copy until it ends (page tables never change) and takes a reference on the first's too.
4. From 3, and since a release goes from the deepest page up, a parent is never older than its children in the list of
   evictable pages. So the oldest page never has findable children: chains are evicted from their ends, in O(1).

The order of releases is the only clock. Every operation takes O(1) a page.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict

import numpy as np

from jaxpd.cache.keys import Chain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """What a replica has for a prompt, and what else it could give, at one moment."""

    pages: np.ndarray  # int32 [hit]: the longest known prefix, in order
    room: int  # pages that could be had besides those
    free_slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixStats:
    """Counters since the start, in pages. A request counts once, when it gets its lease."""

    queried: int = 0  # full pages that could have been found
    hit: int = 0
    evicted: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of every page, for tests and post-mortems: O(num_pages)."""

    free: tuple[int, ...]
    evictable: tuple[int, ...]  # the next to be evicted first
    refs: dict[int, int]  # pages in use
    findable: dict[bytes, int]  # key -> page


class PrefixCache:
    """Pages and slots of one replica of one pool, with what its pages contain. Thread-safe."""

    def __init__(self, num_pages: int, num_slots: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.page_size = page_size
        self._lock = threading.Lock()
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._refs = [0] * num_pages
        self._key: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._generation = 0  # of keys: leases from before a `forget` commit nothing
        self._queried = self._hit = self._evicted = 0

    # finding and taking -------------------------------------------------------------------------------------------

    def match(self, chain: Chain, *, whole: bool = False, fresh: bool = False) -> Match:
        """The longest findable prefix of a prompt; changes nothing, not even the order of eviction.

        At least the last token is left to compute, so that there are logits to sample from, unless `whole`: a decode
        pool, which is handed the KV and the first token, needs nothing computed. `fresh`: all of it is to be computed,
        and nothing is found.
        """
        with self._lock:
            pages, room = self._find(chain, 0 if fresh else self._limit(chain, whole))
            return Match(pages=np.asarray(pages, np.int32), room=room, free_slots=len(self._free_slots))

    def acquire(self, chain: Chain, pages: int, *, whole: bool = False, fresh: bool = False) -> PrefixLease | None:
        """A slot and `pages` pages, which begin with the longest findable prefix; None: not now, no side effects.

        Args:
            chain: the prompt. The lease keeps it, to know what later commits contain.
            pages: how many in all; may be fewer than the prompt takes (see `PrefixLease.grow`).
            whole: as for `match`.
            fresh: as for `match`.
        """
        with self._lock:
            limit = 0 if fresh else self._limit(chain, whole)
            found, room = self._find(chain, min(limit, pages))
            if pages - len(found) > room or not self._free_slots:
                return None
            for page in found:
                self._take(page)
            taken = [self._new_page() for _ in range(pages - len(found))]
            self._queried += limit
            self._hit += len(found)
            return PrefixLease(
                cache=self,
                chain=chain,
                pages=np.asarray(found + taken, np.int32),
                slot=self._free_slots.pop(),
                hit_pages=len(found),
                generation=self._generation,
                found_at=found,
            )

    def forget(self) -> None:
        """Nothing is findable any more: the pages' contents were lost, or other weights were loaded."""
        with self._lock:
            self._generation += 1
            self._page_of.clear()
            self._key = [None] * self.num_pages
            self._free.extend(self._evictable)
            self._evictable.clear()

    # readings -----------------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Pages without owner and contents."""
        with self._lock:
            return len(self._free)

    @property
    def evictable_pages(self) -> int:
        """Pages without owner that can still be found."""
        with self._lock:
            return len(self._evictable)

    @property
    def generation(self) -> int:
        """How often `forget` was called."""
        with self._lock:
            return self._generation

    @property
    def free_slots(self) -> int:
        """Slots without an owner."""
        with self._lock:
            return len(self._free_slots)

    def stats(self) -> PrefixStats:
        """Counters since the start."""
        with self._lock:
            return PrefixStats(queried=self._queried, hit=self._hit, evicted=self._evicted)

    def snapshot(self) -> Snapshot:
        """The state of every page."""
        with self._lock:
            return Snapshot(
                free=tuple(self._free),
                evictable=tuple(self._evictable),
                refs={page: refs for page, refs in enumerate(self._refs) if refs},
                findable=dict(self._page_of),
            )

    # for leases ---------------------------------------------------------------------------------------------------

    def _commit(self, lease: PrefixLease, tokens: int) -> None:
        full = min(tokens, lease.chain.length) // self.page_size
        with self._lock:
            if lease.released or lease.generation != self._generation:
                return
            if full > len(lease.pages):
                raise ValueError(f"commit of {tokens} tokens, the lease has {len(lease.pages)} x {self.page_size}")
            for i in range(len(lease.found_at), full):
                key, mine = lease.chain.keys[i], int(lease.pages[i])
                page = self._page_of.setdefault(key, mine)
                if page == mine:
                    self._key[page] = key
                else:
                    self._take(page)
                lease.found_at.append(page)

    def _grow(self, lease: PrefixLease, count: int) -> bool:
        with self._lock:
            if lease.released or count > len(self._free) + len(self._evictable):
                return False
            taken = np.asarray([self._new_page() for _ in range(count)], np.int32)
            lease.pages = np.concatenate([lease.pages, taken])
            return True

    def _give_back(self, lease: PrefixLease) -> None:
        with self._lock:
            if lease.released:
                return
            lease.released = True
            for i in range(len(lease.pages) - 1, -1, -1):
                page = int(lease.pages[i])
                self._let_go(page)
                if i < len(lease.found_at) and lease.found_at[i] != page:
                    self._let_go(lease.found_at[i])
            self._free_slots.append(lease.slot)

    # with the lock held -------------------------------------------------------------------------------------------

    def _limit(self, chain: Chain, whole: bool) -> int:
        if chain.page_size != self.page_size:
            raise ValueError(f"a chain of pages of {chain.page_size} tokens, the cache has pages of {self.page_size}")
        return len(chain.keys) if whole else max(chain.length - 1, 0) // self.page_size

    def _find(self, chain: Chain, limit: int) -> tuple[list[int], int]:
        """(the longest findable prefix of at most `limit` pages, pages that could be had besides)."""
        found: list[int] = []
        unused = 0
        for key in chain.keys[:limit]:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
            unused += not self._refs[page]
        return found, len(self._free) + len(self._evictable) - unused

    def _take(self, page: int) -> None:
        """One more reference on a findable page."""
        if not self._refs[page]:
            del self._evictable[page]
        self._refs[page] += 1

    def _new_page(self) -> int:
        """A page for one owner: a free one, or else the least recently released. The caller knows that there is one."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            key, self._key[page] = self._key[page], None
            assert key is not None, "evictable pages have a key"
            del self._page_of[key]
            self._evicted += 1
        self._refs[page] = 1
        return page

    def _let_go(self, page: int) -> None:
        """One reference less; after the last one the page stays findable, or is free if it never was."""
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if self._key[page] is None:
            self._free.append(page)
        else:
            self._evictable[page] = None


@dataclasses.dataclass(eq=False, kw_only=True)
class PrefixLease:
    """One sequence's references on pages, and its slot. The tokens of the first `hit_pages` pages need no computing.

    `release` may be called from any thread and more than once; what else is called after it does nothing.
    """

    cache: PrefixCache
    chain: Chain
    pages: np.ndarray  # int32 page ids in the order of the sequence's tokens
    slot: int
    hit_pages: int
    generation: int
    found_at: list[int]  # where the contents of the first so many pages are found: here, or in another sequence's copy
    released: bool = False

    @property
    def hit_tokens(self) -> int:
        """Tokens whose KV was there already."""
        return self.hit_pages * self.cache.page_size

    @property
    def lost(self) -> bool:
        """Whether the contents of its hit were forgotten after it was acquired: what it did not compute is gone."""
        return self.hit_pages > 0 and self.generation != self.cache.generation

    def commit(self, tokens: int) -> None:
        """Makes full pages findable.

        Call it when the work that writes the KV of the sequence's first `tokens` tokens has been dispatched, since what
        is dispatched later reads after it. Tokens that the chain does not know yet are left for a later call. Raises
        ValueError when they are more than the lease has pages for.
        """
        self.cache._commit(self, tokens)

    def grow(self, count: int) -> bool:
        """`count` more pages at the end; False: not now, nothing has changed. Makes a new `pages` array."""
        return self.cache._grow(self, count)

    def release(self) -> None:
        """Gives everything back, the first time it is called; findable pages stay until their room is needed."""
        self.cache._give_back(self)
