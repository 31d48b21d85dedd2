"""A pool: one model copy, one mesh, one page pool, one policy, and the one thread that drives them.

    inbox --> receive --> admit --> launch step k+1 --> read step k's tokens --> events, hand-offs
                 ^                                                                   |
                 +------------------- blocks only when there is nothing to do -------+

Step k+1 is dispatched before the tokens of step k are read: a decode takes its input token from the device
(`from_slot`). So stop conditions are seen one step late, and the surplus token of a sequence that ended is dropped.
Where a grammar decides what may be sampled, the sampling alone waits until step k's tokens are read, not the forward.

A pool that decodes takes pages one by one as its sequences grow beyond what was reserved. When there is none, the
youngest sequence of the replica gives way: it goes back to this pool's queue and is computed again from its tokens.

What a pool does not decide itself it asks its `Owner` (the engine): reservations, the hand-off, and how a sequence
ends.
"""

from __future__ import annotations

import bisect
import logging
import queue
import threading
import time
from typing import Protocol

import jax
import numpy as np

from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixCache, PrefixLease
from jaxpd.device import PoolDevice
from jaxpd.errors import Internal, JaxpdError
from jaxpd.handoff import Arrivals, Chunk, take_chunk
from jaxpd.life import Stage
from jaxpd.limits import PoolLimits
from jaxpd.policies import queueing
from jaxpd.policies.batching import Policy, stall_free
from jaxpd.policies.chunking import Costs, next_chunk
from jaxpd.policies.placement import Place
from jaxpd.request import Event, FinishReason, TokensEvent
from jaxpd.sampling import Logprobs, logprobs_of_row, scored_logprobs
from jaxpd.sequence import Sequence, State
from jaxpd.stepper import InFlight, Stepper, Work, lease_of
from meshes.transfer.in_process import Staging
from meshes.transfer.meter import Meter

log = logging.getLogger(__name__)


class Owner(Protocol):
    """What a pool needs from the engine. Called from the pool's thread."""

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        """Reserves all that the sequence needs to be computed in `pool`, and where it decodes; False: not now."""
        ...

    def send(self, seq: Sequence, pool: Pool, chunk: Chunk) -> None:
        """Sends pages of a prompt to the decode replica that was reserved for it."""

    def settled(self, chunk: Chunk) -> None:
        """Pages that were sent are in the decode pool's, or were dropped."""

    def hand_off(self, seq: Sequence) -> None:
        """Takes a sequence whose first token is out and whose last pages were sent."""

    def first_token(self, seq: Sequence) -> None:
        """A sequence's first token was read: its prompt is computed."""

    def costs(self) -> Costs:
        """What prefill and hand-off take."""
        ...

    def finish(
        self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, error: JaxpdError | None = None
    ) -> list[Event]:
        """Frees everything the sequence owns and returns its last event; none if it has ended before."""
        ...

    def emit(self, events: list[Event]) -> None:
        """Sends one step's events on."""


class Pool:
    """See the module docstring. Methods under "any thread" may be called from any; the rest is the pool's thread's."""

    def __init__(
        self, index: int, limits: PoolLimits, device: PoolDevice, owner: Owner, *, policy: Policy = stall_free
    ) -> None:
        self.index = index
        self.role = limits.role
        self.limits = limits
        self.device = device
        self.owner = owner
        self.policy = policy
        self.cost = Meter()  # of steps with prompts, in tokens
        self.busy_since: float | None = None  # when the step under way began; None: it waits for something to do
        self.preempted = [0] * limits.spec.dp  # how often a sequence of each replica has given way
        self.given_up = False  # a step took too long, its requests were answered, and the thread is still in it
        size = device.spec.page_size
        self.spaces = [PrefixCache(limits.num_pages, limits.rows, size) for _ in range(limits.spec.dp)]
        self._stepper = Stepper(limits, device)
        self._arrivals = Arrivals(device, start=self._take_over, fail=self._fail, settled=self._settled)
        self._last_chosen = [0] * limits.spec.dp
        self._running: list[list[Sequence]] = [[] for _ in self.spaces]  # in the order of service
        self._waiting: list[Sequence] = []  # in the order of service
        self._staged: set[Sequence] = set()  # last chunk dispatched, first token not read yet
        self._retry = False  # room was freed, or someone came, since admission was last tried
        self._look = False  # an abort may have been asked for since it was last looked for
        self._completed_s = 0.0
        self._coming: dict[Sequence, None] = {}  # in the inbox: a pool that hangs must not keep them either
        self._inbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"jaxpd-{self.role}-{index}", daemon=True)

    # any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, seq: Sequence) -> None:
        """Puts a QUEUED sequence into the queue."""
        self._coming[seq] = None
        self._inbox.put(("submit", seq))

    def piece(self, seq: Sequence, chunk: Chunk, moved: list[Staging] | None, error: Exception | None) -> None:
        """Pages that were sent to this pool have settled on its mesh, or failed to."""
        self._inbox.put(("piece", seq, chunk, moved, error))

    def offer(self, seq: Sequence) -> None:
        """Takes an OFFERED sequence; what it lacks of its pages is on its way."""
        self._coming[seq] = None
        self._inbox.put(("offer", seq))

    def wake(self) -> None:
        """Something changed that may let the pool go on: pages were freed, or an abort was asked for."""
        self._inbox.put(("wake",))

    def close(self) -> None:
        """Ends the thread after the step it is in."""
        self._inbox.put(("close",))
        if self._thread.ident is not None and not self.given_up:
            self._thread.join()

    def places(self, chain: Chain, *, whole: bool, fresh: bool = False) -> list[Place]:
        """What each replica has of a prompt and has free; `whole` and `fresh` as for `PrefixCache.match`.

        `whole`, a hand-off, gets nothing while sequences of the pool's own queue wait for room: they were here before.
        Load is in sequences for a hand-off. Else it is in tokens of prompt that are not computed yet, and each sequence
        counts for one page more; then the pool's own thread must ask.
        """
        out = []
        closed = self.given_up or (whole and bool(self._waiting))
        for r, space in enumerate(self.spaces):
            match = space.match(chain, whole=whole, fresh=fresh)
            load = float(space.num_slots - match.free_slots)
            if not whole:
                load = load * space.page_size + sum(seq.prompt_left for seq in self._running[r])
            out.append(
                Place(
                    hit_pages=len(match.pages),
                    room=match.room,
                    free_slots=0 if closed else match.free_slots,
                    load=load,
                    last_chosen=self._last_chosen[r],
                )
            )
        return out

    def acquire(
        self, replica: int, chain: Chain, pages: int, *, whole: bool, fresh: bool = False
    ) -> PrefixLease | None:
        """A lease in a replica that `places` led to; None: others were quicker."""
        lease = self.spaces[replica].acquire(chain, pages, whole=whole, fresh=fresh)
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

    @property
    def handoff_failures(self) -> dict[str, int]:
        """Sequences that this pool could not take over, by reason."""
        return dict(self._arrivals.failures)

    def everyone(self) -> list[Sequence]:
        """All sequences in this pool or arriving (a reading): those that a pool that hangs must not keep."""
        running = [seq for replica in self._running for seq in list(replica)]
        return [*list(self._coming), *self._waiting, *running, *list(self._staged), *self._arrivals.everyone()]

    # the pool's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        in_flight: list[InFlight] = []
        while True:
            try:
                self.busy_since = None
                self._receive(block=not in_flight and not self._has_work())
                self.busy_since = time.monotonic()
                if self._closing:
                    return
                self._drop_aborted()
                self._admit()
                launched = self._launch()
                while in_flight:
                    self._complete(in_flight.pop(0))
                self._sample_rest(launched)
                in_flight = launched  # and no other name for a step that is over: it holds staging
                launched = []
                if self.given_up:
                    raise TimeoutError("the step took longer than --step-timeout")
            except Exception as error:
                log.exception("a step of the %s pool %d failed", self.role, self.index)
                in_flight = []
                self._recover(error)

    def _has_work(self) -> bool:
        if self._retry and self._waiting:
            return True
        return any(seq.prompt_left or seq.wants_tokens for replica in self._running for seq in replica)

    def _receive(self, *, block: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            match message:
                case ("submit", seq):
                    self._coming.pop(seq, None)
                    if seq.state is not State.FINISHED:
                        bisect.insort(self._waiting, seq, key=lambda s: s.rank)
                    self._retry = self._look = True
                case ("piece", seq, chunk, moved, error):
                    self._arrivals.piece(seq, chunk, moved, error)
                case ("offer", seq):
                    self._coming.pop(seq, None)
                    self._look = True
                    if seq.state is not State.FINISHED:
                        self._arrivals.first_token(seq)
                case ("wake",):
                    self._retry = self._look = True
                case ("close",):
                    self._closing = True

    def _drop_aborted(self) -> None:
        if not self._look:
            return
        self._look = False
        aborted = [s for s in (*self._waiting, *(s for r in self._running for s in r)) if s.abort_requested]
        aborted += self._arrivals.aborted()
        for seq in aborted:
            self.owner.emit(self._end_asked(seq))

    def _admit(self) -> None:
        if not self._retry:
            return
        self._retry = False
        blocked: list[Sequence] = []
        for seq in self._waiting[: queueing.candidates([s.passed for s in self._waiting])]:
            seq.refill()
            if not self.owner.reserve(seq, self):
                blocked.append(seq)
                continue
            lease = seq.prefill_lease
            assert lease is not None
            self._waiting.remove(seq)
            seq.cached = lease.hit_tokens
            seq.capacity = len(lease.pages) * self.device.spec.page_size
            if not seq.life.count(Stage.PREEMPTED):
                seq.hit_tokens = min(lease.hit_tokens, seq.prompt_len)
            seq.move(State.PREFILLING)
            self._insert(seq.prefill_replica, seq)
            for other in blocked:
                other.passed += 1

    def _insert(self, replica: int, seq: Sequence) -> None:
        bisect.insort(self._running[replica], seq, key=lambda s: s.rank)

    def _take_over(self, seq: Sequence) -> None:
        """The end of a hand-off: all pages are there, and it decodes from the next step on."""
        if seq.abort_requested:
            self.owner.emit(self._end_asked(seq))
            return
        lease = seq.decode_lease
        assert lease is not None
        lease.commit(seq.fill_len)
        seq.life.mark(Stage.ACCEPTED)
        seq.cached = seq.fill_len
        seq.capacity = len(lease.pages) * self.device.spec.page_size
        seq.move(State.DECODING)
        self._insert(seq.decode_target[1], seq)

    def _settled(self, chunk: Chunk) -> None:
        self.owner.settled(chunk)

    def _fail(self, seq: Sequence, error: JaxpdError) -> None:
        self.owner.emit(self._end(seq, FinishReason.ERROR, error=error))

    def _launch(self) -> list[InFlight]:
        """Dispatches what the policy says: the next steps, if any sequence has something to do.

        The first batches of all replicas make one step, and so on; decodes and prompts of different replicas may meet
        in one, which takes the bucket that fits both. A prompt that is scored makes steps of its own.
        """
        now = time.monotonic()
        costs = self.owner.costs() if self.role == "prefill" else Costs()
        work: list[list[Work]] = []
        scoring: list[tuple[int, Sequence]] = []
        for r in range(len(self._running)):
            decodes, prompts = self._ready(r)
            scoring += [(r, seq) for seq in prompts if seq.to_score]
            chunked = [seq for seq in prompts if not seq.to_score] if scoring else prompts
            batches = self.policy(
                len(decodes),
                [self._chunk(seq, costs) for seq in chunked],
                token_budget=self.limits.max_tokens,
                max_rows=self.limits.rows,
                clock_s=now,
            )
            work.append(
                [Work(decodes[: batch.decodes], [(chunked[i], n) for i, n in batch.chunks]) for batch in batches]
            )
        launched = [
            self._stepper.step([of[step] if step < len(of) else Work([]) for of in work])
            for step in range(max(map(len, work)))
        ]
        launched += [self._stepper.score(r, seq) for r, seq in scoring]
        for step in launched:
            step.dispatched_s = now
        if self.role == "prefill":
            for r, replica in enumerate(self._running):
                for seq in list(replica):
                    self._send(r, seq)
        return launched

    def _ready(self, replica: int) -> tuple[list[Sequence], list[Sequence]]:
        """The sequences that want a token and have room for it, and those with prompt left, in the order of service."""
        decodes, prompts, short = [], [], False
        for seq in self._running[replica]:
            if seq.cached < seq.fill_len:
                prompts.append(seq)
            elif seq.sampled < seq.max_tokens:
                decodes.append(seq)
                short = short or seq.cached >= seq.capacity
        if not short or self.role == "prefill":
            return decodes, prompts
        self._make_room(replica)
        gone = State.QUEUED
        return [s for s in decodes if s.state is not gone], [s for s in prompts if s.state is not gone]

    def _chunk(self, seq: Sequence, costs: Costs) -> int:
        """The most tokens of a prompt to compute in the next step."""
        left = seq.prompt_left
        if self.role != "prefill":
            return left
        first, size = seq.cached <= lease_of(seq).hit_tokens, self.device.spec.page_size
        return next_chunk(left, self.limits.max_tokens, first=first, page_size=size, costs=costs)

    def _send(self, replica: int, seq: Sequence) -> None:
        """Sends the pages that are new since the last time; after the last chunk its prefill pages are free.

        Steps that are dispatched later come after the copy.
        """
        if len(seq.request.outputs) + 1 == seq.max_tokens:  # ends here, whatever the token
            return
        lease = lease_of(seq)
        ready = take_chunk(self.device, replica, seq, lease, self.limits.page_bytes * self.limits.spec.tp)
        if ready is not None:
            self.owner.send(seq, self, ready)
        if not seq.prompt_left:
            self._running[replica].remove(seq)
            self._staged.add(seq)
            lease.release()
            self._retry = True

    def _make_room(self, replica: int) -> None:
        """Every sequence that decodes next has a page to write to, or has given way."""
        running = self._running[replica]
        self._stepper.grew()
        for seq in list(running):
            if seq.cached < seq.capacity or not seq.wants_tokens or seq.state is State.QUEUED:
                continue
            lease = lease_of(seq)
            while seq.state is not State.QUEUED and not lease.grow(1):
                youngest = running[queueing.victim([s.rank for s in running])]
                running.remove(youngest)
                youngest.preempt()
                self.preempted[replica] += 1
                bisect.insort(self._waiting, youngest, key=lambda s: s.rank)
                self._retry = True
                log.info("request %s gives way: replica %d has no free page", youngest.request_id, replica)
            seq.capacity = len(lease.pages) * self.device.spec.page_size

    def _sample_rest(self, launched: list[InFlight]) -> None:
        """Samples what had to wait until the tokens of the step before were read."""
        for step in launched:
            for seq, error in self._stepper.sample(step):
                self._fail(seq, error)

    def _complete(self, step: InFlight) -> None:
        """Reads a step's tokens; ends, hands off or goes on with each sequence that sampled one."""
        if step.scored is not None:
            self._read_scores(*step.scored)
        if step.sampled is None:
            return
        tokens = np.asarray(step.sampled.tokens_B).tolist()
        now = time.monotonic()
        if step.prompts:
            self.cost.record(step.tokens, now - max(step.dispatched_s, self._completed_s))
        self._completed_s = now
        logprobs = step.sampled.logprobs
        if logprobs is not None:
            logprobs = jax.device_get(logprobs)
        events: list[Event] = []
        leaving: list[Sequence] = []
        finished, prefilling = State.FINISHED, State.PREFILLING  # looked up once: an enum's members are slow to get
        for r, i, seq in step.sampling:
            if seq.state is finished:
                continue
            token, index = tokens[r][i], len(seq.outputs)
            try:
                ended = seq.add_output(token, now)
            except Exception as error:  # a grammar that gave up; the token is not the client's
                log.info("request %s cannot go on", seq.request_id, exc_info=error)
                failure = error if isinstance(error, JaxpdError) else _internal("its grammar", error)
                seq.outputs.pop()
                events += self._end(seq, FinishReason.ERROR, error=failure)
                continue
            events.append(
                TokensEvent(
                    seq.request.request_id,
                    index,
                    (token,),
                    None if logprobs is None else logprobs_of_row(logprobs, r, i, seq.request.params.logprobs),
                    None if index else seq.scores(),
                    seq.sample,
                )
            )
            if ended is not None:
                events += self._end(seq, ended[0], stop_token=ended[1])
            elif seq.abort_requested:
                events += self._end_asked(seq)
            elif seq in self._staged:
                leaving.append(seq)
            elif seq.state is prefilling:  # one pool does both: it goes on where it is
                seq.move(State.DECODING)
            if not index:
                self.owner.first_token(seq)
        self.owner.emit(events)
        for seq in leaving:  # after its first token is out: what the decode pool says comes later
            self._staged.discard(seq)
            self.owner.hand_off(seq)

    def _read_scores(self, replica: int, seq: Sequence, start: int, count: int, logprobs: Logprobs) -> None:
        asked = seq.request.params.prompt_logprobs
        assert asked is not None
        seq.prompt_logprobs[start : start + count] = scored_logprobs(jax.device_get(logprobs), replica, count, asked)

    def _end_asked(self, seq: Sequence) -> list[Event]:
        """Ends a sequence whose abort was asked for."""
        reason = FinishReason.ABORT if seq.failure is None else FinishReason.ERROR
        return self._end(seq, reason, error=seq.failure)

    def _end(
        self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, error: JaxpdError | None = None
    ) -> list[Event]:
        if seq in self._waiting:
            self._waiting.remove(seq)
        for replica in self._running:
            if seq in replica:
                replica.remove(seq)
        self._staged.discard(seq)
        self._retry = True
        return self.owner.finish(seq, reason, stop_token=stop_token, error=error)

    def _recover(self, error: Exception) -> None:
        """A step failed: its sequences are answered, and the page pool (which may be gone) is made anew."""
        failure = self.device.explained(error) or _internal("a device step", error)
        victims = [seq for replica in self._running for seq in replica] + list(self._staged)
        self._staged.clear()
        self._waiting = [seq for seq in self._waiting if seq.state is not State.FINISHED]  # a watchdog's answers
        events: list[Event] = []
        for seq in victims:
            events += self._end(seq, FinishReason.ERROR, error=failure)
        self._stepper.reset()
        for space in self.spaces:
            space.forget()
        self._arrivals.lose(failure)
        self.given_up = False
        self.owner.emit(events)


def _internal(what: str, error: Exception) -> Internal:
    """An error for the client: what failed and the kind, no stack and no path."""
    return Internal(f"{what} failed ({type(error).__name__}); the server's log has the details")
