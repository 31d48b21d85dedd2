"""What waits for a router that reads slowly: few messages, complete, in order, and of bounded size."""

from __future__ import annotations

import asyncio

import pytest

from jaxpd.errors import Unavailable
from jaxpd.request import Event, FinishEvent, FinishReason, Timings, TokenLogprobs, TokensEvent, Usage
from jaxpd.stats import EngineStats
from serving.gateway import State
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.worker import session as sessions
from serving.worker.reading import Reading, Steps, reading_to_proto
from serving.worker.session import Session
from serving.worker.wire import events_from_proto


def token(name: str, index: int, *, sample: int = 0, top: int | None = None) -> TokensEvent:
    scores = None if top is None else (TokenLogprobs(logprob=-0.5, top=((1, -0.5),) * top),)
    return TokensEvent(name, index, (index % 250,), scores, None, sample)


def end(name: str, sample: int = 0) -> FinishEvent:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    return FinishEvent(request_id=name, reason=FinishReason.STOP, usage=usage, timings=Timings(), sample=sample)


async def fetched(session: Session, count: int) -> list[pb.WorkerMessage]:
    """The next `count` messages."""
    messages = session.messages()
    found = [await anext(messages) for _ in range(count)]
    await messages.aclose()
    return found


def events_of(message: pb.WorkerMessage) -> list[Event]:
    return events_from_proto(message.events, started_s={})


def test_what_a_slow_router_has_not_fetched_is_one_message() -> None:
    async def run() -> None:
        session = Session("slow")
        for index in range(10_000):
            session.add([token("a", index, top=2), token("b", index), token("b", index, sample=1)])
        session.add([end("a"), token("b", 10_000)])
        (message,) = await fetched(session, 1)
        a, b, b1, ended = events_of(message)
        assert isinstance(a, TokensEvent) and isinstance(b, TokensEvent) and isinstance(b1, TokensEvent)
        assert a.token_ids == tuple(i % 250 for i in range(10_000)) and a.first_index == 0
        assert a.logprobs is not None and len(a.logprobs) == 10_000
        assert len(b.token_ids) == 10_001 and (b1.sample, len(b1.token_ids)) == (1, 10_000)
        assert isinstance(ended, FinishEvent) and ended.request_id == "a"

    asyncio.run(run())


def test_no_message_grows_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_UNITS", 100)

    async def run() -> None:
        session = Session("slow")
        for index in range(1000):
            session.add([token("a", index, top=3)])  # five units each
        found = [event for message in await fetched(session, 50) for event in events_of(message)]
        assert [event.first_index for event in found if isinstance(event, TokensEvent)] == list(range(0, 1000, 20))
        assert all(isinstance(event, TokensEvent) and len(event.token_ids) == 20 for event in found)

    asyncio.run(run())


def test_a_reading_replaces_the_one_before_but_keeps_its_steps() -> None:
    async def run() -> None:
        session = Session("slow")
        for state, steps in ((State.READY, ((3, 0.1),)), (State.DRAINING, ((4, 0.2),))):
            stats = EngineStats(states={}, replicas=(), staging_bytes=0)
            session.read(reading_to_proto(Reading(state=state, stats=stats, steps=steps)))
        (message,) = await fetched(session, 1)
        assert message.reading.state == pb.WORKER_STATE_DRAINING
        assert sorted(step.sequences for step in message.reading.steps) == [3, 4]

    asyncio.run(run())


def test_the_end_of_a_session_is_the_end_of_its_messages() -> None:
    async def run() -> None:
        session = Session("gone")
        session.add([token("a", 0)])
        assert not session.over.is_set()
        flushing = asyncio.create_task(session.flushed())
        await asyncio.sleep(0)
        assert not flushing.done()
        session.end(Unavailable("bye"))
        session.end()  # what came first counts
        await flushing
        session.add([token("a", 1)])
        with pytest.raises(Unavailable, match="bye"):
            await fetched(session, 1)

    asyncio.run(run())


def test_a_request_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REMEMBERED", 2)

    async def run() -> None:
        session = Session("r")
        assert [session.starts(name) for name in ("a", "b", "a", "b", "c")] == [True, True, False, False, True]

    asyncio.run(run())


def test_steps_are_told_from_the_tokens_of_the_same_sequences() -> None:
    steps = Steps()
    steps.replicas = 2
    for i in range(4):
        steps.note([token(name, i) for name in ("a", "b", "c")], 10.0 + i, 1)
    steps.note([end("a")], 13.5, 1)
    steps.note([token("x", 0)], 14.0, 1)  # a prompt's first token is no decode step
    steps.note([token("a", 5)], 14.5, 2)  # nor is one after a pause, or of another pool
    assert steps.take() == ((2, 1.0),)
    assert steps.take() == ()
