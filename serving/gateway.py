"""Between the fronts and the engine: the asyncio side of a request's life.

    starting --open--> ready --close_doors--> draining
                         |
    stream():  check -> tokenize -> submit -> [tokens -> text]* -> finished
                                       |            ^
                                       v            | one call_soon_threadsafe a step
                                    Engine --on_events (a pool's thread)

Every request is one `Live` record, from the first check until the engine's FinishEvent, so that an id is never used
twice at once. Whoever leaves a stream early (cancelled, failed) aborts its request in `finally`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Protocol

from jaxpd.errors import Internal, InvalidArgument, JaxpdError, Unavailable
from jaxpd.request import (
    Event,
    FinishReason,
    Request,
    TokensEvent,
)
from serving.callers import Caller, Quotas, salted_by
from serving.messages import (
    Answer,
    GenerateRequest,
    Message,
    Tokens,
    Understood,
    check_request_id,
    collect,
    new_request_id,
    shown,
)
from serving.model import ServedModel
from serving.observer import Observer, Observers, Origin
from serving.pace import Pace
from serving.stream import Live, Reader, Waiting, aborted_early
from serving.understand import LONG_PROMPT, check_response, check_sizes, params_of, prompt_characters, prompt_ids_of

if TYPE_CHECKING:
    from jaxpd.stats import EngineStats

logger = logging.getLogger(__name__)

SUBMITTING_THREADS = 2
# Streams hear of new tokens together, and the more streams the more rarely. A message costs the loop a fifth of this or
# so, and the engine's threads, and clients, want the rest: on two cores 64 streams get a sixth more tokens than with
# 0.0002 s, and their first ones in a third of the time (benchmarks/fronts.py). First and last tokens never wait.
MESSAGE_S, LONGEST_PACE_S = 0.0005, 0.05
HERE = Origin()  # a caller in this process


class Engine(Protocol):
    """What the gateway needs of `jaxpd.engine.Engine`; all of it may be called from any thread."""

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str, *, sample: int | None = None) -> bool: ...
    def stats(self) -> EngineStats: ...


class State(enum.Enum):
    """Whether requests are taken."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Gateway:
    """Made on the event loop that serves the network; `on_events` is the only method for other threads.

    `salt_by_caller` keeps the prompts of different API keys apart in the prefix cache: nobody can find out by timing
    what somebody else has asked.
    """

    def __init__(self, *, observers: Iterable[Observer] = (), salt_by_caller: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._pace = Pace()
        self._observers = Observers((self._pace, *observers))
        self._salt_by_caller = salt_by_caller
        self._state = State.STARTING
        self._engine: Engine | None = None
        self._model: ServedModel | None = None
        self._live: dict[str, Live] = {}
        self._quotas = Quotas()
        # Grammars are compiled in here; a thread of their own keeps them from holding up prompts.
        self._submitting = concurrent.futures.ThreadPoolExecutor(SUBMITTING_THREADS, thread_name_prefix="jaxpd-submit")
        self._paced: set[Live] = set()  # have news, and will be woken together
        self._waking: asyncio.TimerHandle | None = None
        self._woken_s = 0.0
        self._readers = 0
        self._nobody_reads = asyncio.Event()
        self._nobody_reads.set()

    # -- life of the server

    @property
    def state(self) -> State:
        """Whether requests are taken."""
        return self._state

    @property
    def model(self) -> ServedModel:
        """The served model. Raises Unavailable until it is loaded."""
        if self._model is None:
            raise Unavailable(
                "the server is starting (loading weights, compiling); try again when its health check says that it is "
                "ready: GET /health, or jaxpd.v1.Inference over gRPC"
            )
        return self._model

    def stats(self) -> EngineStats | None:
        """The engine's load; None until it is ready."""
        return None if self._engine is None else self._engine.stats()

    def open(self, engine: Engine, model: ServedModel) -> None:
        """The engine is ready: take requests."""
        self._engine, self._model = engine, model
        if self._state is State.STARTING:
            self._state = State.READY

    def close_doors(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._state = State.DRAINING

    def abort_all(self) -> None:
        """Ends every running request; their readers get what was made so far."""
        for request_id in list(self._live):
            self.abort(request_id)

    async def idle(self, timeout_s: float) -> bool:
        """True when all answers have been read to their end; False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nobody_reads.wait(), timeout_s)
        return self._nobody_reads.is_set()

    # -- requests

    async def generate(self, asked: GenerateRequest, origin: Origin = HERE) -> Answer:
        """The whole answer. Raises JaxpdError, also when the answer failed half way."""
        async with contextlib.aclosing(self.stream(asked, origin)) as messages:
            answer = collect([message async for message in messages])
        if answer.error is not None:
            raise answer.error
        return answer

    async def stream(self, asked: GenerateRequest, origin: Origin = HERE) -> AsyncGenerator[Message, None]:
        """One Understood, any number of Tokens, one Finished for each sample.

        Raises JaxpdError before the first message and at no time later: a request that fails after it was admitted ends
        with a Finished that holds the error. Close the generator (`contextlib.aclosing`) to abort the request.
        """
        arrival_s = time.monotonic()
        live: Live | None = None
        request_id = asked.request_id if asked.request_id is not None else new_request_id()
        self._observers.arrived(request_id, origin)
        try:
            try:
                engine, model = self._admit()
                live = self._register(request_id, origin)
                understood, request = await self._understand(asked, model, request_id, arrival_s)
                if not live.aborted:
                    await self._submit(live, engine, request)
            except Exception as error:
                self._observers.refused(request_id, origin, _shown_error(error))
                raise
            yield understood
            if not live.submitted:
                for end in aborted_early(understood):
                    yield end
                return
            reader = Reader(live, understood, model, want_timeline=bool(asked.want_timeline), shown_ids=asked.shown_ids)
            while not reader.finished:
                await live.wake.wait()
                live.wake.clear()
                messages = reader.read()
                for sample in reader.take_stopped():
                    engine.abort(request_id, sample=sample)
                for message in messages:
                    if isinstance(message, Tokens):
                        self._observers.sent(message.count)
                    yield message
            self._observers.detokenized(reader.detokenize_s)
        finally:
            if live is not None:
                self._leave(live)

    async def tokenize(self, asked: GenerateRequest) -> tuple[int, ...]:
        """The prompt as token ids, in a thread when it is long. Raises InvalidArgument, Unavailable."""
        model = self.model
        if prompt_characters(asked) > LONG_PROMPT:
            return await asyncio.to_thread(prompt_ids_of, asked, model)
        return prompt_ids_of(asked, model)

    def in_use(self, request_id: str) -> bool:
        """Whether a running request has this id."""
        return request_id in self._live

    def abort(self, request_id: str, caller: Caller | None = None) -> bool:
        """Ends one request; True if it was running. Its reader gets a Finished with ABORT for each sample.

        With a `caller` only its own requests are found.
        """
        live = self._live.get(request_id)
        if live is None or live.finished or (caller is not None and live.origin.caller.name != caller.name):
            return False
        if not live.submitted:
            live.aborted = True
            return True
        assert self._engine is not None
        return self._engine.abort(request_id)

    def _admit(self) -> tuple[Engine, ServedModel]:
        if self._state is State.DRAINING:
            raise Unavailable("the server is shutting down and takes no new requests; ask another one")
        model = self.model
        assert self._engine is not None
        return self._engine, model

    def _register(self, request_id: str, origin: Origin) -> Live:
        check_request_id(request_id)
        if request_id in self._live:
            raise InvalidArgument(
                f"request_id={shown(request_id)} is in use by a running request; take another one or leave it out",
                field="request_id",
            )
        live = self._live[request_id] = Live(request_id, origin)
        self._readers += 1
        self._nobody_reads.clear()
        return live

    async def _submit(self, live: Live, engine: Engine, request: Request) -> None:
        """Gives the request to the engine; in a thread where that takes time. Raises JaxpdError."""
        self._pace.check(live.origin.deadline_s, priority=request.priority)
        tokens = len(request.prompt_ids) + request.params.max_tokens * request.params.n
        self._quotas.take(live.origin.caller, tokens)
        live.charged = tokens
        live.samples = [Waiting() for _ in range(request.params.n)]
        live.request = request  # its first events may be here before `submit` is back
        if request.params.structured is None and len(request.prompt_ids) <= LONG_PROMPT:
            engine.submit(request)
        else:
            live.submitting = True
            submitting = self._loop.run_in_executor(self._submitting, engine.submit, request)
            try:
                await asyncio.shield(submitting)
            except asyncio.CancelledError:
                submitting.add_done_callback(lambda done: self._submitted_late(live, engine, done))
                raise
            except Exception:
                live.submitting = False
                raise
            live.submitting = False
        self._note_submitted(live)
        if live.aborted:  # meanwhile
            engine.abort(live.request_id)

    def _note_submitted(self, live: Live) -> None:
        """The engine has it: `submit` says so, or an event that was faster. Observers hear of it once."""
        if not live.submitted:
            live.submitted = True
            assert live.request is not None
            self._observers.submitted(live.request, live.origin)

    def _submitted_late(self, live: Live, engine: Engine, done: asyncio.Future[None]) -> None:
        """Nobody waits for the request any more that the engine has just taken, or refused."""
        live.submitting = False
        error = None if done.cancelled() else done.exception()
        if error is None and not done.cancelled():
            self._note_submitted(live)
        elif isinstance(error, Exception):
            if not isinstance(error, JaxpdError):
                logger.error("submitting request %s failed", live.request_id, exc_info=error)
            self._observers.refused(live.request_id, live.origin, _shown_error(error))
        if live.submitted and not live.finished:
            engine.abort(live.request_id)
        else:
            self._forget(live)

    def _leave(self, live: Live) -> None:
        """The reader is gone, for whatever reason; what still runs is aborted."""
        live.left = True
        for waiting in live.samples:
            waiting.pending, waiting.logprobs = [], []
        self._readers -= 1
        if self._readers == 0:
            self._nobody_reads.set()
        if live.submitting:
            return  # the thread's end decides
        if not live.submitted or live.finished:
            self._forget(live)
            return
        # The record stays until the last FinishEvent: were the id free, a late one could end a new request of that id.
        assert self._engine is not None
        self._engine.abort(live.request_id)

    def _forget(self, live: Live) -> None:
        if self._live.pop(live.request_id, None) is not None and live.charged:
            self._quotas.give_back(live.origin.caller, live.charged)

    async def _understand(
        self, asked: GenerateRequest, model: ServedModel, request_id: str, arrival_s: float
    ) -> tuple[Understood, Request]:
        """Fills in every option and tokenizes. Raises InvalidArgument."""
        check_sizes(asked, model)
        check_response(asked, model)
        prompt_ids = await self.tokenize(asked)
        params = params_of(asked, room=model.max_model_len - len(prompt_ids))
        salt = asked.cache_salt or ""
        if self._salt_by_caller:
            salt = salted_by(self._live[request_id].origin.caller, salt)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            arrival_s=arrival_s,
            priority=asked.priority or 0,
            cache_salt=salt,
        )
        request.validate(vocab_size=model.vocab_size, max_model_len=model.max_model_len)
        understood = Understood(
            request_id=request_id,
            prompt_tokens=len(prompt_ids),
            prompt_ids=prompt_ids if asked.want_prompt_ids else None,
            params=params,
            want_text=model.tokenizer is not None if asked.want_text is None else asked.want_text,
            want_token_ids=asked.want_token_ids is not False,
            priority=request.priority,
        )
        return understood, request

    # -- events

    def on_events(self, events: list[Event]) -> None:
        """One step's events, from any thread. After the loop has ended nobody is left to tell, and they are dropped."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            early = self._live.get(event.request_id)
            if early is not None and not early.submitted:
                self._note_submitted(early)
        self._observers.progressed(events)
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            waiting = live.samples[event.sample]
            if isinstance(event, TokensEvent):
                if not live.left:
                    waiting.take(event)
            else:
                waiting.finish = event
                assert live.request is not None
                if waiting.stopped:
                    event = dataclasses.replace(event, reason=FinishReason.STOP, error=None)
                self._observers.finished(live.request, live.origin, event)
                if live.left and live.finished and not live.submitting:
                    self._forget(live)
            if live.begun and waiting.finish is None:
                self._paced.add(live)
            else:
                live.begun = True
                live.wake.set()
        if self._paced and self._waking is None:
            wait_s = self._woken_s + min(self._readers * MESSAGE_S, LONGEST_PACE_S) - time.monotonic()
            if wait_s > 0:
                self._waking = self._loop.call_later(wait_s, self._wake_paced)
            else:
                self._wake_paced()

    def _wake_paced(self) -> None:
        self._waking, self._woken_s = None, time.monotonic()
        for live in self._paced:
            live.wake.set()
        self._paced.clear()


def _shown_error(error: Exception) -> JaxpdError:
    return error if isinstance(error, JaxpdError) else Internal("internal error")
