"""What a worker does just now, and how it crosses a session: once a second, and when its state changes."""

from __future__ import annotations

import dataclasses

from jaxpd.cache.prefix import PrefixStats
from jaxpd.sequence import State as SequenceState
from jaxpd.stats import EngineStats, ReplicaStats
from serving.gateway import State
from serving.proto.jaxpd.v1 import worker_pb2 as pb

STATES = {
    State.STARTING: pb.WORKER_STATE_STARTING,
    State.READY: pb.WORKER_STATE_READY,
    State.DRAINING: pb.WORKER_STATE_DRAINING,
}
STATES_BACK = {value: state for state, value in STATES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a worker does just now. `steps`: decode steps since the last reading, (sequences, seconds) each.

    After the wire `stats` has counts of requests, replicas and bytes; what it has of single sequences stays behind.
    """

    state: State
    stats: EngineStats
    steps: tuple[tuple[int, float], ...] = ()


def reading_to_proto(reading: Reading) -> pb.Reading:
    """Counts, rooms and bytes."""
    stats = reading.stats
    return pb.Reading(
        state=STATES[reading.state],
        queued=stats.queued,
        running=stats.running,
        staging_bytes=stats.staging_bytes,
        crossed_bytes=stats.crossed_bytes,
        replicas=[_replica_to_proto(replica) for replica in stats.replicas],
        handoff_failures=stats.handoff_failures,
        steps=[pb.StepReading(sequences=sequences, step_s=step_s) for sequences, step_s in reading.steps],
    )


def reading_from_proto(message: pb.Reading) -> Reading:
    """Requests that run are counted as prefilling where the worker has no pool that decodes, else as decoding."""
    replicas = tuple(_replica_from_proto(replica) for replica in message.replicas)
    decodes = any(replica.role != "prefill" for replica in replicas)
    running = SequenceState.DECODING if decodes else SequenceState.PREFILLING
    states = {SequenceState.QUEUED.value: message.queued, running.value: message.running}
    return Reading(
        state=STATES_BACK.get(message.state, State.STARTING),
        stats=EngineStats(
            states={state: count for state, count in states.items() if count},
            replicas=replicas,
            staging_bytes=message.staging_bytes,
            crossed_bytes=message.crossed_bytes,
            handoff_failures=dict(message.handoff_failures),
        ),
        steps=tuple((step.sequences, step.step_s) for step in message.steps),
    )


_REPLICA = (
    "role",
    "pool",
    "replica",
    "free_pages",
    "num_pages",
    "free_slots",
    "num_slots",
    "pinned_pages",
    "cached_pages",
    "preempted",
)  # fields of the same name in both


def _replica_to_proto(replica: ReplicaStats) -> pb.ReplicaReading:
    return pb.ReplicaReading(
        prefix_queried=replica.prefix.queried,
        prefix_hit=replica.prefix.hit,
        prefix_evicted=replica.prefix.evicted,
        **{field: getattr(replica, field) for field in _REPLICA},
    )


def _replica_from_proto(message: pb.ReplicaReading) -> ReplicaStats:
    return ReplicaStats(
        prefix=PrefixStats(queried=message.prefix_queried, hit=message.prefix_hit, evicted=message.prefix_evicted),
        **{field: getattr(message, field) for field in _REPLICA},
    )
