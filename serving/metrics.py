"""What a server did, in numbers for Prometheus: an observer that counts, and one text of all it knows.

    Gateway --observer--> counts as they happen (this file) ---+
    Engine.stats(), read when Prometheus asks -----------------+--> families (serving/metric_families.py) --> render
    XLA, whenever it compiles (jaxpd/compiles.py) -------------+

Tokens count as they come, and so do the times to the first and second one and between two: they are taken when the
event loop hears of a token, which is what a client can notice. Everything else a request tells when it ends, from its
`jaxpd.life.Life`.

Several servers may live in one process: each has a registry of its own. What belongs to the process (compiled programs,
memory, CPU time) every one of them reports.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from jaxpd import compiles
from jaxpd.errors import JaxpdError
from jaxpd.life import Stage
from jaxpd.request import Event, FinishEvent, FinishReason, Request, TokensEvent
from serving.callers import Keys
from serving.gateway import State
from serving.histogram import BETWEEN_TOKENS, COMPILE, MESSAGE, REQUEST, STAGE, TOKENS, TTFT, Histogram
from serving.metric_families import Families
from serving.model import ServedModel
from serving.observer import Observer, Origin

if TYPE_CHECKING:
    from jaxpd.stats import EngineStats

WARMUP, SERVING = "warmup", "serving"
CODES = (  # of `jaxpd.errors`, in lower case
    *("invalid_argument", "not_found", "unauthenticated", "resource_exhausted", "failed_precondition"),
    *("unavailable", "internal"),
)
STAGES = ("queue", "prefill", "transfer", "decode_wait", "decode", "detokenize")


class Source(Protocol):
    """What is read of a gateway when somebody asks."""

    @property
    def state(self) -> State: ...
    @property
    def model(self) -> ServedModel: ...
    def stats(self) -> EngineStats | None: ...


class _Watched:
    """A request under way."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.last_s: dict[int, float] = {}  # sample -> when its latest token came
        self.ended = 0  # samples


class Metrics(Observer):
    """Counts for one gateway. Methods are the event loop's, but `render`, which any thread may call.

    With `keys` those who came without one count as refused, too: the gateway never hears of them.
    """

    def __init__(self, keys: Keys | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.keys = keys
        self.source: Source | None = None
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self.requests: Counter[tuple[str, str]] = Counter()  # (front, operation)
        self.refusals = Counter(dict.fromkeys(CODES, 0))
        self.finishes = Counter({reason.value: 0 for reason in FinishReason if reason is not FinishReason.HANDED_OFF})
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ttft = Histogram(TTFT)
        self.ttst = Histogram(TTFT)
        self.itl = Histogram(BETWEEN_TOKENS)
        self.tpot = Histogram(BETWEEN_TOKENS)
        self.e2e = Histogram(REQUEST)
        self.decoding = Histogram(REQUEST)  # first to last token
        self.queued = Histogram(REQUEST)
        self.prefilled = Histogram(REQUEST)
        self.stages = {stage: Histogram(STAGE) for stage in STAGES}
        self.prompt_lengths = Histogram(TOKENS)
        self.answer_lengths = Histogram(TOKENS)
        self.message_tokens = Histogram(MESSAGE)
        self._compiling = threading.Lock()
        self.compiles = {phase: Histogram(COMPILE) for phase in (WARMUP, SERVING)}
        self.registry = CollectorRegistry()
        self.registry.register(Families(self))
        ProcessCollector(registry=self.registry)
        self._stop_watching = compiles.watch(self._compiled)

    def attach(self, source: Source) -> None:
        """From now on `source` (the gateway that this observes) is read, too."""
        self.source = source

    def close(self) -> None:
        """Stops counting what XLA compiles."""
        self._stop_watching()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics and their content type: OpenMetrics or Prometheus text, as the Accept header `accept` prefers."""
        wanted = _quality(accept, "application/openmetrics-text")
        if wanted > 0 and wanted >= _quality(accept, "text/plain"):
            # Its other escapings turn the colons of our names into underscores, in samples alone (0.26).
            text = openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8)
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    # -- the observer

    def arrived(self, request_id: str, origin: Origin) -> None:
        """See `Observer`."""
        self.requests[origin.front, origin.operation] += 1

    def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
        """See `Observer`."""
        self.refusals[error.code.lower()] += 1

    def submitted(self, request: Request, origin: Origin) -> None:
        """See `Observer`."""
        self._watched[request.request_id] = _Watched(request)

    def progressed(self, events: Sequence[Event]) -> None:
        """See `Observer`."""
        now = self._clock()
        gaps: dict[float, int] = {}  # most sequences of a step have had their last token in the same one
        for event in events:
            if type(event) is not TokensEvent:
                continue
            count = len(event.token_ids)
            self.generation_tokens += count
            watched = self._watched.get(event.request_id)
            if watched is None:
                continue
            last_s = watched.last_s.get(event.sample)
            watched.last_s[event.sample] = now
            if last_s is not None:
                gap = (now - last_s) / count
                gaps[gap] = gaps.get(gap, 0) + count
            if event.first_index <= 1 and not event.sample:
                self._began(watched.request, event.first_index, count, now)
        for gap, times in gaps.items():
            self.itl.observe(gap, times)

    def sent(self, tokens: int) -> None:
        """See `Observer`."""
        self.message_tokens.observe(tokens)

    def detokenized(self, seconds: float) -> None:
        """See `Observer`."""
        self.stages["detokenize"].observe(seconds)

    def finished(self, request: Request, origin: Origin, event: FinishEvent) -> None:
        """See `Observer`."""
        watched = self._watched[request.request_id]
        watched.ended += 1
        if watched.ended == request.params.n:
            del self._watched[request.request_id]
            self.prompt_lengths.observe(len(request.prompt_ids))
        self.finishes[event.reason.value] += 1
        self.answer_lengths.observe(event.usage.completion_tokens)
        self._stages_of(event)
        life = event.life
        if life is None:
            return
        ended_s = life.first(Stage.FINISHED) or life.first(Stage.FAILED)
        if ended_s is not None:
            self.e2e.observe(ended_s - request.arrival_s)
        if len(life.token_times) > 1:
            decoding_s = life.token_times[-1] - life.token_times[0]
            self.decoding.observe(decoding_s)
            self.tpot.observe(decoding_s / (len(life.token_times) - 1))

    def _began(self, request: Request, first_index: int, count: int, now: float) -> None:
        """The first or second token of the first sample has come."""
        if not first_index:
            self.prompt_tokens += len(request.prompt_ids)
            self.ttft.observe(now - request.arrival_s)
        if first_index + count > 1:
            self.ttst.observe(now - request.arrival_s)

    def _stages_of(self, event: FinishEvent) -> None:
        timings = event.timings
        for stage, seconds in (
            ("queue", timings.queue_s),
            ("prefill", timings.prefill_s),
            ("transfer", timings.transfer_s),
            ("decode_wait", timings.transfer_exposed_s),
            ("decode", timings.decode_s),
        ):
            if seconds is not None:
                self.stages[stage].observe(seconds)
        for histogram, seconds in (
            (self.queued, timings.queue_s),
            (self.prefilled, timings.prefill_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def _compiled(self, seconds: float) -> None:
        """XLA has compiled a program, in whatever thread."""
        phase = WARMUP if self.source is None or self.source.state is State.STARTING else SERVING
        with self._compiling:
            self.compiles[phase].observe(seconds)


def _quality(accept: str, media_type: str) -> float:
    """How much an Accept header wants exactly this type: its q, 0 where it does not name it."""
    best = 0.0
    for entry in accept.lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name != media_type:
            continue
        q = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
        with contextlib.suppress(ValueError):
            best = max(best, float(q))
    return best
