"""The names of the metrics, and what stands behind each.

`vllm:` names mean what they mean there, so that routers, load generators and dashboards made for it work unchanged;
what is ours is under `jaxpd:`. All carry `model_name`; `role`, `pool` and `replica` only ours do. A family that is not
known yet (there is no engine, the backend does not say) is left out, never zero.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpd.errors import Unavailable
from jaxpd.version import __version__
from serving.histogram import Histogram

if TYPE_CHECKING:
    from jaxpd.stats import EngineStats, ReplicaStats
    from serving.metrics import Metrics

Samples = Iterable[tuple[Sequence[str], float]]  # label values without the model's name, value
PLACE = ("role", "pool", "replica")
FAILURES = ("copy", "step", "lost", "peer", "refused", "lease")  # jaxpd.errors.HandoffFailed
STARTUP = {"loading weights": "weights", "compiling": "compile", "start": "all"}


class Families(Collector):
    """Makes the families of one server whenever they are asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Nothing: the families depend on what the server does by then."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families that are known now."""
        metrics, source = self._metrics, self._metrics.source
        name, page_size, stats = "", 0, None
        if source is not None:
            try:
                name, page_size = source.model.name, source.model.page_size
            except Unavailable:
                name = ""  # it is loading
            stats = source.stats()
        yield from _process(metrics, name)
        if not name:
            return
        yield from _requests(metrics, name)
        yield from _times(metrics, name)
        if stats is not None:
            yield from _load(stats, name, page_size)
            yield from _pools(stats, name)
            yield from _transfers(stats, name)


def _counter(name: str, text: str, model: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    family = CounterMetricFamily(name, text, labels=("model_name", *labels))
    for values, value in samples:
        family.add_metric((model, *values), value)
    return family


def _gauge(name: str, text: str, model: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
    for values, value in samples:
        family.add_metric((model, *values), value)
    return family


def _histogram(name: str, text: str, model: str, of: Histogram | Mapping[str, Histogram], label: str = "") -> Metric:
    family = HistogramMetricFamily(name, text, labels=("model_name", label) if label else ("model_name",))
    for value, histogram in (of if isinstance(of, Mapping) else {"": of}).items():
        family.add_metric((model, value) if label else (model,), histogram.buckets(), histogram.sum)
    return family


def _by(counts: Mapping[str, float]) -> Samples:
    return [((key,), value) for key, value in sorted(counts.items())]


def _one(value: float) -> Samples:
    return [((), value)]


@functools.cache
def _build() -> dict[str, str]:
    return {
        "version": __version__,
        "jax": importlib.metadata.version("jax"),
        "python": platform.python_version(),
    }


def _process(metrics: Metrics, model: str) -> Iterator[Metric]:
    build = _build()
    refusals = dict(metrics.refusals)
    if metrics.keys is not None:
        refusals["unauthenticated"] += metrics.keys.refused
    yield _gauge("jaxpd:build_info", "Versions; always 1", model, [(tuple(build.values()), 1)], tuple(build))
    yield _counter(
        "jaxpd:xla_compiles",
        "Programs that XLA compiled or took from its disk cache; of a warm server that serves none should come",
        model,
        _by({phase: histogram.count for phase, histogram in metrics.compiles.items()}),
        ("phase",),
    )
    yield _histogram("jaxpd:xla_compile_seconds", "Time one program took", model, metrics.compiles, "phase")
    yield _counter(
        "jaxpd:admission_rejections",
        "Requests that the gateway refused, and calls without a key where one is needed",
        model,
        _by(refusals),
        ("reason",),
    )


def _requests(metrics: Metrics, model: str) -> Iterator[Metric]:
    yield _counter("vllm:prompt_tokens", "Tokens of prompts that were computed", model, _one(metrics.prompt_tokens))
    yield _counter("vllm:generation_tokens", "Tokens that were generated", model, _one(metrics.generation_tokens))
    yield _counter("vllm:request_success", "Answers that ended", model, _by(metrics.finishes), ("finished_reason",))
    yield _histogram("vllm:request_prompt_tokens", "Tokens of a prompt", model, metrics.prompt_lengths)
    yield _histogram("vllm:request_generation_tokens", "Tokens of an answer", model, metrics.answer_lengths)
    yield _counter(
        "jaxpd:requests",
        "Requests that arrived, also those that were refused",
        model,
        sorted(metrics.requests.items()),
        ("front", "operation"),
    )
    yield _histogram(
        "jaxpd:tokens_per_stream_message",
        "New tokens in a message to a client: more than one where the client or the server is behind",
        model,
        metrics.message_tokens,
    )


def _times(metrics: Metrics, model: str) -> Iterator[Metric]:
    for name, text, histogram in (
        ("vllm:time_to_first_token_seconds", "Arrival to first token", metrics.ttft),
        ("jaxpd:time_to_second_token_seconds", "Arrival to second token: contains the hand-off", metrics.ttst),
        ("vllm:inter_token_latency_seconds", "Time between two tokens of an answer", metrics.itl),
        ("vllm:request_time_per_output_token_seconds", "Mean time between the tokens of an answer", metrics.tpot),
        ("vllm:e2e_request_latency_seconds", "Arrival to the end of an answer", metrics.e2e),
        ("vllm:request_queue_time_seconds", "Arrival to the reservation of pages", metrics.queued),
        ("vllm:request_prefill_time_seconds", "Reservation to first token", metrics.prefilled),
        ("vllm:request_decode_time_seconds", "First to last token", metrics.decoding),
        ("jaxpd:kv_transfer_seconds", "Hand-off of a prompt: offer to accept", metrics.stages["transfer"]),
        (
            "jaxpd:kv_transfer_exposed_seconds",
            "The part of a hand-off that nothing hid: first token to ready to decode",
            metrics.stages["decode_wait"],
        ),
    ):
        yield _histogram(name, text, model, histogram)
    yield _histogram("jaxpd:request_stage_seconds", "Time an answer spent in a stage", model, metrics.stages, "stage")


def _load(stats: EngineStats, model: str, page_size: int) -> Iterator[Metric]:
    yield _gauge("vllm:num_requests_running", "Answers being computed", model, _one(stats.running))
    yield _gauge("vllm:num_requests_waiting", "Answers that wait for room", model, _one(stats.queued))
    computing = [replica for replica in stats.replicas if replica.role != "decode"]
    yield _gauge("vllm:kv_cache_usage_perc", "Pages in use, 0 to 1, of the fullest role", model, _one(_fullest(stats)))
    pages = sum(replica.num_pages for replica in computing)
    yield _gauge(
        "vllm:cache_config_info",
        "Pages of the pools that compute prompts, where the prefix cache saves work; always 1",
        model,
        [((str(page_size), str(pages)), 1)],
        ("block_size", "num_gpu_blocks"),
    )
    yield _counter(
        "vllm:prefix_cache_queries",
        "Tokens of full pages of prompts that could have been in the prefix cache",
        model,
        _one(page_size * sum(replica.prefix.queried for replica in computing)),
    )
    yield _counter(
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were in the prefix cache",
        model,
        _one(page_size * sum(replica.prefix.hit for replica in computing)),
    )
    preempted = sum(replica.preempted for replica in stats.replicas)
    yield _counter("vllm:num_preemptions", "Answers that gave way and were computed again", model, _one(preempted))
    decode = sum(pool.waiting for pool in stats.pools if pool.role == "decode")
    depths = {
        "prefill": max(stats.queued - decode, 0),
        "transfer": stats.states.get("offered", 0),
        "decode": decode,
    }
    yield _gauge(
        "jaxpd:stage_queue_depth",
        "Answers that wait for pages to be prefilled, for the rest of a hand-off, or for pages of a decode pool",
        model,
        _by(depths),
        ("stage",),
    )
    stages = {STARTUP[name]: seconds for name, seconds in stats.startup_s.items() if name in STARTUP}
    yield _gauge("jaxpd:startup_seconds", "Time a stage of the engine's start took", model, _by(stages), ("stage",))


def _fullest(stats: EngineStats) -> float:
    used: dict[str, int] = {}
    total: dict[str, int] = {}
    for replica in stats.replicas:
        used[replica.role] = used.get(replica.role, 0) + replica.num_pages - replica.free_pages
        total[replica.role] = total.get(replica.role, 0) + replica.num_pages
    return max((used[role] / total[role] for role in used), default=0.0)


def _place(replica: ReplicaStats) -> tuple[str, str, str]:
    return replica.role, str(replica.pool), str(replica.replica)


def _pools(stats: EngineStats, model: str) -> Iterator[Metric]:
    pages: list[tuple[Sequence[str], float]] = []
    for replica in stats.replicas:
        for state, count in (
            ("used", replica.num_pages - replica.free_pages),
            ("cached", replica.cached_pages),
            ("free", replica.free_pages - replica.cached_pages),
        ):
            pages.append(((*_place(replica), state), count))
    yield _gauge(
        "jaxpd:kv_pages",
        "Pages by what they are: used, free, or cached (free to take, and found by prompts that begin alike)",
        model,
        pages,
        (*PLACE, "state"),
    )
    decoding = [replica for replica in stats.replicas if replica.role != "prefill"]
    for name, text, slots in (
        ("used", "Answers that hold a slot to decode in", [r.num_slots - r.free_slots for r in decoding]),
        ("total", "Slots to decode in", [r.num_slots for r in decoding]),
    ):
        samples = [(_place(replica), float(count)) for replica, count in zip(decoding, slots, strict=True)]
        yield _gauge(f"jaxpd:decode_slots_{name}", text, model, samples, PLACE)
    yield _gauge(
        "jaxpd:kv_blocks_pinned",
        "Pages of decode pools that are reserved for prompts whose hand-off is not over",
        model,
        [(_place(replica), replica.pinned_pages) for replica in stats.replicas if replica.role == "decode"],
        PLACE,
    )
    for name, text, counts in (
        ("queried", "that could have been in the cache", [r.prefix.queried for r in stats.replicas]),
        ("hit", "that were in the cache", [r.prefix.hit for r in stats.replicas]),
    ):
        samples = [(_place(replica), float(count)) for replica, count in zip(stats.replicas, counts, strict=True)]
        yield _counter(f"jaxpd:prefix_pages_{name}", f"Full pages of prompts {text}", model, samples, PLACE)
    yield _counter(
        "jaxpd:prefix_pages_evicted",
        "Cached pages that made room for others",
        model,
        [(_place(replica), replica.prefix.evicted) for replica in stats.replicas],
        PLACE,
    )
    memory = [
        ((pool.role, str(pool.pool), kind), float(count))
        for pool in stats.pools
        for kind, count in (("weights", pool.weight_bytes), ("kv", pool.kv_bytes), ("free", pool.free_bytes))
        if count is not None
    ]
    yield _gauge(
        "jaxpd:device_hbm_bytes",
        "Memory of each device of a pool; free where the backend says so (not on CPU)",
        model,
        memory,
        ("role", "pool", "kind"),
    )


def _transfers(stats: EngineStats, model: str) -> Iterator[Metric]:
    yield _counter(
        "jaxpd:kv_transfer_bytes", "KV that crossed from prefill to decode pools", model, _one(stats.crossed_bytes)
    )
    yield _gauge("jaxpd:kv_staging_bytes", "Memory charged for KV on its way", model, _one(stats.staging_bytes))
    yield _counter(
        "jaxpd:kv_transfer_failures",
        "Answers that ended since their hand-off failed",
        model,
        _by({**dict.fromkeys(FAILURES, 0), **stats.handoff_failures}),
        ("reason",),
    )
