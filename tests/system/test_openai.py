"""OpenAI's own SDK against a real server process: what people do with it works, and fails as they expect."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
MODEL = ROOT / "tests" / "data" / "tiny" / "smollm2"
TOOL_TEMPLATE = ROOT / "tests" / "data" / "tool_template.jinja"
SMALL = ("--max-model-len", 256, "--max-num-seqs", 4, "--max-num-batched-tokens", 64, "--no-precompile")
KEYS = '[alice]\nkey = "alices-key"\n[bob]\nkey = "bobs-key"\nmax_requests = 1\n'
HI: Any = [{"role": "user", "content": "Hello there"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "lamp", "description": "a lamp", "parameters": SWITCH}}]


@dataclasses.dataclass
class Process:
    """A server and what it has written to its standard error."""

    url: str
    stderr: list[str]

    def client(self, key: str = "alices-key", **options: Any) -> openai.OpenAI:
        """The SDK's client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=120, **{"max_retries": 0, **options})


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """`jaxpd serve` of a tiny model that knows tools, with keys."""
    folder = tmp_path_factory.mktemp("openai")
    model = folder / "tiny-tools"
    shutil.copytree(MODEL, model)
    shutil.copy(TOOL_TEMPLATE, model / "chat_template.jinja")
    keys = folder / "keys.toml"
    keys.write_text(KEYS, encoding="utf-8")
    command = [sys.executable, "-m", "jaxpd", "serve", model, "--port", 0, "--no-grpc", "--api-key-file", keys, *SMALL]
    with subprocess.Popen(
        [*map(str, command), "--served-model-name", "tiny", "--served-model-name", "also-tiny"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        stderr: list[str] = []
        reader = threading.Thread(target=stderr.extend, args=(server.stderr,))
        reader.start()
        try:
            found = next((match for line in server.stdout if (match := re.search(r"curl (http://\S+)/v1", line))), None)
            assert found, f"the server ended:\n{''.join(stderr)}"
            yield Process(found[1], stderr)
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()
            reader.join()
    assert "Traceback" not in "".join(stderr), "".join(stderr)
    assert "alices-key" not in "".join(stderr)


@pytest.fixture(scope="module")
def client(process: Process) -> Iterator[openai.OpenAI]:
    with process.client() as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("tiny").owned_by == "jaxpd"


def test_a_completion(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt="Hello world", max_tokens=6, temperature=0)
    assert done.choices[0].finish_reason in ("length", "stop") and done.usage is not None
    assert done.usage.completion_tokens <= 6
    assert done.id.removeprefix("cmpl-") == done._request_id
    again = client.completions.create(model="also-tiny", prompt=[5, 17, 40], max_tokens=4, seed=7, temperature=1)
    same = client.completions.create(model="tiny", prompt=[5, 17, 40], max_tokens=4, seed=7, temperature=1)
    assert again.choices[0].text == same.choices[0].text


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "Hello world", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    streamed = [
        p for c in chunks for choice in c.choices if choice.logprobs for p in choice.logprobs.token_logprobs or []
    ]
    assert whole.choices[0].logprobs is not None
    assert streamed == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-3)


def test_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HI, "max_completion_tokens": 8, "temperature": 0}
    done = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    (choice,) = done.choices
    assert choice.message.role == "assistant" and choice.logprobs is not None and choice.logprobs.content
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    first = choice.logprobs.content[0]
    assert first.logprob == first.top_logprobs[0].logprob, "greedy takes the likeliest"
    text = ""
    with client.chat.completions.create(**asked, stream=True) as stream:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == choice.message.content


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "one two three four five six seven eight nine ten " * 2}]
    for _ in range(2):
        done = client.chat.completions.create(model="tiny", messages=turns, max_tokens=2, temperature=0)
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens, "the same prompt again"


def test_the_async_client(process: Process) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="alices-key", timeout=120) as client:
            asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0}
            whole = await client.chat.completions.create(**asked)
            text = ""
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content
            many = [client.completions.create(model="tiny", prompt=f"{i}", max_tokens=4) for i in range(8)]
            assert len(await asyncio.gather(*many)) == 8

    asyncio.run(run())


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for stream in (False, True):
        asked: Any = {"model": "tiny", "messages": HI, "response_format": wanted, "max_tokens": 100, "seed": 3}
        if stream:
            chunks = client.chat.completions.create(**asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = client.chat.completions.create(**asked).choices[0].message.content or ""
        assert json.loads(text)["city"] in ("Bern", "Oslo")
    choice = client.completions.create(
        model="tiny", prompt="x", max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choice.choices[0].text in ("yes", "no")


def test_a_tool_is_called_and_its_answer_goes_back(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": 3}
    done = client.chat.completions.create(**asked, parallel_tool_calls=False, messages=HI)
    (choice,) = done.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "lamp"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    with client.chat.completions.stream(**asked, parallel_tool_calls=False, messages=HI) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    turns: Any = [
        *HI,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS, max_tokens=4).choices


def test_extras_by_extra_body(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "ignore_eos": True, "min_tokens": 2, "top_k": 3, "timings": True}
    done = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, extra_body=extra)
    said = done.choices[0].model_dump()
    assert len(said["token_ids"]) == 5 and said["prompt_token_ids"]
    assert said["timings"]["ttft_s"] > 0 and {"transferred", "decode_start"} <= {m["stage"] for m in said["timeline"]}


def test_errors(process: Process, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-x", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="word " * 1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="suffix") as unserved:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert unserved.value.param == "suffix"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x", encoding_format="float")
    with process.client("nobodys-key") as stranger, pytest.raises(openai.AuthenticationError) as unknown:
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"


def test_the_sdk_tries_again_when_it_is_told_to(process: Process) -> None:
    long: Any = {"model": "tiny", "prompt": "x", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with process.client("bobs-key", max_retries=4) as bob, bob.completions.create(**long, stream=True) as stream:
        next(iter(stream))
        with process.client("bobs-key") as impatient, pytest.raises(openai.RateLimitError) as full:
            impatient.completions.create(model="tiny", prompt="y", max_tokens=2)
        assert full.value.code == "rate_limit_exceeded"
        assert full.value.response.headers["retry-after"] == "1"
        closing = threading.Timer(0.3, stream.close)
        closing.start()
        began = time.monotonic()
        raw = bob.completions.with_raw_response.create(model="tiny", prompt="y", max_tokens=2)
        closing.join()
        assert raw.retries_taken >= 1 and raw.parse().choices
        assert 0.5 < time.monotonic() - began < 20


def test_metrics_and_health_need_no_key(process: Process) -> None:
    with httpx.Client(base_url=process.url) as client:
        assert client.get("/health").status_code == 200
        metrics = client.get("/metrics").text
        assert "vllm:prompt_tokens_total" in metrics and "xla_compiles_total" in metrics
        assert client.get("/").headers["content-type"].startswith("text/html")
        assert client.get("/v1/models").status_code == 401
