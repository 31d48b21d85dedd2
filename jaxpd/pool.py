"""A pool: one model copy, one mesh, one page pool, one policy, and the one thread that drives them.

    inbox --> receive --> admit --> launch step k+1 --> read step k's tokens --> events, hand-offs
                 ^                                                                   |
                 +------------------- blocks only when there is nothing to do -------+

Step k+1 is dispatched before the tokens of step k are read: a decode takes its input token from the device
(`from_slot`). So stop conditions are seen one step late, and the surplus token of a sequence that ended is dropped.

What a pool does not decide itself it asks its `Owner` (the engine): reservations for a hand-off, the hand-off, and how
a sequence ends.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from typing import Protocol

import jax
import numpy as np

from jaxpd.batch import Row, bucket_for, from_slot
from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixCache, PrefixLease
from jaxpd.device import PoolDevice
from jaxpd.errors import Internal, JaxpdError
from jaxpd.limits import PoolLimits
from jaxpd.policies.batching import Batch, Candidate, Policy, stall_free
from jaxpd.policies.placement import Place
from jaxpd.request import Event, FinishReason, TokensEvent
from jaxpd.sampling import Sampled, logprobs_of_row
from jaxpd.sequence import Sequence, State
from jaxpd.slot_options import Flag, counts_row
from meshes.transfer.in_process import Staging

log = logging.getLogger(__name__)


class Owner(Protocol):
    """What a pool needs from the engine. Called from the pool's thread."""

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        """Reserves pages in `pool`, and pages, slot and staging in a decode pool; False: not now."""
        ...

    def hand_off(self, seq: Sequence, pool: Pool, pieces: list[Staging]) -> None:
        """Takes a sequence whose first token is out and whose KV is in `pieces`."""

    def accepted(self, seq: Sequence) -> None:
        """The sequence's KV is in its decode pages; its staging is free."""

    def finish(
        self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, error: JaxpdError | None = None
    ) -> Event:
        """Frees everything the sequence owns and returns its last event."""
        ...

    def emit(self, events: list[Event]) -> None:
        """Sends one step's events on."""


@dataclasses.dataclass(eq=False)
class _InFlight:
    """A dispatched step: which sequences sample in which row, and the staging gathered behind it."""

    sampled: Sampled  # [R, B]
    sampling: list[tuple[int, int, Sequence]]
    staged: dict[Sequence, list[Staging]]


class Pool:
    """See the module docstring. `submit`, `accept`, `wake` and `close` may be called from any thread."""

    def __init__(
        self, index: int, limits: PoolLimits, device: PoolDevice, owner: Owner, *, policy: Policy = stall_free
    ) -> None:
        self.index = index
        self.role = limits.role
        self.limits = limits
        self.device = device
        self.owner = owner
        self.policy = policy
        size = device.spec.page_size
        self.spaces = [PrefixCache(limits.num_pages, limits.rows, size) for _ in range(limits.spec.dp)]
        self._last_chosen = [0] * limits.spec.dp
        self._running: list[list[Sequence]] = [[] for _ in self.spaces]
        self._waiting: deque[Sequence] = deque()
        self._slot_users: dict[tuple[int, int], PrefixLease] = {}  # (replica, slot): whose options the device has there
        self._staged: set[Sequence] = set()  # last chunk dispatched, first token not read yet
        self._inbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"jaxpd-{self.role}-{index}", daemon=True)

    # any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, seq: Sequence) -> None:
        """Puts a QUEUED sequence into the queue."""
        self._inbox.put(("submit", seq))

    def accept(self, seq: Sequence, pieces: list[Staging]) -> None:
        """Takes a SETTLED sequence and its KV, on this pool's mesh."""
        self._inbox.put(("accept", seq, pieces))

    def wake(self) -> None:
        """Something changed that may let the pool go on: pages were freed, or an abort was asked for."""
        self._inbox.put(("wake",))

    def close(self) -> None:
        """Ends the thread after the step it is in."""
        self._inbox.put(("close",))
        if self._thread.ident is not None:
            self._thread.join()

    def places(self, chain: Chain) -> list[Place]:
        """What each replica has of a prompt and has free.

        Load is in sequences in a decode pool. Elsewhere it is in tokens of prompt that are not computed yet, and each
        sequence counts for one page more: then the pool's own thread must ask.
        """
        out = []
        for r, space in enumerate(self.spaces):
            match = space.match(chain, whole=self.role == "decode")
            load = float(space.num_slots - match.free_slots)
            if self.role != "decode":
                load = load * space.page_size + sum(seq.prompt_left for seq in self._running[r])
            out.append(
                Place(
                    hit_pages=len(match.pages),
                    room=match.room,
                    free_slots=match.free_slots,
                    load=load,
                    last_chosen=self._last_chosen[r],
                )
            )
        return out

    def acquire(self, replica: int, chain: Chain, pages: int) -> PrefixLease | None:
        """A lease in a replica that `places` led to; None: others were quicker."""
        lease = self.spaces[replica].acquire(chain, pages, whole=self.role == "decode")
        if lease is not None:
            self._last_chosen[replica] = max(self._last_chosen) + 1
        return lease

    @property
    def num_sequences(self) -> int:
        """Sequences that hold a slot."""
        return sum(space.num_slots - space.free_slots for space in self.spaces)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue (a reading, not a promise)."""
        return len(self._waiting)

    # the pool's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        in_flight: list[_InFlight] = []
        while True:
            self._receive(block=not in_flight and not self._runnable())
            if self._closing:
                return
            try:
                self._drop_aborted()
                self._admit()
                launched = self._launch()
                while in_flight:
                    self._complete(in_flight.pop(0))
                in_flight = launched  # and no other name for a step that is over: it holds staging
                launched = []
            except Exception as error:
                log.exception("a step of the %s pool %d failed", self.role, self.index)
                in_flight = []
                self._recover(error)

    def _runnable(self) -> bool:
        return any(seq.prompt_left or seq.wants_tokens for replica in self._running for seq in replica)

    def _receive(self, *, block: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if message[0] == "submit":
                self._waiting.append(message[1])
            elif message[0] == "accept":
                self._take_over(message[1], message[2])
            elif message[0] == "close":
                self._closing = True

    def _drop_aborted(self) -> None:
        aborted = [s for s in (*self._waiting, *(s for r in self._running for s in r)) if s.abort_requested]
        if aborted:
            self.owner.emit([self._end(seq, FinishReason.ABORT) for seq in aborted])

    def _admit(self) -> None:
        while self._waiting and self.owner.reserve(self._waiting[0], self):
            seq = self._waiting.popleft()
            assert seq.prefill_lease is not None
            seq.cached = seq.hit_tokens = seq.prefill_lease.hit_tokens
            seq.move(State.PREFILLING)
            self._running[seq.prefill_replica].append(seq)

    def _take_over(self, seq: Sequence, pieces: list[Staging]) -> None:
        """The last step of a hand-off: scatter into the reserved pages, and decode from the next step on."""
        if seq.abort_requested:
            self.owner.emit([self.owner.finish(seq, FinishReason.ABORT)])
            return
        replica, lease = seq.decode_target[1], self._lease(seq)
        if lease.lost:  # a step failed since it was reserved: the pages that did not cross are gone
            failure = Internal("the decode pool lost the pages of the prompt that it had; send the request again")
            self.owner.emit([self.owner.finish(seq, FinishReason.ERROR, error=failure)])
            return
        try:
            self.device.scatter(replica, lease.pages[lease.hit_pages : self._pages_for(seq.prompt_len)], pieces)
            lease.commit(seq.prompt_len)
        except Exception as error:
            log.exception("accepting request %s failed", seq.request_id)
            self.owner.emit(
                [self.owner.finish(seq, FinishReason.ERROR, error=_internal("accept of a hand-off", error))]
            )
            self._recover(error)
            return
        seq.move(State.DECODING)
        self._running[replica].append(seq)
        self.owner.accepted(seq)

    def _launch(self) -> list[_InFlight]:
        """Dispatches what the policy says: the next steps, if any sequence has something to do.

        The first batches of all replicas make one step, and so on; decodes and prompts of different replicas may meet
        in one, which takes the bucket that fits both.
        """
        now = time.monotonic()
        batches: list[list[Batch]] = []
        for replica in self._running:
            candidates = [Candidate(prompt_left=s.prompt_left, wants_token=s.wants_tokens) for s in replica]
            batches.append(
                self.policy(candidates, token_budget=self.limits.max_tokens, max_rows=self.limits.rows, clock_s=now)
            )
        steps = [
            [
                [(replica[i], n) for i, n in (of[step] if step < len(of) else [])]
                for replica, of in zip(self._running, batches, strict=True)
            ]
            for step in range(max(map(len, batches)))
        ]
        return [self._dispatch(chosen) for chosen in steps]

    def _dispatch(self, chosen: list[list[tuple[Sequence, int]]]) -> _InFlight:
        """One step: the sequences of each replica, with how many tokens of each."""
        rows: list[list[Row]] = []
        sampling: list[tuple[int, int, Sequence]] = []
        last_chunks: list[tuple[int, Sequence]] = []
        for r, work in enumerate(chosen):
            rows.append([self._row(r, seq, count) for seq, count in work])
            for i, (seq, _) in enumerate(work):
                if not seq.prompt_left:
                    if self.role == "prefill":
                        last_chunks.append((r, seq))
                    seq.sampled += 1
                    sampling.append((r, i, seq))
        sampled = self.device.step(bucket_for(self.limits.shapes, rows), rows)
        return _InFlight(sampled, sampling, {seq: self._stage(r, seq) for r, seq in last_chunks})

    def _row(self, replica: int, seq: Sequence, count: int) -> Row:
        """The row of a sequence in the next step, and its counters moved on."""
        lease = self._lease(seq)
        if seq.prompt_left:
            token_ids = seq.request.prompt_ids[seq.cached : seq.cached + count]
        elif len(seq.outputs) >= seq.sampled:
            token_ids = (seq.outputs[seq.sampled - 1],)
        else:  # not read back yet: the device knows it
            token_ids = (from_slot(lease.slot),)
        seq.cached += count
        lease.commit(seq.cached)  # what has been dispatched is there for whoever is dispatched later
        params = seq.request.params
        flags = 0 if seq.prompt_left else seq.flags
        if flags and seq.options is not None:
            self._set_slot(replica, lease, seq)
        return Row(
            token_ids=token_ids,
            context_len=seq.cached,
            pages=lease.pages,
            slot=lease.slot,
            output_index=seq.sampled,
            seed=params.seed or 0,
            temperature=params.temperature,
            flags=flags,
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

    def _stage(self, replica: int, seq: Sequence) -> list[Staging]:
        """Copies a finished prompt's KV into staging and frees its prefill pages: later steps come after the copy."""
        lease = self._lease(seq)
        if seq.request.params.max_tokens == 1:  # ends here, whatever the token
            return []
        there = seq.decode_lease.hit_pages if seq.decode_lease is not None else 0  # the decode replica has these
        pieces = self.device.gather(replica, lease.pages[there : self._pages_for(seq.prompt_len)])
        self._running[replica].remove(seq)
        self._staged.add(seq)
        lease.release()
        return pieces

    def _complete(self, step: _InFlight) -> None:
        """Reads a step's tokens; ends, hands off or goes on with each sequence that sampled one."""
        tokens = np.asarray(step.sampled.tokens_B)
        logprobs = step.sampled.logprobs
        if logprobs is not None:
            logprobs = jax.device_get(logprobs)
        events: list[Event] = []
        leaving: list[Sequence] = []
        for r, i, seq in step.sampling:
            if seq.state is State.FINISHED:
                continue
            self._staged.discard(seq)
            token = int(tokens[r, i])
            index = len(seq.outputs)
            ended = seq.add_output(token)
            events.append(
                TokensEvent(
                    request_id=seq.request_id,
                    first_index=index,
                    token_ids=(token,),
                    logprobs=logprobs_of_row(logprobs, r, i, seq.request.params.logprobs),
                )
            )
            if ended is not None:
                events.append(self._end(seq, ended[0], stop_token=ended[1]))
            elif seq.abort_requested:
                events.append(self._end(seq, FinishReason.ABORT))
            elif seq in step.staged:
                leaving.append(seq)
            elif seq.state is State.PREFILLING:  # one pool does both: it goes on where it is
                seq.move(State.DECODING)
        self.owner.emit(events)
        for seq in leaving:  # after its first token is out: what the decode pool says comes later
            self.owner.hand_off(seq, self, step.staged[seq])

    def _end(
        self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, error: JaxpdError | None = None
    ) -> Event:
        if seq in self._waiting:
            self._waiting.remove(seq)
        for replica in self._running:
            if seq in replica:
                replica.remove(seq)
        return self.owner.finish(seq, reason, stop_token=stop_token, error=error)

    def _recover(self, error: Exception) -> None:
        """A step failed: its sequences are answered, and the page pool (which may be gone) is made anew."""
        victims = [seq for replica in self._running for seq in replica] + list(self._staged)
        self._staged.clear()
        events = [self._end(s, FinishReason.ERROR, error=_internal("a device step", error)) for s in victims]
        self.device.reset()
        for space in self.spaces:
            space.forget()
        self._slot_users.clear()
        self.owner.emit(events)

    def _lease(self, seq: Sequence) -> PrefixLease:
        lease = seq.decode_lease if seq.state in (State.DECODING, State.SETTLED) else seq.prefill_lease
        assert lease is not None, "a sequence in a pool has pages there"
        return lease

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.device.spec.page_size)


def _internal(what: str, error: Exception) -> Internal:
    """An error for the client: what failed and the kind, no stack and no path."""
    return Internal(f"{what} failed ({type(error).__name__}); the server's log has the details")
