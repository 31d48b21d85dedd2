"""Everything that a request may have too much of is refused in words, and before the work it would have cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.structured import CHOICE, JSON_SCHEMA, REGEX, StructuredOutput
from serving import gateway as gateway_module
from serving import understand
from serving.gateway import Gateway
from serving.messages import GenerateRequest

Opened = Callable[..., tuple[Gateway, Any]]
LONG = "long " * 10_000


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def schema(text: str) -> dict[str, Any]:
    return {"structured": StructuredOutput(kind=JSON_SCHEMA, text=text)}


TOO_MUCH: dict[str, dict[str, Any]] = {
    "prompt has 12800001 characters, and more than 12800000 are not 100000 tokens": {"text": "a" * 12_800_001},
    "prompt has 100001 tokens, above the limit of 100000": {"text": None, "token_ids": (1,) * 100_001},
    "stop holds 65 strings, the limit is 64": {"stop": ("a",) * 65},
    "stop holds a string of 1025 characters, the limit is 1024": {"stop": ("a" * 1025,)},
    "stop_token_ids holds 1025 ids, the limit is 1024": {"stop_token_ids": (1,) * 1025},
    "n=129 must be between 1 and 128": {"n": 129},
    "logprobs=21 must be between 0 and 20": {"logprobs": 21},
    "prompt_logprobs=21 must be between 0 and 20": {"prompt_logprobs": 21},
    "logit_bias holds 301 tokens, the limit is 300": {"logit_bias": {1000 + i: 0.0 for i in range(301)}},
    "65537 bytes, the limit for kind=json_schema is 65536": schema('{"a":"' + "x" * (65537 - 8) + '"}'),
    "is nested deeper than 100 levels; use $ref": schema('{"a":' + "[" * 100 + "]" * 100 + "}"),
    "]]]]}' is nested deeper than 100 levels": schema('{"a":' + "[" * 30_000 + "]" * 30_000 + "}"),
    "8193 bytes, the limit for kind=regex is 8192": {"structured": StructuredOutput(kind=REGEX, text="a" * 8193)},
    "holds 1001 strings, it must be 1 to 1000": {"structured": StructuredOutput(kind=CHOICE, choices=("a",) * 1001)},
    "cache_salt has 257 characters, the limit is 256": {"text": "short", "cache_salt": "x" * 257},
    "tools is nested deeper than 64 levels": {"text": None, "chat": ({"role": "user"},), "tools": ({"a": nested(65)},)},
    "chat is nested deeper than 64 levels": {"text": None, "chat": ({"role": "user", "content": nested(10_000)},)},
    "template_options is nested deeper than 64": {"text": None, "chat": ({},), "template_options": {"a": nested(65)}},
}


@pytest.mark.parametrize("said", TOO_MUCH)
def test_too_much(opened: Opened, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = GenerateRequest(**{"text": LONG, **TOO_MUCH[said]})
    if asked.text != "short":
        monkeypatch.setattr(gateway_module, "prompt_ids_of", lambda *_: pytest.fail("it was tokenized"))

    async def run() -> None:
        gateway, engine = opened(max_model_len=100_000)
        began_s = time.monotonic()
        with pytest.raises(InvalidArgument) as caught:
            await gateway.generate(asked)
        assert said in caught.value.message and len(caught.value.message) < 500
        assert time.monotonic() - began_s < 0.5
        assert not engine.submitted and not gateway._live
        engine.close()

    asyncio.run(run())


def test_as_much_as_is_allowed(opened: Opened) -> None:
    chat = ({"role": "user", "content": "x"},)

    async def run() -> None:
        gateway, engine = opened(max_model_len=1000)
        for more in (
            {"text": "a" * 999},
            {"stop": ("b" * 1024,) * 64, "stop_token_ids": (1,) * 1024},
            {"n": 128, "logprobs": 20, "prompt_logprobs": 20},
            schema('{"a":' + "[" * 99 + "]" * 99 + "}"),
            {"cache_salt": "x" * 256},
            {"text": None, "chat": chat, "template_options": {"a": nested(60)}},
        ):
            await gateway.generate(GenerateRequest(**{"text": "abc", "max_tokens": 1, **more}))
        engine.close()

    asyncio.run(run())


def test_tools_count_as_text() -> None:
    """Else a prompt that is long by its tools would be rendered and tokenized on the loop."""
    tools = ({"type": "function", "function": {"name": "f", "description": LONG}},)
    asked = GenerateRequest(chat=({"role": "user", "content": "x"},), tools=tools)
    assert understand.prompt_characters(asked) > understand.LONG_PROMPT
    assert understand.prompt_characters(GenerateRequest(token_ids=(1,) * 10_000)) == 0
