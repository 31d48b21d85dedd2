"""`POST /v1/chat/completions`: a conversation in, a message out, with tool calls and reasoning told apart from content.

    messages, tools -> chat template -> prompt text -> gateway -> answer text -> parser -> delta or message
                                            |
                         tool_choice, response_format -> grammar

The prompt is written here and goes to the gateway as text, since grammar and parser have to know how it ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxpd.errors import InvalidArgument, JaxpdError, TooLong
from jaxpd.request import MAX_LOGPROBS
from jaxpd.structured import StructuredOutput
from jaxpd.text import prompt_text
from jaxpd.tokenizer import Tokenizer
from serving.gateway import Gateway
from serving.http.errors import response_of
from serving.http.openai.answering import Answering, Call, call_of, stream, whole
from serving.http.openai.asked import check_model, checked_messages, only_one, sampling_of, structured_of
from serving.http.openai.chat_reply import ChatReply, ChatWriter
from serving.http.openai.extras import tokenizer_of
from serving.http.openai.schema import ChatRequest
from serving.messages import GenerateRequest
from serving.model import ServedModel
from serving.parsing import Parser, Tools, forced_answer, forced_calls, make_parser, marker_token_ids, read_tools
from serving.parsing.formats import reasoning_marks
from serving.understand import LONG_PROMPT, prompt_characters


def make_router(gateway: Gateway) -> APIRouter:
    """The one route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        model = gateway.model
        check_model(body.model, model)
        call = call_of(request, gateway, "chat").named(_names(body))
        try:
            asked, parser = await understood(body, model, call)
        except JaxpdError as error:
            return response_of(error, call.request_id, call.names)
        reply = ChatReply(body, model, f"chatcmpl-{call.request_id}", parser)
        if body.stream:
            return Answering(call, lambda send: stream(call, [asked], ChatWriter(reply), send))
        return Answering(call, lambda send: whole(call, [asked], reply.whole, send))

    return router


async def understood(
    body: ChatRequest, model: ServedModel, call: Call
) -> tuple[GenerateRequest, Callable[[], Parser] | None]:
    """The request for the gateway, and what makes a parser for each answer; None where there is nothing to parse.

    Raises InvalidArgument naming the field.
    """
    tokenizer = tokenizer_of(model)
    chat, tools = checked_messages(body.messages), read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    options = sampling_of(body)
    prompt = await _prompt(tokenizer, chat, tools, _template_options(body))
    template = tokenizer.template_for(tools=bool(tools.listed))
    asked = GenerateRequest(
        **options,
        text=prompt,
        add_special_tokens=False,  # the template has written them
        logprobs=_logprobs(body),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        structured=_structured(body, tools, template, prompt, tokenizer),
        shown_ids=marker_token_ids(tokenizer, template, tools=tools.parsed),
        want_token_ids=bool(body.return_token_ids) or bool(body.logprobs),
    )
    if asked.max_tokens is None:
        asked = await _filling_the_context(asked, model, call)
    if reasoning_marks(template) is None and not tools.parsed:
        return asked, None
    return asked, lambda: make_parser(
        template, tools=tools.parsed, prompt_text=prompt, schemas=tools.schemas, most_calls=tools.most_calls
    )


async def _prompt(
    tokenizer: Tokenizer, chat: tuple[Mapping[str, Any], ...], tools: Tools, options: Mapping[str, Any] | None
) -> str:
    """The conversation as the template writes it, in a thread when it is long."""

    def write() -> str:
        return prompt_text(tokenizer, chat, tools=tools.listed or None, template_options=options)

    characters = prompt_characters(GenerateRequest(chat=chat, tools=tools.listed))
    return await asyncio.to_thread(write) if characters > LONG_PROMPT else write()


def _template_options(body: ChatRequest) -> dict[str, Any] | None:
    """Variables for the template; those that have a field of their own go before."""
    own = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
    named = {name: value for name in own if (value := getattr(body, name)) is not None}
    return {**(body.chat_template_kwargs or {}), **named} or None


def _logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidArgument(f"top_logprobs={top} must be between 0 and {MAX_LOGPROBS}", field="top_logprobs")
    if top and not body.logprobs:
        raise InvalidArgument(
            f"top_logprobs={top} needs logprobs=true; set it, or leave both out", field="top_logprobs"
        )
    return (top or 0) if body.logprobs else None


def _structured(
    body: ChatRequest, tools: Tools, template: str | None, prompt: str, tokenizer: Tokenizer
) -> StructuredOutput | None:
    return only_one(
        tool_choice=forced_calls(tools, template=template, prompt_text=prompt, tokenizer=tokenizer),
        response_format=forced_answer(body.response_format, template=template, prompt_text=prompt, tokenizer=tokenizer),
        structured_outputs=structured_of(body),
    )


async def _filling_the_context(asked: GenerateRequest, model: ServedModel, call: Call) -> GenerateRequest:
    """With all that the model's context has left for the answer, or that the caller may have in flight."""
    ids = await call.gateway.tokenize(asked)
    room = model.max_model_len - len(ids)
    if room < 1:
        raise TooLong(
            f"messages make {len(ids)} tokens, which leaves nothing of the {model.max_model_len} for prompt "
            "and answer together (--max-model-len); shorten them",
            field="messages",
        )
    most = call.origin.caller.max_tokens
    if most is not None:
        room = max(1, min(room, (most - len(ids)) // (asked.n or 1)))
    return dataclasses.replace(asked, text=None, add_special_tokens=None, token_ids=ids, max_tokens=max(room, 1))


def _names(body: ChatRequest) -> dict[str, str]:
    names = {"prompt": "messages", "text": "messages", "token_ids": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names
