"""The engine: prefill pools, decode pools and the hand-off between them, in one process.

The path of a request, by who has it:

    submit   registry (this file), then the queue of a prefill pool              jaxpd/engine.py
    reserve  prefill pages, a decode replica's pages and slot, staging bytes     jaxpd/reservation.py, jaxpd/policies/
    prefill  chunks of the prompt in the prefill pool's steps; first token       jaxpd/pool.py, jaxpd/stepper.py
    offer    full pages cross to the decode replica while later chunks compute   jaxpd/handoff.py, meshes/transfer/
    accept   scattered into the reserved pages; whole once the last has come     jaxpd/handoff.py
    decode   one token per step                                                  jaxpd/pool.py
    finish   everything freed, one FinishEvent                                   this file

In the modes that share one mesh a mixed pool does both: one reservation, no offer and no accept.

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
from jaxpd.errors import Internal, InvalidArgument, JaxpdError, NotFound, ResourceExhausted, Unavailable
from jaxpd.grammar import Grammar, GrammarCompiler
from jaxpd.handoff import Chunk
from jaxpd.life import Stage
from jaxpd.limits import Limits
from jaxpd.models.layout import ModelLayout
from jaxpd.policies.chunking import Costs
from jaxpd.pool import Pool
from jaxpd.progress import Progress, SilentProgress, TimedProgress
from jaxpd.request import MAX_SEED, Event, FinishEvent, FinishReason, Request, Usage
from jaxpd.reservation import Reservations
from jaxpd.sequence import Sequence, State
from jaxpd.startup import Placement, build_pools, place
from jaxpd.stats import EngineStats, read_engine
from jaxpd.watchdog import Watchdog
from meshes.sharding import replica_mesh
from meshes.transfer.in_process import InProcessTransport, Staging

log = logging.getLogger(__name__)


class Engine:
    """Serves one model on a set of prefill and decode meshes. All public methods may be called from any thread.

    `on_events` gets one list of events per step, from a pool's thread; it must not block.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        *,
        on_events: Callable[[list[Event]], None],
        progress: Progress | None = None,
    ) -> None:
        self.checkpoint = checkpoint
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
        self._reservations: Reservations
        staged = max((p.kv_bytes * p.spec.tp for p in self.limits.prefill), default=0)
        self._transport = InProcessTransport(max_staging_bytes=staged)

    @property
    def limits(self) -> Limits:
        """The memory plan and all limits; known before any weight is read."""
        return self._placement.limits

    @property
    def mode(self) -> str:
        """How prefill and decode share the hardware; one of `jaxpd.config.MODES`."""
        return self._placement.mode

    # life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Loads weights, compiles every program and starts the pools. Blocking; after it the engine is ready."""
        began_s = time.monotonic()
        self._pools = build_pools(self._placement, self.checkpoint, self.config, owner=self, progress=self._progress)
        decode = [pool for pool in self._pools if pool.role == "decode"]
        start = [pool for pool in self._pools if pool.role != "decode"]
        self._reservations = Reservations(self.limits, start, decode, self._transport)
        for pool in self._pools:
            pool.start()
        self._watchdog = Watchdog(self._pools, self.config.step_timeout_s, self._answer_all)
        self._watchdog.start()
        self._progress.seconds["start"] = time.monotonic() - began_s
        with self._lock:
            self._state = "ready"

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
        self._transport.close()
        while self._pools:
            self._pools.pop().close()
        # Whoever still holds the engine must not hold weights and pages with it; pools and engine know each other, so
        # that only the collector ends them.
        self._watchdog = None
        self._reservations = Reservations(self.limits, [], [], self._transport)
        gc.collect()

    # requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidArgument, ResourceExhausted (queue full) or Unavailable (not ready).

        Of `n` samples the first computes the prompt; the others start when that is done, and find it in the caches
        (without a prefix cache, in what the first one leaves there for them alone). A grammar is compiled here, in the
        caller's thread: milliseconds, rarely seconds.
        """
        request.validate(vocab_size=self.checkpoint.config.vocab_size, max_model_len=self.limits.max_model_len)
        grammar = None if request.params.structured is None else self._grammars().compile(request.params.structured)
        samples = [self._sequence(request, i, grammar) for i in range(request.params.n)]
        samples[0].siblings = samples[1:]
        with self._lock:
            if self._state != "ready":
                raise Unavailable(f"the engine is {self._state}")
            roles = (self._reservations.prefill, self._reservations.decode)
            if any(pools and all(pool.given_up for pool in pools) for pools in roles):
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
        self._route(samples[0])

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

    def _route(self, seq: Sequence) -> None:
        self._reservations.route(seq).submit(seq)

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
        for pool in self._pools:
            pool.wake()
        return bool(ending)

    def _answer_all(self, pool: Pool, seconds: float) -> None:
        """A step of a pool does not end: its requests are answered (the watchdog's thread)."""
        error = Internal(f"a device step has not ended for {seconds:.0f} s (--step-timeout); the request is given up")
        for seq in pool.everyone():
            self.emit(self.finish(seq, FinishReason.ERROR, error=error))
        decode = self._reservations.decode
        if pool not in decode or not all(other.given_up for other in decode):
            return
        with self._lock:  # nobody will reserve for those that wait; their pools are well and end them
            waiting = [s for live in self._registry.values() for s in live.values() if s.state is State.QUEUED]
        for seq in waiting:
            seq.failure, seq.abort_requested = error, True
        for other in self._pools:
            other.wake()

    def stats(self) -> EngineStats:
        """Requests by state, free pages and slots, staged bytes, and what was counted since the start."""
        with self._lock:
            sequences = [s for live in self._registry.values() for s in live.values()]
            states: dict[str, int] = {}
            for seq in sequences:
                states[seq.state.value] = states.get(seq.state.value, 0) + 1
        return read_engine(states, sequences, self._pools, self._transport, self._progress.seconds)

    # the pools' owner ---------------------------------------------------------------------------------------------

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        """All that a sequence needs to be computed in `pool` and to decode where it will; False: not now."""
        return self._reservations.reserve(seq, pool)

    def costs(self) -> Costs:
        """What prefill and hand-off take, as measured so far."""
        return self._reservations.costs()

    def send(self, seq: Sequence, pool: Pool, chunk: Chunk) -> None:
        """Sends pages of a prompt to the decode replica that was reserved for it."""
        target = self._reservations.decode[seq.decode_target[0]]
        mesh = replica_mesh(target.device.spec.mesh, seq.decode_target[1])

        def done(moved: list[Staging] | None, error: Exception | None) -> None:
            if error is not None:
                log.error("the hand-off of request %s failed", seq.request_id, exc_info=error)
            target.piece(seq, chunk, moved, error)

        layout: ModelLayout = pool.device.spec.layout
        self._transport.offer(chunk.pieces, layout.heads, target.device.spec.layout.heads, mesh, done)

    def settled(self, chunk: Chunk) -> None:
        """A piece is in the decode pages, or was dropped: its staging is free."""
        self._transport.staging.give_back(chunk.staging_bytes)
        for pool in self._reservations.prefill:
            pool.wake()

    def hand_off(self, seq: Sequence) -> None:
        """Gives a sequence whose first token is out to the decode pool that was reserved for it."""
        seq.move(State.OFFERED)
        target = self._reservations.decode[seq.decode_target[0]]
        target.offer(seq)
        if target.given_up:  # after it was offered: whoever gave the pool up has seen it, or this does
            error = Internal("the decode pool's device step does not end (--step-timeout); the request is given up")
            self.emit(self.finish(seq, FinishReason.ERROR, error=error))

    def first_token(self, seq: Sequence) -> None:
        """The prompt of a request is computed: its other samples find it in the caches."""
        with self._lock:
            siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            self._route(sibling)

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
        self._reservations.free_staging(seq)
        with self._lock:
            samples = self._registry[seq.request_id]
            del samples[seq.sample]
            if not samples:
                del self._registry[seq.request_id]
            self._idle.notify_all()
        for pool in self._pools:
            pool.wake()
        for sibling in siblings:  # its prompt was never computed for them: they start on their own
            self._route(sibling)
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
