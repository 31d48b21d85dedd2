"""Traces: what happened to a request, as OpenTelemetry spans, made when it has ended.

    the caller's span (traceparent of its headers)
      |
      +-- llm_request                                    arrival to the end of the last sample
            +-- queue         arrival -> pages reserved
            +-- prefill       -> first token
            +-- transfer      first pages sent -> all taken over     (overlaps with prefill)
            +-- decode_wait   first token -> ready to decode         (the part of the hand-off that nothing hid)
            +-- decode        -> last token

Nothing is done for a trace while a request runs: its `jaxpd.life.Life` has all the times. A sequence that ended inside
a stage has that stage as its last one, until then. Spans leave in batches from a thread of OpenTelemetry's; when the
collector does not answer they are dropped, and no request notices.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

from jaxpd.errors import FailedPrecondition, InvalidArgument, JaxpdError
from jaxpd.life import Life
from jaxpd.life import Stage as S
from jaxpd.request import FinishEvent, FinishReason, Request
from jaxpd.version import __version__
from serving.observer import Observer, Origin

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from serving.metrics import Source

OPERATIONS = {"chat": "chat"}  # else text_completion
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
REPEAT_S = 60.0  # between two lines of the log that say that the collector does not answer


@dataclasses.dataclass(frozen=True)
class StageSpan:
    """A stage of one sequence, in `time.monotonic()` seconds."""

    name: str
    start_s: float
    end_s: float


def stage_spans(life: Life) -> list[StageSpan]:
    """The stages that a sequence has been in, by their beginning; one that it did not get out of ends with it."""
    first_token = life.token_times[0] if life.token_times else None
    ended = life.first(S.FINISHED) or life.first(S.FAILED)
    handed_off = life.first(S.OFFERED) is not None or life.first(S.ACCEPTED) is not None
    last_token = life.token_times[-1] if len(life.token_times) > 1 else None
    decoding = life.first(S.DECODE_START)
    spans = [
        ("queue", life.first(S.ARRIVED), life.first(S.ADMITTED)),
        ("prefill", life.first(S.ADMITTED), first_token),
        ("transfer", life.first(S.OFFERED), life.first(S.ACCEPTED)),
        ("decode_wait", first_token if handed_off else None, decoding),
        ("decode", decoding, last_token),
    ]
    out = []
    for name, start, end in spans:
        end = ended if end is None else end
        if start is not None and end is not None:
            out.append(StageSpan(name, start, max(start, end)))
    return sorted(out, key=lambda span: span.start_s)


class Tracing(Observer):
    """Makes the spans of one gateway's requests with `provider`. All on the event loop; `close` may block."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("jaxpd", __version__)
        self._context_of = TraceContextTextMapPropagator()
        self._wall_ns = time.time_ns() - time.monotonic_ns()  # once, so that the spans of a trace never overlap wrongly
        self._source: Source | None = None
        self._ended: dict[str, list[FinishEvent]] = {}

    def attach(self, source: Source) -> None:
        """From now on spans name the model of `source` (the gateway that this observes)."""
        self._source = source

    def close(self) -> None:
        """Sends what is left, for at most a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="jaxpd-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)  # the SDK itself would try for half a minute

    def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
        """See `Observer`."""
        now = time.monotonic()
        span = self._start(request_id, origin, now)
        _failed(span, error)
        span.end(self._ns(now))

    def finished(self, request: Request, origin: Origin, event: FinishEvent) -> None:
        """See `Observer`."""
        ended = self._ended.setdefault(request.request_id, [])
        ended.append(event)
        if len(ended) == request.params.n:
            del self._ended[request.request_id]
            self._trace(request, origin, sorted(ended, key=lambda event: event.sample))

    def _trace(self, request: Request, origin: Origin, events: list[FinishEvent]) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._start(request.request_id, origin, request.arrival_s)
        span.set_attributes(_attributes(request, events))
        context = set_span_in_context(span)
        end_s = request.arrival_s
        for event in events:
            if event.error is not None:
                _failed(span, event.error)
            if event.life is None:
                continue
            for stage in stage_spans(event.life):
                child = self._tracer.start_span(stage.name, context, start_time=self._ns(stage.start_s))
                if request.params.n > 1:
                    child.set_attribute("jaxpd.sample", event.sample)
                child.end(self._ns(stage.end_s))
            for moment in event.life.moments:
                end_s = max(end_s, moment.at_s)
                if moment.stage in (S.CHUNK, S.PREEMPTED):
                    span.add_event(moment.stage.value, {"jaxpd.tokens": moment.tokens}, self._ns(moment.at_s))
            if event.life.token_times:
                span.add_event("first_token", {"jaxpd.sample": event.sample}, self._ns(event.life.token_times[0]))
        span.end(self._ns(end_s))

    def _start(self, request_id: str, origin: Origin, at_s: float) -> Span:
        from opentelemetry.trace import SpanKind

        parent = self._context_of.extract(dict(origin.headers))
        model = ""
        if self._source is not None:
            try:
                model = self._source.model.name
            except JaxpdError:
                model = ""  # it is loading: all requests are refused
        return self._tracer.start_span(
            "llm_request",
            parent,
            kind=SpanKind.SERVER,
            start_time=self._ns(at_s),
            attributes={
                "gen_ai.operation.name": OPERATIONS.get(origin.operation, "text_completion"),
                "gen_ai.provider.name": "jaxpd",
                "gen_ai.request.model": model,
                "gen_ai.response.id": request_id,
                "jaxpd.request_id": request_id,
                "jaxpd.front": origin.front,
            },
        )

    def _ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._wall_ns


def _attributes(request: Request, events: list[FinishEvent]) -> dict[str, Any]:
    params, first = request.params, events[0]
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.usage.input_tokens": first.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(event.usage.completion_tokens for event in events),
        "gen_ai.usage.cache_read.input_tokens": first.usage.cached_tokens,
        "gen_ai.response.finish_reasons": [event.reason.value for event in events],
        "jaxpd.aborted": any(event.reason is FinishReason.ABORT for event in events),
    }


def _failed(span: Span, error: JaxpdError) -> None:
    from opentelemetry.trace import Status, StatusCode

    # not the message: what is wrong with a request may quote it
    span.set_status(Status(StatusCode.ERROR, error.code))
    span.set_attribute("error.type", error.code)


def make_tracer(endpoint: str) -> Tracing:
    """An observer that sends spans to `endpoint` by OTLP over HTTP, such as http://localhost:4318/v1/traces.

    Without a path it is a collector's base, and /v1/traces is added. Whether somebody answers there is not asked: a
    collector may come later, or never. Raises InvalidArgument for what is no URL, FailedPrecondition where the extra is
    not installed.
    """
    url = _checked(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise FailedPrecondition(
            f"--otlp-traces-endpoint needs OpenTelemetry and it is not installed ({error.name} is missing); install it "
            "with: pip install 'jaxpd[tracing]'",
            field="otlp_traces_endpoint",
        ) from error
    for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).addFilter(_quiet)
    resource = Resource.create({"service.name": "jaxpd", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)))
    return Tracing(provider)


def _checked(endpoint: str) -> str:
    try:
        parts = urllib.parse.urlsplit(endpoint)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise InvalidArgument(
            f"--otlp-traces-endpoint {endpoint} is not an http(s) URL; write it like http://localhost:4318/v1/traces",
            field="otlp_traces_endpoint",
        )
    return endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


class OnceAWhile(logging.Filter):
    """Lets one record pass every `seconds`: a collector that is away fails every few seconds in the same way."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + self._seconds
        return True


_quiet = OnceAWhile(REPEAT_S)
