"""Who may ask what: API keys at the HTTP front."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from serving.callers import Caller, Keys

KEYS = Keys({"alices-key": Caller(name="alice", max_requests=1), "bobs-key": Caller(name="bob")})
GUARDED = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/server_info"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("GET", "/live"),
    ("GET", "/v1/not/there"),
    ("GET", "/not/there"),
    ("GET", "//v1/models"),
    ("GET", "/page/../v1/models"),
)
OPEN = ("/", "/health", "/version", "/openapi.json", "/page/page.js")


def test_what_needs_a_key(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app(keys=KEYS) as running:
            for method, path in GUARDED:
                for value in (None, "", "Bearer", "Bearer nobodys-key", "Basic alices-key", "alices-key"):
                    headers = {} if value is None else {"authorization": value}
                    response = await running.client.request(method, path, headers=headers, json={"prompt": "a"})
                    assert response.status_code == 401, (method, path, value)
                    error = response.json()["error"]
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert "-key" not in response.text, "no key is ever repeated"
            for path in OPEN:
                assert (await running.client.get(path)).status_code == 200, path

    asyncio.run(run())


def test_a_key_opens_and_has_its_own_limits(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app(keys=KEYS, step_s=0.02) as running:
            body = {"prompt": "a", "max_tokens": 10}
            alice, bob = ({"authorization": f"Bearer {name}-key"} for name in ("alices", "bobs"))
            assert (await running.client.get("/v1/models", headers=alice)).status_code == 200
            first = asyncio.ensure_future(running.post("/v1/completions", body, **alice))
            while not running.engine.running:
                await asyncio.sleep(0.005)
            second = await running.post("/v1/completions", body, **alice)
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            assert (await running.post("/v1/completions", body, **bob)).status_code == 200
            assert (await first).status_code == 200

    asyncio.run(run())


def test_without_keys_nobody_needs_one(http_app: Callable[..., Any]) -> None:
    async def run() -> None:
        async with http_app() as running:
            for headers in ({}, {"authorization": "Bearer anything"}):
                assert (await running.client.get("/v1/models", headers=headers)).status_code == 200

    asyncio.run(run())
