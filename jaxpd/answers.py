"""The engine's events of one request as a caller of `jaxpd.LLM` sees them: deltas and completions, with text.

    TokensEvent(sample) -> text, stop strings -> Delta(sample)
    FinishEvent(sample) -> what was held back -> Completion(sample)

Each sample has its own text and its own stop strings: a stop string ends the sample that wrote it, and no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jaxpd.errors import JaxpdError
from jaxpd.life import Life
from jaxpd.request import Event, FinishEvent, FinishReason, Request, Timings, TokenLogprobs, TokensEvent, Usage
from jaxpd.text import AnswerText
from jaxpd.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample. `token_ids` are complete (EOS and stop tokens included); `text` hides those, and special
    tokens.

    `logprobs` has one entry a token where the request asked for them. `prompt_logprobs` come with sample 0 where they
    were asked for: one for each token of the prompt but the first, which has nothing before it. `life` is everything
    that happened to the sample inside the engine, with its times.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    error: JaxpdError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    sample: int = 0
    life: Life | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens of one sample, their log probabilities where asked for, and the text that became safe to show."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    sample: int = 0


@dataclasses.dataclass
class _Sample:
    """What came of one sample so far."""

    text: AnswerText
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Answer:
    """The samples of one request while they grow. `abort` is called with a sample that a stop string has ended."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, eos_ids: Iterable[int], *, abort: Callable[[int], object]
    ) -> None:
        params = request.params
        self.request = request
        self.unfinished = params.n
        self._abort = abort
        hidden = params.ending_ids(eos_ids)
        self._samples = [_Sample(AnswerText(tokenizer, stop=params.stop, hidden=hidden)) for _ in range(params.n)]

    def take(self, event: Event) -> list[Delta | Completion]:
        """What a caller sees of the next event of this request."""
        sample = self._samples[event.sample]
        if isinstance(event, FinishEvent):
            return self._finish(sample, event)
        # After a stop string come tokens that were on their way.
        return [] if sample.text.stopped else self._tokens(sample, event)

    def _tokens(self, sample: _Sample, event: TokensEvent) -> list[Delta | Completion]:
        count, text = sample.text.push(event.token_ids)
        if sample.text.stopped:
            self._abort(event.sample)
        token_ids = event.token_ids[:count]
        logprobs = None if event.logprobs is None else event.logprobs[:count]
        sample.token_ids.extend(token_ids)
        sample.logprobs.extend(logprobs or ())
        if event.prompt_logprobs is not None:
            sample.prompt_logprobs = event.prompt_logprobs
        return [Delta(token_ids=token_ids, text=text, logprobs=logprobs, sample=event.sample)]

    def _finish(self, sample: _Sample, event: FinishEvent) -> list[Delta | Completion]:
        self.unfinished -= 1
        rest = sample.text.finish()
        stopped = sample.text.stopped  # by a stop string; what the engine did until it heard of that does not count
        completion = Completion(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(sample.token_ids),
            text=sample.text.text,
            finish_reason=FinishReason.STOP if stopped else event.reason,
            stop_token_id=None if stopped else event.stop_token_id,
            usage=dataclasses.replace(event.usage, completion_tokens=len(sample.token_ids)),
            timings=event.timings,
            error=None if stopped else event.error,
            logprobs=None if self.request.params.logprobs is None else tuple(sample.logprobs),
            prompt_logprobs=sample.prompt_logprobs,
            sample=event.sample,
            life=event.life,
        )
        held_back = [Delta(token_ids=(), text=rest, sample=event.sample)] if rest else []
        return [*held_back, completion]
