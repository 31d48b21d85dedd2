"""Where a sequence is computed and where it decodes: the policies of `jaxpd.policies`, asked about the pools there are.

route     at its arrival: the queue of which pool                 placement and chunking (is a hand-off worth it?)
reserve   when its turn comes: replicas, pages, slot and staging  admission, placement
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxpd.limits import Limits
from jaxpd.policies.admission import Need, admit
from jaxpd.policies.chunking import Costs, prefill_here
from jaxpd.policies.placement import prefer_prefix
from jaxpd.pool import Pool
from jaxpd.sequence import Sequence
from meshes.transfer.in_process import InProcessTransport, StagingBound
from meshes.transfer.meter import Meter


class Reservations:
    """Asks the policies and takes what they choose. Safe to use from several threads.

    `prefill` are the pools where prompts start, of the role prefill or mixed; `decode` those of the role decode.
    """

    def __init__(self, limits: Limits, prefill: Seq[Pool], decode: Seq[Pool], transport: InProcessTransport) -> None:
        self.prefill = list(prefill)
        self.decode = list(decode)
        self._limits = limits
        self._transport = transport

    def route(self, seq: Sequence) -> Pool:
        """The least loaded pool of those where its prompt is to be computed."""
        pools = self.decode if self.decode and self._here(seq) else self.prefill
        return least_loaded(pools)

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        """Prefill pages, the decode replica's pages and slot, and the staging bytes; False: not now.

        Where it stays in the pool that computes it one lease is all of it.
        """
        return self._reserve_both(seq, pool) if pool.role == "prefill" else reserve_one(self._limits, seq, pool)

    def free_staging(self, seq: Sequence) -> None:
        """Gives back what is charged for pages that were not offered."""
        free_staging(seq, self._transport.staging)

    def costs(self) -> Costs:
        """What prefill and hand-off take, as measured so far."""
        return measured_costs(self.prefill[0], self._transport.cost, self._limits.page_size)

    def _reserve_both(self, seq: Sequence, pool: Pool) -> bool:
        page_size, fresh = self._limits.page_size, scores_prompt(seq)
        prompt_pages = -(-seq.fill_len // page_size)
        need = Need(
            prefill_pages=prompt_pages,
            decode_pages=-(-seq.reserved_len(self._limits.reserve_tokens) // page_size),
            prompt_pages=prompt_pages,
            staged_page_bytes=staged_page_bytes(pool),
        )
        staging = self._transport.staging
        targets = [(p, r) for p in self.decode for r in range(len(p.spaces))]
        choice = admit(
            need,
            pool.places(seq.chain, whole=False, fresh=fresh),
            [place for p in self.decode for place in p.places(seq.chain, whole=True)],
            prefill_hit_value=page_size,
            staging_free=staging.limit - staging.used,
            staging_in_use=staging.used,
        )
        if choice is None or not staging.charge(choice.staging_bytes):
            return False
        seq.prefill_replica = choice.prefill
        target, replica = targets[choice.decode]
        seq.decode_target = (target.index, replica)
        seq.staging_bytes = choice.staging_bytes
        seq.prefill_lease = pool.acquire(choice.prefill, seq.chain, need.prefill_pages, whole=False, fresh=fresh)
        seq.decode_lease = target.acquire(replica, seq.chain, need.decode_pages, whole=True)
        if seq.prefill_lease is None or seq.decode_lease is None:  # another prefill pool was quicker
            seq.release()
            self.free_staging(seq)
            return False
        seq.sent_pages = seq.landed_pages = seq.decode_lease.hit_pages
        return True

    def _here(self, seq: Sequence) -> bool:
        """Whether a decode pool should compute the prompt itself."""
        limit, size = self._limits.local_prefill, self._limits.page_size
        if limit == 0 or scores_prompt(seq):  # decode pools have no program to score with
            return False
        there, here = (
            max(place.hit_pages for pool in pools for place in pool.places(seq.chain, whole=False))
            for pools in (self.prefill, self.decode)
        )
        return prefill_here(
            seq.fill_len - max(there, here) * size, seq.fill_len - here * size, limit=limit, costs=self.costs()
        )


def least_loaded(pools: Seq[Pool]) -> Pool:
    """The pool with the fewest sequences, of those whose device steps end."""
    able = [pool for pool in pools if not pool.given_up] or pools
    return min(able, key=lambda pool: pool.num_waiting + pool.num_sequences)


def free_staging(seq: Sequence, staging: StagingBound) -> None:
    """Gives back what is charged for pages that were not offered."""
    if seq.staging_bytes:
        staging.give_back(seq.staging_bytes)
        seq.staging_bytes = 0


def measured_costs(pool: Pool, transfers: Meter, page_size: int) -> Costs:
    """What a prefill pool and the hand-off take; `transfers` were measured in bytes."""
    setup_s, s_per_byte = transfers.fit()
    step_s, s_per_token = pool.cost.fit()
    return Costs(
        prefill_s_per_token=s_per_token,
        step_s=step_s,
        transfer_s=setup_s,
        transfer_s_per_token=s_per_byte * staged_page_bytes(pool) / page_size,
    )


def reserve_one(limits: Limits, seq: Sequence, pool: Pool) -> bool:
    """Pages and a slot for a sequence that is computed and decodes in one pool; False: not now."""
    pages = -(-seq.reserved_len(limits.reserve_tokens) // limits.page_size)
    fresh = scores_prompt(seq)
    places = pool.places(seq.chain, whole=False, fresh=fresh)
    replica = prefer_prefix(places, pages, hit_value=limits.page_size)
    if replica is None:
        return False
    seq.prefill_replica = replica
    seq.prefill_lease = seq.decode_lease = pool.acquire(replica, seq.chain, pages, whole=False, fresh=fresh)
    return seq.prefill_lease is not None


def scores_prompt(seq: Sequence) -> bool:
    """Whether all of its prompt must be computed, for its log probabilities."""
    return seq.to_score > 0


def staged_page_bytes(pool: Pool) -> int:
    """Bytes that one page of a prefill pool takes in staging."""
    return pool.limits.page_bytes * pool.limits.spec.tp
