"""`POST /v1/completions`: text or token ids in, text out; one prompt or many, echoed if wanted."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxpd.errors import InvalidArgument
from jaxpd.request import TokenLogprobs
from jaxpd.structured import StructuredOutput
from serving.gateway import Gateway
from serving.http.openai.answering import Answering, call_of, stream, whole
from serving.http.openai.asked import check_model, only_one, sampling_of, structured_of
from serving.http.openai.extras import tokenizer_of
from serving.http.openai.render import (
    CompletionLogprobs,
    TokenTexts,
    prompt_logprobs,
    stop_reason,
    texts_of,
    timings_of,
    usage_of,
)
from serving.http.openai.schema import CompletionRequest
from serving.http.openai.sse import ChunkWriter, quoted
from serving.messages import Answer, Finished, GenerateRequest, Sample, Tokens, Understood
from serving.model import ServedModel
from serving.parsing import forced_answer

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024


def make_router(gateway: Gateway) -> APIRouter:
    """The one route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Goes on with one or more prompts."""
        model = gateway.model
        check_model(body.model, model)
        asks = asks_of(body, model)
        call = call_of(request, gateway, "completion")
        reply = Reply(body, model, f"cmpl-{call.request_id}")
        if body.stream:
            return Answering(call, lambda send: stream(call, asks, CompletionWriter(reply), send))
        return Answering(call, lambda send: whole(call, asks, reply.whole, send))

    return router


def asks_of(body: CompletionRequest, model: ServedModel) -> list[GenerateRequest]:
    """One request for each prompt. Raises InvalidArgument naming the field."""
    prompts = _prompts(body.prompt)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidArgument(f"prompt holds {len(prompts)} prompts, the limit is {MAX_PROMPTS}", field="prompt")
    if body.suffix:
        raise InvalidArgument("suffix is not served; put what should follow into the prompt", field="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidArgument(
            f"best_of={body.best_of} is not served; leave it out, or set it to n, that is {body.n or 1}",
            field="best_of",
        )
    scored = body.echo and body.logprobs is not None
    if scored and body.stream and (body.n or 1) > 1:
        raise InvalidArgument(
            "a stream with echo and logprobs has one sample; set n to 1 or stream to false", field="n"
        )
    options = sampling_of(body)
    logprobs = body.logprobs
    if scored and options["prompt_logprobs"] is None:
        options |= {"prompt_logprobs": logprobs, "want_prompt_ids": True}
    want_ids = bool(body.return_token_ids) or logprobs is not None
    nothing_new = body.echo and body.max_tokens == 0
    asked = GenerateRequest(
        **options,
        logprobs=logprobs,
        max_tokens=1 if nothing_new else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        structured=_structured(body, model),
        want_token_ids=want_ids or model.tokenizer is None,
    )
    return [
        dataclasses.replace(asked, text=prompt, add_special_tokens=body.add_special_tokens)
        if isinstance(prompt, str)
        else dataclasses.replace(asked, token_ids=tuple(prompt))
        for prompt in prompts
    ]


def _structured(body: CompletionRequest, model: ServedModel) -> StructuredOutput | None:
    format_ = None
    if body.response_format is not None:
        format_ = forced_answer(body.response_format, template=None, prompt_text="", tokenizer=tokenizer_of(model))
    return only_one(response_format=format_, structured_outputs=structured_of(body))


def _prompts(prompt: Any) -> list[Any]:
    """Of the four forms, those that hold one prompt as lists of one."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


class Reply:
    """What both a whole answer and a stream are made with."""

    def __init__(self, body: CompletionRequest, model: ServedModel, answer_id: str) -> None:
        self.body = body
        self.model = model
        self.answer_id = answer_id
        self.name = body.model or model.name
        self.texts: TokenTexts = texts_of(model)
        self.prompts = _prompts(body.prompt)
        self.nothing_new = bool(body.echo) and body.max_tokens == 0

    def echo(self, prompt: int) -> str:
        """The prompt as it is repeated: the client's own text, or that of its token ids."""
        if not self.body.echo:
            return ""
        given = self.prompts[prompt]
        if isinstance(given, str):
            return given
        return "" if self.model.tokenizer is None else self.model.tokenizer.decode(given)

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """The body of all answers."""
        choices = [
            self._choice(len(answer.samples) * prompt + sample.index, prompt, answer, sample)
            for prompt, answer in enumerate(answers)
            for sample in answer.samples
        ]
        usages = [answer.usage for answer in answers]
        if self.nothing_new:
            usages = [dataclasses.replace(usage, completion_tokens=0) for usage in usages]
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": usage_of(usages),
        }

    def _choice(self, index: int, prompt: int, answer: Answer, sample: Sample) -> dict[str, Any]:
        finished = sample.finished
        ids, logprobs = (sample.token_ids, sample.logprobs) if not self.nothing_new else ((), ())
        choice: dict[str, Any] = {
            "index": index,
            "text": self.echo(prompt) + ("" if self.nothing_new else sample.text or ""),
            "logprobs": None,
            "finish_reason": "length" if self.nothing_new else finished.reason.value,
            "stop_reason": None if self.nothing_new else stop_reason(finished, self.model),
        }
        if self.body.logprobs is not None:
            writer = CompletionLogprobs(self.texts)
            choice["logprobs"] = self.logprobs(
                writer, answer.understood, answer.prompt_logprobs, ids, logprobs or (), first=True
            )
        if self.body.return_token_ids:
            choice |= {"prompt_token_ids": answer.understood.prompt_ids, "token_ids": ids}
        if self.body.prompt_logprobs is not None:
            assert answer.understood.prompt_ids is not None
            scores = prompt_logprobs(answer.understood.prompt_ids, answer.prompt_logprobs or (), self.texts)
            choice["prompt_logprobs"] = scores
        if self.body.timings:
            choice |= timings_of(finished)
        return choice

    def logprobs(
        self,
        writer: CompletionLogprobs,
        understood: Understood,
        of_prompt: Sequence[TokenLogprobs] | None,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Of new tokens, with the prompt's in front where it is echoed and they are the first."""
        if of_prompt is None and understood.prompt_tokens == 1:
            of_prompt = ()  # there is nothing to say of its only token, and nothing came
        if self.body.echo and first and of_prompt is not None:
            assert understood.prompt_ids is not None
            before = writer.chunk(understood.prompt_ids, [None, *of_prompt])
            writer.begin()
            after = writer.chunk(ids, logprobs)
            return {key: before[key] + after[key] for key in before}
        return writer.chunk(ids, logprobs)


class CompletionWriter(ChunkWriter):
    """The events of a stream of completions."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.body, kind="text_completion", answer_id=reply.answer_id, model=reply.name)
        self._reply = reply
        self._plain = reply.body.logprobs is None and not self._want_ids and not reply.body.prompt_logprobs
        self._kept: dict[tuple[int, int], tuple[str, str]] = {}  # text and more that wait for the end
        self._begun: set[tuple[int, int]] = set()
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}

    def tokens(self, prompt: int, message: Tokens, *, last: bool) -> bytes:
        """New tokens; the first ones of a sample bring the prompt along where it is echoed."""
        key = (prompt, message.sample)
        text = message.text or ""
        if key not in self._begun:
            self._begun.add(key)
            if self._reply.nothing_new:
                text = ""
                self._made -= message.count
            more = "" if self._plain else self._more(key, message, first=True)
            text = self._reply.echo(prompt) + text
        else:
            if not text and self._plain and not last:
                return b""  # part of a character, say
            more = "" if self._plain else self._more(key, message, first=False)
        if last:
            before, kept = self._kept.get(key, ("", ""))  # text may come behind its tokens, with a message of none
            self._kept[key] = (before + text, kept or more)
            return b""
        return self.write(*key, f'"text":{quoted(text)}{more or PLAIN},"finish_reason":null')

    def finish(self, prompt: int, message: Finished) -> bytes:
        """The end of a sample."""
        key = (prompt, message.sample)
        text, more = self._kept.pop(key, ("", ""))
        if self._reply.nothing_new:
            reason, stopped = "length", "null"
        else:
            reason, stopped = message.reason.value, json.dumps(stop_reason(message, self._reply.model))
        end = f',"finish_reason":"{reason}","stop_reason":{stopped}{self.timings(message)}'
        return self.write(*key, f'"text":{quoted(text)}{more or PLAIN}{end}')

    def usage(self) -> dict[str, Any]:
        """Of all prompts; nothing was made where only the echo was wanted."""
        usage = super().usage()
        if self._reply.nothing_new:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _more(self, key: tuple[int, int], message: Tokens, *, first: bool) -> str:
        """`logprobs` and what else was asked for of these tokens."""
        body, understood = self._reply.body, self._understood[key[0]]
        more: dict[str, Any] = {"logprobs": None}
        nothing_new = self._reply.nothing_new
        ids, logprobs = ((), ()) if nothing_new else (message.token_ids, message.logprobs or ())
        if body.logprobs is not None:
            if first:
                self._logprobs[key] = CompletionLogprobs(self._reply.texts)
            scores = message.prompt_logprobs
            more["logprobs"] = self._reply.logprobs(self._logprobs[key], understood, scores, ids, logprobs, first=first)
        if body.return_token_ids:
            more |= {"prompt_token_ids": understood.prompt_ids, "token_ids": ids} if first else {"token_ids": ids}
        if body.prompt_logprobs is not None and message.prompt_logprobs is not None:
            assert understood.prompt_ids is not None
            scored = prompt_logprobs(understood.prompt_ids, message.prompt_logprobs, self._reply.texts)
            more["prompt_logprobs"] = scored
        return "," + json.dumps(more)[1:-1]


PLAIN = ',"logprobs":null'
