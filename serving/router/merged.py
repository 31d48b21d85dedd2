"""The readings of all workers as one `EngineStats`: metrics, page and control show a router's pools like a server's.

Counters of workers that are gone stay in the sums. How many requests wait or run is the router's own view, in which a
request without a token waits as far as the workers say that so many do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxpd.request import Request
from jaxpd.sequence import State
from jaxpd.stats import MAX_SHOWN, EngineStats, SequenceStats
from serving.router.legs import Legs
from serving.router.places import Places


class Past:
    """What workers that are gone had counted."""

    def __init__(self) -> None:
        self.crossed_bytes = 0
        self.failures: Counter[str] = Counter()

    def add(self, stats: EngineStats) -> None:
        """The last reading of one that is gone."""
        self.crossed_bytes += stats.crossed_bytes
        self.failures.update(stats.handoff_failures)


def merged(
    readings: Sequence[tuple[str, EngineStats]], places: Places, past: Past, live: Iterable[tuple[Request, Legs]]
) -> EngineStats:
    """`readings`: (address, what it last said) of each worker; `live`: the requests of this router."""
    failures = past.failures.copy()
    for _, stats in readings:
        failures.update(stats.handoff_failures)
    sequences = [entry for request, legs in live for entry in _sequences(request, legs)]
    states = Counter(entry.state for entry in sequences)
    waiting = min(states[State.PREFILLING.value], sum(stats.queued for _, stats in readings))
    states.update({State.QUEUED.value: waiting})
    states.subtract({State.PREFILLING.value: waiting})
    return EngineStats(
        states={state: count for state, count in states.items() if count},
        replicas=tuple(replica for address, stats in readings for replica in places.replicas(address, stats)),
        staging_bytes=sum(stats.staging_bytes for _, stats in readings),
        crossed_bytes=past.crossed_bytes + sum(stats.crossed_bytes for _, stats in readings),
        handoff_failures=dict(failures),
        sequences=tuple(sequences[:MAX_SHOWN]),
    )


def _sequences(request: Request, legs: Legs) -> list[SequenceStats]:
    """The samples that have not ended; which pages they have only their workers know."""
    entries = []
    for sample in legs.samples:
        if sample.finished:
            continue
        made, prompt = len(sample.tokens), len(request.prompt_ids)
        state = State.DECODING if made > 1 else State.OFFERED if made else State.PREFILLING
        entries.append(
            SequenceStats(
                request_id=request.request_id,
                sample=sample.index,
                state=state.value,
                prompt_tokens=prompt,
                computed=prompt if made else 0,
                tokens=made,
                holds=(),
            )
        )
    return entries
