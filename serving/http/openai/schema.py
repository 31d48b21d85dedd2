"""What a client may send. Keys that stand in none of the classes are kept aside, where `unserved` looks at them.

Types are strict (a number in quotes is no number) and null means absent. What values are allowed is checked where they
are used, by `SamplingParams` above all, so that both fronts refuse the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_ID = 2**31 - 1


class Body(BaseModel):
    """A JSON object; more keys are allowed."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)


def _ids(value: Any) -> Any:
    """A list of token ids, checked without a look at each by pydantic: there may be a million."""
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ValueError("must be a list of token ids, whole numbers")
    if value and not (0 <= min(value) and max(value) <= MAX_ID):
        raise ValueError(f"holds an id outside 0..{MAX_ID}")
    return value


def _prompt(value: Any) -> Any:
    """One of four forms."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value):
            return value
        if type(value[0]) is int:
            return _ids(value)
        if all(isinstance(part, list) and part for part in value):
            return [_ids(part) for part in value]
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, none empty")


def _many(value: Any) -> Any:
    """A string stands for a list of one."""
    return [value] if isinstance(value, str) else value


TokenIds = Annotated[
    Any, BeforeValidator(_ids), Field(json_schema_extra={"type": "array", "items": {"type": "integer"}})
]
Prompt = Annotated[
    Any,
    BeforeValidator(_prompt),
    Field(
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        }
    ),
]
Stop = Annotated[
    list[str],
    BeforeValidator(_many),
    Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # usage in every chunk


class SamplingBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop | None = None
    user: str | None = None
    service_tier: str | None = None
    # beyond OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatRequest(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
