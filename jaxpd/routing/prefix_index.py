"""Who probably has which prefix: a router's guess at the prefix caches of its workers, from what it sent them.

    record(site, keys)  ->  hits(site, keys)  ->  learn(site, believed, found)        forget(worker)
    at dispatch             pages it should have     what the worker really found        it is gone, or restarted

Keys are a prompt's chained page hashes (jaxpd/cache/keys.py): key i names all tokens up to page i, so one key of every
`stride` is enough, and a hit is known to `stride` pages. A site remembers at most `capacity` keys, as many as its pool
has pages (over `stride`) or fewer, and forgets the one that was wanted longest ago, as the pool does.

A chain is recorded from its end to its beginning. So a key is never remembered longer than what comes before it, what a
site has of a prompt is an unbroken beginning, and bisection finds its length: a few look-ups a site, however long the
prompt. Ages keep that order, too.

It is a guess: other routers send prompts too, and a pool may be smaller than it says, or have its cache switched off.
`learn` compares what was believed with what was found, and what is believed of that site next shrinks or grows with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jaxpd.policies.workers import Site

MAX_KEYS = 65_536  # a site's: about 10 MB of Python
MAX_AGE_S = 3600.0  # longer nothing is believed to be kept
DOUBT = 0.1  # share of the trust in a site that its latest answer decides


class PrefixIndex:
    """The believed caches of all sites. Not thread-safe."""

    def __init__(self, *, stride: int = 1, max_keys: int = MAX_KEYS, max_age_s: float = MAX_AGE_S) -> None:
        if stride < 1 or max_keys < 1:
            raise ValueError(f"stride={stride} and max_keys={max_keys} must each be at least 1")
        self.stride = stride
        self._max_keys = max_keys
        self._max_age_s = max_age_s
        self._kept: dict[Site, OrderedDict[bytes, float]] = {}  # key -> when it was last recorded, oldest first
        self._trust: dict[Site, float] = {}

    def record(self, site: Site, keys: Sequence[bytes], *, capacity: int, now_s: float) -> None:
        """`site`, with a pool of `capacity` pages, has or soon has the pages with these keys (all of a prompt's)."""
        most = min(self._max_keys, capacity // self.stride)
        kept = self._kept.setdefault(site, OrderedDict())
        for key in reversed(keys[self.stride - 1 :: self.stride][:most]):
            kept[key] = now_s
            kept.move_to_end(key)
        while len(kept) > most:
            kept.popitem(last=False)

    def hits(self, site: Site, keys: Sequence[bytes], *, now_s: float) -> int:
        """Pages of a prompt with these keys that the site probably has, from the first one on."""
        kept = self._kept.get(site)
        if not kept:
            return 0
        oldest_s = now_s - self._max_age_s
        low, high = 0, len(keys) // self.stride  # strides that it has for certain, and at most
        while low < high:
            middle = (low + high + 1) // 2
            if kept.get(keys[middle * self.stride - 1], oldest_s) > oldest_s:
                low = middle
            else:
                high = middle - 1
        return round(low * self.stride * self._trust.get(site, 1.0))

    def learn(self, site: Site, *, believed: int, found: int) -> None:
        """A worker said that it found so many of the pages that `hits` had promised for a prompt."""
        if believed > 0:
            trust = self._trust.get(site, 1.0)
            # More than promised is learned in full, so that trust that was lost comes back.
            share = min(found * trust / believed, 1.0)
            self._trust[site] = max((1 - DOUBT) * trust + DOUBT * share, DOUBT)

    def forget(self, worker: str) -> None:
        """A worker that is gone has nothing; one that comes back begins with empty caches."""
        for kept in (self._kept, self._trust):
            for site in [site for site in kept if site.worker == worker]:
                del kept[site]

    def expire(self, now_s: float) -> None:
        """Drops what is too old to be believed; for the memory only, `hits` never counts it."""
        for kept in self._kept.values():
            while kept and next(iter(kept.values())) <= now_s - self._max_age_s:
                kept.popitem(last=False)

    def __len__(self) -> int:
        """Keys remembered, over all sites."""
        return sum(map(len, self._kept.values()))
