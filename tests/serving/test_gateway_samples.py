"""Requests with several samples, log probabilities, grammars and observers, over a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jaxpd.errors import JaxpdError, ResourceExhausted
from jaxpd.life import Stage
from jaxpd.request import Event, FinishEvent, FinishReason, Request, TokenLogprobs
from jaxpd.structured import StructuredOutput
from serving.gateway import Gateway
from serving.messages import Finished, GenerateRequest, Message, Tokens, Understood, collect
from serving.observer import Observer, Origin

Opened = Callable[..., tuple[Gateway, Any]]
ANY_JSON = StructuredOutput(kind="json_object")


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)


async def read(gateway: Gateway, asked: GenerateRequest) -> list[Message]:
    async with contextlib.aclosing(gateway.stream(asked)) as messages:
        return [message async for message in messages]


def test_samples_have_their_own_text_tokens_and_finish(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        messages = await read(gateway, GenerateRequest(text="abcd", n=3, max_tokens=4))
        assert isinstance(messages[0], Understood) and messages[0].params.n == 3
        answer = collect(messages)
        assert [s.text for s in answer.samples] == ["abcd", "bcda", "cdab"]
        assert [s.index for s in answer.samples] == [s.finished.sample for s in answer.samples] == [0, 1, 2]
        assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens == 4
        for sample in range(3):
            pieces = [m for m in messages if isinstance(m, Tokens) and m.sample == sample]
            assert [p.first_index for p in pieces] == [sum(p.count for p in pieces[:i]) for i in range(len(pieces))]
        assert await gateway.idle(0) and engine.running == 0
        engine.close()

    asyncio.run(run())


def test_a_stop_string_ends_the_sample_that_wrote_it_and_no_other(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.002)
        asked = GenerateRequest(text="abcdefghij", n=2, max_tokens=9, stop=("ab", "ja"))
        answer = await gateway.generate(asked)
        first, second = answer.samples
        assert (first.text, first.finished.stop_string, first.finished.usage.completion_tokens) == ("", "ab", 2)
        assert (second.text, second.finished.reason) == ("bcdefghij", FinishReason.LENGTH)
        assert engine.aborts.count(answer.understood.request_id) >= 1
        engine.close()

    asyncio.run(run())


def test_logprobs_belong_to_the_tokens_that_are_told(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        asked = GenerateRequest(text="abc", max_tokens=5, logprobs=2, prompt_logprobs=0, stop=("ca",))
        messages = await read(gateway, asked)
        answer = collect(messages)
        assert answer.text == "ab" and len(answer.token_ids) == 4, "the token that completed the stop string belongs"
        logprobs = answer.samples[0].logprobs
        assert logprobs is not None and [entry.top[0][0] for entry in logprobs] == list(answer.token_ids)
        assert answer.prompt_logprobs == (TokenLogprobs(logprob=-0.5, top=()),) * 2
        plain = await gateway.generate(GenerateRequest(text="abc", max_tokens=5))
        assert plain.samples[0].logprobs is None and plain.prompt_logprobs is None
        engine.close()

    asyncio.run(run())


def test_the_timeline_is_there_when_asked_for(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        answer = await gateway.generate(GenerateRequest(text="abc", max_tokens=2, want_timeline=True))
        timeline = answer.finished.timeline
        assert timeline is not None and timeline[0].stage is Stage.ARRIVED and timeline[0].at_s == 0.0
        assert [m.at_s for m in timeline] == sorted(m.at_s for m in timeline)
        assert {Stage.CHUNK, Stage.ACCEPTED, Stage.FINISHED} <= {m.stage for m in timeline}
        assert (await gateway.generate(GenerateRequest(text="abc", max_tokens=2))).finished.timeline is None
        engine.close()

    asyncio.run(run())


def test_a_grammar_is_compiled_off_the_loop(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(submit_s=0.3)
        slow = asyncio.create_task(gateway.generate(GenerateRequest(text="abc", max_tokens=3, structured=ANY_JSON)))
        await asyncio.sleep(0.02)
        began = time.monotonic()
        await gateway.generate(GenerateRequest(text="abc", max_tokens=3))
        assert time.monotonic() - began < 0.2 and not slow.done()
        assert (await slow).text == "abc"
        engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("refused", [False, True])
def test_a_client_that_leaves_while_a_grammar_compiles_leaves_nothing(opened: Opened, refused: bool) -> None:
    async def run() -> None:
        gateway, engine = opened(submit_s=0.1, step_s=0.001, max_queued=0 if refused else 64)
        asked = GenerateRequest(text="abc", max_tokens=4000, structured=ANY_JSON, request_id="mine")
        task = asyncio.create_task(gateway.generate(asked))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gateway.in_use("mine"), "its thread is not done"
        await until(lambda: not gateway.in_use("mine") and engine.running == 0)
        assert len(engine.submitted) == (0 if refused else 1) and await gateway.idle(0)
        engine.close()

    asyncio.run(run())


def test_abort_while_a_grammar_compiles(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(submit_s=0.1, step_s=0.001)
        asked = GenerateRequest(text="abc", max_tokens=4000, structured=ANY_JSON, request_id="mine", n=2)
        task = asyncio.create_task(gateway.generate(asked))
        await asyncio.sleep(0.03)
        assert gateway.abort("mine")
        answer = await task
        assert [s.finished.reason for s in answer.samples] == [FinishReason.ABORT] * 2
        await until(lambda: engine.running == 0 and not gateway.in_use("mine"))
        engine.close()

    asyncio.run(run())


class Recorder(Observer):
    """Notes what it hears."""

    def __init__(self, faulty: bool = False) -> None:
        self.heard: list[str] = []
        self.tokens = 0
        self.told = 0
        self._faulty = faulty

    def _note(self, what: str) -> None:
        self.heard.append(what)
        if self._faulty:
            raise ZeroDivisionError("an observer's own fault")

    def arrived(self, request_id: str, origin: Origin) -> None:
        self._note(f"arrived {origin.front}")

    def refused(self, request_id: str, origin: Origin, error: JaxpdError) -> None:
        self._note(f"refused {error.code}")

    def submitted(self, request: Request, origin: Origin) -> None:
        self._note("submitted")

    def progressed(self, events: Sequence[Event]) -> None:
        self.tokens += sum(len(e.token_ids) for e in events if not isinstance(e, FinishEvent))

    def sent(self, tokens: int) -> None:
        self.told += tokens

    def finished(self, request: Request, origin: Origin, event: FinishEvent) -> None:
        self._note(f"finished {event.sample} {event.reason}")


@pytest.mark.parametrize("submit_s", [0.0, 0.05])
def test_observers_hear_of_everything_and_their_faults_harm_nobody(scripted: Any, submit_s: float) -> None:
    async def run() -> None:
        faulty, recorder = Recorder(faulty=True), Recorder()
        gateway = Gateway(observers=(faulty, recorder))
        engine = scripted.ScriptedEngine(gateway.on_events, submit_s=submit_s)
        engine.start()
        gateway.open(engine, scripted.served_model(scripted.byte_tokenizer()))
        asked = GenerateRequest(text="abc", max_tokens=3, n=2, structured=ANY_JSON if submit_s else None)
        answer = await gateway.generate(asked, Origin(front="grpc"))
        assert answer.text == "abc"
        expected = ["arrived grpc", "submitted", "finished 0 length", "finished 1 length"]
        assert sorted(recorder.heard) == sorted(expected) and recorder.heard[0] == expected[0]
        assert recorder.tokens == recorder.told == 6 and faulty.heard == recorder.heard
        recorder.heard.clear()
        engine.max_queued = 0
        with pytest.raises(ResourceExhausted):
            await gateway.generate(asked)
        assert recorder.heard == ["arrived local", "refused RESOURCE_EXHAUSTED"]
        engine.close()

    asyncio.run(run())


def test_an_aborted_message_is_one_finish_a_sample(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.002)
        asked = GenerateRequest(text="abc", max_tokens=4000, n=3, request_id="mine")
        task = asyncio.create_task(read(gateway, asked))
        await until(lambda: engine.running == 3)
        assert gateway.abort("mine")
        ends = [m for m in await task if isinstance(m, Finished)]
        assert sorted(end.sample for end in ends) == [0, 1, 2] and {e.reason for e in ends} == {FinishReason.ABORT}
        engine.close()

    asyncio.run(run())
