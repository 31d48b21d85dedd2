"""`/v1/chat/completions` over a scripted engine, which answers with the prompt again and again: its template writes
`role:content;`, so that what the messages say is what the model says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.tokenizer import Tokenizer
from serving.callers import Caller, Keys

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
# The prompt is the last message's content alone, and the answer so as well.
ECHO = (
    "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if tools %}{% endif %}{#<tool_call></think>#}"  # what a template's marks are found by
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


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


@pytest.fixture
def echoing(opened: Callable[..., Any], http_app: Callable[..., Any], scripted: Any) -> Callable[..., Any]:
    """`echoing(text, body, stream)`: the choice, or the deltas, of a model that answers `text`."""

    def run(text: str, body: dict[str, Any], *, stream: bool) -> Any:
        async def inside() -> Any:
            async with http_app() as running:
                model = scripted.served_model(scripted.byte_tokenizer())
                model.tokenizer.chat_template = ECHO
                running.gateway.open(running.engine, model)
                length = len(text.encode())
                asked = {"messages": [{"role": "user", "content": text}], "max_tokens": length, **body}
                if stream:
                    return [event["choices"][0] for event in await running.events(PATH, asked)]
                response = await running.post(PATH, asked)
                assert response.status_code == 200, response.text
                return response.json()["choices"][0]

        return asyncio.run(inside())

    return run


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas add up to."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, str]] = {}
    for choice in choices:
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
        for call in choice["delta"].get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
    return {**message, **({"tool_calls": [calls[i] for i in sorted(calls)]} if calls else {})}


def test_the_shape_of_an_answer(http_app: Callable[..., Any]) -> None:
    answer = ask(http_app, {"model": "bytes", "messages": HI, "max_completion_tokens": 5, "max_tokens": 3})
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "bytes")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "user:", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 5, "max_completion_tokens goes before max_tokens"


def test_a_stream_begins_with_role_and_first_token_together(http_app: Callable[..., Any]) -> None:
    got = events(http_app, {"messages": HI, "max_tokens": 3}, step_s=0.02)
    assert [event["choices"][0]["delta"] for event in got] == [
        {"role": "assistant", "content": "u"},
        {"content": "s"},
        {"content": "e"},
    ]
    assert [event["choices"][0]["finish_reason"] for event in got] == [None, None, "length"]
    assert {event["object"] for event in got} == {"chat.completion.chunk"}


def test_content_in_parts(http_app: Callable[..., Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    answer = ask(http_app, {"messages": messages, "max_tokens": 8})
    assert answer["choices"][0]["message"]["content"] == "user:ab;"


def test_without_max_tokens_the_context_is_filled(http_app: Callable[..., Any]) -> None:
    answer = ask(http_app, {"messages": HI}, max_model_len=40)
    assert answer["usage"]["total_tokens"] == 40
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_max_tokens_a_callers_limit_is_kept(http_app: Callable[..., Any]) -> None:
    keys = Keys({"secret": Caller(name="alice", max_tokens=30)})

    async def run() -> Any:
        async with http_app(keys=keys) as running:
            response = await running.post(PATH, {"messages": HI, "n": 2}, authorization="Bearer secret")
            return response.json()

    assert asyncio.run(run())["usage"]["completion_tokens"] == 2 * 11


def test_samples(http_app: Callable[..., Any]) -> None:
    body = {"messages": HI, "n": 2, "max_tokens": 3}
    assert [choice["message"]["content"] for choice in ask(http_app, body)["choices"]] == ["use", "ser"]
    got = ["", ""]
    roles = [0, 0]
    for event in events(http_app, body):
        choice = event["choices"][0]
        got[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
    assert (got, roles) == (["use", "ser"], [1, 1])


def test_logprobs(http_app: Callable[..., Any]) -> None:
    body = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    (choice,) = ask(http_app, body)["choices"]
    first, _ = choice["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("u", -0.5, [117])
    assert [entry["token"] for entry in first["top_logprobs"]] == ["u", "v"]
    streamed = [event["choices"][0]["logprobs"]["content"] for event in events(http_app, body)]
    assert [entry for part in streamed for entry in part] == choice["logprobs"]["content"]


def test_token_ids_stand_where_vllm_has_them(http_app: Callable[..., Any]) -> None:
    body = {"messages": HI, "max_tokens": 2, "return_token_ids": True}
    answer = ask(http_app, body)
    assert bytes(answer["prompt_token_ids"]) == b"user:hi;"
    assert bytes(answer["choices"][0]["token_ids"]) == b"us"
    first, *others = events(http_app, body, step_s=0.02)
    assert bytes(first["prompt_token_ids"]) == b"user:hi;"
    assert all("prompt_token_ids" not in event for event in others)
    ids = [token for event in (first, *others) for token in event["choices"][0]["token_ids"]]
    assert bytes(ids) == b"us"


def test_prompt_logprobs_stand_beside_the_choices(http_app: Callable[..., Any]) -> None:
    body = {"messages": HI, "max_tokens": 2, "prompt_logprobs": 0}
    assert len(ask(http_app, body)["prompt_logprobs"]) == 8
    first, *_ = events(http_app, body)
    assert first["prompt_logprobs"][0] is None and len(first["prompt_logprobs"]) == 8


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_apart(echoing: Callable[..., Any], stream: bool) -> None:
    got = echoing("<think>hm, so</think>\n\nYes.", {}, stream=stream)
    message = joined(got) if stream else got["message"]
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("hm, so", "Yes.")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(echoing: Callable[..., Any], stream: bool) -> None:
    body = {"tools": [WEATHER], "stop_token_ids": [ord("\x04")], "max_tokens": 500}
    got = echoing(f"Let me see. {CALL}\x04", body, stream=stream)
    if stream:
        message, reason = joined(got), got[-1]["finish_reason"]
        (call,) = message["tool_calls"]
        begins = [c for choice in got for c in choice["delta"].get("tool_calls", ()) if "id" in c]
        assert [(c["index"], c["type"]) for c in begins] == [(0, "function")]
    else:
        message, reason = got["message"], got["finish_reason"]
        (whole,) = message["tool_calls"]
        assert whole["type"] == "function" and whole["id"]
        call = whole["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Bern"})
    assert message["content"].strip() == "Let me see."
    assert reason == "tool_calls"


def test_an_answer_of_tool_calls_alone_has_no_content(echoing: Callable[..., Any]) -> None:
    got = echoing(CALL, {"tools": [WEATHER]}, stream=False)
    assert got["message"]["content"] is None
    assert got["finish_reason"] == "length", "it was cut there, whatever it holds"


def test_without_tools_a_call_is_content(echoing: Callable[..., Any]) -> None:
    assert echoing(CALL, {}, stream=False)["message"]["content"] == CALL


def submitted(http_app: Callable[..., Any], scripted: Any, body: dict[str, Any], template: str = ECHO) -> Any:
    """The request that reached the engine."""

    async def run() -> Any:
        async with http_app() as running:
            tokenizer: Tokenizer = scripted.byte_tokenizer()
            tokenizer.chat_template = template
            running.gateway.open(running.engine, scripted.served_model(tokenizer))
            response = await running.post(PATH, {"messages": HI, "max_tokens": 2, **body})
            assert response.status_code == 200, response.text
            return running.engine.submitted[0]

    return asyncio.run(run())


def test_response_formats(http_app: Callable[..., Any], scripted: Any) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert submitted(http_app, scripted, {"response_format": {"type": "text"}}, plain).params.structured is None
    any_json = submitted(http_app, scripted, {"response_format": {"type": "json_object"}}, plain).params.structured
    assert any_json.kind == "json_object"
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    structured = submitted(http_app, scripted, {"response_format": wanted}, plain).params.structured
    assert (structured.kind, json.loads(structured.text)) == ("json_schema", schema)


def test_a_tool_choice_is_forced_by_a_grammar(http_app: Callable[..., Any], scripted: Any) -> None:
    body = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    structured = submitted(http_app, scripted, body).params.structured
    assert structured.kind == "grammar" and "weather" in structured.text


def test_template_options(http_app: Callable[..., Any], scripted: Any) -> None:
    template = "{{ reasoning_effort }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"chat_template_kwargs": {"mood": "grim"}, "reasoning_effort": "low"}
    request = submitted(http_app, scripted, body, template)
    assert bytes(request.prompt_ids) == b"lowgrimhi"
