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
import contextlib
import enum
import secrets
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from jaxpd.errors import InvalidArgument, Unavailable
from jaxpd.request import (
    MAX_SEED,
    Event,
    FinishEvent,
    FinishReason,
    Request,
    SamplingParams,
    Timings,
    TokensEvent,
    Usage,
)
from jaxpd.text import to_prompt_ids
from serving.messages import (
    Answer,
    Finished,
    GenerateRequest,
    Message,
    Understood,
    check_request_id,
    collect,
    new_request_id,
    shown,
)
from serving.model import ServedModel
from serving.stream import Live, Reader

if TYPE_CHECKING:
    from jaxpd.stats import EngineStats

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
# Longer prompts are tokenized in a thread, so that nobody's tokens wait for it.
LONG_PROMPT = 4096  # characters
MESSAGE_SIZE = 64  # characters that one chat message counts for by itself
# Searched in Python for every token; without bounds one request could hold up all others.
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 64, 1024, 1024


class Engine(Protocol):
    """What the gateway needs of `jaxpd.engine.Engine`; all of it may be called from any thread."""

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def stats(self) -> EngineStats: ...


class State(enum.Enum):
    """Whether requests are taken."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Gateway:
    """Made on the event loop that serves the network; `on_events` is the only method for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = State.STARTING
        self._engine: Engine | None = None
        self._model: ServedModel | None = None
        self._live: dict[str, Live] = {}
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
                "the server is starting (loading weights, compiling); try again when the health check of "
                "jaxpd.v1.Inference says SERVING"
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

    async def generate(self, asked: GenerateRequest) -> Answer:
        """The whole answer. Raises JaxpdError, also when the answer failed half way."""
        async with contextlib.aclosing(self.stream(asked)) as messages:
            answer = collect([message async for message in messages])
        if answer.finished.error is not None:
            raise answer.finished.error
        return answer

    async def stream(self, asked: GenerateRequest) -> AsyncGenerator[Message, None]:
        """One Understood, any number of Tokens, one Finished.

        Raises JaxpdError before the first message and at no time later: a request that fails after it was admitted ends
        with a Finished that holds the error. Close the generator (`contextlib.aclosing`) to abort the request.
        """
        arrival_s = time.monotonic()
        engine, model = self._admit()
        live = self._register(asked.request_id)
        finished = False
        try:
            understood, request = await self._understand(asked, model, live.request_id, arrival_s)
            if not live.aborted:
                engine.submit(request)
                live.submitted = True
            yield understood
            if live.aborted:
                usage = Usage(prompt_tokens=understood.prompt_tokens, completion_tokens=0)
                yield Finished(reason=FinishReason.ABORT, usage=usage, timings=Timings())
                return
            reader = Reader(live, understood, model)
            while not finished:
                await live.wake.wait()
                live.wake.clear()
                messages = reader.read()
                if reader.stop_string is not None and live.finish is None:
                    engine.abort(live.request_id)
                for message in messages:
                    finished = finished or isinstance(message, Finished)
                    yield message
        finally:
            self._leave(live)

    def abort(self, request_id: str) -> bool:
        """Ends one request; True if it was running. Its reader gets a Finished with ABORT."""
        live = self._live.get(request_id)
        if live is None or live.finish is not None:
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

    def _register(self, asked_id: str | None) -> Live:
        if asked_id is not None:
            check_request_id(asked_id)
            if asked_id in self._live:
                raise InvalidArgument(
                    f"request_id={shown(asked_id)} is in use by a running request; take another one or leave it out",
                    field="request_id",
                )
        live = Live(asked_id if asked_id is not None else new_request_id())
        self._live[live.request_id] = live
        self._readers += 1
        self._nobody_reads.clear()
        return live

    def _leave(self, live: Live) -> None:
        """The reader is gone, for whatever reason; what still runs is aborted."""
        live.left = True
        live.pending = []
        self._readers -= 1
        if self._readers == 0:
            self._nobody_reads.set()
        if not live.submitted or live.finish is not None:
            self._live.pop(live.request_id, None)
            return
        # The record stays until the FinishEvent: were the id free, a late one could end a new request of that id.
        assert self._engine is not None
        self._engine.abort(live.request_id)

    async def _understand(
        self, asked: GenerateRequest, model: ServedModel, request_id: str, arrival_s: float
    ) -> tuple[Understood, Request]:
        """Fills in every option and tokenizes. Raises InvalidArgument."""
        _check_sizes(asked, model)
        _check_response(asked, model)
        if _prompt_characters(asked) > LONG_PROMPT:
            prompt_ids = await asyncio.to_thread(_tokenize, asked, model)
        else:
            prompt_ids = _tokenize(asked, model)
        max_tokens = asked.max_tokens
        if max_tokens is None:  # a prompt that fills the model's length is refused by Request.validate
            max_tokens = max(1, min(DEFAULT_MAX_TOKENS, model.max_model_len - len(prompt_ids)))
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if asked.temperature is None else asked.temperature,
            seed=secrets.randbelow(MAX_SEED + 1) if asked.seed is None else asked.seed,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=bool(asked.ignore_eos),
        )
        request = Request(request_id=request_id, prompt_ids=prompt_ids, params=params, arrival_s=arrival_s)
        request.validate(vocab_size=model.vocab_size, max_model_len=model.max_model_len)
        understood = Understood(
            request_id=request_id,
            prompt_tokens=len(prompt_ids),
            prompt_ids=prompt_ids if asked.want_prompt_ids else None,
            params=params,
            want_text=model.tokenizer is not None if asked.want_text is None else asked.want_text,
            want_token_ids=asked.want_token_ids is not False,
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
            live = self._live.get(event.request_id)
            if live is None:
                continue
            match event:
                case TokensEvent():
                    if not live.left:
                        live.pending.extend(event.token_ids)
                case FinishEvent():
                    live.finish = event
                    if live.left:
                        del self._live[event.request_id]
            live.wake.set()


def _check_sizes(asked: GenerateRequest, model: ServedModel) -> None:
    """Refuses what would take long even to look at."""
    if asked.token_ids is not None and len(asked.token_ids) > model.max_model_len:
        raise InvalidArgument(
            f"prompt has {len(asked.token_ids)} tokens, above the limit of {model.max_model_len} (--max-model-len)",
            field="prompt",
        )
    longest = max((len(stop) for stop in asked.stop), default=0)
    for field, count, limit, what in (
        ("stop", len(asked.stop), MAX_STOP_STRINGS, "{} strings"),
        ("stop", longest, MAX_STOP_CHARACTERS, "a string of {} characters"),
        ("stop_token_ids", len(asked.stop_token_ids), MAX_STOP_TOKEN_IDS, "{} ids"),
    ):
        if count > limit:
            raise InvalidArgument(f"{field} holds {what.format(count)}, the limit is {limit}", field=field)


def _check_response(asked: GenerateRequest, model: ServedModel) -> None:
    if asked.want_text is False and asked.want_token_ids is False:
        raise InvalidArgument("response asks for neither text nor token_ids; ask for one of them", field="response")
    for field, needed in (("stop", bool(asked.stop)), ("response.text", bool(asked.want_text))):
        if needed and model.tokenizer is None:
            raise InvalidArgument(
                f"{field} needs a tokenizer and {model.name} has none; leave it out and use token ids", field=field
            )


def _prompt_characters(asked: GenerateRequest) -> int:
    if asked.text is not None:
        return len(asked.text)
    return sum(MESSAGE_SIZE + len(str(entry.get("content", ""))) for entry in asked.chat or ())


def _tokenize(asked: GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    return to_prompt_ids(model.tokenizer, text=asked.text, token_ids=asked.token_ids, chat=asked.chat)
