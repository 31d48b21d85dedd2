"""One answer on its way out: the record that the engine's events fill, and the reader that makes messages of it.

    events -> Live.pending, Live.finish -> Reader.read() -> Tokens ..., Finished

Both belong to the event loop. What a slow reader has not fetched waits as one flat list of ids, at most `max_tokens`
long, and the next message takes all of it.
"""

from __future__ import annotations

import asyncio
import dataclasses

from jaxpd.request import FinishEvent, FinishReason
from jaxpd.text import TextStream
from serving.messages import Finished, Message, Tokens, Understood
from serving.model import ServedModel


class Live:
    """One request between its check and its FinishEvent."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.submitted = False
        self.aborted = False  # by abort(), before it was submitted
        self.left = False  # nobody reads any more
        self.pending: list[int] = []
        self.finish: FinishEvent | None = None
        self.wake = asyncio.Event()


class Reader:
    """Turns what waits in a record into messages: text, stop strings, the finish."""

    def __init__(self, live: Live, understood: Understood, model: ServedModel) -> None:
        params = understood.params
        self._live = live
        self._understood = understood
        # Tokens that end the answer: in its ids, never in its text.
        self._hidden = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
        self._text: TextStream | None = None
        if understood.want_text or params.stop:
            assert model.tokenizer is not None
            self._text = TextStream(model.tokenizer, stop=params.stop)
        self._count = 0
        self.stop_string: str | None = None

    def read(self) -> list[Message]:
        """Everything there is to say now. After a stop string: nothing but the finish, once the engine has sent it."""
        live, messages = self._live, list[Message]()
        ids, live.pending = live.pending, []
        if self.stop_string is None:
            ids, text = self._push(ids)
            if live.finish is not None and self._text is not None and self.stop_string is None:
                text += self._text.finish()
                self.stop_string = self._text.stop_string
            if ids or text:
                messages.append(
                    Tokens(
                        first_index=self._count,
                        count=len(ids),
                        token_ids=tuple(ids) if self._understood.want_token_ids else (),
                        text=text if self._understood.want_text else None,
                    )
                )
            self._count += len(ids)
        if live.finish is not None:
            messages.append(self._finished(live.finish))
        return messages

    def _push(self, ids: list[int]) -> tuple[list[int], str]:
        """The ids that belong to the answer (fewer after a stop string) and the text that became certain."""
        if self._text is None:
            return ids, ""
        if not self._understood.params.stop:
            return ids, self._text.push([i for i in ids if i not in self._hidden])
        texts = []
        for index, token in enumerate(ids):  # one by one, to find the token that completed the stop string
            if token in self._hidden:
                continue
            texts.append(self._text.push([token]))
            if self._text.stopped:
                self.stop_string = self._text.stop_string
                return ids[: index + 1], "".join(texts)
        return ids, "".join(texts)

    def _finished(self, event: FinishEvent) -> Finished:
        if self.stop_string is None:
            return Finished(
                reason=event.reason,
                usage=event.usage,
                timings=event.timings,
                stop_token_id=event.stop_token_id,
                error=event.error,
            )
        usage = dataclasses.replace(event.usage, completion_tokens=self._count)
        return Finished(reason=FinishReason.STOP, usage=usage, timings=event.timings, stop_string=self.stop_string)
