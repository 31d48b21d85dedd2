"""What known load generators and evaluators send, as recorded, and what each of them reads of the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One request of a client; `read` raises where the client would."""

    client: str
    path: str
    body: dict[str, Any]
    read: Callable[[Any], None]
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


def guidellm(events: Any) -> None:
    """It counts the content of each delta and takes usage from whatever event has it."""
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]) == "user:hi;"
    assert all(USAGE <= set(event["usage"]) for event in events)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 8


def aiperf(events: Any) -> None:
    """It warns where its tokenizer and `usage` differ, and takes the first content for the first token."""
    *chunks, last = events
    assert chunks[0]["choices"][0]["delta"]["content"] == "u"
    assert last["usage"]["prompt_tokens"] == 8


def vllm_bench(events: Any) -> None:
    """The first event with choices is the first token, each later one an inter-token time."""
    timed = [event for event in events if event["choices"]]
    assert "".join(event["choices"][0]["text"] for event in timed) == "abcabcabca"
    assert timed[0]["choices"][0]["text"] == "a"
    assert events[-1]["usage"]["completion_tokens"] == 10


def vllm_bench_chat(events: Any) -> None:
    """The same with deltas."""
    timed = [event for event in events if event["choices"]]
    assert timed[0]["choices"][0]["delta"]["content"] == "u"
    assert events[-1]["usage"]["completion_tokens"] == 8


def sglang_bench(events: Any) -> None:
    """It looks into choices[0] of every event, unguarded."""
    assert "".join(event["choices"][0]["text"] for event in events) == "abcabcabca"
    assert all((event.get("usage") or {}) == {} for event in events)


def lm_eval_loglikelihood(answer: Any) -> None:
    """It cuts the context off the lists and the generated token off their end."""
    for choice, prompt in zip(
        sorted(answer["choices"], key=lambda c: c["index"]), ([97, 98, 99], [120, 121]), strict=True
    ):
        scored = choice["logprobs"]["token_logprobs"][1:-1]
        tops = choice["logprobs"]["top_logprobs"][1:-1]
        assert len(scored) == len(tops) == len(prompt) - 1
        assert sum(scored) < 0
        for token, logprob, top in zip(choice["logprobs"]["tokens"][1:-1], scored, tops, strict=True):
            assert max(top.values()) == logprob and token in top


def lm_eval_generation(answer: Any) -> None:
    """It takes the texts by index."""
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "xyxyxyxy"]


HI = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
SHAPES = (
    Shape(
        "guidellm",
        CHAT,
        {
            "messages": HI,
            "model": "bytes",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "stop": None,
        },
        guidellm,
    ),
    Shape(
        "aiperf",
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "model": "bytes",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 8,
        },
        aiperf,
        {"x-request-id": "9f0c", "x-correlation-id": "77aa", "x-session-affinity": "77aa"},
    ),
    Shape(
        "vllm bench serve",
        COMPLETIONS,
        {
            "model": "bytes",
            "prompt": "abc",
            "repetition_penalty": 1.0,
            "max_tokens": 10,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
        vllm_bench,
        {"x-request-id": "bench-0", "authorization": "Bearer None"},
    ),
    Shape(
        "vllm bench serve, chat",
        CHAT,
        {
            "model": "bytes",
            "messages": HI,
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
        },
        vllm_bench_chat,
    ),
    Shape(
        "sglang bench",
        COMPLETIONS,
        {
            "model": "bytes",
            "prompt": "abc",
            "best_of": 1,
            "temperature": 0.0,
            "max_tokens": 10,
            "stream": True,
            "ignore_eos": True,
        },
        sglang_bench,
    ),
    Shape(
        "lm-eval loglikelihood",
        COMPLETIONS,
        {
            "model": "bytes",
            "prompt": [[97, 98, 99], [120, 121]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
        lm_eval_loglikelihood,
    ),
    Shape(
        "lm-eval generation",
        COMPLETIONS,
        {
            "model": "bytes",
            "prompt": [[97, 98, 99], [120, 121]],
            "max_tokens": 8,
            "temperature": 0,
            "stop": ["c", "\n\n", "</s>"],
            "seed": 1234,
        },
        lm_eval_generation,
    ),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.client)
def test_what_clients_send(http_app: Callable[..., Any], shape: Shape) -> None:
    async def run() -> None:
        async with http_app(step_s=0.01) as running:
            if shape.body.get("stream"):
                answer = await running.events(shape.path, shape.body, **shape.headers)
            else:
                response = await running.post(shape.path, shape.body, **shape.headers)
                assert response.status_code == 200, response.text
                answer = response.json()
            shape.read(answer)

    asyncio.run(run())


def test_what_clients_look_for_besides(http_served: Callable[..., Any]) -> None:
    """Paths that are asked for at the start, and whose absence is borne."""

    async def run() -> None:
        async with http_served(metrics_render=lambda accept: (b"", "text/plain")) as running:
            for method, path, statuses in (
                ("GET", "/health", (200,)),
                ("GET", "/v1/models", (200,)),
                ("HEAD", "/metrics", (200,)),
                ("GET", "/metrics", (200,)),
                ("GET", "/server_info", (200,)),
                ("GET", "/tokenizer_info", (200,)),
                ("POST", "/flush_cache", (404,)),
            ):
                response = await running.client.request(method, path)
                assert response.status_code in statuses, path
            # lm-eval's remote tokenizer
            info = (await running.client.get("/tokenizer_info")).json()
            asked = {"prompt": info["eos_token"], "add_special_tokens": False}
            assert (await running.post("/tokenize", asked)).json()["tokens"] == info["eos_token_ids"]
            assert json.loads((await running.post("/detokenize", {"tokens": [97]})).text) == {"prompt": "a"}

    asyncio.run(run())
