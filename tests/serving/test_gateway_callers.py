"""Limits of callers through the gateway, given back in every ending; salts by caller; observers and their faults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jaxpd.errors import Internal, InvalidArgument, JaxpdError, ResourceExhausted, Unavailable
from jaxpd.request import Event, FinishEvent, Request, TokensEvent
from jaxpd.structured import JSON_OBJECT, StructuredOutput
from serving.callers import Caller
from serving.gateway import Gateway
from serving.messages import GenerateRequest, Message, Tokens
from serving.observer import Observer, Origin

Opened = Callable[..., tuple[Gateway, Any]]
ALI = Origin(caller=Caller(name="ali", max_requests=1, max_tokens=5000))
ASKED = GenerateRequest(text="abc", max_tokens=4)
LONG = GenerateRequest(text="abc", max_tokens=4000)
JSON = StructuredOutput(kind=JSON_OBJECT)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")


class Journal(Observer):
    """What was told of each request, in order."""

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {}
        self.callers: set[str] = set()
        self.sent_tokens = 0

    def _note(self, request_id: str, what: str) -> None:
        notes = self.told.setdefault(request_id, [])
        if not notes or notes[-1] != what:
            notes.append(what)

    def arrived(self, request_id: str, origin: Origin) -> None:
        self._note(request_id, "arrived")
        self.callers.add(origin.caller.name)

    def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
        self._note(request_id, f"refused {error.code}")

    def submitted(self, request: Request, origin: Origin) -> None:
        self._note(request.request_id, "submitted")

    def progressed(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEvent):
                self._note(event.request_id, "progressed")

    def sent(self, tokens: int) -> None:
        self.sent_tokens += tokens

    def finished(self, request: Request, origin: Origin, event: FinishEvent) -> None:
        self._note(request.request_id, f"finished {event.reason}")


async def nothing_is_taken(gateway: Gateway, engine: Any) -> None:
    """Everything is as before the first request."""
    await until(lambda: not gateway._live)
    assert gateway._quotas._requests == gateway._quotas._tokens == {}
    assert engine.running == 0 and await gateway.idle(1)
    assert not gateway._pace._waiting


async def whole(gateway: Gateway, engine: Any) -> None:
    await gateway.generate(ASKED, ALI)


async def stopped(gateway: Gateway, engine: Any) -> None:
    answer = await gateway.generate(GenerateRequest(text="abc", max_tokens=4000, stop=("cab",)), ALI)
    assert answer.finished.stop_string == "cab"


async def samples(gateway: Gateway, engine: Any) -> None:
    await gateway.generate(GenerateRequest(text="abc", max_tokens=40, n=3, stop=("cab",)), ALI)


async def aborted(gateway: Gateway, engine: Any) -> None:
    asked = GenerateRequest(text="abc", max_tokens=4000, request_id="a")
    answer = asyncio.ensure_future(gateway.generate(asked, ALI))
    await until(lambda: engine.running == 1)
    assert not gateway.abort("a", Caller(name="bo")) and gateway.abort("a", ALI.caller)
    assert (await answer).finish_reason == "abort"


async def left(gateway: Gateway, engine: Any) -> None:
    async with contextlib.aclosing(gateway.stream(LONG, ALI)) as messages:
        async for message in messages:
            if isinstance(message, Tokens):
                return


async def cancelled(gateway: Gateway, engine: Any) -> None:
    answer = asyncio.ensure_future(gateway.generate(LONG, ALI))
    await until(lambda: engine.running == 1)
    answer.cancel()


async def failed(gateway: Gateway, engine: Any) -> None:
    engine.fail_with = Internal("the KV hand-off failed")
    with pytest.raises(Internal):
        await gateway.generate(GenerateRequest(text="!x", max_tokens=40), ALI)


async def queue_full(gateway: Gateway, engine: Any) -> None:
    engine.max_queued = 0
    for asked in (ASKED, GenerateRequest(text="abc", structured=JSON, max_tokens=4)):
        with pytest.raises(ResourceExhausted, match="wait already"):
            await gateway.generate(asked, ALI)
    engine.max_queued = 64


async def bug(gateway: Gateway, engine: Any) -> None:
    engine.submit = lambda request: [][0]
    for asked in (ASKED, GenerateRequest(text="abc", structured=JSON, max_tokens=4)):
        with pytest.raises(IndexError):
            await gateway.generate(asked, ALI)
    del engine.submit


async def wrong(gateway: Gateway, engine: Any) -> None:
    with pytest.raises(InvalidArgument, match="temperature"):
        await gateway.generate(GenerateRequest(text="abc", temperature=-1), ALI)


async def too_much(gateway: Gateway, engine: Any) -> None:
    with pytest.raises(InvalidArgument, match="may take 8003 tokens .* the limit of key .* is 5000"):
        await gateway.generate(GenerateRequest(text="abc", max_tokens=4000, n=2), ALI)


async def one_too_many(gateway: Gateway, engine: Any) -> None:
    async with contextlib.aclosing(gateway.stream(LONG, ALI)) as messages:
        await anext(messages)
        with pytest.raises(ResourceExhausted, match="1 requests of key 'ali' are in flight"):
            await gateway.generate(ASKED, ALI)
        await gateway.generate(ASKED)  # others may


async def draining(gateway: Gateway, engine: Any) -> None:
    engine.draining = True
    with pytest.raises(Unavailable):
        await gateway.generate(ASKED, ALI)
    engine.draining = False


async def gone_while_compiling(gateway: Gateway, engine: Any) -> None:
    engine.submit_s = 0.1
    answer = asyncio.ensure_future(gateway.generate(GenerateRequest(text="a", structured=JSON, max_tokens=400), ALI))
    await asyncio.sleep(0.03)
    answer.cancel()
    await asyncio.sleep(0)
    assert gateway._quotas._requests == {"ali": 1}, "the engine will have it, and nobody may take its place until then"


async def gone_while_compiling_and_refused(gateway: Gateway, engine: Any) -> None:
    engine.max_queued = 0
    await gone_while_compiling(gateway, engine)
    await until(lambda: not gateway._live)
    engine.max_queued = 64


async def gone_while_compiling_and_done_at_once(gateway: Gateway, engine: Any) -> None:
    engine.submit_s = 0.05
    asked = GenerateRequest(text="a", structured=JSON, max_tokens=1)
    for wait_s in (0.048, 0.049, 0.05, 0.051):
        answer = asyncio.ensure_future(gateway.generate(asked, ALI))
        await asyncio.sleep(wait_s)
        answer.cancel()
        await until(lambda: not gateway._live)


async def aborted_while_compiling(gateway: Gateway, engine: Any) -> None:
    engine.submit_s = 0.1
    asked = GenerateRequest(text="a", structured=JSON, max_tokens=4000, request_id="a")
    answer = asyncio.ensure_future(gateway.generate(asked, ALI))
    await asyncio.sleep(0.03)
    assert gateway.abort("a", ALI.caller)
    assert (await answer).finish_reason == "abort"


async def gone_while_tokenizing(gateway: Gateway, engine: Any) -> None:
    answer = asyncio.ensure_future(gateway.generate(GenerateRequest(text="abc " * 25_000), ALI))
    await asyncio.sleep(0)
    answer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answer


ENDINGS = {
    ending.__name__: ending
    for ending in (
        whole,
        stopped,
        samples,
        aborted,
        left,
        cancelled,
        failed,
        queue_full,
        bug,
        wrong,
        too_much,
        one_too_many,
        draining,
        gone_while_compiling,
        gone_while_compiling_and_refused,
        gone_while_compiling_and_done_at_once,
        aborted_while_compiling,
        gone_while_tokenizing,
    )
}
GONE = {"gone_while_tokenizing"}  # nobody is there to be told


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_limit_is_given_back_in_every_ending(opened: Opened, ending: str) -> None:
    journal = Journal()

    async def run() -> None:
        gateway, engine = opened(step_s=0.001, observers=(journal,), max_model_len=200_000)
        await ENDINGS[ending](gateway, engine)
        await nothing_is_taken(gateway, engine)
        engine.submit_s = 0.0
        assert (await gateway.generate(ASKED, ALI)).text == "abca", "and the next one is taken"
        await nothing_is_taken(gateway, engine)
        engine.close()

    asyncio.run(run())
    for notes in journal.told.values():
        assert notes[0] == "arrived", notes
        if ending in GONE and len(notes) == 1:
            continue
        if notes[1].startswith("refused"):
            assert len(notes) == 2, notes
        else:
            assert notes[1] == "submitted" and notes[-1].startswith("finished"), notes
            assert notes.count("submitted") == 1, notes


def test_events_that_overtake_submit(opened: Opened) -> None:
    """The thread that submits is slow to come back, and all of the answer is there before it."""
    journal = Journal()

    async def run() -> None:
        gateway, engine = opened(observers=(journal,))
        submit = engine.submit

        def slow(request: Request) -> None:
            submit(request)
            deadline = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop)
            deadline.result()

        loop = asyncio.get_running_loop()
        engine.submit = slow
        asked = GenerateRequest(text="abc", structured=JSON, max_tokens=4, request_id="a")
        assert (await gateway.generate(asked, ALI)).text == "abca"
        await nothing_is_taken(gateway, engine)
        engine.close()

    asyncio.run(run())
    assert journal.told["a"] == ["arrived", "submitted", "progressed", "finished length"]
    assert journal.sent_tokens == 4


def test_a_bug_is_refused_for_observers_without_details(opened: Opened) -> None:
    errors: list[JaxpdError] = []

    class Refusals(Observer):
        def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
            errors.append(error)

    async def run() -> None:
        gateway, engine = opened(observers=(Refusals(),))
        await bug(gateway, engine)
        engine.close()

    asyncio.run(run())
    assert [(error.code, error.message) for error in errors] == [("INTERNAL", "internal error")] * 2


@pytest.mark.parametrize("salted", [True, False])
def test_salts_by_caller(opened: Opened, salted: bool) -> None:
    async def run() -> None:
        gateway, engine = opened(salt_by_caller=salted)
        bo = Origin(caller=Caller(name="bo"))
        for origin in (ALI, bo):
            for salt in (None, "s"):
                await gateway.generate(GenerateRequest(text="abc", max_tokens=1, cache_salt=salt), origin)
        salts = [request.cache_salt for request in engine.submitted]
        assert len(set(salts)) == 4 if salted else salts == ["", "s", "", "s"]
        await gateway.generate(GenerateRequest(text="abc", max_tokens=1), ALI)
        assert engine.submitted[-1].cache_salt == salts[0]
        with pytest.raises(InvalidArgument, match="cache_salt has 257 characters, the limit is 256"):
            await gateway.generate(GenerateRequest(text="abc", cache_salt="x" * 257), ALI)
        engine.close()

    asyncio.run(run())


def test_faults_of_observers_harm_nobody(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Observer):
        def __getattribute__(self, name: str) -> Any:
            if name in ("arrived", "refused", "submitted", "progressed", "sent", "finished"):
                raise RuntimeError(f"broken {name}")
            return super().__getattribute__(name)

    journal = Journal()

    async def run() -> list[Message]:
        gateway, engine = opened(observers=(Faulty(), journal))
        with pytest.raises(InvalidArgument):
            await gateway.generate(GenerateRequest(text=""), ALI)
        asked = GenerateRequest(text="abc", max_tokens=4, request_id="a")
        messages = [message async for message in gateway.stream(asked, ALI)]
        await nothing_is_taken(gateway, engine)
        engine.close()
        return messages

    with caplog.at_level(logging.ERROR):
        messages = asyncio.run(run())
    assert "".join(m.text or "" for m in messages if isinstance(m, Tokens)) == "abca"
    assert journal.told["a"] == ["arrived", "submitted", "progressed", "finished length"]
    for method in ("arrived", "refused", "submitted", "progressed", "sent", "finished"):
        assert f"broken {method}" in caplog.text
