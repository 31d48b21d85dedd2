"""What a router counts, and the metric families of it: `jaxpd:router_*`, beside those of `serving.metric_families`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpd.policies.workers import Leg, Reason, Role, State

if TYPE_CHECKING:
    from serving.router.fleet import Info

MODEL = ("model_name",)


@dataclasses.dataclass
class Counts:
    """Since the start. `refusals` is by leg and reason, of attempts too; `again` counts "retries" and "replays"."""

    refusals: Counter[tuple[str, str]] = dataclasses.field(
        default_factory=lambda: Counter({(leg.value, reason.value): 0 for leg in Leg for reason in Reason})
    )
    again: Counter[str] = dataclasses.field(default_factory=lambda: Counter({"retries": 0, "replays": 0}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """One reading of a router, for a collector in any thread."""

    model: str
    infos: list[Info]
    counts: Counts
    openings: int  # of circuit breakers
    in_flight: int  # legs


class RouterFamilies(Collector):
    """Makes the families of one router whenever they are asked for; `read` may be called from any thread."""

    def __init__(self, read: Callable[[], Numbers | None]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing: the families depend on what the router does by then."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families; none before a worker has said which model it is."""
        numbers = self._read()
        if numbers is None:
            return
        model, counts = numbers.model, numbers.counts
        workers = Counter({(role.value, state.value): 0 for role in Role for state in State if state is not State.GONE})
        for info in numbers.infos:
            if info.role is not None:
                workers[info.role.value, info.state] += 1
        place = ("role", "state")
        yield _fill(
            GaugeMetricFamily("jaxpd:router_workers", "Workers that the router knows", labels=("model_name", *place)),
            model,
            sorted(workers.items()),
        )
        for family, value in (
            (
                GaugeMetricFamily("jaxpd:router_legs", "Legs of requests that workers have", labels=MODEL),
                numbers.in_flight,
            ),
            (_counter("retries", "Requests that were sent again before their first token"), counts.again["retries"]),
            (_counter("replays", "Answers that went on elsewhere behind the tokens they had"), counts.again["replays"]),
            (
                _counter("breaker_openings", "Times that a worker failed so often that it was left alone"),
                numbers.openings,
            ),
        ):
            yield _fill(family, model, [((), value)])
        refusals = _counter("refusals", "Times that no worker was chosen", "leg", "reason")
        yield _fill(refusals, model, sorted(counts.refusals.items()))


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"jaxpd:router_{name}", text, labels=(*MODEL, *labels))


def _fill(
    family: CounterMetricFamily | GaugeMetricFamily, model: str, samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    for values, value in samples:
        family.add_metric((model, *values), value)
    return family
