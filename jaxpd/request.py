"""The nouns: what a client asks for, and what the engine answers.

A `Request` is what a client sent, already tokenized: the engine speaks token ids only. The engine answers with a stream
of `Event`s: for each of its `n` samples any number of `TokensEvent`, then exactly one `FinishEvent`, whatever happens.
Text, stop strings and chat templates belong to `jaxpd.text` and `serving`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from jaxpd.errors import InvalidArgument, JaxpdError, TooLong
from jaxpd.structured import StructuredOutput

if TYPE_CHECKING:
    from jaxpd.life import Life

MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**31 - 1  # more than the vocabulary has keeps all of it
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 300
MAX_SAMPLES = 128
MAX_SALT = 256  # characters
MOST_URGENT, LEAST_URGENT = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How sequences are sampled and when they stop; `jaxpd.sampling` says in which order the options work.

    `n` sequences answer the same prompt, each with a seed of its own made from `seed`; `seed=None` lets the gateway
    draw one. Penalties count the answer, `repetition_penalty` the prompt too. `logit_bias` maps token ids to what is
    added to their logits. No EOS (unless ignored) and no stop token id comes among the first `min_tokens` tokens; stop
    strings are not held off. `logprobs` is the number of likeliest tokens reported beside each token that was sampled:
    0 for its own log probability alone, None for nothing. `prompt_logprobs` is the same for the tokens of the prompt,
    all of which are computed for it, whatever the prefix cache has. `structured` is what the text has to match; the
    answer ends when nothing more can follow, also before `min_tokens` and in spite of `ignore_eos`.
    """

    max_tokens: int = 128
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    structured: StructuredOutput | None = None

    def ending_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The token ids that end an answer of a model with these EOS tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

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
        if self.structured is not None:
            self.structured.validate()
        self._validate_options(vocab_size)

    def _validate_options(self, vocab_size: int) -> None:
        def check(field: str, fine: bool, limit: str) -> None:
            if not fine:
                raise InvalidArgument(f"{field}={getattr(self, field)} must be {limit}", field=field)

        # written so that NaN fails
        check("top_k", 0 <= self.top_k <= MAX_TOP_K, f"between 0 (off) and {MAX_TOP_K}")
        check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1 (off)")
        check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 (off) and 1")
        check("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "between 0.01 and 100 (1 is off)")
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2 (0 is off)")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2 (0 is off)")
        check(
            "min_tokens",
            0 <= self.min_tokens <= self.max_tokens,
            f"between 0 and max_tokens, that is {self.max_tokens}",
        )
        for field in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, field)
            check(field, asked is None or 0 <= asked <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        check("n", 1 <= self.n <= MAX_SAMPLES, f"between 1 and {MAX_SAMPLES}")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidArgument(
                f"logit_bias holds {len(self.logit_bias)} tokens, the limit is {MAX_LOGIT_BIASES}; keep those that "
                "matter most",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidArgument(
                    f"logit_bias holds token {token}, which is outside the vocabulary 0..{vocab_size - 1}",
                    field="logit_bias",
                )
            if not -100.0 <= bias <= 100.0:
                raise InvalidArgument(
                    f"logit_bias holds {bias} for token {token}; a bias must be between -100 and 100",
                    field="logit_bias",
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt for the engine. `params.seed` is set by then. Times are `time.monotonic()` seconds.

    A lower `priority` is served earlier, and gives way later. Only requests with the same `cache_salt` (one a tenant,
    say) find each other's prompts in the prefix cache.

    `outputs` are tokens of the answer that were made elsewhere, and that the client has: it goes on behind them, as if
    they had been made here. They count for `max_tokens`, `min_tokens`, penalties, grammar, random keys and usage; there
    is one sample then, with a seed of its own. None of them may end the answer. Events tell of what is new only, and
    `prompt_logprobs` do not come again.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str = ""
    outputs: tuple[int, ...] = ()

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
        if not MOST_URGENT <= self.priority <= LEAST_URGENT:
            raise InvalidArgument(
                f"priority={self.priority} must be between {MOST_URGENT} and {LEAST_URGENT} (lower is served earlier)",
                field="priority",
            )
        check_salt(self.cache_salt)
        total = len(self.prompt_ids) + self.params.max_tokens
        if total > max_model_len:
            raise TooLong(
                f"max_tokens={self.params.max_tokens} with a prompt of {len(self.prompt_ids)} tokens makes {total}, "
                f"above the limit of {max_model_len} (--max-model-len); shorten the prompt or lower max_tokens",
                field="max_tokens",
            )
        if self.outputs:
            self._validate_outputs(vocab_size)

    def _validate_outputs(self, vocab_size: int) -> None:
        worst = max(self.outputs) if min(self.outputs) >= 0 else min(self.outputs)
        if not 0 <= worst < vocab_size:
            raise InvalidArgument(
                f"outputs holds {worst}, which is outside the vocabulary 0..{vocab_size - 1}", field="outputs"
            )
        if len(self.outputs) >= self.params.max_tokens:
            raise InvalidArgument(
                f"outputs has {len(self.outputs)} tokens of max_tokens={self.params.max_tokens}: the answer is "
                "complete; take it as it is",
                field="outputs",
            )
        if self.params.n != 1:
            raise InvalidArgument(
                f"outputs are of one answer and n={self.params.n} must be 1 with them; send a request for each sample, "
                "with the sample's own seed",
                field="n",
            )
        if self.params.seed is None:
            raise InvalidArgument(
                "outputs without a seed cannot go on as they began; give the seed they were sampled with", field="seed"
            )


def check_salt(cache_salt: str) -> None:
    """Raises InvalidArgument for a salt that is too long."""
    if len(cache_salt) > MAX_SALT:
        raise InvalidArgument(
            f"cache_salt has {len(cache_salt)} characters, the limit is {MAX_SALT}; take a hash of it",
            field="cache_salt",
        )


class FinishReason(enum.StrEnum):
    """Why a sequence ended. `stop` covers EOS, stop token ids and stop strings.

    `handed_off` ends it in an engine that only prefills: its first token is out, another engine decodes it. No client
    sees that one.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDED_OFF = "handed_off"


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
class TokenLogprobs:
    """Natural logarithms of probabilities under the model alone, before bias, penalties, temperature and filters.

    `logprob` is of the token that was sampled, or stands in the prompt; `top` are the likeliest (token id, logprob),
    likeliest first and the lower id first among equals, as many as the request asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class TokensEvent(NamedTuple):
    """New tokens of one sample, in order; `first_index` is the output index of `token_ids[0]`.

    `logprobs` has one entry a token where the request asked for them. `prompt_logprobs` come with the first token of
    sample 0, one for each token of the prompt but the first, which has nothing before it. A named tuple, since every
    sequence makes one in every step, and a frozen dataclass takes four times as long.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    sample: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishEvent:
    """The last event of a sample. `error` is set exactly when `reason` is ERROR.

    `stop_token_id` is the EOS or stop token that ended it (it is the last one of its tokens, ids are complete).
    """

    request_id: str
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: int | None = None
    error: JaxpdError | None = None
    sample: int = 0
    life: Life | None = None


Event = TokensEvent | FinishEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillLeg:
    """An engine that only prefills computes the prompt and hands over to `peer`; `handoffs` has an id a sample."""

    peer: str
    handoffs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeLeg:
    """An engine that only decodes is handed the samples of the request under these ids."""

    handoffs: tuple[int, ...]


Leg = PrefillLeg | DecodeLeg
