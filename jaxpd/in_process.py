"""The mover of an engine that has all pools in this process: hand-offs go from mesh to mesh, device to device.

In the modes that share one mesh a mixed pool does both: one reservation, and nothing is moved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from jaxpd.errors import Internal, InvalidArgument, JaxpdError
from jaxpd.handoff import Chunk
from jaxpd.limits import Limits
from jaxpd.mover import Ends
from jaxpd.policies.chunking import Costs
from jaxpd.pool import Pool
from jaxpd.request import FinishReason, Leg
from jaxpd.reservation import Reservations
from jaxpd.sequence import Sequence, State
from meshes.sharding import replica_mesh
from meshes.transfer.in_process import InProcessTransport, Staging

log = logging.getLogger(__name__)


class InProcess:
    """See `jaxpd.mover.Mover`."""

    def __init__(self, ends: Ends, limits: Limits, pools: Seq[Pool], transport: InProcessTransport) -> None:
        self._ends = ends
        self.transport = transport
        self.failures: dict[str, int] = {}
        decode = [pool for pool in pools if pool.role == "decode"]
        start = [pool for pool in pools if pool.role != "decode"]
        self.reservations = Reservations(limits, start, decode, transport)

    @property
    def staging_bytes(self) -> int:
        return self.transport.staging.used

    @property
    def crossed_bytes(self) -> int:
        return self.transport.crossed_bytes

    def check(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        if leg is not None:
            raise InvalidArgument(
                "this engine serves requests whole; a leg of one is for a worker of role prefill or decode", field="leg"
            )

    def begin(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        samples[0].siblings = list(samples[1:])
        self.route(samples[0])

    def route(self, seq: Sequence) -> None:
        self.reservations.route(seq).submit(seq)

    def given_up(self) -> bool:
        roles = (self.reservations.prefill, self.reservations.decode)
        return any(pools and all(pool.given_up for pool in pools) for pools in roles)

    def pool_given_up(self, pool: Pool, error: JaxpdError, waiting: Seq[Sequence]) -> None:
        decode = self.reservations.decode
        if pool not in decode or not all(other.given_up for other in decode):
            return
        for seq in waiting:  # nobody will reserve for them; their pools are well and end them
            seq.failure, seq.abort_requested = error, True
        self._ends.wake()

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        return self.reservations.reserve(seq, pool)

    def costs(self) -> Costs:
        return self.reservations.costs()

    def send(self, seq: Sequence, pool: Pool, chunk: Chunk) -> None:
        target = self.reservations.decode[seq.decode_target[0]]
        mesh = replica_mesh(target.device.spec.mesh, seq.decode_target[1])

        def done(moved: list[Staging] | None, error: Exception | None) -> None:
            if error is not None:
                log.error("the hand-off of request %s failed", seq.request_id, exc_info=error)
            target.piece(seq, chunk, moved, error)

        layouts = pool.device.spec.layout.heads, target.device.spec.layout.heads
        self.transport.offer(chunk.pieces, *layouts, mesh, done)

    def settled(self, chunk: Chunk) -> None:
        self.transport.staging.give_back(chunk.staging_bytes)
        for pool in self.reservations.prefill:
            pool.wake()

    def hand_off(self, seq: Sequence) -> None:
        seq.move(State.OFFERED)
        target = self.reservations.decode[seq.decode_target[0]]
        target.offer(seq)
        if target.given_up:  # after it was offered: whoever gave the pool up has seen it, or this does
            error = Internal("the decode pool's device step does not end (--step-timeout); the request is given up")
            self._ends.emit(self._ends.finish(seq, FinishReason.ERROR, error=error))

    def aborting(self, seqs: Seq[Sequence]) -> None:
        """Their pools look for them."""

    def ended(self, seq: Sequence) -> None:
        self.reservations.free_staging(seq)

    def close(self) -> None:
        self.transport.close()
