"""What a leg would take in each replica, in seconds, and by how much it would miss what the request was promised.

    prefill   what is queued there - what of it is computed already + what no cache has of the prompt      -> TTFT
    decode    transfer of what is missing + the answer's steps, with one sequence more                  -> TTST, TPOT

Fitted to each worker by what it took before (jaxpd/policies/fit.py). Transfer is no part of the TTFT: the prefill
worker streams the first token itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxpd.policies.candidates import Candidate, hit_tokens
from jaxpd.policies.fit import Fit, pooled
from jaxpd.policies.workers import Asked, Site, Worker

STALE_S = 30.0  # without a prompt: what a replica is expected to take counts half against a bound, and so on
SLACK = 1.0  # usual errors added to an estimate before it is held against a bound

Estimates = dict[Site, tuple[float, float, str]]  # (cost in seconds, seconds too late or 0, which bound that is)


def prefill_estimates(asked: Asked, found: Sequence[Candidate]) -> Estimates | None:
    """By replica, of the first token; None while nothing is known of any worker."""
    fits = {c.worker.name: c.worker.prefill for c in found}
    sure = {name for name, fit in fits.items() if fit.sure}
    if not sure:
        return None
    best = min((fits[name] for name in sorted(sure)), key=lambda fit: fit.seconds(asked.prompt_tokens))
    estimates: Estimates = {}
    for c in found:
        replica = c.replica
        known = c.worker.name in sure and replica.idle_s <= STALE_S
        fit = fits[c.worker.name] if known else best
        done_s = min(replica.head_s, fit.seconds(replica.head_tokens)) if replica.queued else 0.0
        queue_s = fit.seconds(replica.pending_tokens, replica.queued) - done_s
        missing = asked.prompt_tokens - hit_tokens(asked, c)
        first_s = max(queue_s, 0.0) + fit.seconds(missing)
        # Errors of many prompts in a row add up like their square root.
        slack_s = SLACK * fit.spread_s * math.sqrt(replica.queued + 1)
        doubted_s = (first_s + slack_s) * 0.5 ** (replica.idle_s / STALE_S)
        estimates[c.site] = (first_s, _late(asked.ttft_slo_s, asked.waited_s + doubted_s, fit), "ttft")
    return estimates


def decode_estimates(asked: Asked, found: Sequence[Candidate]) -> Estimates | None:
    """By replica, of the whole answer from its second token on; None while nothing is known of any worker."""
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
            (_late(asked.tpot_slo_s, step_s + SLACK * step.spread_s, step), "tpot"),
            (_late(asked.ttst_slo_s, second_s + slack_s, step), "ttst"),
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
