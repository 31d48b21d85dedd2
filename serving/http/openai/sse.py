"""The events of a stream, made of ready pieces: a stream writes one for every few tokens, so each has to be cheap.

    data: {"id", "object", "created", "model": ..., "choices": [{"index": i, <what is new>}], "usage": ...}

Nothing goes out for a sample before its first token, for clients take the time of the first choice they see. The last
tokens wait for the finish reason, which is there already, so that an answer of N tokens makes N events.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any

from jaxpd.errors import JaxpdError
from jaxpd.request import Usage
from serving.http.openai.render import timings_of, usage_of
from serving.http.openai.schema import SamplingBody
from serving.messages import Finished, Message, Tokens, Understood, total_usage

# A string as JSON; ASCII, since some clients split lines at U+2028 and its like.
quoted: Callable[[str], str] = encode_basestring_ascii


class ChunkWriter(abc.ABC):
    """What the streams of both routes have in common; `tokens` and `finish` are theirs.

    `choice` numbers go through the prompts: `n` for the first, then `n` for the next.
    """

    def __init__(self, body: SamplingBody, *, kind: str, answer_id: str, model: str) -> None:
        self.error: JaxpdError | None = None
        self._head = (
            f'data: {{"id":{quoted(answer_id)},"object":"{kind}","created":{int(time.time())},"model":{quoted(model)},'
        )
        options = body.stream_options
        self._usage_asked = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        self._tail = ',"usage":null}\n\n' if self._usage_asked else "}\n\n"
        self._want_timings = bool(body.timings)
        self._want_ids = bool(body.return_token_ids)
        self._prompt_tokens = 0
        self._made = 0  # tokens, of all samples
        self._understood: dict[int, Understood] = {}
        self._usages: dict[int, list[Usage]] = {}
        self._prefixes: dict[tuple[int, int], str] = {}  # (prompt, sample) -> everything before what is new

    def begin(self, prompt: int, understood: Understood) -> None:
        """A prompt was taken."""
        self._understood[prompt] = understood
        self._usages[prompt] = []
        self._prompt_tokens += understood.prompt_tokens
        n = understood.params.n
        for sample in range(n):
            self._prefixes[prompt, sample] = f'{self._head}"choices":[{{"index":{prompt * n + sample},'

    def chunk(self, prompt: int, message: Message) -> bytes:
        """The event of a message, or nothing."""
        if isinstance(message, Tokens):
            self._made += message.count
            last = message.first_index + message.count == self._understood[prompt].params.max_tokens
            return self.tokens(prompt, message, last=last)
        if isinstance(message, Finished):
            self._usages[prompt].append(message.usage)
            if message.error is not None:
                self.error = self.error or message.error
                return b""
            return self.finish(prompt, message)
        return b""

    @abc.abstractmethod
    def tokens(self, prompt: int, message: Tokens, *, last: bool) -> bytes:
        """New tokens; `last` when they are as many as were asked for."""

    @abc.abstractmethod
    def finish(self, prompt: int, message: Finished) -> bytes:
        """The end of a sample, and what was kept back for it."""

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        if not self._usage_asked:
            return b""
        usage = self.usage()
        return f'{self._head}"choices":[],"usage":{json.dumps(usage)}}}\n\n'.encode()

    def usage(self) -> dict[str, Any]:
        """Of all prompts and samples that have ended."""
        return usage_of(total_usage(usages) for usages in self._usages.values() if usages)

    def write(self, prompt: int, sample: int, new: str, more: str = "") -> bytes:
        """An event with what is `new` of a choice; `more` stands beside the choices."""
        tail = self._tail
        if self._usage_always:
            made, total = self._made, self._prompt_tokens + self._made
            usage = f'{{"prompt_tokens":{self._prompt_tokens},"completion_tokens":{made},"total_tokens":{total}}}'
            tail = f',"usage":{usage}}}\n\n'
        return f"{self._prefixes[prompt, sample]}{new}}}]{more}{tail}".encode()

    def timings(self, message: Finished) -> str:
        """`timings` and `timeline` as part of a choice, where they were asked for."""
        return "," + json.dumps(timings_of(message))[1:-1] if self._want_timings else ""
