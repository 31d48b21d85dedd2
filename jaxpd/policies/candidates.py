"""Which replicas may be chosen for a leg of a request, or why there are none: what all routing policies share.

    of the role and ready -> large enough -> not tried before -> healthy -> queue not full -> with room now, if any has

Each arrow that leaves nobody is a `Reason`, in this order: the first that holds is the one that the client is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxpd.policies.workers import Asked, Leg, Reason, Refusal, Replica, Role, Site, State, Worker

LEAST_RETRY_S = 0.1
MOST_RETRY_S = 30.0
UNKNOWN_RETRY_S = 1.0


class Candidate(NamedTuple):
    """A replica that may be chosen."""

    site: Site
    worker: Worker
    replica: Replica


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
    if not able and any(_could_hold(asked, worker, leg) for worker in ours):
        message = f"no {leg.value} worker that can hold {asked.prompt_tokens} tokens is ready; try again"
        return _refuse(leg, Reason.NO_WORKER, message, UNKNOWN_RETRY_S)
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
        return _refuse(leg, Reason.FAILING, message, hint(wait_s))
    short = [c for c in healthy if c.replica.queued < c.worker.queue_limit]
    if not short:
        limit = max(c.worker.queue_limit for c in healthy)
        message = f"all {len(healthy)} {leg.value} replicas have their queues full (up to {limit}); try again"
        return _refuse(leg, Reason.FULL, message, hint(min(_until_next(c) for c in healthy)))
    return [c for c in short if _has_room(asked, c, leg)] or short


def _pages(asked: Asked, worker: Worker, leg: Leg) -> int:
    return asked.all_pages if leg is Leg.DECODE or worker.role is Role.MIXED else asked.prompt_pages


def _has_room(asked: Asked, candidate: Candidate, leg: Leg) -> bool:
    """A prefill worker takes its prompts one after another and gives their pages back: its queue is its load."""
    replica, worker = candidate.replica, candidate.worker
    if leg is Leg.PREFILL and worker.role is not Role.MIXED:
        return True
    fits = asked.all_pages - replica.hit_pages <= replica.free_pages
    return fits and replica.queued + replica.running < worker.slots


def _could_hold(asked: Asked, worker: Worker, leg: Leg) -> bool:
    return any(_pages(asked, worker, leg) <= replica.total_pages for replica in worker.replicas)


def hit_tokens(asked: Asked, candidate: Candidate) -> int:
    """Of the prompt in the replica's cache, one less than all of it at most: the last one is always computed."""
    return min(candidate.replica.hit_pages * asked.page_size, asked.prompt_tokens - 1)


def _until_next(candidate: Candidate) -> float:
    """Seconds until a full queue is one shorter."""
    fit, replica = candidate.worker.prefill, candidate.replica
    return fit.seconds(replica.head_tokens) - replica.head_s if fit.sure else UNKNOWN_RETRY_S


def hint(seconds: float) -> float:
    """When to ask again, within reason."""
    return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)


def _refuse(leg: Leg, reason: Reason, message: str, retry_after_s: float | None) -> Refusal:
    return Refusal(leg=leg, reason=reason, message=message, retry_after_s=retry_after_s)
