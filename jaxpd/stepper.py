"""What a pool dispatches: the rows of a step, and what its sampling needs to know of each sequence.

Counters of a sequence (`cached`, `sampled`) move on when work is dispatched; what is dispatched later comes after it on
the device. Only the pool's thread is here.
"""

from __future__ import annotations

import dataclasses

from jaxpd.batch import Row, bucket_for, from_slot
from jaxpd.cache.prefix import PrefixLease
from jaxpd.device import PoolDevice
from jaxpd.life import Stage
from jaxpd.limits import PoolLimits
from jaxpd.programs import SCORE_TOKENS
from jaxpd.sampling import Logprobs, Sampled
from jaxpd.sequence import Sequence, State
from jaxpd.slot_options import Flag, counts_row

Work = list[tuple[Sequence, int]]  # the sequences of one replica in a step, with how many tokens of each


@dataclasses.dataclass(eq=False)
class InFlight:
    """A dispatched step: which sequence samples in which row of which replica, and what is scored of a prompt."""

    sampled: Sampled | None = None  # [R, B]
    sampling: list[tuple[int, int, Sequence]] = dataclasses.field(default_factory=list)
    scored: tuple[int, Sequence, int, int, Logprobs] | None = None  # replica, sequence, first token, count
    tokens: int = 0  # most of one replica
    prompts: bool = False  # whether any of them are of prompts
    dispatched_s: float = 0.0


class Stepper:
    """Makes steps of sequences, on one pool's device."""

    def __init__(self, limits: PoolLimits, device: PoolDevice) -> None:
        self.limits = limits
        self.device = device
        self._slot_users: dict[tuple[int, int], PrefixLease] = {}  # (replica, slot): whose options the device has there

    def reset(self) -> None:
        """The device's slots are new."""
        self.device.reset()
        self._slot_users.clear()

    def step(self, work: list[Work]) -> InFlight:
        """Dispatches one step of all replicas."""
        rows: list[list[Row]] = []
        sampling: list[tuple[int, int, Sequence]] = []
        prompts = False
        for r, of in enumerate(work):
            mine = []
            for i, (seq, count) in enumerate(of):
                if seq.cached < seq.fill_len:
                    prompts = True
                    mine.append(self._prompt_row(r, seq, count))
                else:
                    mine.append(self._decode_row(r, seq))
                if seq.cached >= seq.fill_len:
                    seq.sampled += 1
                    sampling.append((r, i, seq))
            rows.append(mine)
        most = max(sum(n for _, n in of) for of in work)
        sampled = self.device.step(bucket_for(self.limits.shapes, rows), rows)
        return InFlight(sampled, sampling, tokens=most, prompts=prompts)

    def score(self, replica: int, seq: Sequence) -> InFlight:
        """Dispatches a chunk of a prompt whose log probabilities are asked for; it samples nothing."""
        start, lease = seq.cached, lease_of(seq)
        count = min(seq.to_score, SCORE_TOKENS)
        seq.cached += count
        lease.commit(seq.cached)
        seq.life.mark(Stage.CHUNK, tokens=count)
        ids = seq.token_ids(start, start + count + 1)
        row = Row(
            token_ids=ids[:-1],
            context_len=seq.cached,
            pages=lease.pages,
            slot=lease.slot,
            output_index=0,
            seed=0,
            temperature=0.0,
        )
        logprobs = self.device.score(replica, row, ids[1:])
        return InFlight(scored=(replica, seq, start, count, logprobs), tokens=count, prompts=True)

    def _prompt_row(self, replica: int, seq: Sequence, count: int) -> Row:
        lease, params = lease_of(seq), seq.request.params
        token_ids = seq.token_ids(seq.cached, seq.cached + count)
        seq.cached += count
        lease.commit(seq.cached)  # what has been dispatched is there for whoever is dispatched later
        seq.life.mark(Stage.CHUNK, tokens=count)
        flags = 0 if seq.prompt_left else seq.flags
        if flags and seq.options is not None:
            self._set_slot(replica, lease, seq)
        return Row(
            token_ids=token_ids,
            context_len=seq.cached,
            pages=lease.pages,
            slot=lease.slot,
            output_index=seq.sampled,
            seed=seq.seed,
            temperature=params.temperature,
            flags=flags,
        )

    def _decode_row(self, replica: int, seq: Sequence) -> Row:
        lease = seq.decode_lease
        assert lease is not None, "a sequence that decodes has pages for it"
        slot, sampled = lease.slot, seq.sampled
        known = len(seq.outputs) >= sampled  # else it is not read back yet, and the device knows it
        seq.cached += 1
        if seq.cached % self.device.spec.page_size == 1:  # the page before is full, and all its tokens are read
            lease.commit(seq.cached)
        if seq.flags and seq.options is not None:
            self._set_slot(replica, lease, seq)
        return Row(
            token_ids=(seq.outputs[sampled - 1] if known else from_slot(slot),),
            context_len=seq.cached,
            pages=lease.pages,
            slot=slot,
            output_index=sampled,
            seed=seq.seed,
            temperature=seq.request.params.temperature,
            flags=seq.flags,
        )

    def _set_slot(self, replica: int, lease: PrefixLease, seq: Sequence) -> None:
        """Before the first sampling in a slot: the device gets the options, and the counts of all that was said.

        From then on the device counts what it samples itself. All outputs are known here at that time: there are none,
        or the sequence comes from another slot, and its last token was read before it left that.
        """
        if self._slot_users.get((replica, lease.slot)) is lease:
            return
        assert seq.options is not None and len(seq.outputs) == seq.sampled
        counts = None
        if seq.flags & Flag.COUNT:
            counts = counts_row(seq.request.prompt_ids, seq.outputs, self.device.spec.layout.padded_vocab)
        self.device.set_slot(replica, lease.slot, seq.options, counts)
        self._slot_users[replica, lease.slot] = lease


def lease_of(seq: Sequence) -> PrefixLease:
    """The pages of a sequence in the pool that has it."""
    lease = seq.decode_lease if seq.state is State.DECODING else seq.prefill_lease
    assert lease is not None, "a sequence in a pool has pages there"
    return lease
