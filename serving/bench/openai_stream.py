"""What one event of an OpenAI stream says, and what a stream says as a whole."""

from __future__ import annotations

import json
from typing import Any

from serving.bench.records import BAD_ANSWER, BROKEN, ENDED_BADLY, NO_TOKENS, SERVER_ERROR, Failure, Reply

SHOWN = 300


def take(reply: Reply, event: str, now: float) -> bool:
    """Adds an event that came at `now`; True when the stream is over, by [DONE] or by a failure.

    A message counts from its first content on: text, reasoning, a tool call, or token ids. One without content that
    reports new tokens counts too (half a character has no text yet), provided that all before it reported theirs: else
    it is the sum at the end.
    """
    if event.strip() == "[DONE]":
        return True
    try:
        body = json.loads(event)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        reply.failure = Failure(BAD_ANSWER, f"an event that is no JSON object: {event[:SHOWN]}")
        return True
    if body.get("error"):
        error = body["error"]
        said = error.get("message", error) if isinstance(error, dict) else error
        reply.failure = Failure(SERVER_ERROR, str(said)[:SHOWN])
        return True
    new_tokens = _usage(reply, body.get("usage"))
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    if choice is not None:
        if isinstance(choice.get("finish_reason"), str):
            reply.finish_reason = choice["finish_reason"]
        if _has_content(choice) or (new_tokens and None not in reply.message_tokens):
            reply.message_s.append(now)
            reply.message_tokens.append(new_tokens)
    return False


def finish(reply: Reply, *, done: bool) -> None:
    """The verdict at the end of the stream; `done` says whether it ended by [DONE]."""
    if not done and reply.finish_reason is None:
        reply.failure = Failure(BROKEN, f"ended after {len(reply.message_s)} messages without [DONE] or finish_reason")
    elif reply.finish_reason in ENDED_BADLY:
        reply.failure = Failure(f"finished by {reply.finish_reason}", f"finish_reason is {reply.finish_reason}")
    elif not reply.message_s:
        reply.failure = Failure(NO_TOKENS, "the answer holds no tokens")


def _usage(reply: Reply, usage: Any) -> int | None:
    """Notes the usage so far; returns the tokens that are new since the last, None where it does not say."""
    if not isinstance(usage, dict):
        return None
    before = reply.completion_tokens or 0
    if isinstance(usage.get("prompt_tokens"), int):
        reply.prompt_tokens = usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        reply.cached_tokens = details["cached_tokens"]
    if not isinstance(usage.get("completion_tokens"), int):
        return None
    reply.completion_tokens = usage["completion_tokens"]
    return max(0, usage["completion_tokens"] - before)


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    places = (choice, delta) if isinstance(delta, dict) else (choice,)
    names = ("text", "content", "reasoning_content", "reasoning", "tool_calls", "token_ids", "refusal")
    return any(place.get(name) for place in places for name in names)
