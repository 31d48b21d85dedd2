"""A router's workers, and each request's way over them: the one place where snapshots are made and outcomes are told.

    join -> ready -> drain -> gone                   a worker; while it drains, what it has goes on
    dispatch -> first_token -> decoding -> end       a request; `lost` at any point gives a leg back and says what next

A request that goes on elsewhere (`Next.AGAIN`, `Next.REPLAY`) is dispatched anew, with the worker it lost in
`Asked.avoid`. Every way to end leaves the ledger without a trace of the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpd.policies.breaker import Breaker, Outcome
from jaxpd.policies.fit import Fit
from jaxpd.policies.routing import POLICIES, Policy, route
from jaxpd.policies.workers import Asked, Choice, Leg, Refusal, Replica, Role, Route, Site, State, Worker
from jaxpd.routing.ledger import Charge, Ledger
from jaxpd.routing.prefix_index import PrefixIndex


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """What a worker says of itself when it joins, and what is learned of it since."""

    name: str
    role: Role
    state: State
    replicas: int
    pages: int  # of one replica's pool
    slots: int
    queue_limit: int
    prefill: Fit = Fit()
    transfer: Fit = Fit()
    step: Fit = Fit()
    prefill_breaker: Breaker = Breaker()
    decode_breaker: Breaker = Breaker()

    def breaker(self, leg: Leg) -> Breaker:
        return self.prefill_breaker if leg is Leg.PREFILL else self.decode_breaker

    def with_breaker(self, leg: Leg, breaker: Breaker) -> Member:
        if leg is Leg.PREFILL:
            return dataclasses.replace(self, prefill_breaker=breaker)
        return dataclasses.replace(self, decode_breaker=breaker)


class _Sent(NamedTuple):
    route: Route
    at_s: float
    taken: bool  # its KV has left the prefill worker


class Roster:
    """The state of one router. Not thread-safe: it belongs to the router's event loop."""

    def __init__(self, *, prefill: str | Policy, decode: str | Policy, index: PrefixIndex | None = None) -> None:
        """`prefill` and `decode` are policies or their names. Raises ValueError for a name that does not exist."""
        self.policies: dict[Leg, Policy] = {}
        for leg, policy in ((Leg.PREFILL, prefill), (Leg.DECODE, decode)):
            if isinstance(policy, str):
                if policy not in POLICIES:
                    known = ", ".join(POLICIES)
                    raise ValueError(f"{leg.value} policy {policy!r} does not exist; choose one of {known}")
                policy = POLICIES[policy]
            self.policies[leg] = policy
        self.ledger = Ledger()
        self.index = index or PrefixIndex()
        self._members: dict[str, Member] = {}
        self._sent: dict[str, _Sent] = {}  # by request
        self.openings = 0  # of circuit breakers, so far

    def join(
        self, name: str, role: Role, *, replicas: int, pages: int, slots: int = 256, queue_limit: int = 1024
    ) -> None:
        """A worker that is not ready yet. Raises ValueError where the name is taken: a restart is a new name."""
        if name in self._members:
            raise ValueError(f"a worker named {name!r} has joined already; one that restarts needs another name")
        if min(replicas, pages, slots, queue_limit) < 1:
            raise ValueError(
                f"worker {name!r}: replicas={replicas}, pages={pages}, slots={slots} and queue_limit={queue_limit} "
                "must each be at least 1"
            )
        self._members[name] = Member(
            name=name,
            role=role,
            state=State.JOINING,
            replicas=replicas,
            pages=pages,
            slots=slots,
            queue_limit=queue_limit,
        )

    def ready(self, name: str) -> None:
        """It may be chosen; also one that was draining. A name that is not known is left alone."""
        self._set(name, State.READY)

    def drain(self, name: str) -> None:
        """It is not chosen any more, and ends what it has."""
        self._set(name, State.DRAINING)

    def gone(self, name: str, *, now_s: float) -> list[Charge]:
        """Forgets it; the legs that it had are returned, and each of their requests is to be told `lost`."""
        self._members.pop(name, None)
        self.index.forget(name)
        return self.ledger.forget(name, now_s=now_s)

    def states(self) -> dict[str, State]:
        """Of all workers."""
        return {name: member.state for name, member in self._members.items()}

    def snapshot(self, keys: Sequence[bytes], *, now_s: float) -> tuple[Worker, ...]:
        """The workers as a request with these page keys finds them."""
        return tuple(
            Worker(
                name=member.name,
                role=member.role,
                state=member.state,
                replicas=tuple(self._replica(member, i, keys, now_s) for i in range(member.replicas)),
                slots=member.slots,
                queue_limit=member.queue_limit,
                prefill_barred_s=member.prefill_breaker.waits_s(now_s),
                decode_barred_s=member.decode_breaker.waits_s(now_s),
                prefill=member.prefill,
                transfer=member.transfer,
                step=member.step,
            )
            for member in self._members.values()
        )

    def dispatch(
        self, request_id: str, asked: Asked, keys: Sequence[bytes], *, draws: tuple[float, float], now_s: float
    ) -> Route | Refusal:
        """Chooses both legs, charges both and remembers who will have the prompt; a refusal changes nothing."""
        chosen = route(
            asked,
            self.snapshot(keys, now_s=now_s),
            prefill=self.policies[Leg.PREFILL],
            decode=self.policies[Leg.DECODE],
            draws=draws,
        )
        if isinstance(chosen, Refusal):
            return chosen
        self._send(request_id, Leg.PREFILL, chosen.prefill, asked, keys, chosen.whole, now_s)
        self._send(request_id, Leg.DECODE, chosen.decode, asked, keys, chosen.whole, now_s)
        self._sent[request_id] = _Sent(chosen, now_s, taken=False)
        return chosen

    def first_token(self, request_id: str, *, computed: int, found_pages: int, prefill_s: float, now_s: float) -> None:
        """The prompt is computed: `found_pages` were in the cache and `computed` tokens were not."""
        charge = self.ledger.give_back(request_id, Leg.PREFILL, now_s=now_s)
        if charge is not None and request_id in self._sent:
            believed = self._sent[request_id].route.prefill.hit_pages
            self.index.learn(charge.site, believed=believed, found=found_pages)
            self._learn(charge.site.worker, "prefill", computed, prefill_s)

    def decoding(self, request_id: str, *, now_s: float, moved_bytes: int = 0, transfer_s: float | None = None) -> None:
        """The decode worker has it and decodes; None: nothing had to cross. Only now the prefill leg went well."""
        self.ledger.start(request_id)
        sent = self._sent.get(request_id)
        if sent is None or sent.taken:
            return
        self._sent[request_id] = sent._replace(taken=True)
        self._tell(Leg.PREFILL, Outcome.OK, sent, now_s)
        if transfer_s is not None:
            self._learn(sent.route.decode.site.worker, "transfer", moved_bytes, transfer_s)

    def stepped(self, worker: str, *, sequences: int, step_s: float) -> None:
        """One of its replicas took so long for a decode step of so many sequences."""
        self._learn(worker, "step", sequences, step_s)

    def transferred(self, worker: str, *, moved_bytes: int, transfer_s: float) -> None:
        """A hand-off to it took so long; where that is known at the end only, and `decoding` could not say it."""
        self._learn(worker, "transfer", moved_bytes, transfer_s)

    def end(self, request_id: str, *, now_s: float, keys: Sequence[bytes] = ()) -> None:
        """Answered to the end. `keys`: those of prompt and answer, which the decode replica has now."""
        sent = self._give_back(request_id, now_s)
        if sent is None:
            return
        if not sent.taken:
            self._tell(Leg.PREFILL, Outcome.OK, sent, now_s)
        # One that ended with its first token was never seen by its decode worker, unless that is the same one.
        seen = sent.taken or sent.route.whole
        self._tell(Leg.DECODE, Outcome.OK if seen else Outcome.NEUTRAL, sent, now_s)
        site = sent.route.decode.site
        if site.worker in self._members and keys:
            self.index.record(site, keys, capacity=self._members[site.worker].pages, now_s=now_s)

    def lost(self, request_id: str, leg: Leg, what: Outcome, *, now_s: float) -> None:
        """`leg` ended with `what`; the other is given back too and says nothing about its worker.

        A prefill worker may be at fault after the first token, too: the KV has to be fetched from it.
        """
        sent = self._give_back(request_id, now_s)
        if sent is not None:
            for each in Leg:
                self._tell(each, what if each is leg else Outcome.NEUTRAL, sent, now_s)

    def _set(self, name: str, state: State) -> None:
        if name in self._members:
            self._members[name] = dataclasses.replace(self._members[name], state=state)

    def _replica(self, member: Member, i: int, keys: Sequence[bytes], now_s: float) -> Replica:
        site = Site(member.name, i)
        load = self.ledger.load(site)
        head_tokens, head_s = self.ledger.head(site, now_s)
        return Replica(
            total_pages=member.pages,
            free_pages=max(member.pages - load.pages, 0),
            hit_pages=self.index.hits(site, keys, now_s=now_s),
            pending_tokens=load.pending_tokens,
            context_tokens=load.context_tokens,
            queued=max(load.prompts, load.arriving),  # in a mixed worker each prompt is also a sequence to come
            running=load.running,
            head_tokens=head_tokens,
            head_s=head_s,
            idle_s=self.ledger.idle_s(site, now_s),
            last_chosen=self.ledger.last_chosen(site),
        )

    def _send(
        self, request_id: str, leg: Leg, choice: Choice, asked: Asked, keys: Sequence[bytes], whole: bool, now_s: float
    ) -> None:
        site = choice.site
        member = self._members[site.worker]
        if leg is Leg.PREFILL:
            tokens = max(asked.prompt_tokens - choice.hit_pages * asked.page_size, 1)
            pages = 0 if whole else max(asked.prompt_pages - choice.hit_pages, 0)
        else:
            tokens = asked.prompt_tokens + asked.answer_tokens
            pages = max(asked.all_pages - choice.hit_pages, 0)
        self.ledger.charge(request_id, leg, site, tokens=tokens, pages=pages, now_s=now_s)
        self.index.record(site, keys, capacity=member.pages, now_s=now_s)
        self._members[member.name] = member.with_breaker(leg, member.breaker(leg).sent(now_s))

    def _give_back(self, request_id: str, now_s: float) -> _Sent | None:
        """Both legs, whatever is still charged; None where the request has ended before."""
        for leg in Leg:
            self.ledger.give_back(request_id, leg, now_s=now_s)
        return self._sent.pop(request_id, None)

    def _tell(self, leg: Leg, what: Outcome, sent: _Sent, now_s: float) -> None:
        choice = sent.route.prefill if leg is Leg.PREFILL else sent.route.decode
        member = self._members.get(choice.site.worker)
        if member is not None:
            before = member.breaker(leg)
            breaker = before.ended(what, sent_s=sent.at_s, now_s=now_s)
            self.openings += breaker.openings > before.openings
            self._members[member.name] = member.with_breaker(leg, breaker)

    def _learn(self, worker: str, what: str, units: float, seconds: float) -> None:
        member = self._members.get(worker)
        if member is None:
            return
        fits: dict[str, Any] = {what: getattr(member, what).learn(units, seconds)}
        self._members[worker] = dataclasses.replace(member, **fits)
