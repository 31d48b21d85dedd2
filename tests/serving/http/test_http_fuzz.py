"""Random and mutated requests to every HTTP route: each gets an answer or an error of OpenAI's shape; nothing is logged
as a bug, and afterwards the server is as it was.

The suite sends what a mutator makes of the bodies that clients send; `make fuzz` lets schemathesis read the server's
own description, too.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from serving.callers import Keys
from serving.http.app import make_app
from serving.http.front import HttpFront

pytestmark = pytest.mark.heavy  # a thousand requests

Opened = Callable[..., Any]
Random = random.Random
AT_ONCE = 16
SEED = 20261201

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CHAT: dict[str, Any] = {
    "model": "bytes",
    "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "ho"}]},
    ],
    "max_tokens": 5,
    "temperature": 0.5,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_object"},
    "stream": False,
}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        CHAT,
        {**CHAT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2},
        {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 3},
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
            "chat_template_kwargs": {"enable_thinking": False},
            "max_completion_tokens": 4,
            "stream": True,
        },
    ),
    "/v1/completions": (
        {"model": "bytes", "prompt": "abc", "max_tokens": 4, "seed": 3, "echo": True, "logprobs": 2, "n": 2},
        {"prompt": ["ab", "cd"], "stream": True, "logit_bias": {"7": 1.5}, "max_tokens": 4, "top_p": 0.5, "top_k": 3},
        {"prompt": [1, 2, 3], "ignore_eos": True, "min_tokens": 1, "max_tokens": 3, "return_token_ids": True},
        {"prompt": [[1, 2], [3]], "stop": "x", "presence_penalty": 1, "frequency_penalty": 1, "timings": True},
        {"prompt": "x", "guided_regex": "[a-z]+", "priority": 3, "cache_salt": "s", "best_of": 1, "user": "me"},
    ),
    "/tokenize": ({"prompt": "abc", "add_special_tokens": True}, {"messages": [{"role": "user", "content": "x"}]}),
    "/detokenize": ({"tokens": [1, 2, 3]},),
}
PATHS = (
    "/v1/models",
    "/v1/models/bytes",
    "/version",
    "/health",
    "/server_info",
    "/tokenizer_info",
    "/start_profile",
    "/",
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    65,
    129,
    257,
    2**31,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "auto",
    "\x00",
    "\ud800",
    "é語😀",
    "{{ x }}",
    "[" * 3000,
    "x" * 5000,
    [],
    [""],
    [1, "a", None],
    ["a"] * 200,
    [[]],
    {},
    {"type": "json_schema"},
    {"a": {"b": [1]}},
    {"role": "user"},
)


def nested(rng: Random) -> Any:
    value: Any = rng.choice(OTHERS)
    for _ in range(rng.choice((3, 70, 500))):
        value = [value] if rng.random() < 0.5 else {"type": "object", "properties": {"a": value}, "a": 1}
    return value


def any_value(rng: Random) -> Any:
    return nested(rng) if rng.random() < 0.05 else copy.deepcopy(rng.choice(OTHERS))


def mutated(rng: Random, body: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The body with a few values changed, gone, or added under names that the server's description has."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(0, 3)):
        places = list(places_of(body))
        where, key = rng.choice(places) if places else (body, "model")
        match rng.randrange(5):
            case 0:
                body[rng.choice(names)] = any_value(rng)
            case 1 if places:
                del where[key]
            case 2 if isinstance(where, list):
                where.append(any_value(rng))
            case _:
                where[key] = any_value(rng)
    return body


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places_of(value[key])


def request_of(rng: Random, names: dict[str, list[str]]) -> dict[str, Any]:
    """Arguments of `AsyncClient.build_request`."""
    headers = {"content-type": "application/json"}
    if rng.random() < 0.1:
        headers = {
            "content-type": rng.choice(("text/plain", "application/json; charset=utf-16", "", "multipart/form-data")),
            "x-request-id": rng.choice(("a", "a b", "x" * 500)),
            "traceparent": rng.choice(("00", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
            "authorization": rng.choice(("Bearer x", "Basic x", "")),
        }
    path = rng.choice([*BODIES] * 4 + [*PATHS])
    if path not in BODIES:
        method = rng.choice(("GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"))
        path += rng.choice(("", "", "?a=%00&b[]=1", "/x", "/%2e%2e/%ff", "//"))
        return {"method": method, "url": path, "headers": headers}
    content = json.dumps(mutated(rng, rng.choice(BODIES[path]), names[path])).encode()
    if rng.random() < 0.15:
        data = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        content = bytes(data)
    method = "POST" if rng.random() < 0.97 else rng.choice(("GET", "PATCH", "BREW"))
    return {"method": method, "url": path, "headers": headers, "content": content}


def check(request: httpx.Request, status: int, kind: str, body: bytes) -> None:
    """Raises AssertionError for an answer that no server should give."""
    what = f"{request.method} {request.url} {request.content[:500]!r}: {status} {body[:500]!r}"
    assert status < 500, what
    assert b"Traceback" not in body, what
    if status >= 400 and request.method != "HEAD":
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"], what
    elif kind.startswith("text/event-stream"):
        events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]", what
        for event in events[:-1]:
            assert json.loads(event).get("error", {}).get("type") != "server_error", what


@contextlib.asynccontextmanager
async def serving(opened: Opened) -> AsyncIterator[tuple[str, Any, Any, dict[str, Any]]]:
    """A ready server on a free port, and its description."""
    gateway, engine = opened(max_model_len=64, max_queued=200)
    front = HttpFront(gateway)
    port = front.bind("127.0.0.1", 0)
    await front.start()
    await front.set_ready(True)
    try:
        yield f"http://127.0.0.1:{port}", gateway, engine, make_app(gateway, keys=Keys({})).openapi()
        for _ in range(500):
            if not gateway._live and not engine.running:
                break
            await asyncio.sleep(0.01)
        assert not gateway._live and not engine.running and await gateway.idle(1)
        assert gateway._quotas._requests == gateway._quotas._tokens == {} and not gateway._pace._waiting
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answer = await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
            assert answer.json()["choices"][0]["text"] == "abca", "it goes on as if nothing had been"
    finally:
        await front.stop(0)
        engine.close()


def names_of(description: dict[str, Any]) -> dict[str, list[str]]:
    """The keys that each route's body may have."""
    schemas, names = description["components"]["schemas"], {}
    for path in BODIES:
        content = description["paths"][path]["post"]["requestBody"]["content"]
        names[path] = list(schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]["properties"])
    return names


async def storm(client: httpx.AsyncClient, names: dict[str, list[str]], count: int, seed: int) -> Any:
    """So many requests, and how they ended."""
    ends: collections.Counter[tuple[str, int]] = collections.Counter()
    numbers = iter(range(seed, seed + count))

    async def caller() -> None:
        for number in numbers:
            rng = Random(number)  # of its own, so that one request can be made again alone
            request = client.build_request(**request_of(rng, names))
            patience_s = rng.choice((0.0005, 0.002)) if rng.random() < 0.03 else 60
            with contextlib.suppress(TimeoutError):
                answer = await asyncio.wait_for(client.send(request), patience_s)
                check(request, answer.status_code, answer.headers.get("content-type", ""), answer.content)
                ends[request.url.path, answer.status_code] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(caller())
    return ends


def attack(opened: Opened, caplog: pytest.LogCaptureFixture, count: int, seed: int) -> Any:
    async def run() -> Any:
        async with serving(opened) as (address, _, _, description):
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                return await storm(client, names_of(description), count, seed)

    with caplog.at_level(logging.WARNING):
        ends = asyncio.run(run())
    assert_no_bugs(caplog)
    return ends


def assert_no_bugs(caplog: pytest.LogCaptureFixture) -> None:
    bad = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not bad, bad[:3]


def test_a_thousand_requests(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    ends = attack(opened, caplog, 1000, SEED)
    assert ends.total() > 900
    for path in BODIES:  # it reaches what it is for
        assert ends[path, 200] > 10 and ends[path, 400] > 10, ends


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(6))
def test_six_thousand_requests(opened: Opened, caplog: pytest.LogCaptureFixture, part: int) -> None:
    attack(opened, caplog, 1000, 1_000_000 + 1000 * part)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)  # most of it is schemathesis making up requests
def test_what_schemathesis_makes_of_the_description(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    """4,000 requests and more that fit the description and that do not, most of them with a body."""
    schemathesis = pytest.importorskip("schemathesis", reason="pip install 'jaxpd[fuzz]'")
    import hypothesis

    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)

    def send_all(address: str, description: dict[str, Any]) -> int:
        sent = 0
        schema = schemathesis.openapi.from_dict(description)
        operations = [operation.ok() for operation in schema.get_all_operations()]
        with httpx.Client(base_url=address, timeout=60) as client:

            def send(case: Any) -> None:
                nonlocal sent
                prepared = case.as_transport_kwargs(base_url=address)
                body = {key: value for key, value in prepared.items() if key in ("json", "data") and value is not None}
                content = json.dumps(body["json"]).encode() if "json" in body else body.get("data", b"")
                headers = {key: str(value).encode("latin-1", "replace") for key, value in prepared["headers"].items()}
                request = client.build_request(
                    prepared["method"], prepared["url"], params=prepared.get("params"), headers=headers, content=content
                )
                answer = client.send(request)
                check(request, answer.status_code, answer.headers.get("content-type", ""), answer.content)
                sent += 1

            for operation in operations:
                many = 1100 if operation.body else 20
                for mode in modes if operation.body else modes[:1]:
                    run = hypothesis.given(case=operation.as_strategy(generation_mode=mode))(send)
                    settings = hypothesis.settings(
                        max_examples=many // 2,
                        deadline=None,
                        derandomize=True,
                        database=None,
                        suppress_health_check=list(hypothesis.HealthCheck),
                    )
                    settings(run)()
        return sent

    async def run() -> int:
        async with serving(opened) as (address, _, _, description):
            return await asyncio.to_thread(send_all, address, description)

    with caplog.at_level(logging.WARNING):
        sent = asyncio.run(run())
    assert_no_bugs(caplog)
    assert sent > 4000, sent
