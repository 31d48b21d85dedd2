"""The nouns between the fronts (gRPC, later HTTP), the gateway and the clients.

A front turns bytes into a `GenerateRequest`; the gateway answers with a stream of one `Understood`, any number of
`Tokens` and exactly one `Finished`. Clients get the same four back, so that whoever reads an answer reads the same
dataclasses, in process or over the network. In a `GenerateRequest` None means "not set", everywhere.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpd.errors import Internal, InvalidArgument, JaxpdError
from jaxpd.request import FinishReason, SamplingParams, Timings, Usage

MAX_REQUEST_ID = 128  # characters
SHOWN = 60  # characters of a foreign value that an error message repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What a client asks for. Exactly one of `text`, `token_ids` and `chat` is set."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[Mapping[str, Any], ...] | None = None  # {"role": ..., "content": ...}
    request_id: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    want_text: bool | None = None
    want_token_ids: bool | None = None
    want_prompt_ids: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Understood:
    """The first message: the request with every option filled in; `params.seed` is set.

    `prompt_ids` is None where they were not asked for.
    """

    request_id: str
    prompt_tokens: int
    prompt_ids: tuple[int, ...] | None
    params: SamplingParams
    want_text: bool
    want_token_ids: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """`count` new tokens; `first_index` is the output index of the first.

    `token_ids` is empty and `text` None where they were not asked for. `text` is what became certain; the last of it
    may come with `count` 0.
    """

    first_index: int
    count: int
    token_ids: tuple[int, ...]
    text: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """The last message. `error` is set exactly when `reason` is ERROR."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: int | None = None
    stop_string: str | None = None
    error: JaxpdError | None = None


Message = Understood | Tokens | Finished


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer; `text` is empty where it was not asked for."""

    understood: Understood
    token_ids: tuple[int, ...]
    text: str
    finished: Finished

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.finished.reason

    @property
    def usage(self) -> Usage:
        """Its token counts."""
        return self.finished.usage

    @property
    def timings(self) -> Timings:
        """Where its time went."""
        return self.finished.timings

    @property
    def error(self) -> JaxpdError | None:
        """What went wrong after it was admitted."""
        return self.finished.error


def collect(messages: Iterable[Message]) -> Answer:
    """The whole answer of a finished stream."""
    understood: Understood | None = None
    finished: Finished | None = None
    ids: list[int] = []
    texts: list[str] = []
    for message in messages:
        match message:
            case Understood():
                understood = message
            case Tokens():
                ids.extend(message.token_ids)
                texts.append(message.text or "")
            case Finished():
                finished = message
    if understood is None or finished is None:
        raise Internal("the answer ended without its first or last message")
    return Answer(understood=understood, token_ids=tuple(ids), text="".join(texts), finished=finished)


def new_request_id() -> str:
    """64 random bits in hexadecimal."""
    return secrets.token_hex(8)


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument unless the id can stand in a log line and in call metadata."""
    visible = request_id.isascii() and all("!" <= c <= "~" for c in request_id)
    if not visible or not 1 <= len(request_id) <= MAX_REQUEST_ID:
        raise InvalidArgument(
            f"request_id={shown(request_id)} must be 1 to {MAX_REQUEST_ID} visible ASCII characters; "
            "leave it out to get one",
            field="request_id",
        )


def shown(value: str) -> str:
    """`value` quoted for an error message, cut when it is long."""
    return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}... ({len(value)} characters)"
