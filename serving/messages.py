"""The nouns between the fronts (gRPC and HTTP), the gateway and the clients.

A front turns bytes into a `GenerateRequest`; the gateway answers with a stream of one `Understood`, any number of
`Tokens` and one `Finished` for each of the `n` samples. gRPC clients get the same four back, so that whoever reads an
answer reads the same dataclasses, in process or over the network. In a `GenerateRequest` None means "not set".
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpd.errors import Internal, InvalidArgument, JaxpdError
from jaxpd.life import Moment
from jaxpd.request import FinishReason, SamplingParams, Timings, TokenLogprobs, Usage
from jaxpd.structured import StructuredOutput

MAX_REQUEST_ID = 128  # characters
SHOWN = 60  # characters of a foreign value that an error message repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What a client asks for. Exactly one of `text`, `token_ids` and `chat` is set.

    `tools` and `template_options` are handed to the chat template; `add_special_tokens` is for `text`. The options from
    `max_tokens` to `structured` are those of `jaxpd.request.SamplingParams`, with its defaults where they are not set.
    `shown_ids` are special tokens that the text shows, all others being hidden: marks that a parser has to see.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[Mapping[str, Any], ...] | None = None  # {"role": ..., "content": ..., what else the template knows}
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_options: Mapping[str, Any] | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    structured: StructuredOutput | None = None
    shown_ids: frozenset[int] = frozenset()
    want_text: bool | None = None
    want_token_ids: bool | None = None
    want_prompt_ids: bool | None = None
    want_timeline: bool | None = None


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
    priority: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """`count` new tokens of one sample; `first_index` is the output index of the first.

    `token_ids` is empty and `text` None where they were not asked for. `text` is what became certain; the last of it
    may come with `count` 0. `logprobs` has one entry a token where they were asked for. `prompt_logprobs` come with the
    first tokens of sample 0: one for each token of the prompt but the first, which has nothing before it.
    """

    first_index: int
    count: int
    token_ids: tuple[int, ...]
    text: str | None
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """The last message of a sample. `error` is set exactly when `reason` is ERROR.

    `timeline` is what happened to the sample, with times in seconds since its arrival, where it was asked for.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: int | None = None
    stop_string: str | None = None
    error: JaxpdError | None = None
    sample: int = 0
    timeline: tuple[Moment, ...] | None = None


Message = Understood | Tokens | Finished


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One of the answers to a request, whole. `text` is None and `token_ids` empty where they were not asked for."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finished: Finished


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer: `samples` in order. What belongs to one sample is also to be had here, for the first."""

    understood: Understood
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first sample."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """Of the first sample; empty where it was not asked for."""
        return self.samples[0].text or ""

    @property
    def finished(self) -> Finished:
        """Of the first sample."""
        return self.samples[0].finished

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.finished.reason

    @property
    def usage(self) -> Usage:
        """Token counts: the prompt once, the tokens of all samples."""
        return total_usage(sample.finished.usage for sample in self.samples)

    @property
    def timings(self) -> Timings:
        """Where the time of the first sample went."""
        return self.finished.timings

    @property
    def error(self) -> JaxpdError | None:
        """What went wrong after it was admitted, in any sample."""
        return next((s.finished.error for s in self.samples if s.finished.error is not None), None)


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Of all samples of a request: they share one prompt, whose cached part is the first sample's."""
    first, *others = usages
    tokens = first.completion_tokens + sum(usage.completion_tokens for usage in others)
    return dataclasses.replace(first, completion_tokens=tokens)


def collect(messages: Iterable[Message]) -> Answer:
    """The whole answer of a finished stream. Raises Internal where a first or last message is missing."""
    understood: Understood | None = None
    tokens: dict[int, list[Tokens]] = {}
    ends: dict[int, Finished] = {}
    for message in messages:
        match message:
            case Understood():
                understood = message
            case Tokens():
                tokens.setdefault(message.sample, []).append(message)
            case Finished():
                ends[message.sample] = message
    if understood is None or sorted(ends) != list(range(understood.params.n)):
        raise Internal("the answer ended without its first or last message")
    scored = (piece.prompt_logprobs for piece in tokens.get(0, ()) if piece.prompt_logprobs is not None)
    return Answer(
        understood=understood,
        samples=tuple(_sample(understood, i, tokens.get(i, []), end) for i, end in sorted(ends.items())),
        prompt_logprobs=next(scored, None),
    )


def _sample(understood: Understood, index: int, pieces: list[Tokens], end: Finished) -> Sample:
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return Sample(
        index=index,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        text="".join(piece.text or "" for piece in pieces) if understood.want_text else None,
        logprobs=tuple(logprobs) if understood.params.logprobs is not None else None,
        finished=end,
    )


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
