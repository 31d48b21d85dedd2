"""What a pool dispatches: the rows of a step, and what its sampling needs to know of each sequence.

Counters of a sequence (`cached`, `sampled`) move on when work is dispatched; what is dispatched later comes after it on
the device. Only the pool's thread is here.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxpd.batch import BatchShape, PageTables, Row, bucket_for, from_slot, pack
from jaxpd.cache.prefix import PrefixLease
from jaxpd.device import Forwarded, PoolDevice
from jaxpd.errors import JaxpdError
from jaxpd.life import Stage
from jaxpd.limits import PoolLimits
from jaxpd.programs import SCORE_TOKENS
from jaxpd.sampling import Logprobs, Sampled
from jaxpd.sequence import Sequence, State
from jaxpd.slot_options import Flag, counts_row
from jaxpd.structured import EVERYTHING, mask_words


@dataclasses.dataclass(eq=False, slots=True)
class Work:
    """What one replica does in a step: sequences that decode, and chunks of prompts with their tokens."""

    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)


class _Steady(NamedTuple):
    """The last step, where it was nothing but decodes: what the next one of the same sequences is made from."""

    decodes: list[list[Sequence]]  # of each replica
    shape: BatchShape
    packed: np.ndarray
    sampling: list[tuple[int, int, Sequence]]


@dataclasses.dataclass(eq=False)
class InFlight:
    """A dispatched step: which sequence samples in which row of which replica, and what is scored of a prompt."""

    sampled: Sampled | None = None  # [R, B]; None as long as its sampling waits for masks
    forwarded: Forwarded | None = None
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
        self._page_size = device.spec.page_size
        self._tables = PageTables()
        self._steady: _Steady | None = None
        self._slot_users: dict[tuple[int, int], PrefixLease] = {}  # (replica, slot): whose options the device has there

    def reset(self) -> None:
        """The device's slots are new."""
        self.device.reset()
        self._steady = None
        self._slot_users.clear()

    def step(self, work: list[Work]) -> InFlight:
        """Dispatches one step of all replicas."""
        most = max(len(of.decodes) + sum(n for _, n in of.chunks) for of in work)
        if any(of.chunks for of in work):
            self._steady = None
            shape, packed, sampling = self._pack(work)
            return self._dispatch(shape, packed, InFlight(sampling=sampling, tokens=most, prompts=True))
        decodes = [of.decodes for of in work]
        if self._steady is not None and self._steady.decodes == decodes:
            shape, packed, sampling = self._pack_again(self._steady)
        else:
            shape, packed, sampling = self._pack(work)
        self._steady = _Steady(decodes, shape, packed, sampling)
        return self._dispatch(shape, packed, InFlight(sampling=sampling, tokens=most))

    def grew(self) -> None:
        """Some sequence has pages that it did not have before."""
        self._steady = None

    def _dispatch(self, shape: BatchShape, packed: np.ndarray, step: InFlight) -> InFlight:
        if any(seq.grammar is not None for _, _, seq in step.sampling):
            step.forwarded = self.device.forward(shape, packed)
        else:
            step.sampled = self.device.step(shape, packed)
        return step

    def _pack(self, work: list[Work]) -> tuple[BatchShape, np.ndarray, list[tuple[int, int, Sequence]]]:
        rows: list[list[Row]] = []
        sampling: list[tuple[int, int, Sequence]] = []
        for r, of in enumerate(work):
            mine = [self._decode_row(r, seq) for seq in of.decodes]
            sampling += [(r, i, seq) for i, seq in enumerate(of.decodes)]
            for seq, count in of.chunks:
                mine.append(self._prompt_row(r, seq, count))
                if not seq.prompt_left:
                    seq.sampled += 1
                    sampling.append((r, len(mine) - 1, seq))
            rows.append(mine)
        shape = bucket_for(self.limits.shapes, rows)
        return shape, pack(shape, rows, self._tables), sampling

    def _pack_again(self, last: _Steady) -> tuple[BatchShape, np.ndarray, list[tuple[int, int, Sequence]]]:
        """The next step of the same sequences with the same pages: every number of a row is the last one, plus one.

        So it is made without a loop over numbers. The tokens are those that the device has sampled last.
        """
        packed, fields = last.packed.copy(), last.shape.fields()
        context, index, ids = (fields[name][0] for name in ("context_lens", "output_index", "token_ids"))
        slots = fields["slots"][0]
        for r, decodes in enumerate(last.decodes):
            count = len(decodes)
            lengths = packed[r, context : context + count]
            lengths += 1
            packed[r, index : index + count] += 1
            packed[r, ids : ids + count] = -1 - packed[r, slots : slots + count]  # batch.from_slot
            for seq in decodes:
                seq.cached += 1
                seq.sampled += 1
            for i in np.flatnonzero(lengths % self._page_size == 1):
                seq = decodes[i]
                lease_of(seq).commit(seq.cached)
        return last.shape, packed, last.sampling

    def sample(self, step: InFlight) -> list[tuple[Sequence, JaxpdError]]:
        """Dispatches a sampling that had to wait until the tokens of the step before were read.

        Returns the sequences that cannot go on, and why; what they sample is anything.
        """
        batch = step.forwarded
        if batch is None:
            return []
        words = mask_words(self.device.spec.layout.padded_vocab)
        mask_RBW = np.full((self.device.spec.replicas, batch.shape.rows, words), EVERYTHING, np.int32)
        failed: list[tuple[Sequence, JaxpdError]] = []
        for r, i, seq in step.sampling:
            if seq.grammar is None or seq.state is State.FINISHED:
                continue
            try:
                seq.grammar.mask(mask_RBW[r, i])
            except JaxpdError as error:
                failed.append((seq, error))
                mask_RBW[r, i] = EVERYTHING
        step.sampled, step.forwarded = self.device.sample(batch, mask_RBW), None
        return failed

    def score(self, replica: int, seq: Sequence) -> InFlight:
        """Dispatches a chunk of a prompt whose log probabilities are asked for; it samples nothing."""
        start, lease = seq.cached, lease_of(seq)
        count = min(seq.to_score, SCORE_TOKENS)
        seq.cached += count
        lease.commit(seq.cached)
        _mark_chunk(seq, count)
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
        _mark_chunk(seq, count)
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
        lease, sampled = seq.decode_lease, seq.sampled
        assert lease is not None, "a sequence that decodes has pages for it"
        seq.cached = cached = seq.cached + 1
        if cached % self._page_size == 1:  # the page before is full, and all its tokens are read
            lease.commit(cached)
        if seq.options is not None:
            self._set_slot(replica, lease, seq)
        slot, outputs = lease.slot, seq.outputs
        # The token before is read back, or else the device knows it.
        token = outputs[sampled - 1] if len(outputs) >= sampled else from_slot(slot)
        temperature = seq.request.params.temperature
        seq.sampled = sampled + 1
        return Row((token,), cached, lease.pages, slot, sampled, seq.seed, temperature, seq.flags)

    def _set_slot(self, replica: int, lease: PrefixLease, seq: Sequence) -> None:
        """Before the first sampling in a slot: the device gets the options, and the counts of all that was said.

        From then on the device counts what it samples itself. All outputs are known here at that time: there are
        none but those that the request came with, or the sequence comes from another slot, and its last token was read
        before it left that.
        """
        if self._slot_users.get((replica, lease.slot)) is lease:
            return
        assert seq.options is not None and len(seq.outputs) == seq.sampled
        counts = None
        if seq.flags & Flag.COUNT:
            counts = counts_row(seq.request.prompt_ids, seq.outputs, self.device.spec.layout.padded_vocab)
        self.device.set_slot(replica, lease.slot, seq.options, counts)
        self._slot_users[replica, lease.slot] = lease


def _mark_chunk(seq: Sequence, count: int) -> None:
    if seq.life.first(Stage.CHUNK) is None:
        seq.life.mark(Stage.PREFILL_START)
    seq.life.mark(Stage.CHUNK, tokens=count)


def lease_of(seq: Sequence) -> PrefixLease:
    """The pages of a sequence in the pool that has it."""
    lease = seq.decode_lease if seq.state is State.DECODING else seq.prefill_lease
    assert lease is not None, "a sequence in a pool has pages there"
    return lease
