"""What a client asked for, made complete: defaults of options, and bounds that hold before any work is done.

Here stand the limits that protect the server (sizes, counts); what the model allows is checked by `Request.validate`.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpd.errors import InvalidArgument, TooLong
from jaxpd.request import MAX_SEED, SamplingParams
from jaxpd.text import to_prompt_ids
from serving.messages import GenerateRequest
from serving.model import ServedModel

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
# A prompt of more characters is tokenized in a thread, and one of more tokens submitted in one, so that nobody's tokens
# wait for it.
LONG_PROMPT = 4096
CHARACTERS_A_TOKEN = 128  # more than any tokenizer makes of any text, on average
PART_SIZE = 16  # characters that each value in a chat counts for by itself
MAX_LEVELS = 64  # of values in values, in chat messages, tools and template options
# Searched in Python for every token; without bounds one request could hold up all others.
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 64, 1024, 1024
_OPTIONS = tuple(field.name for field in dataclasses.fields(SamplingParams))  # all of them are GenerateRequest's too


def params_of(asked: GenerateRequest, *, room: int) -> SamplingParams:
    """The options with those filled in that were not set; `room` is what the prompt leaves of the model's length."""
    given = {field: value for field in _OPTIONS if (value := getattr(asked, field)) is not None}
    # A prompt that fills the model's length is refused by Request.validate.
    given.setdefault("max_tokens", max(1, min(DEFAULT_MAX_TOKENS, room), asked.min_tokens or 0))
    given.setdefault("seed", secrets.randbelow(MAX_SEED + 1))
    return SamplingParams(**given)


def check_sizes(asked: GenerateRequest, model: ServedModel) -> None:
    """Refuses what would take long even to look at. Raises InvalidArgument."""
    if asked.token_ids is not None and len(asked.token_ids) > model.max_model_len:
        raise TooLong(
            f"prompt has {len(asked.token_ids)} tokens, above the limit of {model.max_model_len} (--max-model-len)",
            field="prompt",
        )
    characters = prompt_characters(asked)
    most = CHARACTERS_A_TOKEN * model.max_model_len
    if characters > most:
        raise TooLong(
            f"prompt has {characters} characters, and more than {most} are not {model.max_model_len} tokens "
            "(--max-model-len); shorten it",
            field="prompt",
        )
    longest = max((len(stop) for stop in asked.stop), default=0)
    for field, count, limit, what in (
        ("stop", len(asked.stop), MAX_STOP_STRINGS, "{} strings"),
        ("stop", longest, MAX_STOP_CHARACTERS, "a string of {} characters"),
        ("stop_token_ids", len(asked.stop_token_ids), MAX_STOP_TOKEN_IDS, "{} ids"),
    ):
        if count > limit:
            raise InvalidArgument(f"{field} holds {what.format(count)}, the limit is {limit}", field=field)
    if characters > LONG_PROMPT:  # wrong options are found before it is tokenized
        params_of(asked, room=model.max_model_len).validate(vocab_size=model.vocab_size)


def check_response(asked: GenerateRequest, model: ServedModel) -> None:
    """Refuses text from a model that has none. Raises InvalidArgument."""
    if asked.want_text is False and asked.want_token_ids is False:
        raise InvalidArgument("response asks for neither text nor token_ids; ask for one of them", field="response")
    for field, needed in (("stop", bool(asked.stop)), ("response.text", bool(asked.want_text))):
        if needed and model.tokenizer is None:
            raise InvalidArgument(
                f"{field} needs a tokenizer and {model.name} has none; leave it out and use token ids", field=field
            )


def prompt_characters(asked: GenerateRequest) -> int:
    """How much there is to render and to tokenize. Raises InvalidArgument for what is nested too deeply."""
    if asked.text is not None:
        return len(asked.text)
    given = {"chat": asked.chat, "tools": asked.tools, "template_options": asked.template_options}
    return sum(_characters(value, field) for field, value in given.items() if value)


def _characters(value: Any, field: str) -> int:
    """All strings in it, and something for everything else; without recursion, which a client could exhaust."""
    total, todo = 0, [(value, 0)]
    while todo:
        inner, level = todo.pop()
        if level > MAX_LEVELS:
            raise InvalidArgument(f"{field} is nested deeper than {MAX_LEVELS} levels; make it flatter", field=field)
        if isinstance(inner, str):
            total += len(inner)
            continue
        total += PART_SIZE
        if isinstance(inner, Mapping):
            todo += [(part, level + 1) for pair in inner.items() for part in pair]
        elif isinstance(inner, Sequence):
            todo += [(part, level + 1) for part in inner]
    return total


def prompt_ids_of(asked: GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    """The prompt as token ids. Raises InvalidArgument."""
    return to_prompt_ids(
        model.tokenizer,
        text=asked.text,
        token_ids=asked.token_ids,
        chat=asked.chat,
        tools=asked.tools,
        template_options=asked.template_options,
        add_special_tokens=asked.add_special_tokens is not False,
    )
