"""Between the fronts and the engine: the asyncio side of a request's life.

    starting --open--> ready --close_doors--> draining
                         |
    stream():  check -> tokenize -> submit -> [tokens -> text]* -> finished
                                       |            ^
                                       v            | one call_soon_threadsafe a step
                                    Engine --on_events (a pool's thread)

Every request is one record in `_live`, from the first check until the engine's FinishEvent, so that an id is never used
twice at once. The tokens a slow reader has not fetched wait in its record as one flat list, at most `max_tokens` long;
the next message takes all of them. Whoever leaves a stream early (cancelled, failed) aborts its request in `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Protocol

from jaxpd.errors import InvalidArgument, Unavailable
from jaxpd.request import MAX_SEED, Event, FinishEvent, FinishReason, Request, SamplingParams, Timings, TokensEvent, Usage
from jaxpd.text import TextStream, to_prompt_ids
from jaxpd.tokenizer import Tokenizer
from serving.messages import (
    Answer,
    Finished,
    GenerateRequest,
    Message,
    Tokens,
    Understood,
    check_request_id,
    collect,
    new_request_id,
    shown,
)

if TYPE_CHECKING:
    from jaxpd.engine import EngineStats

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
# Longer prompts are tokenized in a thread: about a millisecond of work, below which the hop costs more than it saves.
LONG_PROMPT = 4096  # characters


class Engine(Protocol):
    """What the gateway needs of `jaxpd.engine.Engine`; all of it may be called from any thread."""

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def stats(self) -> EngineStats: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the fronts know of the model. `tokenizer` is None for one that speaks token ids only."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    page_size: int
    meshes: Mapping[str, tuple[str, ...]]  # role -> the mesh spec of each of its pools
    tokenizer: Tokenizer | None


class State(enum.Enum):
    """Whether requests are taken."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class _Live:
    """One request between its check and its FinishEvent."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.submitted = False
        self.aborted = False  # by abort(), before it was submitted
        self.left = False  # nobody reads any more
        self.pending: list[int] = []
        self.finish: FinishEvent | None = None
        self.wake = asyncio.Event()


class Gateway:
    """Made on the event loop that serves the network; `on_events` is the only method for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = State.STARTING
        self._engine: Engine | None = None
        self._model: ServedModel | None = None
        self._live: dict[str, _Live] = {}
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
            reader = _Reader(live, understood, model)
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

    def _register(self, asked_id: str | None) -> _Live:
        if asked_id is not None:
            check_request_id(asked_id)
            if asked_id in self._live:
                raise InvalidArgument(
                    f"request_id={shown(asked_id)} is in use by a request that still runs; take another one or leave it out",
                    field="request_id",
                )
        live = _Live(asked_id if asked_id is not None else new_request_id())
        self._live[live.request_id] = live
        self._readers += 1
        self._nobody_reads.clear()
        return live

    def _leave(self, live: _Live) -> None:
        """The reader is gone, for whatever reason; what still runs is aborted."""
        live.left = True
        live.pending = []
        self._readers -= 1
        if self._readers == 0:
            self._nobody_reads.set()
        if not live.submitted or live.finish is not None:
            self._live.pop(live.request_id, None)
            return
        # The record stays until the FinishEvent: were the id free before, a late one could end a new request of that name.
        assert self._engine is not None
        self._engine.abort(live.request_id)

    async def _understand(
        self, asked: GenerateRequest, model: ServedModel, request_id: str, arrival_s: float
    ) -> tuple[Understood, Request]:
        """Fills in every option and tokenizes. Raises InvalidArgument."""
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


class _Reader:
    """Turns what waits in a record into messages: text, stop strings, the finish."""

    def __init__(self, live: _Live, understood: Understood, model: ServedModel) -> None:
        params = understood.params
        self._live = live
        self._understood = understood
        self._hidden = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
        self._text: TextStream | None = None
        if understood.want_text or params.stop:
            assert model.tokenizer is not None
            self._text = TextStream(model.tokenizer, stop=params.stop)
        self._count = 0
        self.stop_string: str | None = None

    def read(self) -> list[Message]:
        """Everything there is to say now. After a stop string: nothing but the finish, once the engine has sent it."""
        live, messages = self._live, list[Message]()
        ids, live.pending = live.pending, []
        if self.stop_string is None:
            ids, text = self._push(ids)
            if live.finish is not None and self._text is not None and self.stop_string is None:
                text += self._text.finish()
                self.stop_string = self._text.stop_string
            if ids or text:
                messages.append(
                    Tokens(
                        first_index=self._count,
                        count=len(ids),
                        token_ids=tuple(ids) if self._understood.want_token_ids else (),
                        text=text if self._understood.want_text else None,
                    )
                )
            self._count += len(ids)
        if live.finish is not None:
            messages.append(self._finished(live.finish))
        return messages

    def _push(self, ids: list[int]) -> tuple[list[int], str]:
        """The ids that belong to the answer (fewer after a stop string) and the text that became certain."""
        if self._text is None:
            return ids, ""
        if not self._understood.params.stop:
            return ids, self._text.push([i for i in ids if i not in self._hidden])
        texts = []
        for index, token in enumerate(ids):  # one by one, to find the token that completed the stop string
            if token in self._hidden:
                continue
            texts.append(self._text.push([token]))
            if self._text.stopped:
                self.stop_string = self._text.stop_string
                return ids[: index + 1], "".join(texts)
        return ids, "".join(texts)

    def _finished(self, event: FinishEvent) -> Finished:
        if self.stop_string is None:
            return Finished(
                reason=event.reason,
                usage=event.usage,
                timings=event.timings,
                stop_token_id=event.stop_token_id,
                error=event.error,
            )
        usage = Usage(prompt_tokens=event.usage.prompt_tokens, completion_tokens=self._count)
        return Finished(
            reason=FinishReason.STOP, usage=usage, timings=event.timings, stop_string=self.stop_string
        )


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
    return sum(len(str(entry.get("content", ""))) for entry in asked.chat or ())


def _tokenize(asked: GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    return to_prompt_ids(model.tokenizer, text=asked.text, token_ids=asked.token_ids, chat=asked.chat)
