"""The engine: prefill pools, decode pools and the hand-off between them, in one process.

The path of a request, by who has it:

    submit   registry (this file), then the queue of a prefill pool              jaxpd/engine.py
    reserve  prefill pages, a decode replica's pages and slot, staging bytes     jaxpd/policies/admission.py
    prefill  chunks of the prompt in the prefill pool's steps; first token       jaxpd/pool.py, jaxpd/device.py
    offer    KV gathered into staging; crosses to the decode replica's devices   meshes/transfer/in_process.py
    accept   scattered into the reserved pages                                   jaxpd/pool.py
    decode   one token per step                                                  jaxpd/pool.py
    finish   everything freed, one FinishEvent                                   this file

In the modes that share one mesh a mixed pool does both: one reservation, no offer and no accept.

A sequence ends in exactly one place, `finish`, and whatever it owned is free when its `FinishEvent` is out.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from jaxpd.cache.keys import Chain
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.config import EngineConfig
from jaxpd.errors import Internal, InvalidArgument, JaxpdError, ResourceExhausted, Unavailable
from jaxpd.limits import Limits
from jaxpd.models.layout import ModelLayout
from jaxpd.policies.admission import Need, admit
from jaxpd.policies.placement import prefer_prefix
from jaxpd.pool import Pool
from jaxpd.progress import Progress, SilentProgress
from jaxpd.request import Event, FinishEvent, FinishReason, Request, Usage
from jaxpd.sequence import Sequence, State
from jaxpd.startup import Placement, build_pools, place
from meshes.sharding import replica_mesh
from meshes.transfer.in_process import InProcessTransport, Staging

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """Room in one replica of one pool."""

    role: str
    pool: int
    replica: int
    free_pages: int
    num_pages: int
    free_slots: int
    num_slots: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A reading of the engine: requests by state, free room, staged bytes."""

    states: dict[str, int]
    replicas: tuple[ReplicaStats, ...]
    staging_bytes: int

    @property
    def live(self) -> int:
        """Requests that are not finished."""
        return sum(self.states.values())

    @property
    def queued(self) -> int:
        """Requests that wait for a reservation."""
        return self.states.get(State.QUEUED.value, 0)

    @property
    def running(self) -> int:
        """Requests that are past the queue."""
        return self.live - self.queued


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
        self._progress = progress or SilentProgress()
        self._placement: Placement = place(checkpoint, config)
        self._registry: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._state = "starting"
        self._pools: list[Pool] = []
        self._prefill: list[Pool] = []  # where requests start: pools of the role prefill, or mixed
        self._decode: list[Pool] = []
        staged = max((p.kv_bytes * p.spec.tp for p in self.limits.prefill), default=0)
        self._transport = InProcessTransport(max_staging_bytes=staged)

    @property
    def limits(self) -> Limits:
        """The memory plan and all limits; known before any weight is read."""
        return self._placement.limits

    # life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Loads weights, compiles every program and starts the pools. Blocking; after it the engine is ready."""
        self._pools = build_pools(self._placement, self.checkpoint, self.config, owner=self, progress=self._progress)
        self._prefill = [pool for pool in self._pools if pool.role != "decode"]
        self._decode = [pool for pool in self._pools if pool.role == "decode"]
        for pool in self._pools:
            pool.start()
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
        self._transport.close()
        for pool in self._pools:
            pool.close()
        self._pools, self._prefill, self._decode = [], [], []

    # requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidArgument, ResourceExhausted (queue full) or Unavailable (not ready)."""
        request.validate(vocab_size=self.checkpoint.config.vocab_size, max_model_len=self.limits.max_model_len)
        known = request.prompt_ids if self.limits.prefix_cache else ()
        chain = Chain(self.limits.page_size, known)
        seq = Sequence(request=request, eos_ids=frozenset(self.checkpoint.config.eos_token_ids), chain=chain)
        with self._lock:
            if self._state != "ready":
                raise Unavailable(f"the engine is {self._state}")
            if request.request_id in self._registry:
                raise InvalidArgument(
                    f"request_id {request.request_id!r} is in use by a running request", field="request_id"
                )
            queued = sum(s.state is State.QUEUED for s in self._registry.values())
            if queued >= self.limits.max_queued_requests:
                raise ResourceExhausted(
                    f"{queued} requests are queued, the limit is {self.limits.max_queued_requests} "
                    "(--max-queued-requests); try again later"
                )
            self._registry[request.request_id] = seq
        min(self._prefill, key=lambda pool: pool.num_waiting + pool.num_sequences).submit(seq)

    def abort(self, request_id: str) -> bool:
        """Ends a request in whatever state it is; False when there is none (any more). Idempotent."""
        with self._lock:
            seq = self._registry.get(request_id)
        if seq is None:
            return False
        seq.abort_requested = True
        for pool in self._pools:
            pool.wake()
        return True

    def stats(self) -> EngineStats:
        """Requests by state, free pages and slots, staged bytes."""
        with self._lock:
            states: dict[str, int] = {}
            for seq in self._registry.values():
                states[seq.state.value] = states.get(seq.state.value, 0) + 1
        replicas = tuple(
            ReplicaStats(
                role=pool.role,
                pool=pool.index,
                replica=r,
                free_pages=space.free_pages + space.evictable_pages,
                num_pages=space.num_pages,
                free_slots=space.free_slots,
                num_slots=space.num_slots,
            )
            for pool in self._pools
            for r, space in enumerate(pool.spaces)
        )
        return EngineStats(states=states, replicas=replicas, staging_bytes=self._transport.staging.used)

    # the pools' owner ---------------------------------------------------------------------------------------------

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        """Prefill pages, and the decode replica's pages and slot for the whole answer, and the staging bytes.

        In a mixed pool one lease is all of it: pages and a slot for the whole answer.
        """
        if pool.role == "mixed":
            return self._reserve_shared(seq, pool)
        page_size = self.limits.page_size
        prompt_pages = -(-seq.prompt_len // page_size)
        need = Need(
            prefill_pages=prompt_pages,
            decode_pages=-(-seq.max_len // page_size),
            prompt_pages=prompt_pages,
            staged_page_bytes=pool.limits.page_bytes * pool.limits.spec.tp,
        )
        staging = self._transport.staging
        targets = [(p, r) for p in self._decode for r in range(len(p.spaces))]
        choice = admit(
            need,
            pool.places(seq.chain),
            [place for p in self._decode for place in p.places(seq.chain)],
            prefill_hit_value=page_size,
            staging_free=staging.limit - staging.used,
            staging_in_use=staging.used,
        )
        if choice is None or not staging.charge(choice.staging_bytes):
            return False
        seq.prefill_replica = choice.prefill
        target_pool, target_replica = targets[choice.decode]
        seq.decode_target = (target_pool.index, target_replica)
        seq.staging_bytes = choice.staging_bytes
        seq.prefill_lease = pool.acquire(choice.prefill, seq.chain, need.prefill_pages)
        seq.decode_lease = target_pool.acquire(target_replica, seq.chain, need.decode_pages)
        if seq.prefill_lease is None or seq.decode_lease is None:  # another prefill pool was quicker
            seq.release()
            self._free_staging(seq)
            return False
        return True

    def _reserve_shared(self, seq: Sequence, pool: Pool) -> bool:
        pages = -(-seq.max_len // self.limits.page_size)
        replica = prefer_prefix(pool.places(seq.chain), pages, hit_value=self.limits.page_size)
        if replica is None:
            return False
        seq.prefill_replica = replica
        seq.prefill_lease = seq.decode_lease = pool.acquire(replica, seq.chain, pages)
        return seq.prefill_lease is not None

    def hand_off(self, seq: Sequence, pool: Pool, pieces: list[Staging]) -> None:
        """Offers a sequence's staged KV to the decode replica that was reserved for it."""
        seq.move(State.OFFERED)
        target = self._decode[seq.decode_target[0]]
        mesh = replica_mesh(target.device.spec.mesh, seq.decode_target[1])

        def done(moved: list[Staging] | None, error: Exception | None) -> None:
            if seq.abort_requested:
                self.emit([self.finish(seq, FinishReason.ABORT)])
            elif error is not None or moved is None:
                log.error("the hand-off of request %s failed", seq.request_id, exc_info=error)
                failure = Internal(f"the KV hand-off failed ({type(error).__name__}); the server's log has the details")
                self.emit([self.finish(seq, FinishReason.ERROR, error=failure)])
            else:
                seq.move(State.SETTLED)
                target.accept(seq, moved)

        layout: ModelLayout = pool.device.spec.layout
        self._transport.offer(pieces, layout.heads, target.device.spec.layout.heads, mesh, done)

    def accepted(self, seq: Sequence) -> None:
        """The KV is in the decode pages: staging is free again."""
        self._free_staging(seq)
        for pool in self._prefill:
            pool.wake()

    def finish(
        self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, error: JaxpdError | None = None
    ) -> Event:
        """Ends a sequence: frees all it owns, forgets it, and returns its FinishEvent."""
        seq.move(State.FINISHED)
        seq.release()
        self._free_staging(seq)
        with self._lock:
            self._registry.pop(seq.request_id, None)
            self._idle.notify_all()
        for pool in self._prefill:
            pool.wake()
        return FinishEvent(
            request_id=seq.request_id,
            reason=reason,
            usage=Usage(prompt_tokens=seq.prompt_len, completion_tokens=len(seq.outputs), cached_tokens=seq.hit_tokens),
            timings=seq.timings(),
            stop_token_id=stop_token,
            error=error,
        )

    def emit(self, events: list[Event]) -> None:
        """Sends events to the listener; its faults must not stop a pool."""
        if not events:
            return
        try:
            self._on_events(events)
        except Exception:
            log.exception("the listener of the engine's events failed")

    def _free_staging(self, seq: Sequence) -> None:
        if seq.staging_bytes:
            self._transport.staging.give_back(seq.staging_bytes)
            seq.staging_bytes = 0
