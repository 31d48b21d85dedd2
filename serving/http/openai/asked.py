"""From the body of a request to a `GenerateRequest`: what completions and chat have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpd.errors import InvalidArgument
from jaxpd.request import MAX_SEED
from jaxpd.structured import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, StructuredOutput, shortened
from serving.http.errors import ModelNotFound
from serving.http.openai.schema import SamplingBody
from serving.http.openai.unserved import refuse_unserved
from serving.messages import shown
from serving.model import ServedModel
from serving.parsing.tools import check_schema

DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MAX_MESSAGES = 4096
SAME = (
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
    "priority",
    "cache_salt",
    "n",
)  # fields with the same name and meaning here and there
SERVICE_TIERS = (None, "auto", "default")
INT64 = 2**63
_KINDS = {"json": JSON_SCHEMA, "regex": REGEX, "choice": CHOICE, "grammar": GRAMMAR, "json_object": JSON_OBJECT}


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises ModelNotFound for another model than the served one; none at all is fine."""
    if name is not None and name not in model.names:
        served = " or ".join(repr(known) for known in model.names)
        raise ModelNotFound(f"model {shown(name)} is not served here; {served} is", field="model")


def sampling_of(body: SamplingBody) -> dict[str, Any]:
    """The options of a `GenerateRequest` that a body sets, but for the prompt, its length and logprobs.

    Raises InvalidArgument naming the field.
    """
    refuse_unserved(body.model_extra)
    if body.service_tier not in SERVICE_TIERS:
        raise InvalidArgument(f"service_tier={shown(body.service_tier or '')} is not served", field="service_tier")
    return {
        **{field: getattr(body, field) for field in SAME},
        "temperature": DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # vLLM's way to say "off"
        "seed": _seed(body.seed),
        "logit_bias": _biases(body.logit_bias),
        "stop": tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "want_prompt_ids": bool(body.return_token_ids) or body.prompt_logprobs is not None,
        "want_timeline": bool(body.timings),
    }


def structured_of(body: SamplingBody) -> StructuredOutput | None:
    """What the answer has to match, in vLLM's spelling: `structured_outputs` and the older `guided_*`.

    Raises InvalidArgument naming the field, also where more than one is set.
    """
    asked: list[tuple[str, str, Any]] = []
    for name, value in (body.structured_outputs or {}).items():
        if value is None or value is False:
            continue
        if name not in _KINDS:
            if name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "backend"):
                continue
            raise InvalidArgument(
                f"structured_outputs.{shown(name)} is not served; {', '.join(_KINDS)} are",
                field=f"structured_outputs.{name[:60]}",
            )
        asked.append((f"structured_outputs.{name}", name, value))
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{name}")) is not None:
            asked.append((f"guided_{name}", name, value))
    if len(asked) > 1:
        raise InvalidArgument(
            f"{asked[0][0]} and {asked[1][0]} exclude each other; send one of them", field=asked[1][0]
        )
    return _structured(*asked[0]) if asked else None


def only_one(**ways: StructuredOutput | None) -> StructuredOutput | None:
    """What the answer has to match, which may be said in one way only. Raises InvalidArgument naming the second."""
    said = [name for name, structured in ways.items() if structured is not None]
    if len(said) > 1:
        raise InvalidArgument(f"{said[0]} and {said[1]} exclude each other; send one of them", field=said[1])
    return ways[said[0]] if said else None


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The conversation. Raises InvalidArgument naming the message that is none."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidArgument(f"messages holds {len(messages)}, it must be 1 to {MAX_MESSAGES}", field="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise InvalidArgument(
                f"{where}.role is missing; it must be text such as 'user', 'assistant' or 'system'",
                field=f"{where}.role",
            )
        content = message.get("content")
        if isinstance(content, list):
            for at, part in enumerate(content):
                _check_part(part, f"{where}.content[{at}]")
        elif content is not None and not isinstance(content, str):
            raise InvalidArgument(
                f"{where}.content={shortened(content)} must be text or a list of text parts", field=f"{where}.content"
            )
    return tuple(messages)


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type", "text"), str):
        raise InvalidArgument(f'{where} must be an object such as {{"type": "text", "text": "..."}}', field=where)
    if (kind := part.get("type", "text")) != "text":
        raise InvalidArgument(f"{where} is of type {shown(kind)}; this model takes text only", field=f"{where}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidArgument(f"{where}.text is missing; it must be text", field=f"{where}.text")


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are any 64-bit integers; of one that is larger than ours the low 32 bits count."""
    if seed is None:
        return None
    if not -INT64 <= seed < INT64:
        raise InvalidArgument(f"seed={shortened(seed)} must be a 64-bit integer", field="seed")
    return seed & MAX_SEED


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    """Keys are token ids as text, since JSON has no others."""
    out: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidArgument(f"logit_bias holds the key {shown(key)}, which is no token id", field="logit_bias")
        out[int(key)] = bias
    return out or None


def _structured(field: str, name: str, value: Any) -> StructuredOutput:
    kind = _KINDS[name]
    match kind:
        case "json_object":
            return StructuredOutput(kind=kind)
        case "choice" if isinstance(value, list) and all(isinstance(choice, str) for choice in value):
            return StructuredOutput(kind=kind, choices=tuple(value))
        case "json_schema" if isinstance(value, dict):
            check_schema(value, field)
            return StructuredOutput(kind=kind, text=json.dumps(value))
        case "json_schema" | "regex" | "grammar" if isinstance(value, str):
            return StructuredOutput(kind=kind, text=value)
    what = {"json_schema": "a JSON schema", "choice": "a list of strings"}.get(kind, "text")
    raise InvalidArgument(f"{field}={shortened(value)} must be {what}", field=field)
