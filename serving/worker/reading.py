"""What a worker does just now, and how it crosses a session: once a second, and when its state changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpd.cache.prefix import PrefixStats
from jaxpd.request import Event, TokensEvent
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


class Steps:
    """What decode steps take, as the events of an engine tell: the time between two tokens of the same sequences.

    A step that prefills in between counts as part of it, as it does for who waits for the tokens.
    """

    MOST = 32  # numbers of sequences that one reading tells of

    def __init__(self) -> None:
        self.replicas = 1  # of the pool that decodes
        self._last: dict[int, tuple[float, set[tuple[str, int]]]] = {}  # by the thread of a pool
        self._sums: dict[int, tuple[int, float]] = {}  # sequences in a replica -> steps, seconds

    def note(self, events: Sequence[Event], at_s: float, thread: int) -> None:
        """The events of one step, which the thread of a pool has handed over at `at_s`."""
        these = {(event.request_id, event.sample) for event in events if isinstance(event, TokensEvent)}
        if not these:
            return
        last_s, those = self._last.get(thread, (at_s, set()))
        self._last[thread] = (at_s, these)
        if 2 * len(these & those) >= len(these):
            sequences = -(-len(these) // self.replicas)
            count, seconds = self._sums.get(sequences, (0, 0.0))
            self._sums[sequences] = (count + 1, seconds + at_s - last_s)

    def take(self) -> tuple[tuple[int, float], ...]:
        """(sequences in a replica, mean seconds of a step) since the last call."""
        sums, self._sums = self._sums, {}
        common = sorted(sums.items(), key=lambda entry: -entry[1][0])[: self.MOST]
        return tuple((sequences, seconds / count) for sequences, (count, seconds) in sorted(common))
