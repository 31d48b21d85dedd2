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
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxpd.policies.fit import Fit, pooled
from jaxpd.policies.workers import (
    Asked,
    Choice,
    Leg,
    Reason,
    Refusal,
    Replica,
    Role,
    Route,
    Site,
    State,
    Worker,
)

# Pending tokens more than the least loaded replica has, above which a prefix is computed again there: a guess, about a
# second of an 8B model's prefill on one chip.
AFFINITY_GAP = 8192
AFFINITY_SHARE = 0.3  # of the prompt: a shorter hit is no reason to go anywhere (SGLang's gateway has the same)
MISSING_WEIGHT = 0.5  # a token that must cross to a decode replica, in tokens of context that it holds: a guess
STALE_S = 30.0  # without a prompt: what a replica is expected to take counts half against a bound, and so on
SLACK = 1.0  # usual errors added to an estimate before it is held against a bound
LEAST_RETRY_S = 0.1
MOST_RETRY_S = 30.0
UNKNOWN_RETRY_S = 1.0

Policy = Callable[[Asked, Sequence[Worker], Leg, float], Choice | Refusal]


class Candidate(NamedTuple):
    """A replica that may be chosen."""

    site: Site
    worker: Worker
    replica: Replica


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
        if _hit_tokens(asked, c) > AFFINITY_SHARE * asked.prompt_tokens and load(c.replica, leg) - least <= gap
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

    A worker that nothing is known of is taken for an average one; while nothing is known of any, `kv_aware` decides.
    Bounds are held against the estimate plus its usual error, and only where the estimate is sure.
    """
    found = candidates(asked, workers, leg)
    if isinstance(found, Refusal):
        return found
    estimate = _prefill_estimates if leg is Leg.PREFILL else _decode_estimates
    estimates = estimate(asked, found)
    if estimates is None:
        return _least(found, lambda c: _tokens_to_do(asked, c, leg))
    late = min(late_s for _, late_s, _ in estimates.values())
    if late > 0:
        bound = min((e for e in estimates.values() if e[1] == late), key=lambda e: e[0])
        message = f"the best {leg.value} worker is expected to miss {bound[2]} by {late:.3g} s; try again later"
        return Refusal(leg=leg, reason=Reason.TOO_LATE, message=message, retry_after_s=_hint(late))
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


def candidates(asked: Asked, workers: Sequence[Worker], leg: Leg) -> list[Candidate] | Refusal:
    """Those that may be chosen for `leg`, at least one: with room now if any has, otherwise those that queue it."""
    roles = (Role.PREFILL, Role.MIXED) if leg is Leg.PREFILL else (Role.DECODE,)
    ours = [worker for worker in workers if worker.role in roles and worker.state is not State.GONE]
    ready = [worker for worker in ours if worker.state is State.READY]
    if not ready:
        states = ", ".join(f"{w.name} is {w.state.value}" for w in ours[:4]) or f"of {len(workers)} workers"
        return _refuse(leg, Reason.NO_WORKER, f"no {leg.value} worker is ready ({states}); try again", UNKNOWN_RETRY_S)
    able = [
        Candidate(Site(worker.name, i), worker, replica)
        for worker in ready
        for i, replica in enumerate(worker.replicas)
        if _pages(asked, worker, leg) <= replica.total_pages
    ]
    if not able:
        need = min(_pages(asked, worker, leg) for worker in ready)
        most = max((r.total_pages for worker in ready for r in worker.replicas), default=0)
        message = (
            f"a prompt of {asked.prompt_tokens} and an answer of {asked.answer_tokens} tokens need {need} pages of "
            f"{asked.page_size}, the largest {leg.value} replica has {most}; shorten one or start it with more "
            "--kv-memory"
        )
        return _refuse(leg, Reason.TOO_LARGE, message, None)
    untried = [c for c in able if c.worker.name not in asked.avoid]
    if not untried:
        tried = ", ".join(sorted({c.worker.name for c in able})[:4])
        message = f"each {leg.value} worker that could serve it has failed or refused it ({tried}); try again"
        return _refuse(leg, Reason.TRIED, message, UNKNOWN_RETRY_S)
    healthy = [c for c in untried if c.worker.barred_s(leg) <= 0]
    if not healthy:
        wait_s = min(c.worker.barred_s(leg) for c in untried)
        message = f"all {len(untried)} {leg.value} replicas belong to workers that keep failing; try again"
        return _refuse(leg, Reason.FAILING, message, _hint(wait_s))
    short = [c for c in healthy if c.replica.queued < c.worker.queue_limit]
    if not short:
        limit = max(c.worker.queue_limit for c in healthy)
        message = f"all {len(healthy)} {leg.value} replicas have their queues full (up to {limit}); try again"
        return _refuse(leg, Reason.FULL, message, _hint(min(_until_next(c) for c in healthy)))
    return [c for c in short if _has_room(asked, c, leg)] or short


def _with_decode(
    asked: Asked, workers: Sequence[Worker], first: Choice, decode: Policy, draw: float
) -> Route | Refusal:
    role = next(worker.role for worker in workers if worker.name == first.site.worker)
    if role is Role.MIXED:
        return Route(prefill=first, decode=first)
    second = decode(dataclasses.replace(asked, first_token_s=first.after_s or 0.0), workers, Leg.DECODE, draw)
    return second if isinstance(second, Refusal) else Route(prefill=first, decode=second)


def _pages(asked: Asked, worker: Worker, leg: Leg) -> int:
    return asked.all_pages if leg is Leg.DECODE or worker.role is Role.MIXED else asked.prompt_pages


def _has_room(asked: Asked, candidate: Candidate, leg: Leg) -> bool:
    """A prefill worker takes its prompts one after another and gives their pages back: its queue is its load."""
    replica, worker = candidate.replica, candidate.worker
    if leg is Leg.PREFILL and worker.role is not Role.MIXED:
        return True
    fits = asked.all_pages - replica.hit_pages <= replica.free_pages
    return fits and replica.queued + replica.running < worker.slots


def _hit_tokens(asked: Asked, candidate: Candidate) -> int:
    """Of the prompt, at least one token of which is always computed."""
    return min(candidate.replica.hit_pages * asked.page_size, asked.prompt_tokens - 1)


def _tokens_to_do(asked: Asked, candidate: Candidate, leg: Leg) -> float:
    replica, missing = candidate.replica, asked.prompt_tokens - _hit_tokens(asked, candidate)
    if leg is Leg.PREFILL:
        return replica.pending_tokens + missing + replica.running
    return replica.context_tokens + MISSING_WEIGHT * missing


Estimates = dict[Site, tuple[float, float, str]]  # (cost in seconds, seconds too late or <= 0, what would be missed)


def _prefill_estimates(asked: Asked, found: Sequence[Candidate]) -> Estimates | None:
    fits = _known([c.worker for c in found], "prefill")
    if fits is None:
        return None
    estimates: Estimates = {}
    for c in found:
        fit, replica = fits[c.worker.name], c.replica
        done_s = min(replica.head_s, fit.seconds(replica.head_tokens, 1)) if replica.queued else 0.0
        queue_s = fit.seconds(replica.pending_tokens, replica.queued) - done_s
        missing = asked.prompt_tokens - _hit_tokens(asked, c)
        first_s = max(queue_s, 0.0) + fit.seconds(missing)
        # Errors of many prompts in a row add up like their square root.
        slack_s = SLACK * fit.spread_s * math.sqrt(replica.queued + 1)
        doubted_s = (first_s + slack_s) * 0.5 ** (replica.idle_s / STALE_S)
        estimates[c.site] = (first_s, _late(asked.ttft_slo_s, asked.waited_s + doubted_s, fit), "the TTFT")
    return estimates


def _decode_estimates(asked: Asked, found: Sequence[Candidate]) -> Estimates | None:
    workers = [c.worker for c in found]
    steps, transfers = _known(workers, "step"), _known(workers, "transfer")
    if steps is None:
        return None
    estimates: Estimates = {}
    for c in found:
        step = steps[c.worker.name]
        transfer = transfers[c.worker.name] if transfers else Fit()
        missing = max(asked.prompt_pages - c.replica.hit_pages, 0) * asked.page_bytes
        # Those on their way decode when it gets there; that some of the running have ended by then is left out.
        step_s = step.seconds(c.replica.running + c.replica.queued + 1)
        transfer_s = transfer.seconds(missing)
        second_s = asked.waited_s + asked.first_token_s + transfer_s + step_s
        slack_s = SLACK * (transfer.spread_s + step.spread_s)
        misses = (
            (_late(asked.tpot_slo_s, step_s + SLACK * step.spread_s, step), "the TPOT"),
            (_late(asked.ttst_slo_s, second_s + slack_s, step), "the TTST"),
        )
        late_s, what = max(misses)
        idle = c.replica.running + c.replica.queued == 0
        estimates[c.site] = (transfer_s + asked.answer_tokens * step_s, 0.0 if idle else late_s, what)
    return estimates


def _known(workers: Sequence[Worker], what: str) -> dict[str, Fit] | None:
    """A fit for each worker by name, its own where that is sure; None where no worker's is."""
    own: dict[str, Fit] = {worker.name: getattr(worker, what) for worker in workers}
    sure = [fit for fit in own.values() if fit.sure]
    if not sure:
        return None
    if len(sure) == len(own):
        return own
    common = pooled(sure)
    return {name: fit if fit.sure else common for name, fit in own.items()}


def _late(bound_s: float | None, expected_s: float, fit: Fit) -> float:
    """Seconds above the bound; 0 where there is none, or where the estimate is a guess."""
    return max(expected_s - bound_s, 0.0) if bound_s is not None and fit.sure else 0.0


def _until_next(candidate: Candidate) -> float:
    """Seconds until a full queue is one shorter."""
    fit, replica = candidate.worker.prefill, candidate.replica
    return fit.seconds(replica.head_tokens) - replica.head_s if fit.sure else UNKNOWN_RETRY_S


def _hint(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)


def _least(found: Sequence[Candidate], cost: Callable[[Candidate], float]) -> Choice:
    def rank(c: Candidate) -> tuple[Any, ...]:
        return cost(c), -c.replica.hit_pages, c.replica.last_chosen, c.site

    return _choice(min(found, key=rank))


def _choice(candidate: Candidate) -> Choice:
    return Choice(site=candidate.site, hit_pages=candidate.replica.hit_pages)


def _refuse(leg: Leg, reason: Reason, message: str, retry_after_s: float | None) -> Refusal:
    return Refusal(leg=leg, reason=reason, message=message, retry_after_s=retry_after_s)
