"""The nouns of a benchmark: the call that is to be made, what came of it, and what makes calls.

Call -> Backend.prepare -> Backend.send -> Reply -> Record
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

BROKEN = "broken stream"  # the connection ended, or the answer did, before it was whole
CONNECT = "connect"
TIMEOUT = "timeout"
BAD_ANSWER = "not an answer"  # neither an error nor what the protocol says
SERVER_ERROR = "error in stream"
NO_TOKENS = "no tokens"
ENDED_BADLY = frozenset({"abort", "error"})  # finish reasons that no client wants


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a prompt: equal keys give equal tokens, and a shorter piece is the beginning of a longer one."""

    key: tuple[int, ...]
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One request to make. `due_s` counts from the start of the run; None is "as soon as there is room".

    The prompt is `text` where that is given, else `pieces`. `input_len` is 0 where nobody knows it.
    """

    index: int
    due_s: float | None
    input_len: int
    output_len: int
    pieces: tuple[Piece, ...] = ()
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a call failed: a short kind that is counted, and what was said."""

    kind: str
    message: str


@dataclasses.dataclass(kw_only=True)
class Reply:
    """What one call brought, filled while it runs. Times are those of `time.perf_counter`.

    `message_s` has the times of the messages with tokens in them; `message_tokens` how many each held, None where the
    server did not say. `prompt_tokens`, `completion_tokens` and `cached_tokens` are the server's `usage`.
    """

    sent_s: float
    end_s: float = 0.0
    message_s: list[float] = dataclasses.field(default_factory=list)
    message_tokens: list[int | None] = dataclasses.field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One call that is over. All times in seconds since the start of the run."""

    index: int
    due_s: float | None
    sent_s: float
    end_s: float
    input_len: int  # tokens that were asked for; 0: nobody knows
    output_len: int
    message_s: tuple[float, ...]
    message_tokens: tuple[int, ...] | None  # one a message; None: the server did not say
    prompt_tokens: int | None  # of the server's usage
    completion_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    failure: Failure | None

    @property
    def arrival_s(self) -> float:
        """When it was due; of a closed loop, when it was sent."""
        return self.sent_s if self.due_s is None else self.due_s

    @property
    def tokens(self) -> int:
        """Tokens of the answer: by `usage`, else by the messages."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(self.message_tokens) if self.message_tokens is not None else len(self.message_s)


def record(call: Call, reply: Reply, start_s: float) -> Record:
    """`reply` on the clock of a run that began at `start_s`."""
    counts = [count for count in reply.message_tokens if count is not None]
    known = len(counts) == len(reply.message_s)
    if known and reply.completion_tokens is not None:
        known = sum(counts) == reply.completion_tokens  # else some came where nobody saw them
    if not known and reply.completion_tokens in (None, len(reply.message_s)):  # None: what a report has to say
        counts, known = [1] * len(reply.message_s), True
    return Record(
        index=call.index,
        due_s=call.due_s,
        sent_s=reply.sent_s - start_s,
        end_s=reply.end_s - start_s,
        input_len=call.input_len,
        output_len=call.output_len,
        message_s=tuple(moment - start_s for moment in reply.message_s),
        message_tokens=tuple(counts) if known else None,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        finish_reason=reply.finish_reason,
        failure=reply.failure,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What is known of the server before the first call is timed. `notes` are for the reader of the report."""

    backend: str
    address: str
    model: str
    max_model_len: int | None
    notes: tuple[str, ...] = ()


class Backend(Protocol):
    """One kind of server. Everything is used on one event loop."""

    async def open(self, *, synthetic: bool) -> About:
        """Connects and learns how to make prompts, if `synthetic` ones are wanted. Raises JaxpdError."""
        ...

    async def count_tokens(self, texts: list[str]) -> list[int] | None:
        """How many tokens each text is; None where the server does not tell."""
        ...

    def prepare(self, call: Call, *, seed: int, salt: int) -> Any:
        """What `send` wants, as ready as it can be. Prompts of another `seed` or `salt` have nothing in common."""
        ...

    async def send(self, prepared: Any) -> Reply:
        """Makes the call and reads the answer. What goes wrong is a failure in the reply, never an exception."""
        ...

    async def close(self) -> None:
        """Gives the connections up."""
        ...
