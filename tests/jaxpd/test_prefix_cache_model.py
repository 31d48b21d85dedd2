"""The prefix cache against a naive model: every page's state after any sequence of calls."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixCache, PrefixLease

Path = tuple[str, tuple[int, ...]]  # salt, all tokens up to the end of a page: what a page contains, without a hash
SMALL = 2  # tokens a page
SALTS = st.sampled_from(["", "a"])
PROMPTS = st.builds(  # few different ones, with prefixes in common
    lambda pages, tail: [token for page in pages for token in (page, page)] + tail,
    st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=4),
    st.lists(st.integers(0, 1), max_size=1),
)


@dataclasses.dataclass(eq=False)
class Run:
    """A sequence of the model: its tokens and the pages that it holds."""

    lease: PrefixLease
    salt: str
    ids: list[int]
    pages: list[int]
    extra: dict[int, int] = dataclasses.field(default_factory=dict)  # page index -> another's page of the same contents
    committed: int = 0
    alive: bool = True  # its keys are from after the last `forget`

    def path(self, index: int) -> Path:
        return self.salt, tuple(self.ids[: (index + 1) * SMALL])

    def held(self) -> list[int]:
        order = ([page, *([self.extra[i]] if i in self.extra else [])] for i, page in enumerate(self.pages))
        return [page for pair in reversed(list(order)) for page in pair]


class Model(RuleBasedStateMachine):
    """The state of every page, kept by lists and whole token prefixes, next to the cache's."""

    @initialize(pages=st.integers(3, 10), slots=st.integers(1, 5))
    def start(self, pages: int, slots: int) -> None:
        self.space = PrefixCache(pages, slots, SMALL)
        self.free = set(range(pages))
        self.found: dict[Path, int] = {}
        self.order: list[int] = []  # evictable, the next to go first
        self.runs: list[Run] = []
        self.slots = slots
        self.evicted = self.hit = 0

    def refs(self) -> dict[int, int]:
        held = [page for run in self.runs for page in run.held()]
        return {page: held.count(page) for page in held}

    def prefix(self, salt: str, ids: list[int], limit: int) -> list[int]:
        paths = [(salt, tuple(ids[: (i + 1) * SMALL])) for i in range(limit)]
        return [self.found[path] for path in itertools.takewhile(self.found.__contains__, paths)]

    def supply(self, taken: list[int]) -> None:
        """Accounts for new pages: free ones as long as there are any, then exactly the oldest evictable ones."""
        from_free = min(len(taken), len(self.free))
        assert set(taken[:from_free]) <= self.free
        assert taken[from_free:] == self.order[: len(taken) - from_free]
        self.free -= set(taken[:from_free])
        del self.order[: len(taken) - from_free]
        self.found = {path: page for path, page in self.found.items() if page not in taken}
        self.evicted += len(taken) - from_free

    @rule(ids=PROMPTS, salt=SALTS, extra=st.integers(-1, 3), whole=st.booleans())
    def acquire(self, ids: list[int], salt: str, extra: int, whole: bool) -> None:
        self._acquire(ids, salt, -(-len(ids) // SMALL) + extra, whole)

    @rule(ids=PROMPTS, salt=SALTS, whole=st.booleans())
    def serve(self, ids: list[int], salt: str, whole: bool) -> None:
        """From start to end, so that there is something to find."""
        if (run := self._acquire(ids, salt, -(-len(ids) // SMALL), whole)) is not None:
            self._commit(run, len(ids))
            self._release(run)

    def _acquire(self, ids: list[int], salt: str, pages: int, whole: bool) -> Run | None:
        limit = (len(ids) if whole else len(ids) - 1) // SMALL
        hit = self.prefix(salt, ids, min(limit, pages))
        besides = [page for page in self.order if page not in hit]
        fits = pages - len(hit) <= len(self.free) + len(besides) and len(self.runs) < self.slots
        lease = self.space.acquire(Chain(SMALL, ids, salt=salt), pages, whole=whole)
        assert (lease is not None) == fits
        if lease is None:
            return None
        assert lease.pages[: lease.hit_pages].tolist() == hit and len(lease.pages) == pages
        self.hit += len(hit)
        self.order = besides
        self.supply(lease.pages[len(hit) :].tolist())
        self.runs.append(Run(lease, salt, list(ids), lease.pages.tolist(), committed=len(hit)))
        return self.runs[-1]

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), max_size=3))
    def decode(self, data: st.DataObject, ids: list[int]) -> None:
        run = data.draw(st.sampled_from(self.runs))
        run.ids.extend(ids)
        run.lease.chain.extend(ids)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), count=st.integers(0, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        run = data.draw(st.sampled_from(self.runs))
        fits = count <= len(self.free) + len(self.order)
        assert run.lease.grow(count) == fits
        if fits:
            self.supply(run.lease.pages[len(run.pages) :].tolist())
            run.pages = run.lease.pages.tolist()

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), less=st.integers(0, 3))
    def commit(self, data: st.DataObject, less: int) -> None:
        run = data.draw(st.sampled_from(self.runs))
        self._commit(run, max(min(len(run.ids), len(run.pages) * SMALL) - less, 0))

    def _commit(self, run: Run, upto: int) -> None:
        run.lease.commit(upto)
        while run.alive and run.committed < upto // SMALL:
            path, mine = run.path(run.committed), run.pages[run.committed]
            page = self.found.setdefault(path, mine)
            if page != mine:
                run.extra[run.committed] = page
                self.order = [p for p in self.order if p != page]
            run.committed += 1

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        run = data.draw(st.sampled_from(self.runs))
        self._release(run)
        if again:
            run.lease.release()

    def _release(self, run: Run) -> None:
        self.runs.remove(run)
        refs, known = self.refs(), set(self.found.values())
        for page in run.held():
            if page in known and page not in refs:
                self.order.append(page)
            elif page not in refs:
                self.free.add(page)
        run.lease.release()

    @rule(seldom=st.integers(0, 9))
    def forget(self, seldom: int) -> None:
        if seldom != 7:
            return
        self.space.forget()
        self.free |= set(self.order)
        self.order, self.found = [], {}
        for run in self.runs:
            run.alive = False

    @invariant()
    def same_state(self) -> None:
        state = self.space.snapshot()
        assert set(state.free) == self.free and len(state.free) == len(self.free)
        assert list(state.evictable) == self.order
        assert state.refs == self.refs()
        assert len(state.free) + len(state.refs) + len(state.evictable) == self.space.num_pages
        assert len({*state.free, *state.refs, *state.evictable}) == self.space.num_pages
        assert self.space.free_slots == self.slots - len(self.runs)
        assert (self.space.stats().hit, self.space.stats().evicted) == (self.hit, self.evicted)

    @invariant()
    def what_is_found(self) -> None:
        state = self.space.snapshot()
        assert sorted(state.findable.values()) == sorted(self.found.values())
        for (salt, ids), page in self.found.items():
            pages = self.space.match(Chain(SMALL, ids, salt=salt), whole=True).pages.tolist()
            assert len(pages) == len(ids) // SMALL and pages[-1] == page, "a page without its parents"

    @invariant()
    def own_pages_have_one_owner(self) -> None:
        """A page that a lease may still write to is in nobody else's table, and not findable."""
        tables = [page for run in self.runs for page in run.pages]
        for run in self.runs:
            for page in run.pages[run.committed :]:
                assert tables.count(page) == 1 or not run.alive
                assert page not in self.found.values()


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_the_cache_does_what_a_naive_model_does = Model.TestCase
