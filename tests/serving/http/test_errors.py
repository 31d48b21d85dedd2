"""Every failure has OpenAI's shape, the right status and code, and names the field by the name that the client used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jaxpd.errors import Internal, InvalidArgument
from serving.gateway import Gateway

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def checked(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and "Traceback" not in response.text
    return error


def refused(http_app: Callable[..., Any], path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error that a body gets."""

    async def run() -> Any:
        async with http_app() as running:
            error = checked(await running.post(path, body), status)
            assert running.engine.running == 0
            return error

    return asyncio.run(run())


NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]

COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"store": True}, "store"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {"x": NESTED}}}, "structured_outputs.json"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_json": "{"}, "structured_outputs"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
]

CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "some"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"x": NESTED}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "structured_outputs"),
]  # fmt: skip


def test_faults_of_completions_name_their_field(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            for body, param in COMPLETION_FAULTS:
                response = await running.client.post(
                    COMPLETIONS,
                    content=json.dumps({"prompt": "a", **body}),
                    headers={"content-type": "application/json"},
                )
                error = checked(response, 400)
                assert (error["param"], error["type"]) == (param, "invalid_request_error"), (body, error)
                assert len(error["message"]) > 10, error
            assert running.engine.running == 0
            assert not running.engine.submitted

    asyncio.run(run())


def test_faults_of_chats_name_their_field(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            for body, param in CHAT_FAULTS:
                response = await running.client.post(
                    CHAT, content=json.dumps({"messages": HI, **body}), headers={"content-type": "application/json"}
                )
                error = checked(response, 400)
                assert (error["param"], error["type"]) == (param, "invalid_request_error"), (body, error)
            assert not running.engine.submitted

    asyncio.run(run())


@pytest.mark.parametrize(
    "extra",
    [
        {"audio": None, "functions": [], "store": False, "modalities": ["text"], "service_tier": "auto"},
        {"unknown": 1, "metadata": {"a": "b"}, "prompt_cache_key": "x", "safety_identifier": "y"},
        {"skip_special_tokens": True, "spaces_between_special_tokens": False, "length_penalty": 1.0},
    ],
)
def test_what_asks_for_nothing_is_let_through(http_app: Callable[..., Any], extra: dict[str, Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
                response = await running.post(path, {**body, "max_tokens": 1, **extra})
                assert response.status_code == 200, response.text

    asyncio.run(run())


def test_a_prompt_that_is_too_long(http_app: Callable[..., Any]) -> None:
    for path, body, param in (
        (COMPLETIONS, {"prompt": "a" * 4096}, "max_tokens"),
        (COMPLETIONS, {"prompt": [97] * 5000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 4096}]}, "messages"),
        (CHAT, {"messages": HI, "max_completion_tokens": 4096}, "max_completion_tokens"),
    ):
        error = refused(http_app, path, body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "4096" in error["message"]


def test_another_model(http_app: Callable[..., Any]) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI}), ("/tokenize", {"prompt": "a"})):
        error = refused(http_app, path, {**body, "model": "gpt-x"}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'bytes'" in error["message"]


def test_names_of_a_model(http_app: Callable[..., Any], scripted: Any) -> None:
    async def run() -> None:
        async with http_app() as running:
            model = scripted.served_model(scripted.byte_tokenizer()).called(["one", "two"])
            running.gateway.open(running.engine, model)
            for name in ("one", "two"):
                answer = await running.post(COMPLETIONS, {"prompt": "a", "model": name})
                assert answer.json()["model"] == name
            assert (await running.post(COMPLETIONS, {"prompt": "a"})).json()["model"] == "one"
            assert (await running.post(COMPLETIONS, {"prompt": "a", "model": "bytes"})).status_code == 404
            assert [card["id"] for card in (await running.client.get("/v1/models")).json()["data"]] == ["one", "two"]
            assert (await running.client.get("/v1/models/two")).json()["id"] == "two"
            assert (await running.client.get("/v1/models/a/b")).status_code == 404

    asyncio.run(run())


def test_routes_and_methods_that_are_not_there(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            error = checked(await running.client.get("/v2/nothing"), 404)
            assert error["code"] == "not_found"
            response = await running.client.get(COMPLETIONS)
            error = checked(response, 405)
            assert (error["code"], response.headers["allow"]) == ("method_not_allowed", "POST")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "content_type", "words"),
    [
        (b"", "application/json", "missing"),
        (b"{", "application/json", "not JSON"),
        (b"[]", "application/json", "JSON object"),
        (b'"x"', "application/json", "JSON object"),
        (b"\xff\xfe", "application/json", "not JSON"),
        (b'{"prompt":' + b"[" * 100_000, "application/json", "not JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json", "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "application/json", "temperature"),
        (b'{"prompt": "a"}', "text/plain", "content-type"),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", "content-type"),
    ],
)
def test_bodies_that_are_no_json(http_app: Callable[..., Any], content: bytes, content_type: str, words: str) -> None:
    async def run() -> None:
        async with http_app() as running:
            response = await running.client.post(COMPLETIONS, content=content, headers={"content-type": content_type})
            assert words in checked(response, 400)["message"]

    asyncio.run(run())


def test_a_full_queue_says_when_to_come_back(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app(max_queued=1, step_s=0.05) as running:
            first = asyncio.ensure_future(running.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20}))
            while not running.engine.running:
                await asyncio.sleep(0.01)
            for stream in (False, True):
                response = await running.post(COMPLETIONS, {"prompt": "a", "stream": stream})
                error = checked(response, 429)
                assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
            batch = await running.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": True})
            checked(batch, 429)
            assert (await first).status_code == 200

    asyncio.run(run())


def test_of_a_batch_that_does_not_fit_nothing_goes_on(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app(max_queued=2, step_s=0.05) as running:
            for stream in (False, True):
                response = await running.post(
                    COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 2000, "stream": stream}
                )
                checked(response, 429)
                async with asyncio.timeout(2):
                    while running.engine.running:
                        await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_server_that_starts_or_drains(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            running.gateway.close_doors()
            for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
                response = await running.post(path, body)
                checked(response, 503)
                assert int(response.headers["retry-after"]) >= 1
            checked(await running.client.get("/health"), 503)

    asyncio.run(run())


def test_an_answer_that_fails_half_way(http_app: Callable[..., Any]) -> None:
    fault = Internal("the device was lost")

    async def run() -> None:
        async with http_app(fail_with=fault, step_s=0.02) as running:
            response = await running.post(COMPLETIONS, {"prompt": "!ab", "max_tokens": 9})
            error = checked(response, 500)
            assert "the device was lost" in error["message"] and response.headers["x-request-id"] in error["message"]
            for path, body in ((COMPLETIONS, {"prompt": "!ab"}), (CHAT, {"messages": HI})):
                if path == CHAT:
                    body = {"messages": [{"role": "!", "content": "x"}]}
                *chunks, last = await running.events(path, {**body, "max_tokens": 9})
                assert len(chunks) == 2
                assert "the device was lost" in last["error"]["message"]
                assert set(last["error"]) == {"message", "type", "param", "code"}

    asyncio.run(run())


def test_one_failed_sample_does_not_end_the_others(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app(fail_with=InvalidArgument("no"), step_s=0.01) as running:
            *chunks, last = await running.events(COMPLETIONS, {"prompt": ["!ab", "cd"], "max_tokens": 6})
            assert last["error"]["message"] == "no"
            texts = ["", ""]
            for chunk in chunks:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            assert texts == ["!a", "cdcdcd"]

    asyncio.run(run())


def test_a_bug_shows_nothing_of_itself(http_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError("secret internals at 0x1234")

    async def run() -> None:
        async with http_app() as running:
            monkeypatch.setattr(Gateway, "generate", broken)
            response = await running.post(COMPLETIONS, {"prompt": "a"})
            error = checked(response, 500)
            assert response.headers["x-request-id"] in error["message"]
            assert "secret" not in response.text

    asyncio.run(run())


def test_a_bug_in_a_stream_shows_nothing_of_itself(
    http_app: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret internals at 0x1234")

    async def run() -> None:
        async with http_app() as running:
            monkeypatch.setattr("serving.http.openai.completions.CompletionWriter.tokens", broken)
            (last,) = await running.events(COMPLETIONS, {"prompt": "a"})
            assert last["error"]["code"] == "internal_error"
            assert "secret" not in str(last)
            while running.engine.running:
                await asyncio.sleep(0.01)
            assert running.engine.aborts

    asyncio.run(run())
