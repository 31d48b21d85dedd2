"""Which worker takes a leg of a request: siblings with one signature, pure functions of a snapshot and a random number.

    policy(asked, workers, leg, draw) -> Choice | Refusal

    random           any
    round_robin      the one that was chosen longest ago
    least_pending    the fewest tokens charged
    power_of_two     of two drawn at random the one with fewer tokens charged: nearly as good, and routers that do not
                     see each other's charges do not herd
    prefix_affinity  the longest prefix, unless that one has a gap more to do than the least loaded
    kv_aware         prefill: the least to compute before the first token, what is missing of the prompt included.
                     decode: the least to read in a step, plus what is missing to cross
    ttft_estimate    the same in seconds, as fitted to each worker; refuses at once what would miss its bounds

    workers --candidates--> those that are ready, healthy, not full and not tried --policy--> one --Ledger--> charged

`candidates` comes first in each, so none chooses a worker that drains. Where some have room now, only those are looked
at; where none has, it is queued. Load is what the caller has charged at dispatch (jaxpd/routing/ledger.py), never what
a worker reported a moment ago, or a burst piles up in one. Ties go to the longer prefix and then to the one chosen
longest ago, never to the first: an idle cluster fills all its caches. `route` chooses both legs before any is called.

The naive form of early rejection swings: prefill is idle, all are let in, and decode is full when they get there
(Mooncake, arXiv:2407.00079). Here a decode replica is charged at dispatch, so those on their way already count. And it
can lock itself in: who refuses all learns nothing. So an estimate that no run has confirmed for a while counts less and
less against a request, and a decode replica that has nothing to do is no reason to refuse: one is let in, and shows
what it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxpd.policies.candidates import Candidate, candidates, hint, hit_tokens
from jaxpd.policies.estimates import decode_estimates, prefill_estimates
from jaxpd.policies.workers import Asked, Choice, Leg, Reason, Refusal, Replica, Role, Route, Worker

# Pending tokens more than the least loaded replica has, above which a prefix is computed again there: a guess, about a
# second of an 8B model's prefill on one chip.
AFFINITY_GAP = 8192
AFFINITY_SHARE = 0.3  # of the prompt: a shorter hit is no reason to go anywhere (SGLang's gateway has the same)
MISSING_WEIGHT = 0.5  # a token that must cross to a decode replica, in tokens of context that it holds: a guess

Policy = Callable[[Asked, Sequence[Worker], Leg, float], Choice | Refusal]


def random(asked: Asked, workers: Sequence[Worker], leg: Leg, draw: float) -> Choice | Refusal:
    """`draw` is uniform in [0, 1), here and below."""
    found = candidates(asked, workers, leg)
    return found if isinstance(found, Refusal) else _choice(found[int(draw * len(found))])


def round_robin(asked: Asked, workers: Sequence[Worker], leg: Leg, draw: float) -> Choice | Refusal:
    """By the time of the last choice and not by an index, so that workers that come and go do not disturb it."""
    found = candidates(asked, workers, leg)
    return found if isinstance(found, Refusal) else _choice(min(found, key=lambda c: (c.replica.last_chosen, c.site)))


def least_pending(asked: Asked, workers: Sequence[Worker], leg: Leg, draw: float) -> Choice | Refusal:
    """Prompt tokens yet to be computed, or tokens of context in decode."""
    found = candidates(asked, workers, leg)
    return found if isinstance(found, Refusal) else _least(found, lambda c: load(c.replica, leg))


def power_of_two(asked: Asked, workers: Sequence[Worker], leg: Leg, draw: float) -> Choice | Refusal:
    """Two different ones, of all ordered pairs."""
    found = candidates(asked, workers, leg)
    if isinstance(found, Refusal):
        return found
    if len(found) > 1:
        first, second = divmod(int(draw * len(found) * (len(found) - 1)), len(found) - 1)
        found = [found[first], found[second + (second >= first)]]
    return _least(found, lambda c: load(c.replica, leg))


def prefix_affinity(
    asked: Asked, workers: Sequence[Worker], leg: Leg, draw: float, *, gap: int = AFFINITY_GAP
) -> Choice | Refusal:
    """Of the replicas that have at most `gap` tokens more to do than the least loaded, the one with the longest prefix.

    The gap is each one's own, so that the gate closes for a replica that is busy and stays open for another with the
    same prefix.
    """
    found = candidates(asked, workers, leg)
    if isinstance(found, Refusal):
        return found
    least = min(load(c.replica, leg) for c in found)
    near = [
        c
        for c in found
        if hit_tokens(asked, c) > AFFINITY_SHARE * asked.prompt_tokens and load(c.replica, leg) - least <= gap
    ]
    if not near:
        return _least(found, lambda c: load(c.replica, leg))
    longest = max(c.replica.hit_pages for c in near)
    return _least([c for c in near if c.replica.hit_pages == longest], lambda c: load(c.replica, leg))


def kv_aware(asked: Asked, workers: Sequence[Worker], leg: Leg, draw: float) -> Choice | Refusal:
    """In tokens, by replica. What a mixed worker decodes slows its prompts down and counts there, a token a step."""
    found = candidates(asked, workers, leg)
    return found if isinstance(found, Refusal) else _least(found, lambda c: _tokens_to_do(asked, c, leg))


def ttft_estimate(asked: Asked, workers: Sequence[Worker], leg: Leg, draw: float) -> Choice | Refusal:
    """Prefill: the queue there, then what is missing of the prompt. Decode: the transfer, then the answer's steps.

    A prefill worker that nothing is known of, or nothing of late, is taken for the best: it is tried, and shows what
    it takes; otherwise one whose estimate was spoilt would never be chosen again. While nothing is known of any,
    `kv_aware` decides. Bounds are held against the estimate plus its usual error, and only where it is sure.
    """
    found = candidates(asked, workers, leg)
    if isinstance(found, Refusal):
        return found
    estimate = prefill_estimates if leg is Leg.PREFILL else decode_estimates
    estimates = estimate(asked, found)
    if estimates is None:
        return _least(found, lambda c: _tokens_to_do(asked, c, leg))
    late = min(late_s for _, late_s, _ in estimates.values())
    if late > 0:
        bound = min((e for e in estimates.values() if e[1] == late), key=lambda e: e[0])
        what, limit_s = bound[2], getattr(asked, f"{bound[2]}_slo_s")
        message = (
            f"a {what.upper()} of {limit_s:g} s was asked for, and the {leg.value} worker that comes nearest to it "
            f"would miss it by {late:.3g} s; try again later"
        )
        return Refusal(leg=leg, reason=Reason.TOO_LATE, message=message, retry_after_s=hint(late))
    kept = [c for c in found if estimates[c.site][1] <= 0]
    best = _least(kept, lambda c: estimates[c.site][0])
    after_s = estimates[best.site][0] if leg is Leg.PREFILL else None
    return dataclasses.replace(best, after_s=after_s)


POLICIES: dict[str, Policy] = {
    "random": random,
    "round_robin": round_robin,
    "least_pending": least_pending,
    "power_of_two": power_of_two,
    "prefix_affinity": prefix_affinity,
    "kv_aware": kv_aware,
    "ttft_estimate": ttft_estimate,
}


def route(
    asked: Asked,
    workers: Sequence[Worker],
    *,
    prefill: Policy,
    decode: Policy,
    draws: tuple[float, float],
) -> Route | Refusal:
    """Both legs, each by its policy. A mixed worker that is chosen for the first serves the second as well.

    While no decode worker can take it only mixed workers are asked for the prefill; the refusal is then the decode
    leg's.
    """
    first = prefill(asked, workers, Leg.PREFILL, draws[0])
    if isinstance(first, Refusal):
        return first
    both = _with_decode(asked, workers, first, decode, draws[1])
    if isinstance(both, Route):
        return both
    whole = prefill(asked, [w for w in workers if w.role is Role.MIXED], Leg.PREFILL, draws[0])
    return both if isinstance(whole, Refusal) else Route(prefill=whole, decode=whole)


def load(replica: Replica, leg: Leg) -> int:
    """Tokens that were charged and not given back: to compute, or to read in every step."""
    return replica.pending_tokens if leg is Leg.PREFILL else replica.context_tokens


def _with_decode(
    asked: Asked, workers: Sequence[Worker], first: Choice, decode: Policy, draw: float
) -> Route | Refusal:
    role = next(worker.role for worker in workers if worker.name == first.site.worker)
    if role is Role.MIXED:
        return Route(prefill=first, decode=first)
    second = decode(dataclasses.replace(asked, first_token_s=first.after_s or 0.0), workers, Leg.DECODE, draw)
    return second if isinstance(second, Refusal) else Route(prefill=first, decode=second)


def _tokens_to_do(asked: Asked, candidate: Candidate, leg: Leg) -> float:
    replica, missing = candidate.replica, asked.prompt_tokens - hit_tokens(asked, candidate)
    if leg is Leg.PREFILL:
        return replica.pending_tokens + missing + replica.running
    return replica.context_tokens + MISSING_WEIGHT * missing


def _least(found: Sequence[Candidate], cost: Callable[[Candidate], float]) -> Choice:
    def rank(c: Candidate) -> tuple[Any, ...]:
        return cost(c), -c.replica.hit_pages, c.replica.last_chosen, c.site

    return _choice(min(found, key=rank))


def _choice(candidate: Candidate) -> Choice:
    return Choice(site=candidate.site, hit_pages=candidate.replica.hit_pages)
