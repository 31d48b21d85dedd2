"""Spans of requests, read from OpenTelemetry's in-memory exporter, and what a collector that is away does: nothing."""

from __future__ import annotations

import asyncio
import logging
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `tracing`")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxpd.errors import FailedPrecondition, Internal, InvalidArgument, ResourceExhausted
from jaxpd.life import Life, Stage
from serving.gateway import Gateway
from serving.messages import GenerateRequest
from serving.observer import Origin
from serving.tracing import OnceAWhile, Tracing, make_tracer, stage_spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
STAGES = ["queue", "prefill", "transfer", "decode_wait", "decode"]


class Traced:
    """A tracer whose spans stay here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def parent(self) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == "llm_request"]
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.tracing.close()


def ask(
    scripted: Any, tracing: Tracing, origin: Origin, *requests: GenerateRequest, **options: Any
) -> list[BaseException | None]:
    """What each request raised, one after the other, of a scripted engine."""

    async def run() -> list[BaseException | None]:
        gateway = Gateway(observers=(tracing,))
        tracing.attach(gateway)
        engine = scripted.ScriptedEngine(gateway.on_events, step_s=0.001, **options)
        engine.start()
        gateway.open(engine, scripted.served_model(scripted.byte_tokenizer()))
        raised: list[BaseException | None] = []
        for asked in requests:
            try:
                await gateway.generate(asked, origin)
            except Exception as error:
                raised.append(error)
            else:
                raised.append(None)
        engine.close()
        return raised

    return asyncio.run(run())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_all_stages_are_children_of_one_span_whose_parent_is_the_callers(scripted: Any, traced: Traced) -> None:
    before_ns = time.time_ns()
    origin = Origin(front="http", operation="chat", headers=TRACED)
    asked = GenerateRequest(text="abcd", max_tokens=5, temperature=0.5, top_k=3, request_id="mine")
    ask(scripted, traced.tracing, origin, asked)
    parent = traced.parent()
    assert parent.context.trace_id == int(TRACE, 16)
    assert parent.parent is not None and parent.parent.span_id == int(PARENT, 16) and parent.parent.is_remote
    assert parent.context.trace_state.get("vendor") == "1"
    children = [span for span in traced.spans if span is not parent]
    assert sorted(child.name for child in children) == sorted(STAGES)
    for child in children:
        assert child.parent is not None and child.parent.span_id == parent.context.span_id, child.name
        assert child.context.trace_id == parent.context.trace_id
        assert parent.start_time is not None and parent.end_time is not None
        assert child.start_time is not None and child.end_time is not None
        assert parent.start_time <= child.start_time <= child.end_time <= parent.end_time
    assert parent.start_time is not None and before_ns - 50_000_000 < parent.start_time < time.time_ns(), "wall clock"
    seen = attributes(parent)
    assert seen == {
        **seen,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxpd",
        "gen_ai.request.model": "bytes",
        "gen_ai.response.id": "mine",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 3,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "jaxpd.request_id": "mine",
    }
    assert {event.name for event in parent.events} == {"chunk", "first_token"}


def test_without_a_caller_it_is_a_trace_of_its_own_and_an_unsampled_one_is_none(scripted: Any, traced: Traced) -> None:
    asked = GenerateRequest(text="ab", max_tokens=2)
    ask(scripted, traced.tracing, Origin(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}), asked)
    assert not traced.spans, "the caller does not record this one"
    ask(scripted, traced.tracing, Origin(headers={"traceparent": "nonsense"}), asked)
    assert traced.parent().parent is None and attributes(traced.parent())["gen_ai.operation.name"] == "text_completion"


def test_samples_are_in_one_span(scripted: Any, traced: Traced) -> None:
    ask(scripted, traced.tracing, Origin(), GenerateRequest(text="abcd", n=3, max_tokens=4))
    parent = traced.parent()
    assert attributes(parent)["gen_ai.usage.output_tokens"] == 12
    assert attributes(parent)["gen_ai.response.finish_reasons"] == ("length",) * 3
    samples = [attributes(span)["jaxpd.sample"] for span in traced.spans if span is not parent]
    assert sorted(samples) == sorted([0, 1, 2] * len(STAGES))
    assert not traced.tracing._ended


def test_refusals_and_failures_have_a_status_and_no_words_of_the_request(scripted: Any, traced: Traced) -> None:
    secret = GenerateRequest(text="!secret", max_tokens=4)
    raised = ask(scripted, traced.tracing, Origin(headers=TRACED), secret, fail_with=Internal("it broke"))
    assert isinstance(raised[0], Internal)
    span = traced.parent()
    assert not span.status.is_ok and attributes(span)["error.type"] == "INTERNAL"
    traced.tracing.refused("r", Origin(headers=TRACED), ResourceExhausted("full"))
    refused = traced.spans[-1]
    assert attributes(refused)["error.type"] == "RESOURCE_EXHAUSTED" and refused.parent is not None
    assert refused.parent.span_id == int(PARENT, 16)
    assert not any("secret" in span.to_json() for span in traced.spans)


def life_of(*moments: tuple[Stage, float], tokens: Sequence[float] = ()) -> Life:
    life = Life(token_times=list(tokens))
    for stage, at_s in moments:
        life.mark(stage, at_s=at_s)
    return life


def test_a_stage_that_was_not_left_ends_with_the_sequence() -> None:
    arrived, admitted = (Stage.ARRIVED, 1.0), (Stage.ADMITTED, 2.0)
    queued = life_of(arrived, (Stage.FINISHED, 5.0))
    assert [(s.name, s.start_s, s.end_s) for s in stage_spans(queued)] == [("queue", 1.0, 5.0)]
    crossing = life_of(arrived, admitted, (Stage.OFFERED, 2.5), (Stage.FAILED, 5.0), tokens=[3.0])
    assert [(s.name, s.start_s, s.end_s) for s in stage_spans(crossing)] == [
        ("queue", 1.0, 2.0),
        ("prefill", 2.0, 3.0),
        ("transfer", 2.5, 5.0),
        ("decode_wait", 3.0, 5.0),
    ]
    mixed = life_of(arrived, admitted, (Stage.DECODE_START, 3.0), (Stage.FINISHED, 6.0), tokens=[3.0, 4.0, 5.5])
    assert [(s.name, s.end_s) for s in stage_spans(mixed)] == [("queue", 2.0), ("prefill", 3.0), ("decode", 5.5)]


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://host:4317", "http://", "http://host:port", "/v1/traces"]
)
def test_what_is_no_url_is_refused_at_once(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="--otlp-traces-endpoint .*http://localhost:4318/v1/traces"):
        make_tracer(endpoint)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(FailedPrecondition, match=r"jaxpd\[tracing\]"):
        make_tracer("http://localhost:4318")


@pytest.mark.parametrize("silent", [False, True], ids=["it refuses", "it never answers"])
def test_a_collector_that_is_away_hurts_no_request(silent: bool, scripted: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if silent:
            taken.listen()
        tracing = make_tracer(f"http://127.0.0.1:{taken.getsockname()[1]}")
        asked = [GenerateRequest(text="ab", max_tokens=2)] * 30
        start_s = time.monotonic()
        assert ask(scripted, tracing, Origin(), *asked) == [None] * 30
        assert time.monotonic() - start_s < 5
        closing_s = time.monotonic()
        tracing.close()
        assert time.monotonic() - closing_s < 4, "the end of the process does not wait for it either"


def test_the_log_says_once_in_a_while_that_it_is_away(caplog: pytest.LogCaptureFixture) -> None:
    make_tracer("http://127.0.0.1:1").close()
    make_tracer("http://127.0.0.1:1").close()
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    assert [type(each) for each in exporter.filters].count(OnceAWhile) == 1, "one for all servers of a process"
    logger = logging.getLogger("test_tracing")
    logger.addFilter(OnceAWhile(0.2))
    for _ in range(5):
        logger.warning("it is away")
    assert len(caplog.records) == 1
    time.sleep(0.25)
    logger.warning("it still is")
    assert [record.getMessage() for record in caplog.records] == ["it is away", "it still is"]


def test_spans_reach_a_collector(scripted: Any) -> None:
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            del args

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tracing = make_tracer(f"http://127.0.0.1:{server.server_port}")
        ask(scripted, tracing, Origin(headers=TRACED), GenerateRequest(text="ab", max_tokens=2, request_id="seen"))
        tracing.close()
        server.shutdown()
        thread.join()
    assert [path for path, _ in bodies] == ["/v1/traces"]
    body = bodies[0][1]
    assert bytes.fromhex(TRACE) in body and b"llm_request" in body and b"seen" in body and b"decode_wait" in body


def test_the_file_names_only_the_extra_that_exists() -> None:
    project = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert "\ntracing = [" in project
