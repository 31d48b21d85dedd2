"""What the device keeps of the sampling options of one sequence: a row of int32 in the pool's table of slots.

A row is written once, when a sequence first samples in a pool (`options_row`, from the host); each step that needs it
takes it by its slot. So a step's packed batch says only, in one word a row, which options are in force (`flags_of`),
and a step whose words are all zero runs the program without options.

Penalties need what was said so far, which the host knows one step late. So the device counts: one uint16 a slot and
token, cut over `model` like the vocabulary, the highest bit for "in the prompt", the rest the number of times in the
output (`counts_row` makes the start of it; a sampling adds to it in place). That is slots x vocabulary / tp x 2 bytes:
6 MB for 64 slots of a 49k vocabulary, 67 MB for 256 slots of 128k, whatever the length of the sequences. A list of
tokens by row, sent or kept, would grow with the context and cost a pass over it at every step.

Dimension key: S slots, B rows, K words of a row, V vocabulary (padded), N suppressed tokens, I biases.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpd.errors import InvalidArgument
from jaxpd.request import MAX_LOGIT_BIASES, SamplingParams

MAX_SUPPRESSED = 128  # tokens that could end a sequence and must not before min_tokens
IN_PROMPT = 0x8000
MOST_COUNTED = 0x7FFF  # more occurrences in the output than that count as that
NO_TOKEN = np.iinfo(np.int32).max

_FIELDS = (
    ("top_k", 1),
    ("top_p", 1),
    ("min_p", 1),
    ("repetition", 1),
    ("presence", 1),
    ("frequency", 1),
    ("min_tokens", 1),
    ("suppressed", MAX_SUPPRESSED),
    ("bias_ids", MAX_LOGIT_BIASES),
    ("bias_values", MAX_LOGIT_BIASES),
)
_OFFSETS: dict[str, slice] = {}
for _name, _length in _FIELDS:
    _start = max((s.stop for s in _OFFSETS.values()), default=0)
    _OFFSETS[_name] = slice(_start, _start + _length)
ROW_LEN = _OFFSETS["bias_values"].stop  # K


class Flag(enum.IntFlag):
    """Which options a row uses in a step; 0 for none but temperature and seed."""

    EDIT = 1  # logit_bias, min_tokens
    COUNT = 2  # penalties
    FILTER = 4  # min_p, top_k, top_p
    LOGPROBS = 8

    @property
    def needs_slot(self) -> bool:
        """Whether the row of the slot must have been written."""
        return bool(self & (Flag.EDIT | Flag.COUNT | Flag.FILTER))


def flags_of(params: SamplingParams) -> Flag:
    """The flags of a request. Filters do not change the likeliest token, so that greedy rows go without."""
    flags = Flag(0)
    if params.logit_bias or params.min_tokens > 0:
        flags |= Flag.EDIT
    if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        flags |= Flag.COUNT
    if params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0):
        flags |= Flag.FILTER
    if params.logprobs is not None:
        flags |= Flag.LOGPROBS
    return flags


def options_row(params: SamplingParams, ending: Sequence[int]) -> np.ndarray:
    """[K] int32. `ending` are the tokens that end the sequence: those that min_tokens suppresses.

    Raises InvalidArgument for more of them than a row holds.
    """
    row = np.zeros(ROW_LEN, np.int32)
    real = row.view(np.float32)
    row[_OFFSETS["top_k"]] = params.top_k
    for name, value in (
        ("top_p", params.top_p),
        ("min_p", params.min_p),
        ("repetition", params.repetition_penalty),
        ("presence", params.presence_penalty),
        ("frequency", params.frequency_penalty),
    ):
        real[_OFFSETS[name]] = value
    row[_OFFSETS["min_tokens"]] = params.min_tokens
    row[_OFFSETS["suppressed"]] = row[_OFFSETS["bias_ids"]] = NO_TOKEN
    if params.min_tokens > 0:
        if len(ending) > MAX_SUPPRESSED:
            raise InvalidArgument(
                f"min_tokens={params.min_tokens} with {len(ending)} tokens that end the answer (stop_token_ids and the "
                f"model's end tokens): the limit is {MAX_SUPPRESSED}; give fewer stop_token_ids",
                field="min_tokens",
            )
        row[_OFFSETS["suppressed"]][: len(ending)] = list(ending)
    count = len(params.logit_bias)
    row[_OFFSETS["bias_ids"]][:count] = list(params.logit_bias.keys())
    real[_OFFSETS["bias_values"]][:count] = list(params.logit_bias.values())
    return row


def counts_row(prompt_ids: Sequence[int], outputs: Sequence[int], padded_vocab: int) -> np.ndarray:
    """[V] uint16 of a sequence: the bit of the prompt, and the counts of the outputs so far."""
    counts_V = np.bincount(np.asarray(outputs, np.int64), minlength=padded_vocab).clip(max=MOST_COUNTED)
    counts_V = counts_V.astype(np.uint16)
    counts_V[np.asarray(prompt_ids, np.int64)] |= IN_PROMPT
    return counts_V


class Options(NamedTuple):
    """`options_row`s of a batch, as traced arrays."""

    top_k: jax.Array  # [B] int32; 0: off
    top_p: jax.Array  # [B] float32
    min_p: jax.Array  # [B] float32
    repetition: jax.Array  # [B] float32
    presence: jax.Array  # [B] float32
    frequency: jax.Array  # [B] float32
    min_tokens: jax.Array  # [B] int32
    suppressed: jax.Array  # [B, N] int32, filled up with NO_TOKEN
    bias_ids: jax.Array  # [B, I] int32, filled up with NO_TOKEN
    bias_values: jax.Array  # [B, I] float32


def unpack_options(options_BK: jax.Array) -> Options:
    """The inverse of `options_row` for a batch, while tracing."""

    def real(name: str) -> jax.Array:
        return jax.lax.bitcast_convert_type(options_BK[:, _OFFSETS[name]], jnp.float32)

    return Options(
        top_k=options_BK[:, _OFFSETS["top_k"]][:, 0],
        top_p=real("top_p")[:, 0],
        min_p=real("min_p")[:, 0],
        repetition=real("repetition")[:, 0],
        presence=real("presence")[:, 0],
        frequency=real("frequency")[:, 0],
        min_tokens=options_BK[:, _OFFSETS["min_tokens"]][:, 0],
        suppressed=options_BK[:, _OFFSETS["suppressed"]],
        bias_ids=options_BK[:, _OFFSETS["bias_ids"]],
        bias_values=real("bias_values"),
    )
