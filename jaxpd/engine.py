"""The engine: prefill pools, decode pools and the hand-off between them, in one process.

The path of a request, by who has it:

    submit   registry (this file), then the queue of a prefill pool              jaxpd/engine.py
    reserve  prefill pages, a decode replica's pages and slot, staging bytes     jaxpd/reservation.py, jaxpd/policies/
    prefill  chunks of the prompt in the prefill pool's steps; first token       jaxpd/pool.py, jaxpd/stepper.py
    offer    full pages cross to the decode replica while later chunks compute   jaxpd/handoff.py, meshes/transfer/
    accept   scattered into the reserved pages; whole once the last has come     jaxpd/handoff.py
    decode   one token per step                                                  jaxpd/pool.py
    finish   everything freed, one FinishEvent                                   this file

In the modes that share one mesh a mixed pool does both: one reservation, no offer and no accept. An engine of role
prefill or decode (a worker's) has pools of that role alone, and hands over to engines elsewhere (jaxpd/remote/). What
differs is all in its `Mover`.

A sequence ends in exactly one place, `finish`, and whatever it owned is free when its `FinishEvent` is out.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable

from jaxpd.cache.keys import Chain
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.config import EngineConfig
from jaxpd.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    JaxpdError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jaxpd.grammar import Grammar, GrammarCompiler
from jaxpd.handoff import Chunk
from jaxpd.in_process import InProcess
from jaxpd.life import Stage
from jaxpd.limits import Limits
from jaxpd.mover import Mover
from jaxpd.multihost.leader import Followers
from jaxpd.policies.chunking import Costs
from jaxpd.pool import Pool
from jaxpd.progress import Progress, SilentProgress, TimedProgress
from jaxpd.remote.decode import DecodeSide
from jaxpd.remote.messages import Side
from jaxpd.remote.prefill import PrefillSide
from jaxpd.request import MAX_SEED, Event, FinishEvent, FinishReason, Leg, Request, Usage
from jaxpd.sequence import Sequence, State
from jaxpd.startup import Placement, build_pools, place
from jaxpd.stats import EngineStats, read_engine
from jaxpd.watchdog import Watchdog
from meshes.transfer.in_process import InProcessTransport

log = logging.getLogger(__name__)


class Engine:
    """Serves one model on a set of prefill and decode meshes. All public methods may be called from any thread.

    `on_events` gets one list of events per step, from a pool's thread; it must not block. `followers` are the other
    processes of a worker that is several (jaxpd/multihost/); the engine closes them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        on_events: Callable[[list[Event]], None],
        progress: Progress | None = None,
        followers: Followers | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.followers = followers
        self.config = config
        self._on_events = on_events
        self._progress = TimedProgress(progress or SilentProgress())
        self._placement: Placement = place(checkpoint, config)
        self._registry: dict[str, dict[int, Sequence]] = {}  # request id -> sample -> what is not finished
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._state = "starting"
        self._pools: list[Pool] = []
        self._watchdog: Watchdog | None = None
        self._grammar_lock = threading.Lock()
        self._grammar_compiler: GrammarCompiler | None = None
        self._staging_limit = max((p.kv_bytes * p.spec.tp for p in self.limits.prefill), default=0)
        self._mover: Mover
        self._side: PrefillSide | DecodeSide | None = None

    @property
    def limits(self) -> Limits:
        """The memory plan and all limits; known before any weight is read."""
        return self._placement.limits

    @property
    def mode(self) -> str:
        """How prefill and decode share the hardware; one of `jaxpd.config.MODES`."""
        return self._placement.mode

    @property
    def role(self) -> str:
        """prefill or decode for an engine that does only that, mixed for one that serves requests whole."""
        return self.config.role or "mixed"

    @property
    def side(self) -> Side:
        """Its end of hand-offs with other processes. Raises FailedPrecondition for one that has none."""
        if self._side is None:
            raise FailedPrecondition("an engine that serves requests whole, or has not started, has no peers")
        return self._side

    @property
    def transport(self) -> InProcessTransport:
        """What moves KV between its own pools, to be measured. Raises FailedPrecondition for one that moves none."""
        if not isinstance(self._mover, InProcess):
            raise FailedPrecondition(f"an engine of role {self.role} hands over to other processes")
        return self._mover.transport

    # life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Loads weights, compiles every program and starts the pools. Blocking; after it the engine is ready."""
        began_s = time.monotonic()
        self._pools = build_pools(
            self._placement,
            self.checkpoint,
            self.config,
            owner=self,
            progress=self._progress,
            followers=self.followers,
        )
        self._mover = self._make_mover(self._pools)
        for pool in self._pools:
            pool.start()
        self._watchdog = Watchdog(self._pools, self.config.step_timeout_s, self._answer_all)
        self._watchdog.start()
        self._progress.seconds["start"] = time.monotonic() - began_s
        with self._lock:
            self._state = "ready"

    def _make_mover(self, pools: list[Pool]) -> Mover:
        if self.config.role == "prefill":
            self._side = PrefillSide(self, self.limits, pools, max_staging_bytes=self._staging_limit)
        elif self.config.role == "decode":
            self._side = DecodeSide(self, self.limits, pools)
        else:
            return InProcess(self, self.limits, pools, InProcessTransport(max_staging_bytes=self._staging_limit))
        return self._side

    def drain(self, timeout_s: float) -> bool:
        """Admits nothing more and waits for what runs; False when requests are left after `timeout_s`."""
        with self._lock:
            self._state = "draining"
            return self._idle.wait_for(lambda: not self._registry, timeout_s)

    def close(self) -> None:
        """Ends all requests (ABORT) and all threads. Idempotent."""
        with self._lock:
            self._state = "closed"
            live = list(self._registry)
        for request_id in live:
            self.abort(request_id)
        with self._lock:
            self._idle.wait_for(lambda: not self._registry, timeout=60.0)
        if self._watchdog is not None:
            self._watchdog.close()
        if self._pools:
            self._mover.close()
        while self._pools:
            self._pools.pop().close()
        if self.followers is not None:
            self.followers.close()
        # Whoever still holds the engine must not hold weights and pages with it; pools and engine know each other, so
        # that only the collector ends them.
        self._watchdog = self._side = None
        self._mover = self._make_mover([])
        gc.collect()

    # requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, leg: Leg | None = None) -> None:
        """Queues a request. Raises InvalidArgument, ResourceExhausted (queue full) or Unavailable (not ready).

        `leg`: what an engine of role prefill or decode is to do of it, and with whom.

        Of `n` samples the first computes the prompt; the others start when that is done, and find it in the caches
        (without a prefix cache, in what the first one leaves there for them alone). A grammar is compiled here, in the
        caller's thread: milliseconds, rarely seconds.
        """
        request.validate(vocab_size=self.checkpoint.config.vocab_size, max_model_len=self.limits.max_model_len)
        grammar = None if request.params.structured is None else self._grammars().compile(request.params.structured)
        samples = [self._sequence(request, i, grammar) for i in range(request.params.n)]
        with self._lock:
            self._check_ready()
        self._mover.check(samples, leg)
        with self._lock:
            self._check_ready()
            if self._mover.given_up():
                raise Unavailable("no pool answers: a device step does not end (the server's log has the stacks)")
            if request.request_id in self._registry:
                raise InvalidArgument(
                    f"request_id {request.request_id!r} is in use by a running request", field="request_id"
                )
            queued = sum(s.state is State.QUEUED for live in self._registry.values() for s in live.values())
            if queued >= self.limits.max_queued_requests:
                raise ResourceExhausted(
                    f"{queued} requests are queued, the limit is {self.limits.max_queued_requests} "
                    "(--max-queued-requests); try again later"
                )
            self._registry[request.request_id] = dict(enumerate(samples))
        self._mover.begin(samples, leg)

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise Unavailable(f"the engine is {self._state}")

    def _grammars(self) -> GrammarCompiler:
        with self._grammar_lock:
            if self._grammar_compiler is None:
                config = self.checkpoint.config
                try:
                    tokenizer = self.checkpoint.tokenizer()
                except NotFound:
                    tokenizer = None  # the compiler says what that means for the request
                self._grammar_compiler = GrammarCompiler(tokenizer, config.vocab_size, config.eos_token_ids)
            return self._grammar_compiler

    def _sequence(self, request: Request, sample: int, grammar: Grammar | None) -> Sequence:
        salt, tokens = request.cache_salt, request.prompt_ids + request.outputs
        if not self.limits.prefix_cache:  # nobody else finds it
            salt, tokens = f"{request.request_id} {request.arrival_s}", tokens if request.params.n > 1 else ()
        return Sequence(
            request=request,
            eos_ids=frozenset(self.checkpoint.config.eos_token_ids),
            chain=Chain(self.limits.page_size, tokens, salt=salt),
            sample=sample,
            seed=seed_of(request.params.seed or 0, sample),
            grammar=None if grammar is None else grammar.new_state(),
        )

    def abort(self, request_id: str, *, sample: int | None = None) -> bool:
        """Ends a request, or one sample of it, in whatever state it is; False when there is none. Idempotent."""
        with self._lock:
            live = self._registry.get(request_id, {})
            ending = [s for s in live.values() if sample is None or s.sample == sample]
            held = [s for s in ending for first in live.values() if s in first.siblings]
            for first in list(live.values()):
                first.siblings = [s for s in first.siblings if s not in held]
        for seq in ending:
            seq.abort_requested = True
        for seq in held:  # no pool has it yet
            self.emit(self.finish(seq, FinishReason.ABORT))
        self._mover.aborting([seq for seq in ending if seq not in held])
        self.wake()
        return bool(ending)

    def _answer_all(self, pool: Pool, seconds: float) -> None:
        """A step of a pool does not end: its requests are answered (the watchdog's thread)."""
        error = Internal(f"a device step has not ended for {seconds:.0f} s (--step-timeout); the request is given up")
        for seq in pool.everyone():
            self.emit(self.finish(seq, FinishReason.ERROR, error=error))
        with self._lock:
            waiting = [s for live in self._registry.values() for s in live.values() if s.state is State.QUEUED]
        self._mover.pool_given_up(pool, error, waiting)

    def give_up(self, reason: str) -> None:
        """Nothing can be computed any more: all requests are answered with Unavailable, and no new ones are taken.

        For a worker of which a process is lost: the pool's thread may be in a step that never ends.
        """
        with self._lock:
            self._state = f"broken ({reason})"
            live = [s for samples in self._registry.values() for s in samples.values()]
        error = Unavailable(f"the request is given up: {reason}")
        for seq in live:
            self.emit(self.finish(seq, FinishReason.ERROR, error=error))

    def stats(self) -> EngineStats:
        """Requests by state, free pages and slots, staged bytes, and what was counted since the start."""
        with self._lock:
            sequences = [s for live in self._registry.values() for s in live.values()]
            states: dict[str, int] = {}
            for seq in sequences:
                states[seq.state.value] = states.get(seq.state.value, 0) + 1
        return read_engine(states, sequences, self._pools, self._mover if self._pools else None, self._progress.seconds)

    # the pools' owner ---------------------------------------------------------------------------------------------

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        """All that a sequence needs to be computed in `pool` and to decode where it will; False: not now."""
        return self._mover.reserve(seq, pool)

    def costs(self) -> Costs:
        """What prefill and hand-off take, as measured so far."""
        return self._mover.costs()

    def send(self, seq: Sequence, pool: Pool, chunk: Chunk) -> None:
        """Sends pages of a prompt to where it will decode."""
        self._mover.send(seq, pool, chunk)

    def settled(self, chunk: Chunk) -> None:
        """A piece is in the decode pages, or was dropped: its staging is free."""
        self._mover.settled(chunk)

    def hand_off(self, seq: Sequence) -> None:
        """Gives a sequence whose first token is out to where it decodes."""
        self._mover.hand_off(seq)

    def wake(self) -> None:
        """Something changed that may let the pools go on."""
        for pool in self._pools:
            pool.wake()

    def first_token(self, seq: Sequence) -> None:
        """The prompt of a request is computed: its other samples find it in the caches."""
        with self._lock:
            siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            self._mover.route(sibling)

    def finish(
        self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, error: JaxpdError | None = None
    ) -> list[Event]:
        """Ends a sequence: frees all it owns, forgets it, and returns its FinishEvent; nothing if it has ended."""
        with self._lock:
            if seq.state is State.FINISHED:
                return []
            seq.move(State.FINISHED)
            siblings, seq.siblings = seq.siblings, []
        seq.life.mark(Stage.FAILED if reason is FinishReason.ERROR else Stage.FINISHED)
        seq.life.reason = reason.value
        seq.release()
        self._mover.ended(seq)
        with self._lock:
            samples = self._registry[seq.request_id]
            del samples[seq.sample]
            if not samples:
                del self._registry[seq.request_id]
            self._idle.notify_all()
        self.wake()
        for sibling in siblings:  # its prompt was never computed for them: they start on their own
            self._mover.route(sibling)
        event = FinishEvent(
            request_id=seq.request_id,
            reason=reason,
            usage=Usage(prompt_tokens=seq.prompt_len, completion_tokens=len(seq.outputs), cached_tokens=seq.hit_tokens),
            timings=seq.life.timings(),
            stop_token_id=stop_token,
            error=error,
            sample=seq.sample,
            life=seq.life,
        )
        return [event]

    def emit(self, events: list[Event]) -> None:
        """Sends events to the listener; its faults must not stop a pool."""
        if not events:
            return
        try:
            self._on_events(events)
        except Exception:
            log.exception("the listener of the engine's events failed")


def seed_of(seed: int, sample: int) -> int:
    """The seed of one sample of a request: the request's own for the first, and others that are far apart.

    Multiples of an odd number near 2**32 / golden ratio, so that all samples differ.
    """
    return (seed + sample * 0x9E3779B1) & MAX_SEED
