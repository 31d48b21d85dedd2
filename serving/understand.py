"""What a client asked for, made complete: defaults of options, and bounds that hold before any work is done.

Here stand the limits that protect the server (sizes, counts); what the model allows is checked by `Request.validate`.
"""

from __future__ import annotations

import dataclasses
import secrets

from jaxpd.errors import InvalidArgument, TooLong
from jaxpd.request import MAX_SEED, SamplingParams
from jaxpd.text import to_prompt_ids
from serving.messages import GenerateRequest
from serving.model import ServedModel

DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
MESSAGE_SIZE = 64  # characters that one chat message counts for by itself
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
    longest = max((len(stop) for stop in asked.stop), default=0)
    for field, count, limit, what in (
        ("stop", len(asked.stop), MAX_STOP_STRINGS, "{} strings"),
        ("stop", longest, MAX_STOP_CHARACTERS, "a string of {} characters"),
        ("stop_token_ids", len(asked.stop_token_ids), MAX_STOP_TOKEN_IDS, "{} ids"),
    ):
        if count > limit:
            raise InvalidArgument(f"{field} holds {what.format(count)}, the limit is {limit}", field=field)


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
    """How much there is to tokenize."""
    if asked.text is not None:
        return len(asked.text)
    return sum(MESSAGE_SIZE + len(str(entry.get("content", ""))) for entry in asked.chat or ())


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
