"""The gateway over a scripted engine that echoes the prompt's bytes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from jaxpd.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from jaxpd.request import FinishEvent, FinishReason, SamplingParams, Timings, TokensEvent, Usage
from jaxpd.text import TextStream
from serving import gateway as gateway_module
from serving import understand
from serving.gateway import Gateway, State
from serving.messages import Finished, GenerateRequest, Message, Tokens, Understood

Opened = Callable[..., tuple[Gateway, Any]]


async def read(gateway: Gateway, request: GenerateRequest) -> list[Message]:
    return [message async for message in gateway.stream(request)]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")


def test_first_message_fills_in_what_was_not_set(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(max_model_len=100)
        first = (await read(gateway, GenerateRequest(text="abc")))[0]
        second = (await read(gateway, GenerateRequest(text="abc", want_prompt_ids=True)))[0]
        assert isinstance(first, Understood) and isinstance(second, Understood)
        assert first.prompt_tokens == 3 and first.prompt_ids is None and second.prompt_ids == (97, 98, 99)
        assert first.params.max_tokens == 97, "128, or what the model's length leaves"
        assert first.params.temperature == 0.0 and first.params.ignore_eos is False
        assert first.params.seed is not None and first.params.seed != second.params.seed
        assert first.want_text and first.want_token_ids
        assert first.request_id != second.request_id and len(first.request_id) == 16
        assert [request.params for request in engine.submitted] == [first.params, second.params]
        engine.close()

    asyncio.run(run())


def test_what_was_set_to_zero_stays_zero(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        asked = GenerateRequest(token_ids=(1,), seed=0, temperature=0.0, max_tokens=1, ignore_eos=False)
        await read(gateway, asked)
        assert engine.submitted[0].params == SamplingParams(max_tokens=1, seed=0)
        with pytest.raises(InvalidArgument, match="max_tokens=0"):
            await read(gateway, GenerateRequest(token_ids=(1,), max_tokens=0))
        engine.close()

    asyncio.run(run())


def test_text_never_breaks_a_character(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.002)
        prompt = "aé€😀"
        messages = await read(gateway, GenerateRequest(text=prompt, max_tokens=10))
        tokens = [m for m in messages if isinstance(m, Tokens)]
        assert "".join(m.text or "" for m in tokens) == prompt
        assert not any("\ufffd" in (m.text or "") for m in tokens)
        assert [i for m in tokens for i in m.token_ids] == list(prompt.encode())
        assert [m.first_index for m in tokens] == [sum(m.count for m in tokens[:k]) for k in range(len(tokens))]
        # cut in the middle of a character, the rest comes out as U+FFFD with the last message
        answer = await gateway.generate(GenerateRequest(text="a€", max_tokens=3))
        assert answer.text == "a\ufffd" and answer.token_ids == (97, 0xE2, 0x82)
        engine.close()

    asyncio.run(run())


def test_stop_string_across_tokens(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.005)
        asked = GenerateRequest(text="one END two", stop=("never", " END"), max_tokens=500, request_id="s")
        messages = await read(gateway, asked)
        tokens = [m for m in messages if isinstance(m, Tokens)]
        finished = messages[-1]
        assert isinstance(finished, Finished)
        assert "".join(m.text or "" for m in tokens) == "one"
        assert [i for m in tokens for i in m.token_ids] == list(b"one END")
        assert finished.reason is FinishReason.STOP and finished.stop_string == " END"
        assert finished.usage == Usage(prompt_tokens=11, completion_tokens=7)
        assert engine.aborts == ["s"], "the engine was told, and once"
        assert engine.running == 0
        engine.close()

    asyncio.run(run())


def test_stop_string_in_a_pile_of_tokens_drops_what_follows(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        stream = gateway.stream(GenerateRequest(text="abcdefgh", stop=("d",), max_tokens=8, request_id="s"))
        await anext(stream)
        await until(lambda: engine.running == 0)  # all eight tokens and the finish wait in one pile
        await asyncio.sleep(0.01)
        rest = [message async for message in stream]
        assert rest[0] == Tokens(first_index=0, count=4, token_ids=tuple(b"abcd"), text="abc")
        assert isinstance(rest[1], Finished) and len(rest) == 2
        assert rest[1].reason is FinishReason.STOP and rest[1].usage.completion_tokens == 4
        engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("by", ["eos", "stop_token_id"])
def test_the_token_that_stops_is_in_the_ids_and_not_in_the_text(opened: Opened, by: str) -> None:
    async def run() -> None:
        gateway, engine = opened()
        last = 256 if by == "eos" else ord("c")
        asked = GenerateRequest(token_ids=(97, 98, last), stop_token_ids=() if by == "eos" else (last,))
        answer = await gateway.generate(asked)
        assert answer.token_ids == (97, 98, last) and answer.text == "ab"
        assert answer.finished.reason is FinishReason.STOP and answer.finished.stop_token_id == last
        assert answer.usage.completion_tokens == 3
        engine.close()

    asyncio.run(run())


def test_ignored_eos_goes_on_and_stays_out_of_the_text(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        answer = await gateway.generate(GenerateRequest(token_ids=(97, 256, 98), ignore_eos=True, max_tokens=3))
        assert answer.token_ids == (97, 256, 98) and answer.text == "ab"
        assert answer.finished.reason is FinishReason.LENGTH and answer.finished.stop_token_id is None
        engine.close()

    asyncio.run(run())


def test_only_what_was_asked_for(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        ids = await gateway.generate(GenerateRequest(text="ab", want_text=False, max_tokens=2))
        text = await gateway.generate(GenerateRequest(text="ab", want_token_ids=False, max_tokens=2))
        assert ids.token_ids == (97, 98) and ids.text == ""
        assert text.token_ids == () and text.text == "ab" and text.usage.completion_tokens == 2
        with pytest.raises(InvalidArgument, match="neither text nor token_ids"):
            await gateway.generate(GenerateRequest(text="ab", want_text=False, want_token_ids=False))
        engine.close()

    asyncio.run(run())


def test_a_model_without_tokenizer(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(tokenizer=False)
        answer = await gateway.generate(GenerateRequest(token_ids=(5, 6), max_tokens=2))
        assert answer.token_ids == (5, 6) and answer.text == "" and not answer.understood.want_text
        for asked in (
            GenerateRequest(text="a"),
            GenerateRequest(chat=({"role": "user", "content": "a"},)),
            GenerateRequest(token_ids=(1,), want_text=True),
            GenerateRequest(token_ids=(1,), stop=("a",)),
        ):
            with pytest.raises(InvalidArgument, match="tokenizer"):
                await gateway.generate(asked)
        assert len(engine.submitted) == 1
        engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (GenerateRequest(), "exactly one of text, token_ids and chat; got none"),
        (GenerateRequest(text="a", token_ids=(1,)), "got text and token_ids"),
        (GenerateRequest(text=""), "text is empty"),
        (GenerateRequest(token_ids=()), "token_ids is empty"),
        (GenerateRequest(chat=()), "chat is empty"),
        (GenerateRequest(token_ids=(1, 257)), r"257, which is outside the vocabulary 0..256"),
        (GenerateRequest(token_ids=(-1, 5)), r"-1, which is outside the vocabulary"),
        (GenerateRequest(text="abc", max_tokens=98), r"max_tokens=98 .* 3 tokens makes 101, above the limit of 100"),
        (GenerateRequest(token_ids=(1,) * 100), r"above the limit of 100"),
        (GenerateRequest(token_ids=(1,) * 101), r"prompt has 101 tokens, above the limit of 100 "),
        (GenerateRequest(text="a", stop=("b",) * 65), r"stop holds 65 strings, the limit is 64"),
        (GenerateRequest(text="a", stop=("b" * 1025,)), r"a string of 1025 characters, the limit is 1024"),
        (GenerateRequest(text="a", stop_token_ids=(1,) * 1025), r"stop_token_ids holds 1025 ids, the limit is 1024"),
        (GenerateRequest(text="a", max_tokens=-1), r"max_tokens=-1 must be at least 1"),
        (GenerateRequest(text="a", temperature=-0.5), r"temperature=-0.5 must be between 0"),
        (GenerateRequest(text="a", temperature=float("nan")), r"temperature=nan"),
        (GenerateRequest(text="a", seed=2**32), r"seed=4294967296 must be between 0 and 4294967295"),
        (GenerateRequest(text="a", stop=("",)), r"stop holds an empty string"),
        (GenerateRequest(text="a", stop_token_ids=(999,)), r"stop_token_ids holds 999"),
        (GenerateRequest(text="a", request_id=""), r"request_id='' must be 1 to 128 visible ASCII"),
        (GenerateRequest(text="a", request_id="x" * 129), r"\(129 characters\) must be 1 to 128"),
        (GenerateRequest(text="a", request_id="a b"), r"request_id='a b'"),
    ],
)
def test_bad_requests_name_field_value_and_limit(opened: Opened, asked: GenerateRequest, message: str) -> None:
    async def run() -> None:
        gateway, engine = opened(max_model_len=100)
        with pytest.raises(InvalidArgument, match=message):
            await read(gateway, asked)
        assert engine.submitted == [] and engine.aborts == []
        assert await gateway.idle(0), "nothing is left of it"
        # and the next one is served
        assert (await gateway.generate(GenerateRequest(text="ok", max_tokens=2))).text == "ok"
        engine.close()

    asyncio.run(run())


def test_slow_reader_gets_few_long_messages(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened()
        stream = gateway.stream(GenerateRequest(text="abcde", max_tokens=1000))
        got = [await anext(stream)]
        await until(lambda: engine.running == 0)
        await asyncio.sleep(0.01)
        got += [message async for message in stream]
        assert len(got) <= 4
        tokens = [m for m in got if isinstance(m, Tokens)]
        assert [i for m in tokens for i in m.token_ids] == list(b"abcde" * 200)
        engine.close()

    asyncio.run(run())


def test_a_step_is_one_hop_onto_the_loop(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        gateway, engine = opened()
        hops = 0
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def counted(*args: Any) -> Any:
            nonlocal hops
            hops += 1
            return original(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        events: list[Any] = [TokensEvent(request_id=str(i), first_index=0, token_ids=(1,)) for i in range(100)]
        gateway.on_events(events)
        assert hops == 1
        engine.close()

    asyncio.run(run())


def test_cancelling_aborts_and_the_id_is_free_after_the_finish(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.002)
        asked = GenerateRequest(text="abc", max_tokens=4000, request_id="mine")
        task = asyncio.create_task(gateway.generate(asked))
        await until(lambda: engine.running == 1)
        with pytest.raises(InvalidArgument, match="request_id='mine' is in use"):
            await gateway.generate(asked)
        assert engine.aborts == [], "the refused twin must not end the first one"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert engine.aborts == ["mine"]
        await until(lambda: engine.running == 0 and not gateway._live)
        assert (await gateway.generate(GenerateRequest(text="ab", max_tokens=2, request_id="mine"))).text == "ab"
        engine.close()

    asyncio.run(run())


def test_a_late_finish_cannot_end_the_next_request_of_that_id(scripted: ModuleType) -> None:
    class Holding:
        """Takes requests and says nothing until it is told to."""

        def submit(self, request: Any) -> None:
            self.request = request

        def abort(self, request_id: str, *, sample: int | None = None) -> bool:
            return True

        def stats(self) -> Any:
            raise NotImplementedError

    async def run() -> None:
        gateway, engine = Gateway(), Holding()
        gateway.open(engine, scripted.served_model(None))
        asked = GenerateRequest(token_ids=(1,), request_id="mine", max_tokens=5)
        async with contextlib.aclosing(gateway.stream(asked)) as stream:
            await anext(stream)
        with pytest.raises(InvalidArgument, match="is in use"):
            await gateway.generate(asked)
        gateway.on_events([TokensEvent(request_id="mine", first_index=0, token_ids=(1,))])
        await asyncio.sleep(0.01)
        assert gateway._live["mine"].samples[0].pending == [], "nothing is kept for a reader that left"
        usage = Usage(prompt_tokens=1, completion_tokens=0)
        gateway.on_events([FinishEvent(request_id="mine", reason=FinishReason.ABORT, usage=usage, timings=Timings())])
        await asyncio.sleep(0.01)
        async with contextlib.aclosing(gateway.stream(asked)) as stream:
            assert isinstance(await anext(stream), Understood)

    asyncio.run(run())


def test_abort_gives_the_reader_what_was_made(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.002)
        task = asyncio.create_task(gateway.generate(GenerateRequest(text="abc", max_tokens=4000, request_id="a")))
        await until(lambda: engine.running == 1 and engine._running["a", 0].made > 5)
        assert gateway.abort("a") is True
        answer = await task
        assert answer.finished.reason is FinishReason.ABORT and len(answer.token_ids) == answer.usage.completion_tokens
        assert gateway.abort("a") is False and gateway.abort("never") is False
        engine.close()

    asyncio.run(run())


def test_abort_while_tokenizing_never_reaches_the_engine(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    original = understand.prompt_ids_of

    def slow(*args: Any) -> tuple[int, ...]:
        time.sleep(0.2)
        return original(*args)

    monkeypatch.setattr(gateway_module, "prompt_ids_of", slow)

    async def run() -> None:
        gateway, engine = opened(max_model_len=10_000)
        task = asyncio.create_task(gateway.generate(GenerateRequest(text="a" * 5000, max_tokens=3, request_id="a")))
        began = time.monotonic()
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < 0.15, "a long prompt is tokenized off the loop"
        assert gateway.abort("a") is True
        answer = await task
        assert answer.finished.reason is FinishReason.ABORT
        assert answer.usage == Usage(prompt_tokens=5000, completion_tokens=0)
        assert engine.submitted == [] and await gateway.idle(0)
        engine.close()

    asyncio.run(run())


def test_failed_request_gives_its_tokens_then_its_error_and_hurts_nobody(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.002, fail_with=Internal("the device was lost"))
        good = asyncio.create_task(gateway.generate(GenerateRequest(text="good", max_tokens=8)))
        messages = await read(gateway, GenerateRequest(text="!bad", max_tokens=8))
        finished = messages[-1]
        assert isinstance(finished, Finished) and finished.reason is FinishReason.ERROR
        assert isinstance(finished.error, Internal)
        assert [i for m in messages if isinstance(m, Tokens) for i in m.token_ids] == list(b"!b")
        with pytest.raises(Internal, match="the device was lost"):
            await gateway.generate(GenerateRequest(text="!bad", max_tokens=8))
        assert (await good).text == "goodgood"
        engine.close()

    asyncio.run(run())


def test_a_bug_while_reading_aborts_the_request(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.002)
        monkeypatch.setattr(TextStream, "push", lambda self, ids: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await gateway.generate(GenerateRequest(text="abc", max_tokens=4000, request_id="a"))
        assert engine.aborts == ["a"]
        await until(lambda: engine.running == 0)
        engine.close()

    asyncio.run(run())


def test_full_queue(opened: Opened) -> None:
    async def run() -> None:
        gateway, engine = opened(step_s=0.01, max_queued=1)
        first = asyncio.create_task(gateway.generate(GenerateRequest(text="abc", max_tokens=10)))
        await until(lambda: engine.running == 1)
        with pytest.raises(ResourceExhausted) as caught:
            await gateway.generate(GenerateRequest(text="abc"))
        assert caught.value.retry_after_s == 2.5
        assert (await first).text == "abcabcabca" and engine.aborts == []
        engine.close()

    asyncio.run(run())


def test_states(opened: Opened, scripted: ModuleType) -> None:
    async def run() -> None:
        new = Gateway()
        assert new.state is State.STARTING
        with pytest.raises(Unavailable, match="starting"):
            await new.generate(GenerateRequest(text="a"))
        gateway, engine = opened(step_s=0.01)
        running = asyncio.create_task(gateway.generate(GenerateRequest(text="abc", max_tokens=10)))
        await until(lambda: engine.running == 1)
        gateway.close_doors()
        with pytest.raises(Unavailable, match="shutting down"):
            await gateway.generate(GenerateRequest(text="a"))
        assert not await gateway.idle(0.01)
        assert (await running).text == "abcabcabca"
        assert await gateway.idle(0)
        engine.close()

    asyncio.run(run())


def test_events_after_the_loop_has_ended_are_dropped(opened: Opened) -> None:
    async def run() -> Gateway:
        gateway, engine = opened()
        engine.close()
        return gateway

    asyncio.run(run()).on_events([])
