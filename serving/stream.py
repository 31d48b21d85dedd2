"""One request's answers on their way out: the record that the engine's events fill, and the reader that makes messages.

    events -> Live.samples[i].pending, .finish -> Reader.read() -> Tokens ..., one Finished a sample

Both belong to the event loop. What a slow reader has not fetched waits as one flat list of ids a sample, at most
`max_tokens` long, and the next message takes all of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from jaxpd.life import Life, Moment, Stage
from jaxpd.request import FinishEvent, FinishReason, Request, Timings, TokenLogprobs, TokensEvent, Usage
from jaxpd.text import AnswerText
from serving.messages import Finished, Message, Tokens, Understood
from serving.model import ServedModel
from serving.observer import Origin


@dataclasses.dataclass
class Waiting:
    """What has come of one sample and was not fetched yet."""

    pending: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishEvent | None = None
    stopped: bool = False  # a stop string has ended it, and the engine is told to

    def take(self, event: TokensEvent) -> None:
        """Adds an event's tokens."""
        self.pending.extend(event.token_ids)
        if event.logprobs is not None:
            self.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs


class Live:
    """One request between its check and its last FinishEvent."""

    def __init__(self, request_id: str, origin: Origin) -> None:
        self.request_id = request_id
        self.origin = origin
        self.request: Request | None = None  # once it is understood
        self.submitted = False  # the engine has it
        self.charged = 0  # tokens counted against the caller's limit
        self.submitting = False  # in a thread, which goes on when the reader leaves
        self.aborted = False  # by abort(), before it was submitted
        self.left = False  # nobody reads any more
        self.begun = False  # its first tokens are here
        self.samples: list[Waiting] = []
        self.wake = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether the engine is done with all samples."""
        return bool(self.samples) and all(sample.finish is not None for sample in self.samples)


class Reader:
    """Turns what waits in a record into messages: text, stop strings, the finish of each sample."""

    def __init__(
        self,
        live: Live,
        understood: Understood,
        model: ServedModel,
        *,
        want_timeline: bool,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._samples = [
            _SampleReader(i, waiting, understood, model, want_timeline, shown_ids)
            for i, waiting in enumerate(live.samples)
        ]

    @property
    def finished(self) -> bool:
        """Whether every sample's Finished was read."""
        return all(sample.finished for sample in self._samples)

    def read(self) -> list[Message]:
        """Everything there is to say now. After a stop string: nothing but the finish, once the engine has sent it."""
        return [message for sample in self._samples for message in sample.read()]

    @property
    def detokenize_s(self) -> float:
        """Seconds that it took to make text of ids, so far."""
        return sum(sample.detokenize_s for sample in self._samples)

    def take_stopped(self) -> list[int]:
        """The samples that a stop string has ended since the last call and that the engine still makes."""
        return [sample.index for sample in self._samples if sample.take_stopped()]


class _SampleReader:
    def __init__(
        self,
        index: int,
        waiting: Waiting,
        understood: Understood,
        model: ServedModel,
        want_timeline: bool,
        shown_ids: frozenset[int],
    ) -> None:
        params = understood.params
        self.index = index
        self.finished = False
        self._waiting = waiting
        self._understood = understood
        self._want_timeline = want_timeline
        self._text: AnswerText | None = None
        if understood.want_text or params.stop:
            assert model.tokenizer is not None
            hidden = params.ending_ids(model.eos_token_ids)
            self._text = AnswerText(model.tokenizer, stop=params.stop, hidden=hidden, shown=shown_ids)
        self._count = 0
        self.detokenize_s = 0.0

    @property
    def _stop_string(self) -> str | None:
        return None if self._text is None else self._text.stop_string

    def take_stopped(self) -> bool:
        waiting = self._waiting
        stopped = self._stop_string is not None and not waiting.stopped and waiting.finish is None
        waiting.stopped |= stopped
        return stopped

    def read(self) -> list[Message]:
        waiting, messages = self._waiting, list[Message]()
        if self.finished:
            return messages
        ids, waiting.pending = waiting.pending, []
        logprobs, waiting.logprobs = waiting.logprobs, []
        if self._stop_string is None and (ids or waiting.finish is not None):
            count, text = (len(ids), "") if self._text is None else self._detokenize(self._text, ids)
            if count or text:
                messages.append(self._tokens(ids[:count], text, logprobs[:count]))
            self._count += count
        if waiting.finish is not None:
            self.finished = True
            messages.append(self._finished(waiting.finish))
        return messages

    def _detokenize(self, stream: AnswerText, ids: list[int]) -> tuple[int, str]:
        """How many of `ids` belong to the answer, and the text that became certain."""
        start_s = time.perf_counter()
        count, text = stream.push(ids)
        if self._waiting.finish is not None and stream.stop_string is None:
            text += stream.finish()
        self.detokenize_s += time.perf_counter() - start_s
        return count, text

    def _tokens(self, ids: list[int], text: str, logprobs: list[TokenLogprobs]) -> Tokens:
        prompt_logprobs, self._waiting.prompt_logprobs = self._waiting.prompt_logprobs, None
        return Tokens(
            first_index=self._count,
            count=len(ids),
            token_ids=tuple(ids) if self._understood.want_token_ids else (),
            text=text if self._understood.want_text else None,
            sample=self.index,
            logprobs=tuple(logprobs) if self._understood.params.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _finished(self, event: FinishEvent) -> Finished:
        stop_string = self._stop_string
        timeline = timeline_of(event.life) if self._want_timeline and event.life is not None else None
        if stop_string is None:
            return Finished(
                reason=event.reason,
                usage=event.usage,
                timings=event.timings,
                stop_token_id=event.stop_token_id,
                error=event.error,
                sample=self.index,
                timeline=timeline,
            )
        return Finished(
            reason=FinishReason.STOP,
            usage=dataclasses.replace(event.usage, completion_tokens=self._count),
            timings=event.timings,
            stop_string=stop_string,
            sample=self.index,
            timeline=timeline,
        )


def timeline_of(life: Life) -> tuple[Moment, ...]:
    """What happened, with times in seconds since the arrival."""
    start_s = life.first(Stage.ARRIVED) or 0.0
    return tuple(dataclasses.replace(moment, at_s=moment.at_s - start_s) for moment in life.moments)


def aborted_early(understood: Understood) -> list[Finished]:
    """The end of a request that was aborted before the engine had it."""
    usage = Usage(prompt_tokens=understood.prompt_tokens, completion_tokens=0)
    return [
        Finished(reason=FinishReason.ABORT, usage=usage, timings=Timings(), sample=i)
        for i in range(understood.params.n)
    ]
