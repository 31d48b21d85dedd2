"""A real engine on two meshes behind a gateway: everything that can happen happens, and every metric tells.

The pools are so small that answers give way to each other, and the queue so short that requests are refused. The engine
is warm when it starts: XLA must not compile anything any more, whatever comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.errors import Internal, InvalidArgument, JaxpdError, ResourceExhausted, Unavailable
from jaxpd.progress import SilentProgress
from jaxpd.structured import StructuredOutput
from serving.gateway import Gateway
from serving.messages import Answer, GenerateRequest
from serving.metrics import Metrics
from serving.model import served_model
from serving.observer import Origin
from serving.tracing import Tracing

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
DOCS = pathlib.Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana" / "jaxpd.json"
ORIGIN = Origin(front="grpc", operation="generate")
LIMITS: dict[str, Any] = {
    "prefill_mesh": "1x1",
    "decode_mesh": "1x2",
    "max_model_len": 160,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_queued_requests": 3,
    "reserve_tokens": 1,
    "precompile": True,
}
PAGES = 13  # a replica: one longest sequence and a little
# What does not change while a server runs, and what must not.
CONSTANT = {
    "jaxpd:build_info",
    "vllm:cache_config_info",
    "jaxpd:device_hbm_bytes",
    "jaxpd:startup_seconds",
    "jaxpd:decode_slots_total",
}


@dataclasses.dataclass
class Story:
    """Readings of the metrics, and what the clients got."""

    starting: Samples
    ready: Samples
    meanwhile: list[Samples] = dataclasses.field(default_factory=list)
    after: Samples = dataclasses.field(default_factory=dict)
    answers: list[Answer] = dataclasses.field(default_factory=list)
    errors: list[JaxpdError] = dataclasses.field(default_factory=list)
    spans: list[ReadableSpan] = dataclasses.field(default_factory=list)

    def grew(self, name: str, **labels: str) -> float:
        """How much larger a sample is than when the server was ready."""
        key = name, frozenset(labels.items())
        return self.after[key] - self.ready[key]


def make_engine(folder: pathlib.Path, on_events: Any) -> Engine:
    checkpoint = resolve(str(folder), progress=SilentProgress())
    pages = Engine(checkpoint, EngineConfig(**LIMITS), on_events=on_events).limits.pools  # not started
    memory = PAGES * max(pool.page_bytes for pool in pages)
    return Engine(checkpoint, EngineConfig(**LIMITS, kv_memory=memory), on_events=on_events)


def greedy(prompt: tuple[int, ...], max_tokens: int, **more: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **more)


def long_prompt(seed: int) -> tuple[int, ...]:
    """Six full pages and a bit."""
    return tuple((seed * 31 + i * 7) % 200 + 3 for i in range(100))


def later(done: Callable[..., None]) -> Callable[..., None]:
    """`done`, a third of a second after it is called."""
    return lambda *settled: threading.Timer(0.3, done, settled).start()


async def tell(story: Story, gateway: Gateway, engine: Engine) -> None:
    """Everything that can happen to requests."""

    async def ask(asked: GenerateRequest) -> Answer | None:
        try:
            answer = await gateway.generate(asked, ORIGIN)
        except JaxpdError as error:
            story.errors.append(error)
            return None
        story.answers.append(answer)
        return answer

    # four that outgrow the decode pool's pages together
    await asyncio.gather(*(ask(greedy((i + 3,) * 9, 120)) for i in range(3)))
    # more at once than may wait
    await asyncio.gather(*(ask(greedy(long_prompt(i), 4)) for i in range(12)))
    # prompts that push others out of the prefix cache, and one that is still there
    for seed in (20, 21, 22, 23, 24, 24):
        await ask(greedy(long_prompt(seed), 2))
    await asyncio.gather(*(ask(greedy((i + 40,) * 9, 140)) for i in range(4)))
    # words, a stop string and two samples
    words = await ask(GenerateRequest(text="hello world", max_tokens=24, ignore_eos=True))
    assert words is not None and len(words.text) > 8
    stop = (words.text[4:7],)
    await ask(GenerateRequest(text="hello world", max_tokens=24, ignore_eos=True, stop=stop, n=2))
    # everything that sampling can be asked for
    await ask(
        greedy(long_prompt(7), 5, temperature=0.8, top_k=5, top_p=0.9, seed=1, repetition_penalty=1.2, logprobs=2,
               prompt_logprobs=1, logit_bias={7: -1.0}, min_tokens=2)
    )  # fmt: skip
    await ask(
        GenerateRequest(text="a number:", max_tokens=6, structured=StructuredOutput(kind="regex", text="[0-9]{1,4}"))
    )
    # one that is aborted, one that is wrong, one whose pages get lost on the way
    async with contextlib.aclosing(gateway.stream(greedy((9,) * 9, 140), ORIGIN)) as messages:
        async for message in messages:
            if getattr(message, "count", 0):
                break
    await ask(greedy((), 4))
    offer: Callable[..., int] = engine.transport.offer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.transport, "offer", lambda *asked: asked[-1](None, RuntimeError("the link is down")))
        await ask(greedy(long_prompt(99), 4))
        # and one whose pages take their time
        patch.setattr(engine.transport, "offer", lambda *asked: offer(*asked[:-1], later(asked[-1])))
        await ask(greedy(long_prompt(98), 4))
    deadline = time.monotonic() + 10
    while engine.stats().live and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def story(tiny_folders: dict[str, pathlib.Path], scraped: Callable[[Metrics], Samples]) -> Iterator[Story]:
    async def run() -> Story:
        metrics = Metrics()
        exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracing = Tracing(provider)
        gateway = Gateway(observers=(metrics, tracing))
        metrics.attach(gateway)
        tracing.attach(gateway)
        with pytest.raises(Unavailable):
            await gateway.generate(greedy((1,), 1), ORIGIN)
        starting = scraped(metrics)
        engine = make_engine(tiny_folders["smollm2"], gateway.on_events)
        await asyncio.to_thread(engine.start)
        gateway.open(engine, served_model(engine))
        story = Story(starting=starting, ready=scraped(metrics))

        async def watch() -> None:
            while True:
                story.meanwhile.append(scraped(metrics))
                await asyncio.sleep(0.01)

        watching = asyncio.ensure_future(watch())
        try:
            await tell(story, gateway, engine)
        finally:
            watching.cancel()
            story.after = scraped(metrics)
            await asyncio.to_thread(engine.close)
        metrics.close()
        story.spans = list(exporter.get_finished_spans())
        assert not metrics._watched
        return story

    yield asyncio.run(run())


def test_every_metric_moves_or_is_known_not_to(story: Story) -> None:
    moved: dict[str, bool] = {}
    for key in story.after:
        family = re.sub(r"_(bucket|count|sum|total)$", "", key[0]) if key[0] not in CONSTANT else key[0]
        before = story.ready.get(key)
        changed = any(reading.get(key) != before for reading in (*story.meanwhile, story.after))
        changed = changed or story.starting.get(key, before) != before
        moved[family] = moved.get(family, False) or changed
    still = {family for family, changed in moved.items() if not changed and not family.startswith("process_")}
    assert still <= CONSTANT, f"{sorted(still - CONSTANT)} never changed"
    assert len(moved) > 40, "nearly all of them are known only to an engine"


def test_every_label_of_what_counts_by_kind_moves(story: Story) -> None:
    for stage in ("queue", "prefill", "transfer", "decode_wait", "decode", "detokenize"):
        assert story.grew("jaxpd:request_stage_seconds_count", stage=stage) > 0, stage
        assert story.grew("jaxpd:request_stage_seconds_sum", stage=stage) > 0, stage
    for reason in ("stop", "length", "abort", "error"):
        assert story.grew("vllm:request_success_total", finished_reason=reason) > 0, reason
    for reason in ("invalid_argument", "resource_exhausted"):
        assert story.grew("jaxpd:admission_rejections_total", reason=reason) > 0, reason
    assert story.grew("jaxpd:kv_transfer_failures_total", reason="copy") == 1
    for stage in ("prefill", "transfer", "decode"):
        depth = "jaxpd:stage_queue_depth", frozenset({("stage", stage)})
        assert max(reading[depth] for reading in story.meanwhile) > 0, stage
        assert story.after.get(depth, 0) == 0, stage


def test_before_it_is_ready_a_server_says_what_it_can(story: Story) -> None:
    assert not any(name.startswith("vllm:") for name, _ in story.starting)
    assert story.starting["jaxpd:admission_rejections_total", frozenset({("reason", "unavailable")})] == 1
    for stage in ("weights", "compile", "all"):
        assert story.ready["jaxpd:startup_seconds", frozenset({("stage", stage)})] > 0, stage


def test_a_warm_server_compiles_nothing(story: Story) -> None:
    assert story.ready["jaxpd:xla_compiles_total", frozenset({("phase", "warmup")})] > 10
    assert story.after["jaxpd:xla_compiles_total", frozenset({("phase", "serving")})] == 0


def test_each_replica_of_each_pool_has_its_own(story: Story) -> None:
    places = [("prefill", "0"), ("decode", "0"), ("decode", "1")]
    for role, replica in places:
        place = {"role": role, "pool": "0", "replica": replica}
        used = "jaxpd:kv_pages", frozenset({*place.items(), ("state", "used")})
        assert story.ready[used] == 0 and max(reading[used] for reading in story.meanwhile) > 0, place
        states = [story.ready["jaxpd:kv_pages", frozenset({*place.items(), ("state", s)})] for s in ("used", "free")]
        assert sum(states) == PAGES, "nothing is cached yet"
        assert story.grew("jaxpd:prefix_pages_queried_total", **place) > 0, place
    for role in ("prefill", "decode"):
        for kind in ("weights", "kv"):
            labels = frozenset({("role", role), ("pool", "0"), ("kind", kind)})
            assert story.ready["jaxpd:device_hbm_bytes", labels] > 1000
    slots = "jaxpd:decode_slots_total", frozenset({("role", "decode"), ("pool", "0"), ("replica", "1")})
    assert story.ready[slots] == 4


def test_the_numbers_are_those_that_the_clients_got(story: Story) -> None:
    whole = [a for a in story.answers if all(s.finished.stop_string is None for s in a.samples)]
    tokens = sum(len(sample.token_ids) for answer in whole for sample in answer.samples)
    assert story.grew("vllm:generation_tokens_total") >= tokens
    assert story.grew("vllm:generation_tokens_total") < tokens + 200, "and little more: a stop string, an abort"
    refused = [e for e in story.errors if isinstance(e, ResourceExhausted)]
    assert story.grew("jaxpd:admission_rejections_total", reason="resource_exhausted") == len(refused) > 0
    assert len([e for e in story.errors if isinstance(e, InvalidArgument)]) == 1
    assert len([e for e in story.errors if isinstance(e, Internal)]) == 1, "the hand-off that failed"
    asked = len(story.answers) + 2  # and the one that was left, and the one that failed after its first token
    assert story.grew("vllm:time_to_first_token_seconds_count") == asked
    assert story.grew("jaxpd:requests_total", front="grpc", operation="generate") == asked + len(refused) + 1
    ended = sum(
        story.grew("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")
    )
    assert ended == asked + 1 == story.grew("vllm:e2e_request_latency_seconds_count"), "one had two samples"
    assert story.grew("vllm:prefix_cache_hits_total") >= 96, "one prompt came twice"
    assert story.grew("vllm:prefix_cache_hits_total") < story.grew("vllm:prefix_cache_queries_total")


def test_every_answer_has_a_trace_with_all_its_stages(story: Story) -> None:
    parents = {span.attributes["gen_ai.response.id"]: span for span in story.spans if span.name == "llm_request"}  # type: ignore[index]
    stages: dict[int, list[ReadableSpan]] = {}
    for span in story.spans:
        if span.parent is not None:
            stages.setdefault(span.parent.span_id, []).append(span)
    for answer in story.answers:
        parent = parents[answer.understood.request_id]
        assert parent.attributes is not None and parent.attributes["gen_ai.request.model"] == "smollm2"
        children = stages[parent.context.span_id]
        names = {child.name for child in children}
        assert names == {"queue", "prefill", "transfer", "decode_wait", "decode"}, answer.finish_reason
        for child in children:
            assert child.start_time is not None and child.end_time is not None and parent.end_time is not None
            assert child.start_time <= child.end_time <= parent.end_time
        if len(answer.samples) == 1:
            spent = {c.name: (c.end_time or 0) - (c.start_time or 0) for c in children}
            timings = answer.timings
            for name, seconds in (("queue", timings.queue_s), ("transfer", timings.transfer_s)):
                assert seconds is not None and spent[name] / 1e9 == pytest.approx(seconds, abs=1e-5), name


def metric_names(expr: str) -> set[str]:
    """The metrics that a PromQL expression asks for: what is left without strings, labels, ranges and functions."""
    expr = re.sub(r'"[^"]*"', "", expr)
    expr = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expr)
    expr = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", expr)
    words = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\()\b", expr)
    functions = set(re.findall(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*\(", expr))
    return set(words) - functions - {"and", "or", "unless", "offset", "bool"}


def labels_asked(expr: str) -> set[str]:
    """The labels that an expression names, in matchers and in groups."""
    matched = re.findall(r"([a-zA-Z_]+)\s*(?:=~|!~|!=|=)\s*\"", expr)
    grouped = re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", expr)
    return {*matched, *(name.strip() for group in grouped for name in group.split(","))}


@pytest.mark.parametrize(
    "expr", ['sum by (le) (rate(a:b_bucket{x="y{z"}[5m])) / max(c) and on (i) d', "a:b_bucket+c/d"]
)
def test_names_are_found_in_an_expression(expr: str) -> None:
    assert metric_names(expr) == {"a:b_bucket", "c", "d"}


def test_every_query_of_the_dashboard_finds_something(story: Story) -> None:
    labels: dict[str, set[str]] = {}
    for name, pairs in story.meanwhile[-1]:
        labels.setdefault(name, {"model_name", "instance"}).update(k for k, _ in pairs)
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(exprs) > 40
    for expr in exprs:
        names = metric_names(expr)
        assert names and names <= set(labels), f"{expr}: no such metric as {sorted(names - set(labels))}"
        missing = labels_asked(expr) - {label for name in names for label in labels[name]}
        assert not missing, f"{expr}: no label {sorted(missing)}"
    asked = {name for expr in exprs for name in metric_names(expr)}
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    unshown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in labels if not name.startswith("process_")} - shown
    assert unshown <= {"vllm:cache_config_info"}, "the dashboard shows all there is"


def test_the_documentation_has_a_row_for_each_metric_with_its_labels(story: Story) -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| ([\w, ]*?) ?\|", (DOCS / "observability.md").read_text(), re.MULTILINE)
    described = {name: (kind, set(labels.replace(" ", "").split(",")) - {""}) for name, kind, labels in rows}
    exported: dict[str, tuple[str, set[str]]] = {}
    for name, pairs in story.meanwhile[-1]:
        if name.startswith("process_") or name.endswith(("_sum", "_count")):
            continue
        labels = {label for label, _ in pairs} - {"le"}
        if name.endswith("_bucket"):
            family, kind = name.removesuffix("_bucket"), "histogram"
        elif name.endswith("_total") and name not in CONSTANT:
            family, kind = name.removesuffix("_total"), "counter"
        else:
            family, kind = name, "gauge"
        exported[family] = kind, labels
    assert described == exported
