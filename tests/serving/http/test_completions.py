"""`/v1/completions` over a scripted engine, which answers with the prompt again and again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.request import FinishReason, SamplingParams, Timings, Usage
from serving.http.openai.chat_reply import ChatReply, ChatWriter
from serving.http.openai.completions import CompletionWriter, Reply
from serving.http.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from serving.http.openai.sse import ChunkWriter
from serving.messages import Finished, Tokens, Understood

PATH = "/v1/completions"


def ask(http_app: Callable[..., Any], body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The body of a whole answer."""

    async def run() -> Any:
        async with http_app(**options) as running:
            response = await running.post(PATH, body)
            assert response.status_code == 200, response.text
            return response.json()

    return asyncio.run(run())


def events(http_app: Callable[..., Any], body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The events of a stream."""

    async def run() -> Any:
        async with http_app(**options) as running:
            return await running.events(PATH, body)

    return asyncio.run(run())


def test_the_shape_of_an_answer(http_app: Callable[..., Any]) -> None:
    answer = ask(http_app, {"model": "bytes", "prompt": "abc"})
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "bytes")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "abcabcabcabcabca",  # 16 tokens: OpenAI's default
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (["abc"], ["abca"]),
        (["abc", "xy"], ["abca", "xyxy"]),
        ([97, 98, 99], ["abca"]),
        ([[97, 98, 99], [120]], ["abca", "xxxx"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_four_forms_of_a_prompt(http_app: Callable[..., Any], prompt: Any, texts: list[str], stream: bool) -> None:
    body = {"prompt": prompt, "max_tokens": 4}
    if not stream:
        answer = ask(http_app, body)
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        assert answer["usage"]["completion_tokens"] == 4 * len(texts)
        return
    got = [""] * len(texts)
    for event in events(http_app, body):
        for choice in event["choices"]:
            got[choice["index"]] += choice["text"]
    assert got == texts


def test_samples_of_several_prompts_are_numbered_through(http_app: Callable[..., Any]) -> None:
    body = {"prompt": ["abc", "xyz"], "n": 2, "best_of": 2, "max_tokens": 3}
    answer = ask(http_app, body)
    texts = ["abc", "bca", "xyz", "yzx"]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == 6, "a prompt counts once, whatever n is"
    streamed = ["", "", "", ""]
    for event in events(http_app, body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


def test_a_stream_of_n_tokens_has_n_events(http_app: Callable[..., Any]) -> None:
    got = events(http_app, {"prompt": "abc", "max_tokens": 4}, step_s=0.02)
    assert [event["choices"][0]["text"] for event in got] == ["a", "b", "c", "a"]
    assert [event["choices"][0]["finish_reason"] for event in got] == [None, None, None, "length"]
    assert len({event["id"] for event in got}) == 1
    assert all("usage" not in event for event in got), "some readers look into choices[0] of every event"


def test_usage_comes_when_it_is_asked_for(http_app: Callable[..., Any]) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, last = events(http_app, body, step_s=0.02)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 6
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(http_app, body, step_s=0.02)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_echo_with_logprobs_as_lm_eval_asks(http_app: Callable[..., Any]) -> None:
    body = {
        "prompt": [[97, 98, 99], [120, 121]],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    first, second = ask(http_app, body)["choices"]
    assert first["text"] == "abca"
    assert first["logprobs"] == {
        "tokens": ["a", "b", "c", "a"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"c": -0.5}, {"a": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert len(second["logprobs"]["token_logprobs"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_makes_nothing_new(http_app: Callable[..., Any], stream: bool) -> None:
    body = {
        "prompt": "abc",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
        "stream_options": {"include_usage": True},
    }
    if stream:
        chunk, last = events(http_app, body)
        choice, usage = chunk["choices"][0], last["usage"]
    else:
        answer = ask(http_app, body)
        choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 3)


def test_echo_of_a_prompt_of_one_token(http_app: Callable[..., Any]) -> None:
    (choice,) = ask(http_app, {"prompt": [97], "max_tokens": 1, "echo": True, "logprobs": 1})["choices"]
    assert choice["text"] == "aa"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]


def test_a_stream_echoes_with_its_first_token(http_app: Callable[..., Any]) -> None:
    got = events(http_app, {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 2}, step_s=0.02)
    choices = [event["choices"][0] for event in got]
    assert [choice["text"] for choice in choices] == ["abca", "b"]
    assert choices[0]["logprobs"]["tokens"] == ["a", "b", "c", "a"]
    assert choices[1]["logprobs"]["text_offset"] == [4]


def test_logprobs_of_tokens_that_are_no_characters(http_app: Callable[..., Any]) -> None:
    (choice,) = ask(http_app, {"prompt": "é", "max_tokens": 2, "logprobs": 0})["choices"]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert choice["logprobs"]["text_offset"] == [0, 0]


def test_a_character_in_two_tokens_is_one_event(http_app: Callable[..., Any]) -> None:
    got = events(http_app, {"prompt": "aé", "max_tokens": 4}, step_s=0.02)
    assert [event["choices"][0]["text"] for event in got] == ["a", "é", "a"]
    assert got[-1]["choices"][0]["finish_reason"] == "length"


def test_token_ids_of_prompt_and_answer(http_app: Callable[..., Any]) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "return_token_ids": True}
    (choice,) = ask(http_app, body)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98, 99], [97, 98])
    first, second = (event["choices"][0] for event in events(http_app, body, step_s=0.02))
    assert (first["prompt_token_ids"], first["token_ids"]) == ([97, 98, 99], [97])
    assert "prompt_token_ids" not in second
    assert second["token_ids"] == [98]


def test_prompt_logprobs(http_app: Callable[..., Any]) -> None:
    (choice,) = ask(http_app, {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1})["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


def test_stop_string_and_stop_token(http_app: Callable[..., Any]) -> None:
    (choice,) = ask(http_app, {"prompt": "abcd", "stop": "cd"})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    (choice,) = ask(http_app, {"prompt": "abcd", "stop_token_ids": [99]})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", 99)
    (choice,) = ask(http_app, {"prompt": [97, 256]})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
    *_, last = events(http_app, {"prompt": "abcd", "stop": ["x", "cd"]})
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", "cd")


def test_timings_and_timeline(http_app: Callable[..., Any]) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "timings": True}
    *_, last = events(http_app, body)
    for choice in (ask(http_app, body)["choices"][0], last["choices"][0]):
        assert choice["timings"]["ttft_s"] == 0.25
        stages = [moment["stage"] for moment in choice["timeline"]]
        assert stages[0] == "arrived" and stages[-1] == "finished" and "transferred" in stages
        assert choice["timeline"][0]["at_s"] == 0


def options_of(http_app: Callable[..., Any], body: dict[str, Any]) -> Any:
    """The request that reached the engine."""

    async def run() -> Any:
        async with http_app() as running:
            response = await running.post(PATH, body)
            assert response.status_code == 200, response.text
            return running.engine.submitted[0]

    return asyncio.run(run())


def test_defaults_are_openais(http_app: Callable[..., Any]) -> None:
    params = options_of(http_app, {"prompt": "a", "temperature": None, "logprobs": None, "stop": None}).params
    assert (params.temperature, params.max_tokens, params.n, params.logprobs) == (1.0, 16, 1, None)
    assert params.seed is not None


def test_options_reach_the_engine(http_app: Callable[..., Any]) -> None:
    request = options_of(
        http_app,
        {
            "prompt": "a",
            "temperature": 0,
            "top_p": 0.5,
            "top_k": -1,
            "min_p": 0.1,
            "seed": -1,
            "presence_penalty": 1,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"97": 5, "98": -1.5},
            "min_tokens": 2,
            "ignore_eos": True,
            "stop": ["zz"],
            "stop_token_ids": [3],
            "priority": -7,
            "cache_salt": "tenant",
            "user": "somebody",
            "structured_outputs": {"regex": "a+"},
            "a_key_that_nobody_knows": {"x": 1},
        },
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 0, 0.1)
    assert params.seed == 2**32 - 1, "a seed of 64 bits is folded into ours"
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -0.5, 1.5)
    assert dict(params.logit_bias) == {97: 5, 98: -1.5}
    assert (params.min_tokens, params.ignore_eos, params.stop, params.stop_token_ids) == (2, True, ("zz",), (3,))
    assert (request.priority, request.cache_salt) == (-7, "tenant")
    assert (params.structured.kind, params.structured.text) == ("regex", "a+")


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**63 - 1, -(2**63)])
def test_seeds_are_the_same_every_time(http_app: Callable[..., Any], seed: int) -> None:
    assert options_of(http_app, {"prompt": "a", "seed": seed}).params.seed == seed % 2**32


def test_a_model_without_a_tokenizer_speaks_ids(http_app: Callable[..., Any]) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
    (choice,) = ask(http_app, body, tokenizer=False)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [1, 2])
    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2"]


def test_text_that_comes_behind_its_tokens_is_not_lost(scripted: Any) -> None:
    """The engine may say later that it was the last token, and only then is half a character shown."""
    model = scripted.served_model(scripted.byte_tokenizer())
    usage, params = Usage(prompt_tokens=1, completion_tokens=2), SamplingParams(max_tokens=2, seed=0)
    end = Finished(reason=FinishReason.LENGTH, usage=usage, timings=Timings())
    begin = Understood(
        request_id="r", prompt_tokens=1, prompt_ids=None, params=params, want_text=True, want_token_ids=False
    )
    writers: list[ChunkWriter] = [
        CompletionWriter(Reply(CompletionRequest(prompt="x"), model, "cmpl-r")),
        ChatWriter(ChatReply(ChatRequest(messages=[]), model, "chatcmpl-r", None)),
    ]
    for writer in writers:
        writer.begin(0, begin)
        messages = (
            Tokens(first_index=0, count=2, token_ids=(), text="a"),
            Tokens(first_index=2, count=0, token_ids=(), text="\ufffd"),
            end,
        )
        (event,) = [chunk for message in messages if (chunk := writer.chunk(0, message))]
        choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
        assert (choice.get("text") or choice["delta"]["content"]) == "a\ufffd"
        assert choice["finish_reason"] == "length"


def test_usage_counts_all_tokens_of_a_message(scripted: Any) -> None:
    model = scripted.served_model(scripted.byte_tokenizer())
    body = CompletionRequest(prompt="x", stream_options=StreamOptions(continuous_usage_stats=True))
    writer = CompletionWriter(Reply(body, model, "cmpl-r"))
    params = SamplingParams(max_tokens=9, seed=0)
    writer.begin(
        0,
        Understood(
            request_id="r", prompt_tokens=1, prompt_ids=None, params=params, want_text=True, want_token_ids=False
        ),
    )
    chunks = [writer.chunk(0, Tokens(first_index=i, count=3, token_ids=(), text="abc")) for i in (0, 3)]
    made = [json.loads(chunk.removeprefix(b"data: "))["usage"]["completion_tokens"] for chunk in chunks]
    assert made == [3, 6]


def test_an_answer_with_much_to_write_leaves_the_others_their_turn(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            body = {"prompt": "abc", "n": 8, "max_tokens": 500, "logprobs": 20}
            response = await running.post(PATH, body)
            assert [len(choice["logprobs"]["tokens"]) for choice in response.json()["choices"]] == [500] * 8

    asyncio.run(run())
