"""The nouns: what a client asks for, and what the engine answers.

A `Request` is what a client sent, already tokenized: the engine speaks token ids only. The engine answers with a stream
of `Event`s: any number of `TokensEvent`, then exactly one `FinishEvent`, whatever happens. Text, stop strings and chat
templates belong to `jaxpd.text` and `serving`.
"""

from __future__ import annotations

import dataclasses
import enum

from jaxpd.errors import InvalidArgument, JaxpdError

MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled and when it stops. `seed=None` lets the gateway draw one."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self, *, vocab_size: int) -> None:
        """Raises InvalidArgument naming field, value and limit."""
        if self.max_tokens < 1:
            raise InvalidArgument(f"max_tokens={self.max_tokens} must be at least 1", field="max_tokens")
        if not 0.0 <= self.temperature <= 100.0:  # NaN fails here too
            raise InvalidArgument(
                f"temperature={self.temperature} must be between 0 (greedy) and 100", field="temperature"
            )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidArgument(f"seed={self.seed} must be between 0 and {MAX_SEED}", field="seed")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidArgument(
                    f"stop_token_ids holds {token}, which is outside the vocabulary 0..{vocab_size - 1}",
                    field="stop_token_ids",
                )
        if any(s == "" for s in self.stop):
            raise InvalidArgument("stop holds an empty string, which would stop at once; leave it out", field="stop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt for the engine. `params.seed` is set by then. Times are `time.monotonic()` seconds."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float

    def validate(self, *, vocab_size: int, max_model_len: int) -> None:
        """Raises InvalidArgument naming field, value and limit."""
        if not self.prompt_ids:
            raise InvalidArgument("prompt is empty; give at least one token", field="prompt")
        worst = max(self.prompt_ids) if min(self.prompt_ids) >= 0 else min(self.prompt_ids)
        if not 0 <= worst < vocab_size:
            raise InvalidArgument(
                f"prompt_ids holds {worst}, which is outside the vocabulary 0..{vocab_size - 1}", field="prompt_ids"
            )
        self.params.validate(vocab_size=vocab_size)
        total = len(self.prompt_ids) + self.params.max_tokens
        if total > max_model_len:
            raise InvalidArgument(
                f"max_tokens={self.params.max_tokens} with a prompt of {len(self.prompt_ids)} tokens makes {total}, "
                f"above the limit of {max_model_len} (--max-model-len); shorten the prompt or lower max_tokens",
                field="max_tokens",
            )


class FinishReason(enum.StrEnum):
    """Why a sequence ended. `stop` covers EOS, stop token ids and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the prefix cache of the pool that prefilled it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Where the time of one request went, in seconds; design.md defines the words. None where a stage was not reached.

    `transfer_s` is the hand-off from offer to accept, `transfer_exposed_s` decode-ready minus prefill-end, and both are
    None for a sequence that finished in the prefill pool. `decode_s` runs from decode-ready to the last token.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    transfer_exposed_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    ttst_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensEvent:
    """New tokens of one request, in order; `first_index` is the output index of `token_ids[0]`."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishEvent:
    """The last event of a request. `error` is set exactly when `reason` is ERROR.

    `stop_token_id` is the EOS or stop token that ended it (it is the last one of its tokens, ids are complete).
    """

    request_id: str
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: int | None = None
    error: JaxpdError | None = None


Event = TokensEvent | FinishEvent
