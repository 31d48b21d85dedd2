"""A chat's answer in OpenAI's shape: one message, or the deltas of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpd.request import FinishReason
from serving.http.openai.render import (
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
    stop_reason,
    texts_of,
    timings_of,
    usage_of,
)
from serving.http.openai.schema import ChatRequest
from serving.http.openai.sse import ChunkWriter, quoted
from serving.messages import Answer, Finished, Sample, Tokens
from serving.model import ServedModel
from serving.parsing import Content, Parser, Piece, Reasoning, ToolCall


class ChatReply:
    """What both a whole answer and a stream are made with."""

    def __init__(
        self, body: ChatRequest, model: ServedModel, answer_id: str, make_parser: Callable[[], Parser] | None
    ) -> None:
        self.body = body
        self.model = model
        self.answer_id = answer_id
        self.name = body.model or model.name
        self.texts: TokenTexts = texts_of(model)
        self.make_parser = make_parser

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""
        (answer,) = answers
        whole: dict[str, Any] = {
            "id": self.answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [self._choice(sample) for sample in answer.samples],
            "usage": usage_of([answer.usage]),
        }
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = answer.understood.prompt_ids
        if self.body.prompt_logprobs is not None:
            ids = answer.understood.prompt_ids or ()
            whole["prompt_logprobs"] = prompt_logprobs(ids, answer.prompt_logprobs or (), self.texts)
        return whole

    def reason(self, finished: Finished, calls: bool) -> str:
        """OpenAI's finish reason."""
        return "tool_calls" if calls and finished.reason is FinishReason.STOP else finished.reason.value

    def _choice(self, sample: Sample) -> dict[str, Any]:
        text, finished = sample.text or "", sample.finished
        if self.make_parser is None:
            pieces: list[Piece] = [Content(text)]
        else:
            parser = self.make_parser()
            pieces = [*parser.push(text), *parser.finish()]
        message = message_of(pieces)
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self.reason(finished, "tool_calls" in message),
            "stop_reason": stop_reason(finished, self.model),
        }
        if sample.logprobs is not None:
            choice["logprobs"] = chat_logprobs(sample.token_ids, sample.logprobs, self.texts)
        if self.body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        if self.body.timings:
            choice |= timings_of(finished)
        return choice


class ChatWriter(ChunkWriter):
    """The events of a stream of one chat's answers."""

    def __init__(self, reply: ChatReply) -> None:
        super().__init__(reply.body, kind="chat.completion.chunk", answer_id=reply.answer_id, model=reply.name)
        self._reply = reply
        body = reply.body
        self._plain = not body.logprobs and not self._want_ids and body.prompt_logprobs is None
        self._parsers: dict[int, Parser] = {}
        self._begun: set[int] = set()
        self._kept: dict[int, tuple[list[Piece], str]] = {}

    def tokens(self, prompt: int, message: Tokens, *, last: bool) -> bytes:
        """New tokens; the role comes with the first ones of a sample."""
        sample, text = message.sample, message.text or ""
        first = sample not in self._begun
        choice, beside = ("", "") if self._plain else self._more(message, first=first)
        if self._reply.make_parser is None:
            pieces: list[Piece] = [Content(text)] if text else []
        else:
            if first:
                self._parsers[sample] = self._reply.make_parser()
            pieces = self._parsers[sample].push(text)
        if last and not beside:
            before, kept = self._kept.get(sample, ([], ""))  # text may come behind its tokens, with a message of none
            self._kept[sample] = ([*before, *pieces], kept or choice)
            return b""
        if not (pieces or first or choice):
            return b""
        delta = self._delta(sample, pieces)
        return self.write(prompt, sample, f'{delta}{choice or PLAIN},"finish_reason":null', beside)

    def finish(self, prompt: int, message: Finished) -> bytes:
        """The end of a sample."""
        sample = message.sample
        pieces, choice = self._kept.pop(sample, ([], ""))
        parser = self._parsers.get(sample)
        if parser is not None:
            pieces = [*pieces, *parser.finish()]
        reason = self._reply.reason(message, parser is not None and parser.tool_calls > 0)
        stopped = json.dumps(stop_reason(message, self._reply.model))
        end = f',"finish_reason":"{reason}","stop_reason":{stopped}{self.timings(message)}'
        return self.write(prompt, sample, f"{self._delta(sample, pieces)}{choice or PLAIN}{end}")

    def _delta(self, sample: int, pieces: Sequence[Piece]) -> str:
        first = sample not in self._begun
        self._begun.add(sample)
        if len(pieces) == 1 and isinstance(pieces[0], Content):
            role = '"role":"assistant",' if first else ""
            return f'"delta":{{{role}"content":{quoted(pieces[0].text)}}}'
        return f'"delta":{json.dumps(delta_of(pieces, first=first))}'

    def _more(self, message: Tokens, *, first: bool) -> tuple[str, str]:
        """What else was asked for of these tokens: in the choice, and beside it."""
        body, understood, texts = self._reply.body, self._understood[0], self._reply.texts
        choice: dict[str, Any] = {"logprobs": None}
        beside: dict[str, Any] = {}
        if message.logprobs is not None:
            choice["logprobs"] = chat_logprobs(message.token_ids, message.logprobs, texts)
        if body.return_token_ids:
            choice["token_ids"] = message.token_ids
            if first and not self._begun:
                beside["prompt_token_ids"] = understood.prompt_ids
        if message.prompt_logprobs is not None:
            beside["prompt_logprobs"] = prompt_logprobs(understood.prompt_ids or (), message.prompt_logprobs, texts)
        return "," + json.dumps(choice)[1:-1], "," + json.dumps(beside)[1:-1] if beside else ""


PLAIN = ',"logprobs":null'


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The message of a whole answer. `content` is null where there are only tool calls."""
    content, reasoning, calls = "", "", dict[int, dict[str, Any]]()
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolCall():
                _add_call(calls, piece)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {**message, "refusal": None}


def delta_of(pieces: Iterable[Piece], *, first: bool) -> dict[str, Any]:
    """What is new, in a stream."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolCall(index, call_id, name, arguments):
                begins = {"id": call_id, "type": "function"} if name else {}
                function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
                calls.append({"index": index, **begins, "function": function})
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if content or (first and not reasoning and not calls):
        delta["content"] = content
    if reasoning:
        delta["reasoning_content"] = reasoning
    if calls:
        delta["tool_calls"] = calls
    return delta


def _add_call(calls: dict[int, dict[str, Any]], piece: ToolCall) -> None:
    if piece.index not in calls:
        function = {"name": piece.name, "arguments": ""}
        calls[piece.index] = {"id": piece.id, "type": "function", "function": function}
    calls[piece.index]["function"]["arguments"] += piece.arguments
