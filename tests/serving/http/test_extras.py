"""The model's card, its tokenizer, and the routes for those who run a server."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

from jaxpd.version import __version__
from serving.http.options import HttpOptions


def get(http_app: Callable[..., Any], path: str, **options: Any) -> Any:
    """The body of a GET that works."""

    async def run() -> Any:
        async with http_app(**options) as running:
            response = await running.client.get(path)
            assert response.status_code == 200, response.text
            return response.json()

    return asyncio.run(run())


def post(http_app: Callable[..., Any], path: str, body: Any, status: int = 200, **options: Any) -> Any:
    """The body of a POST."""

    async def run() -> Any:
        async with http_app(**options) as running:
            response = await running.post(path, body)
            assert response.status_code == status, response.text
            return response.json()

    return asyncio.run(run())


def test_models(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            (card,) = (await running.client.get("/v1/models")).json()["data"]
            assert (card["id"], card["object"], card["owned_by"]) == ("bytes", "model", "jaxpd")
            assert (card["max_model_len"], card["has_chat_template"]) == (4096, True)
            assert (await running.client.get("/v1/models/bytes")).json() == card

    asyncio.run(run())
    (card,) = get(http_app, "/v1/models", tokenizer=False)["data"]
    assert card["has_chat_template"] is False


def test_tokenize(http_app: Callable[..., Any]) -> None:
    answer = post(http_app, "/tokenize", {"prompt": "abc", "add_special_tokens": False, "return_token_strs": True})
    assert answer == {"count": 3, "max_model_len": 4096, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    chat = post(http_app, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert bytes(chat["tokens"]) == b"user:hi;"
    assert post(http_app, "/tokenize", {"prompt": ""})["tokens"] == []
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": True}, "add_special_tokens"),
    ):
        assert post(http_app, "/tokenize", body, 400)["error"]["param"] == param


def test_detokenize(http_app: Callable[..., Any]) -> None:
    assert post(http_app, "/detokenize", {"tokens": [97, 98, 256]}) == {"prompt": "ab</s>"}
    assert post(http_app, "/detokenize", {"tokens": []}) == {"prompt": ""}
    assert post(http_app, "/detokenize", {"tokens": [257]}, 400)["error"]["param"] == "tokens"
    assert post(http_app, "/detokenize", {"tokens": ["a"]}, 400)["error"]["param"] == "tokens"


def test_a_model_without_a_tokenizer_has_none_to_offer(http_app: Callable[..., Any]) -> None:
    for path, body in (("/detokenize", {"tokens": [1]}), ("/tokenize", {"prompt": "a"})):
        assert "no tokenizer" in post(http_app, path, body, 400, tokenizer=False)["error"]["message"]
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    assert "no tokenizer" in post(http_app, "/v1/chat/completions", messages, 400, tokenizer=False)["error"]["message"]


def test_tokenizer_info(http_app: Callable[..., Any]) -> None:
    info = get(http_app, "/tokenizer_info")
    assert (info["eos_token"], info["vocab_size"], info["model_max_length"]) == ("</s>", 257, 4096)
    assert info["eos_token_ids"] == [256] and "role" in info["chat_template"]


def test_version_and_server_info(http_app: Callable[..., Any]) -> None:
    assert get(http_app, "/version") == {"version": __version__}
    info = get(http_app, "/server_info")
    assert info["meshes"] == {"prefill": ["2x1"], "decode": ["1x2"]}
    assert (info["model"], info["state"]) == ("bytes", "ready")
    assert not {"decode", "prefill"} & set(info), "sglang's bench takes these keys for a router's answer"


def test_metrics_are_passed_on(http_served: Callable[..., Any]) -> None:
    def render(accept: str) -> tuple[bytes, str]:
        return b"up 1\n", "application/openmetrics-text" if "openmetrics" in accept else "text/plain; version=0.0.4"

    async def run() -> None:
        async with http_served(metrics_render=render) as running:
            plain = await running.client.get("/metrics")
            assert (plain.content, plain.headers["content-type"]) == (b"up 1\n", "text/plain; version=0.0.4")
            other = await running.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
            assert other.headers["content-type"] == "application/openmetrics-text"
            head = await running.client.head("/metrics")
            assert (head.status_code, head.content) == (200, b"")

    asyncio.run(run())


def test_profiles_are_off_unless_a_folder_is_given(http_app: Callable[..., Any]) -> None:
    assert "--profile-dir" in post(http_app, "/start_profile", None, 400)["error"]["message"]


def test_a_profile(http_app: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    async def run() -> None:
        async with http_app(options=HttpOptions(profile_dir=tmp_path / "profiles")) as running:
            assert (await running.client.post("/stop_profile")).status_code == 400
            assert (await running.client.post("/start_profile")).status_code == 200
            assert "running already" in (await running.client.post("/start_profile")).text
            assert (await running.client.post("/stop_profile")).status_code == 200
            assert (await running.client.post("/stop_profile")).status_code == 400

    asyncio.run(run())
    assert any(path.is_file() for path in (tmp_path / "profiles").rglob("*"))


def test_the_page_can_be_left_out(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app(options=HttpOptions(page=False)) as running:
            assert (await running.client.get("/")).status_code == 404
            assert (await running.client.get("/live")).status_code == 404

    asyncio.run(run())


def test_the_description_of_the_api(http_app: Callable[..., Any]) -> None:
    described = get(http_app, "/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= set(described["paths"])
    schema = described["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"]
    assert {form.get("type") for form in schema["properties"]["prompt"]["anyOf"]} == {"string", "array"}
