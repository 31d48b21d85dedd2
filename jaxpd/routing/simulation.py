"""A cluster of synthetic workers under the real router: discrete events, no waiting, the same policies as in serving.

    arrive -> Roster.dispatch -> prefill replica: first come, first served, one prompt at a time, its own prefix cache
                                   -> first token -> transfer of the pages that decode lacks
                                   -> decode replica: all sequences share its steps, a queue for slots and pages
           <- lost: AGAIN or REPLAY while a worker is down (killed at once, connections refused until it is up again)

What it leaves out: chunks that overlap with the transfer, links that are shared, the network's own time, preemption,
and that a decode pool's cache has to make room for what runs. Times follow `synthetic.Speeds`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxpd.policies.breaker import Next, Outcome, after
from jaxpd.policies.routing import Policy
from jaxpd.policies.workers import Asked, Leg, Refusal, Role, Route, Site
from jaxpd.routing.loads import Arrival
from jaxpd.routing.roster import Roster
from jaxpd.routing.synthetic import Cluster, Outage, Record, Result, Slo

CONNECT_S = 0.001  # until a refused connection is known
MOST_TRIES = 4
MOST_MIGRATIONS = 3


def simulate(
    arrivals: Sequence[Arrival],
    cluster: Cluster,
    *,
    prefill: str | Policy,
    decode: str | Policy = "least_pending",
    slo: Slo | None = None,
    outages: Sequence[Outage] = (),
    seed: int = 0,
) -> Result:
    """Every request to its end, under the policies or their names."""
    return _Simulation(cluster, Roster(prefill=prefill, decode=decode), slo or Slo(), seed).run(arrivals, outages)


class _Cache:
    """A prefix cache: what was used longest ago goes first, the ends of chains before their beginnings."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._kept: OrderedDict[bytes, None] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._kept), len(keys))

    def keep(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._kept[key] = None
            self._kept.move_to_end(key)
        while len(self._kept) > self._pages:
            self._kept.popitem(last=False)


class _Request:
    """One request on its way. Events of an attempt that is over are ignored."""

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.record = Record(arrival=arrival)
        self.id = str(number)
        self.attempt = 0
        self.tries = 0
        self.made = 0  # tokens that the client has
        self.avoid: frozenset[str] = frozenset()
        self.route: Route | None = None

    @property
    def prompt_tokens(self) -> int:
        """With what it has been answered so far: a replay computes that, too."""
        return self.record.arrival.prompt_tokens + self.made

    @property
    def left(self) -> int:
        return self.record.arrival.answer_tokens - self.made


class _Prefill:
    def __init__(self, cluster: Cluster) -> None:
        self.cache = _Cache(cluster.pages)
        self.queue: deque[_Request] = deque()
        self.now: _Request | None = None


class _Decode:
    """Sequences that share steps: `made` counts tokens of each since the start, so each ends at a fixed count."""

    def __init__(self, cluster: Cluster) -> None:
        self.cache = _Cache(cluster.pages)
        self.queue: deque[_Request] = deque()
        self.running: dict[_Request, float] = {}  # -> the count at which it ends
        self.made = 0.0
        self.at_s = 0.0
        self.version = 0


class _Simulation:
    def __init__(self, cluster: Cluster, roster: Roster, slo: Slo, seed: int) -> None:
        self.cluster, self.roster, self.slo = cluster, roster, slo
        self.draw = random.Random(seed)
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.down: set[str] = set()
        self.prefill: dict[Site, _Prefill] = {}
        self.decode: dict[Site, _Decode] = {}
        for role, count in ((Role.PREFILL, cluster.prefill), (Role.DECODE, cluster.decode)):
            for i in range(count):
                name = f"{role.value[0]}{i}"
                roster.join(
                    name,
                    role,
                    replicas=cluster.replicas,
                    pages=cluster.pages,
                    slots=cluster.slots,
                    queue_limit=cluster.queue_limit,
                )
                roster.ready(name)
                self.start(name)
        self.busy_s = dict.fromkeys(self.prefill, 0.0)

    def run(self, arrivals: Sequence[Arrival], outages: Sequence[Outage]) -> Result:
        requests = [_Request(number, arrival) for number, arrival in enumerate(arrivals)]
        for request in requests:
            self.at(request.record.arrival.at_s, self.arrive, request)
        for outage in outages:
            self.at(outage.down_s, self.kill, outage.worker)
            self.at(outage.up_s, self.start, outage.worker)
        while self.events:
            self.now_s, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
        return Result([request.record for request in requests], self.busy_s, self.roster)

    def at(self, when_s: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (when_s, next(self.order), act, arguments))

    def start(self, name: str) -> None:
        """A worker with empty caches and queues."""
        self.down.discard(name)
        for i in range(self.cluster.replicas):
            if name.startswith("p"):
                self.prefill[Site(name, i)] = _Prefill(self.cluster)
            else:
                self.decode[Site(name, i)] = _Decode(self.cluster)

    def kill(self, name: str) -> None:
        self.down.add(name)
        for i in range(self.cluster.replicas):
            site = Site(name, i)
            if site in self.prefill:
                work = self.prefill[site]
                had, leg = [*([work.now] if work.now else []), *work.queue], Leg.PREFILL
                work.now = None
            else:
                self.advance(site)
                pool = self.decode[site]
                had, leg = [*pool.running, *pool.queue], Leg.DECODE
                for request, ends in pool.running.items():
                    made = int(request.left - max(ends - pool.made, 0.0))
                    request.made += min(made, request.left - 1)  # its last token was not out
                pool.version += 1
                pool.running.clear()
            for request in had:
                self.lose(request, request.attempt, leg, Outcome.FAULT)

    def arrive(self, request: _Request) -> None:
        cluster, arrival = self.cluster, request.record.arrival
        asked = Asked(
            prompt_tokens=request.prompt_tokens,
            answer_tokens=request.left,
            page_size=cluster.page_size,
            page_bytes=cluster.page_bytes,
            waited_s=self.now_s - arrival.at_s,
            ttft_slo_s=None if request.made else self.slo.ttft_s,
            tpot_slo_s=None if request.made else self.slo.tpot_s,
            avoid=request.avoid,
        )
        draws = (self.draw.random(), self.draw.random())
        chosen = self.roster.dispatch(request.id, asked, arrival.keys, draws=draws, now_s=self.now_s)
        if isinstance(chosen, Refusal):
            request.record.refused, request.record.failed = chosen.reason, request.made > 0
            return
        request.route, request.attempt, request.tries = chosen, request.attempt + 1, request.tries + 1
        request.record.sent.append((self.now_s, chosen.prefill.site, chosen.decode.site))
        if chosen.prefill.after_s is not None and not request.made:
            request.record.expected_s = self.now_s - arrival.at_s + chosen.prefill.after_s
        for leg, site in ((Leg.PREFILL, chosen.prefill.site), (Leg.DECODE, chosen.decode.site)):
            if site.worker in self.down:
                self.at(self.now_s + CONNECT_S, self.lose, request, request.attempt, leg, Outcome.FAULT)
                return
        self.prefill[chosen.prefill.site].queue.append(request)
        self.compute(chosen.prefill.site)

    def lose(self, request: _Request, attempt: int, leg: Leg, what: Outcome) -> None:
        if attempt != request.attempt or request.route is None:
            return
        self.roster.lost(request.id, leg, what, now_s=self.now_s)
        route, request.route = request.route, None
        request.attempt += 1
        failed = route.prefill if leg is Leg.PREFILL else route.decode
        request.avoid = frozenset((failed.site.worker,))
        for queue in (self.prefill[route.prefill.site].queue, self.decode[route.decode.site].queue):
            if request in queue:
                queue.remove(request)
        next_ = after(
            what,
            streamed=request.made,
            tries=request.tries,
            max_tries=MOST_TRIES,
            migrations=request.record.migrations,
            max_migrations=MOST_MIGRATIONS,
        )
        if next_ is Next.STOP:
            request.record.failed = True
            return
        if next_ is Next.REPLAY:
            request.record.migrations += 1
        self.arrive(request)

    def compute(self, site: Site) -> None:
        """The next prompt of a prefill replica that has nothing to do."""
        work, speeds = self.prefill[site], self.cluster.speeds
        if work.now is not None or not work.queue or site.worker in self.down:
            return
        work.now = request = work.queue.popleft()
        tokens = request.prompt_tokens
        pages = min(work.cache.find(request.record.arrival.keys), (tokens - 1) // self.cluster.page_size)
        cached = pages * self.cluster.page_size
        took_s = self.cluster.slow.get(site.worker, 1.0) * (
            speeds.prefill_s
            + speeds.prefill_s_per_token * (tokens - cached)
            + speeds.prefill_s_per_token2 * (tokens**2 - cached**2)
        )
        self.at(self.now_s + took_s, self.computed, request, request.attempt, work, pages, took_s)

    def computed(self, request: _Request, attempt: int, work: _Prefill, pages: int, took_s: float) -> None:
        if request.route is not None and request.attempt == attempt:
            route, record = request.route, request.record
            self.busy_s[route.prefill.site] += took_s
            cached, keys = pages * self.cluster.page_size, record.arrival.keys
            work.cache.keep(keys)
            self.roster.first_token(
                request.id,
                computed=request.prompt_tokens - cached,
                found_pages=pages,
                prefill_s=took_s,
                now_s=self.now_s,
            )
            if record.ttft_s is None:
                record.ttft_s, record.cached_tokens = self.now_s - record.arrival.at_s, cached
            request.made += 1
            if not request.left:
                self.finish(request)
            else:
                missing = max(-(-request.prompt_tokens // self.cluster.page_size), 1)
                missing -= self.decode[route.decode.site].cache.find(keys)
                moved = missing * self.cluster.page_bytes
                took_s = self.cluster.speeds.transfer_s + moved / self.cluster.speeds.transfer_bytes_per_s
                self.at(self.now_s + took_s, self.moved, request, attempt, moved, took_s)
        if work.now is request:
            work.now = None
            self.compute(next(site for site, other in self.prefill.items() if other is work))

    def moved(self, request: _Request, attempt: int, moved: int, took_s: float) -> None:
        if attempt != request.attempt or request.route is None:
            return
        site = request.route.decode.site
        for leg, worker in ((Leg.PREFILL, request.route.prefill.site.worker), (Leg.DECODE, site.worker)):
            if worker in self.down:
                self.lose(request, attempt, leg, Outcome.FAULT)
                return
        self.roster.decoding(request.id, now_s=self.now_s, moved_bytes=moved, transfer_s=took_s)
        self.advance(site)
        self.decode[site].cache.keep(request.record.arrival.keys)
        self.decode[site].queue.append(request)
        self.fill(site)

    def step_s(self, site: Site) -> float:
        speeds, running = self.cluster.speeds, self.decode[site].running
        context = sum(request.prompt_tokens for request in running)
        shared = speeds.step_s + speeds.step_s_per_sequence * len(running) + speeds.step_s_per_context * context
        return shared * self.cluster.slow.get(site.worker, 1.0)

    def advance(self, site: Site) -> None:
        """Counts the tokens that were made since the last change."""
        pool = self.decode[site]
        if pool.running:
            pool.made += (self.now_s - pool.at_s) / self.step_s(site)
        pool.at_s = self.now_s

    def fill(self, site: Site) -> None:
        """Takes what has room from the queue and sets the clock for the next sequence that ends."""
        pool, size = self.decode[site], self.cluster.page_size
        used = sum(-(-(r.prompt_tokens + r.left) // size) for r in pool.running)
        while pool.queue and len(pool.running) < self.cluster.slots:
            need = -(-(pool.queue[0].prompt_tokens + pool.queue[0].left) // size)
            if pool.running and used + need > self.cluster.pages:
                break
            request = pool.queue.popleft()
            pool.running[request] = pool.made + request.left
            used += need
        pool.version += 1
        if pool.running:
            step_s = self.step_s(site)
            self.roster.stepped(site.worker, sequences=len(pool.running), step_s=step_s)
            first = min(pool.running.values())
            self.at(self.now_s + max(first - pool.made, 0.0) * step_s, self.ended, site, pool, pool.version)

    def ended(self, site: Site, pool: _Decode, version: int) -> None:
        if version != pool.version or self.decode[site] is not pool:
            return
        self.advance(site)
        for request in [r for r, ends in pool.running.items() if ends <= pool.made + 1e-6]:
            del pool.running[request]
            self.finish(request)
        self.fill(site)

    def finish(self, request: _Request) -> None:
        self.roster.end(request.id, now_s=self.now_s)
        request.record.end_s = self.now_s - request.record.arrival.at_s
        request.route = None
