"""How an answer goes out, whole or as a stream, and what happens when its client leaves meanwhile.

    Answering: work (gateway -> bytes -> send)  |  receive() until the client has gone
                      whichever ends first ends the other; leaving the gateway's stream aborts the request

Nothing is sent before the gateway has taken the request, so that whatever is wrong with it has a status of its own.
What goes wrong later is a last event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from jaxpd.errors import JaxpdError
from serving.gateway import Gateway
from serving.http.errors import body_of, response_of, unexpected
from serving.messages import MAX_REQUEST_ID, Answer, GenerateRequest, Message, Understood, new_request_id
from serving.observer import Origin

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANY = 10_000  # tokens and log probabilities that are written in a thread, so that nobody's tokens wait for it
DONE = b"data: [DONE]\n\n"
SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would collect a stream
)
TRACING = ("traceparent", "tracestate", "baggage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request to the gateway. `names` are fields that this client calls otherwise."""

    gateway: Gateway
    request_id: str
    origin: Origin
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def named(self, names: Mapping[str, str]) -> Call:
        """The same with names of fields."""
        return dataclasses.replace(self, names=names)

    def with_ids(self, asks: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """The first prompt goes by the request's id, others by one made of it; none by an id that is in use."""
        ids = [self.request_id, *(f"{self.request_id}-{i}" for i in range(1, len(asks)))]
        return [
            dataclasses.replace(asked, request_id=self._free(request_id))
            for asked, request_id in zip(asks, ids, strict=True)
        ]

    def _free(self, request_id: str) -> str:
        taken = self.gateway.in_use(request_id) or len(request_id) > MAX_REQUEST_ID
        return new_request_id() if taken else request_id


def call_of(request: Request, gateway: Gateway, operation: str) -> Call:
    """What the middleware and the headers say of a request."""
    state, headers = request.scope["state"], request.headers
    origin = Origin(
        front="http",
        operation=operation,
        caller=state["caller"],
        headers={name: headers[name] for name in TRACING if name in headers},
    )
    return Call(gateway=gateway, request_id=state["request_id"], origin=origin)


class Writer(Protocol):
    """Writes the events of one stream."""

    error: JaxpdError | None  # what went wrong with one of its samples

    def begin(self, prompt: int, understood: Understood) -> None:
        """A prompt was taken."""

    def chunk(self, prompt: int, message: Message) -> bytes:
        """The event of a message, or nothing."""

    def end(self) -> bytes:
        """What follows when all has been said, before `[DONE]`."""


class Answering(Response):
    """A response that is made while it is sent. `work` raises JaxpdError only before it has sent anything."""

    def __init__(self, call: Call, work: Callable[[Send], Awaitable[None]]) -> None:
        self.background = None
        self.status_code = 200
        self._call = call
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Works until all is sent or the client has left."""
        working = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not working.done():
                working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working  # its request is aborted by then

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._work(send)
        except JaxpdError as error:
            await response_of(error, self._call.request_id, self._call.names)(scope, receive, send)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(call: Call, asks: Sequence[GenerateRequest], body: Callable[[list[Answer]], Any], send: Send) -> None:
    """Sends all answers as one body. Raises JaxpdError, also for an answer that failed half way; the others are aborted
    then."""
    answers = await together([call.gateway.generate(asked, call.origin) for asked in call.with_ids(asks)])
    write = functools.partial(_json_of, body, answers)
    text = await asyncio.to_thread(write) if _entries(answers) > MANY else write()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _json_of(body: Callable[[list[Answer]], Any], answers: list[Answer]) -> bytes:
    return json.dumps(body(answers)).encode()


def _entries(answers: Iterable[Answer]) -> int:
    """How much there is to write: tokens, each with its log probabilities."""
    total = 0
    for answer in answers:
        params = answer.understood.params
        total += answer.usage.completion_tokens * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:
            total += answer.usage.prompt_tokens * (1 + params.prompt_logprobs)
    return total


async def stream(call: Call, asks: Sequence[GenerateRequest], writer: Writer, send: Send) -> None:
    """Sends answers as they come. Raises JaxpdError before anything has been sent."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(contextlib.aclosing(call.gateway.stream(asked, call.origin)))
            for asked in call.with_ids(asks)
        ]
        for index, first in enumerate(await together([_first(messages) for messages in streams])):
            writer.begin(index, first)
        await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        try:
            if len(streams) == 1:
                async for message in streams[0]:
                    if chunk := writer.chunk(0, message):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            else:
                async with contextlib.aclosing(merged(streams)) as messages:
                    async for index, message in messages:
                        if chunk := writer.chunk(index, message):
                            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = writer.end()
        except Exception as error:
            logger.error("the stream of request %s failed", call.request_id, exc_info=error)
            last = event(unexpected(call.request_id))
        if writer.error is not None:  # of one sample; the others have been answered
            if writer.error.code == "INTERNAL":
                logger.error("request %s failed", call.request_id, exc_info=writer.error)
            last = event(body_of(writer.error, call.request_id, call.names)[1])
        await send({"type": "http.response.body", "body": last + DONE})


async def merged(streams: Sequence[AsyncGenerator[Message, None]]) -> AsyncGenerator[tuple[int, Message], None]:
    """The messages of several streams, each with its stream's number. A reader that is slow holds up all of them, and
    what they have to say grows together meanwhile."""
    queue = asyncio.Queue[tuple[int, Message | BaseException | None]](maxsize=len(streams))

    async def pump(index: int, messages: AsyncGenerator[Message, None]) -> None:
        try:
            async for message in messages:
                await queue.put((index, message))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(i, messages)) for i, messages in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, message = await queue.get()
            if message is None:
                running -= 1
            elif isinstance(message, BaseException):
                raise message
            else:
                yield index, message
    finally:
        await _ended(tasks)


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error ends the others."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _ended(tasks)


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _first(messages: AsyncGenerator[Message, None]) -> Understood:
    first = await anext(messages)
    assert isinstance(first, Understood)
    return first


def event(body: Any) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n".encode()
