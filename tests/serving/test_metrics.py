"""What is counted when, under which name: without an engine, and over the scripted one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jaxpd import compiles
from jaxpd.cache.prefix import PrefixStats
from jaxpd.errors import Internal, InvalidArgument, JaxpdError, ResourceExhausted, Unauthenticated
from jaxpd.life import Life, Stage
from jaxpd.request import FinishEvent, FinishReason, Request, SamplingParams, TokensEvent, Usage
from jaxpd.stats import EngineStats, PoolStats, ReplicaStats
from serving.callers import Caller, Keys
from serving.gateway import Gateway, State
from serving.histogram import Histogram
from serving.messages import GenerateRequest
from serving.metrics import CODES, Metrics
from serving.model import ServedModel
from serving.observer import Origin

Scraped = Callable[[Any], dict[tuple[str, frozenset[tuple[str, str]]], float]]
HERE = Origin(front="http", operation="chat")


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@dataclasses.dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class Server:
    """What the metrics read of a gateway."""

    model: ServedModel
    state: State = State.READY
    reading: EngineStats | None = None

    def stats(self) -> EngineStats | None:
        return self.reading


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock, scripted: Any) -> Iterator[Metrics]:
    made = Metrics(clock=clock)
    made.attach(Server(scripted.served_model(None)))
    yield made
    made.close()


def request(name: str = "r", n: int = 1, at_s: float = 100.0) -> Request:
    return Request(request_id=name, prompt_ids=(1, 2, 3), params=SamplingParams(n=n), arrival_s=at_s)


def token(index: int, name: str = "r", sample: int = 0) -> TokensEvent:
    return TokensEvent(name, index, (7,), None, None, sample)


def end(life: Life | None = None, name: str = "r", sample: int = 0, tokens: int = 3) -> FinishEvent:
    return FinishEvent(
        request_id=name,
        reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=3, completion_tokens=tokens),
        timings=(life or Life()).timings(),
        sample=sample,
        life=life,
    )


def test_tokens_and_their_times_count_as_they_come(metrics: Metrics, clock: Clock, scraped: Scraped) -> None:
    metrics.submitted(request(), HERE)
    clock.now = 100.5
    metrics.progressed([token(0)])
    seen = scraped(metrics)
    assert seen[key("vllm:generation_tokens_total")] == 1 and seen[key("vllm:prompt_tokens_total")] == 3
    assert seen[key("vllm:time_to_first_token_seconds_sum")] == pytest.approx(0.5)
    assert seen[key("jaxpd:time_to_second_token_seconds_count")] == 0
    clock.now = 100.75
    metrics.progressed([token(1)])
    clock.now = 101.0
    metrics.progressed([token(2)])
    seen = scraped(metrics)
    assert seen[key("jaxpd:time_to_second_token_seconds_sum")] == pytest.approx(0.75)
    assert seen[key("vllm:inter_token_latency_seconds_count")] == 2
    assert seen[key("vllm:inter_token_latency_seconds_sum")] == pytest.approx(0.5)
    assert seen[key("vllm:generation_tokens_total")] == 3
    assert seen[key("vllm:time_to_first_token_seconds_count")] == 1
    assert seen[key("vllm:e2e_request_latency_seconds_count")] == 0, "it has not ended"


def test_samples_share_a_first_token_and_have_their_own_gaps(metrics: Metrics, clock: Clock, scraped: Scraped) -> None:
    metrics.submitted(request(n=2), HERE)
    for now, events in ((101.0, [token(0)]), (102.0, [token(1), token(0, sample=1)]), (104.0, [token(1, sample=1)])):
        clock.now = now
        metrics.progressed(events)
    seen = scraped(metrics)
    assert seen[key("vllm:time_to_first_token_seconds_count")] == 1
    assert seen[key("vllm:inter_token_latency_seconds_sum")] == pytest.approx(1.0 + 2.0)
    metrics.finished(request(n=2), HERE, end())
    assert metrics._watched
    metrics.finished(request(n=2), HERE, end(sample=1, tokens=2))
    assert not metrics._watched, "nothing is kept of a request that has ended"
    seen = scraped(metrics)
    assert seen[key("vllm:request_prompt_tokens_count")] == 1
    assert seen[key("vllm:request_generation_tokens_sum")] == 5
    assert seen[key("vllm:request_success_total", finished_reason="length")] == 2


def test_the_end_tells_where_the_time_went(metrics: Metrics, scraped: Scraped) -> None:
    life = Life()
    for at, stage in (
        (100.0, Stage.ARRIVED),
        (101.0, Stage.ADMITTED),
        (102.0, Stage.OFFERED),
        (106.0, Stage.ACCEPTED),
        (107.0, Stage.DECODE_START),
        (116.0, Stage.FINISHED),
    ):
        life.mark(stage, at_s=at)
    life.token_times += [104.0, 110.0, 114.0]
    metrics.submitted(request(), HERE)
    metrics.finished(request(), HERE, end(life))
    seen = scraped(metrics)
    for name, seconds in (
        ("vllm:request_queue_time_seconds_sum", 1),
        ("vllm:request_prefill_time_seconds_sum", 3),
        ("vllm:request_decode_time_seconds_sum", 10),
        ("vllm:request_time_per_output_token_seconds_sum", 5),
        ("vllm:e2e_request_latency_seconds_sum", 16),
        ("jaxpd:kv_transfer_seconds_sum", 4),
        ("jaxpd:kv_transfer_exposed_seconds_sum", 3),
    ):
        assert seen[key(name)] == pytest.approx(seconds), name
    stages = {"queue": 1, "prefill": 3, "transfer": 4, "decode_wait": 3, "decode": 7, "detokenize": 0}
    for name, seconds in stages.items():
        assert seen[key("jaxpd:request_stage_seconds_sum", stage=name)] == pytest.approx(seconds), name


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.1000001, 1.0, 5.0):
        histogram.observe(value)
    histogram.observe(0.5, times=3)
    assert histogram.buckets() == [("0.1", 2.0), ("1.0", 7.0), ("+Inf", 8.0)]
    assert histogram.count == 8 and histogram.sum == pytest.approx(7.7500001)


def test_refusals_are_counted_by_code(metrics: Metrics, scraped: Scraped) -> None:
    metrics.arrived("a", HERE)
    metrics.refused("a", HERE, ResourceExhausted("full"))
    metrics.refused("b", HERE, InvalidArgument("bad"))
    metrics.refused("c", HERE, InvalidArgument("worse"))
    seen = scraped(metrics)
    assert seen[key("jaxpd:admission_rejections_total", reason="resource_exhausted")] == 1
    assert seen[key("jaxpd:admission_rejections_total", reason="invalid_argument")] == 2
    assert seen[key("jaxpd:admission_rejections_total", reason="unavailable")] == 0
    assert seen[key("jaxpd:requests_total", front="http", operation="chat")] == 1
    kinds = JaxpdError.__subclasses__()
    assert {kind.code.lower() for kind in kinds} == set(CODES), "every kind of error starts at zero"


def test_who_comes_without_a_key_is_counted(scraped: Scraped) -> None:
    keys = Keys({"right": Caller(name="alice")})
    metrics = Metrics(keys)
    for token, fine in (("right", True), ("wrong", False), (None, False)):
        with contextlib.nullcontext() if fine else pytest.raises(Unauthenticated):
            keys.find(token)
    assert scraped(metrics)[key("jaxpd:admission_rejections_total", reason="unauthenticated")] == 2
    metrics.close()


def test_a_program_compiled_while_serving_is_told_from_one_before(scripted: Any, scraped: Scraped) -> None:
    metrics, server = Metrics(), Server(scripted.served_model(None), state=State.STARTING)
    compiles.compiled(1.0)
    metrics.attach(server)
    compiles.compiled(2.0)
    server.state = State.READY
    seen = scraped(metrics)
    assert seen[key("jaxpd:xla_compiles_total", phase="warmup")] == 2
    assert seen[key("jaxpd:xla_compiles_total", phase="serving")] == 0
    compiler = threading.Thread(target=compiles.compiled, args=(4.0,))
    compiler.start()
    compiler.join()
    server.state = State.DRAINING
    compiles.compiled(0.5)
    metrics.close()
    compiles.compiled(8.0)
    seen = scraped(metrics)
    assert seen[key("jaxpd:xla_compiles_total", phase="serving")] == 2
    assert seen[key("jaxpd:xla_compile_seconds_sum", phase="serving")] == 4.5
    assert seen[key("jaxpd:xla_compile_seconds_sum", phase="warmup")] == 3.0


def replica(role: str, number: int = 0, **more: Any) -> ReplicaStats:
    fields: dict[str, Any] = {"free_pages": 8, "num_pages": 10, "free_slots": 3, "num_slots": 4, **more}
    return ReplicaStats(role=role, pool=0, replica=number, **fields)


def test_the_engine_is_read_when_somebody_asks(metrics: Metrics, scraped: Scraped) -> None:
    server = metrics.source
    assert isinstance(server, Server)
    assert not any("kv_pages" in name for name, _ in scraped(metrics)), "there is no engine to read"
    server.reading = EngineStats(
        states={"queued": 3, "prefilling": 1, "offered": 2, "decoding": 4},
        replicas=(
            replica("prefill", prefix=PrefixStats(queried=10, hit=4, evicted=1), cached_pages=6),
            replica("decode", 0, free_pages=1, pinned_pages=5, preempted=2),
            replica("decode", 1, free_pages=4, free_slots=0, prefix=PrefixStats(queried=9, hit=9), preempted=1),
        ),
        staging_bytes=77,
        pools=(
            PoolStats(role="prefill", pool=0, waiting=2, weight_bytes=100, kv_bytes=50, free_bytes=7),
            PoolStats(role="decode", pool=0, waiting=1, weight_bytes=90, kv_bytes=60),
        ),
        crossed_bytes=1234,
        handoff_failures={"copy": 2},
        startup_s={"loading weights": 1.5, "start": 4.0, "something else": 1.0},
    )
    seen = scraped(metrics)
    decode0: dict[str, str] = {"role": "decode", "pool": "0", "replica": "0"}
    decode1, prefill = {**decode0, "replica": "1"}, {**decode0, "role": "prefill"}
    expected = {
        key("vllm:num_requests_running"): 7,
        key("vllm:num_requests_waiting"): 3,
        key("vllm:kv_cache_usage_perc"): 0.75,  # 15 of 20 in decode, 2 of 10 in prefill
        key("vllm:cache_config_info", block_size="16", num_gpu_blocks="10"): 1,
        key("vllm:prefix_cache_queries_total"): 160,
        key("vllm:prefix_cache_hits_total"): 64,
        key("vllm:num_preemptions_total"): 3,
        key("jaxpd:stage_queue_depth", stage="prefill"): 2,
        key("jaxpd:stage_queue_depth", stage="transfer"): 2,
        key("jaxpd:stage_queue_depth", stage="decode"): 1,
        key("jaxpd:startup_seconds", stage="weights"): 1.5,
        key("jaxpd:startup_seconds", stage="all"): 4.0,
        key("jaxpd:kv_pages", **prefill, state="used"): 2,
        key("jaxpd:kv_pages", **prefill, state="cached"): 6,
        key("jaxpd:kv_pages", **prefill, state="free"): 2,
        key("jaxpd:kv_pages", **decode0, state="used"): 9,
        key("jaxpd:decode_slots_used", **decode0): 1,
        key("jaxpd:decode_slots_used", **decode1): 4,
        key("jaxpd:decode_slots_total", **decode1): 4,
        key("jaxpd:kv_blocks_pinned", **decode0): 5,
        key("jaxpd:prefix_pages_hit_total", **decode1): 9,
        key("jaxpd:prefix_pages_queried_total", **prefill): 10,
        key("jaxpd:prefix_pages_evicted_total", **prefill): 1,
        key("jaxpd:device_hbm_bytes", role="prefill", pool="0", kind="free"): 7,
        key("jaxpd:device_hbm_bytes", role="decode", pool="0", kind="weights"): 90,
        key("jaxpd:device_hbm_bytes", role="decode", pool="0", kind="kv"): 60,
        key("jaxpd:kv_transfer_bytes_total"): 1234,
        key("jaxpd:kv_staging_bytes"): 77,
        key("jaxpd:kv_transfer_failures_total", reason="copy"): 2,
        key("jaxpd:kv_transfer_failures_total", reason="lost"): 0,
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert key("jaxpd:device_hbm_bytes", role="decode", pool="0", kind="free") not in seen, "CPU does not say"
    assert key("jaxpd:decode_slots_used", **prefill) not in seen


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;version=0.0.4;q=0.5", "text/plain"),
        ("application/openmetrics-text;q=0, */*", "text/plain"),
        ("application/openmetrics-text;q=much", "text/plain"),
        ("application/openmetrics-text", "application/openmetrics-text"),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
            "version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            "application/openmetrics-text",
        ),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.5", "application/openmetrics-text"),
    ],
)
def test_the_format_is_negotiated_and_parses(accept: str, wanted: str, metrics: Metrics) -> None:
    assert isinstance(metrics.source, Server)
    metrics.source.reading = EngineStats(states={}, replicas=(replica("prefill"), replica("decode")), staging_bytes=0)
    body, content_type = metrics.render(accept)
    assert content_type.startswith(wanted)
    parse = parse_openmetrics if "openmetrics" in wanted else parse_text
    families = {family.name: family for family in parse(body.decode())}
    for sample in families["vllm:time_to_first_token_seconds"].samples:
        assert sample.labels["model_name"] == "bytes" and set(sample.labels) <= {"model_name", "le"}
    assert families["vllm:kv_cache_usage_perc"].type == "gauge"
    assert len(families["vllm:kv_cache_usage_perc"].samples) == 1, "a router reads one"
    assert "vllm:generation_tokens_total" in body.decode()


def test_before_the_model_is_loaded_only_the_process_is_known(scraped: Scraped) -> None:
    async def run() -> None:
        metrics = Metrics()
        metrics.attach(gateway := Gateway(observers=(metrics,)))
        with pytest.raises(JaxpdError):
            await gateway.generate(GenerateRequest(text="hi"))
        seen = scraped(metrics)
        assert seen[key("jaxpd:admission_rejections_total", reason="unavailable")] == 1
        assert not any(name.startswith("vllm:") for name, _ in seen)
        metrics.close()

    asyncio.run(run())


async def opened_with(metrics: Metrics, scripted: Any, **options: Any) -> tuple[Gateway, Any]:
    gateway = Gateway(observers=(metrics,))
    metrics.attach(gateway)
    engine = scripted.ScriptedEngine(gateway.on_events, **options)
    engine.start()
    gateway.open(engine, scripted.served_model(scripted.byte_tokenizer()))
    return gateway, engine


def test_how_answers_end_and_what_is_sent(scripted: Any, scraped: Scraped) -> None:
    async def run() -> None:
        metrics = Metrics()
        gateway, engine = await opened_with(metrics, scripted, step_s=0.001, fail_with=Internal("broken"))
        await gateway.generate(GenerateRequest(text="abcd", max_tokens=6))
        await gateway.generate(GenerateRequest(text="abcd", max_tokens=500, stop=("cdab",)))
        with pytest.raises(Internal):
            await gateway.generate(GenerateRequest(text="!bcd", max_tokens=6))
        async with contextlib.aclosing(gateway.stream(GenerateRequest(text="abcd", max_tokens=500))) as messages:
            async for message in messages:
                if getattr(message, "count", 0):
                    break
        deadline = time.monotonic() + 5
        while engine.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        seen = scraped(metrics)
        told = [reason for reason in FinishReason if reason is not FinishReason.HANDED_OFF]  # to clients
        ends = {reason: seen[key("vllm:request_success_total", finished_reason=reason)] for reason in told}
        assert ends == {"stop": 1, "length": 1, "abort": 1, "error": 1}
        assert seen[key("jaxpd:tokens_per_stream_message_sum")] >= 6 + 4 + 2 + 1
        assert seen[key("jaxpd:request_stage_seconds_count", stage="detokenize")] == 3, "of those that were read"
        assert seen[key("jaxpd:request_stage_seconds_sum", stage="detokenize")] > 0
        assert not metrics._watched
        engine.close()
        metrics.close()

    asyncio.run(run())


def test_two_servers_of_one_process_count_for_themselves(scripted: Any, scraped: Scraped) -> None:
    async def run() -> None:
        one, other = Metrics(), Metrics()
        gateway, engine = await opened_with(one, scripted)
        _, second = await opened_with(other, scripted)
        await gateway.generate(GenerateRequest(text="abcd", max_tokens=6))
        assert scraped(one)[key("vllm:generation_tokens_total")] == 6
        assert scraped(other)[key("vllm:generation_tokens_total")] == 0
        for each in (engine, second, one, other):
            each.close()

    asyncio.run(run())
