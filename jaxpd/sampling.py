"""Sampling on the device, the same on every mesh: greedy or a seeded draw, and before it the options of a request.

The options of a row work on the model's logits in this order, which is that of vLLM (Hugging Face puts min-p last):

    1. logit_bias is added
    2. min_tokens: before it, the tokens that would end the sequence become impossible
    3. repetition_penalty, over prompt and output: positive logits are divided by it, negative ones multiplied
    4. frequency_penalty times the number of times in the output, and presence_penalty if it is there, are subtracted
    5. temperature divides; 0 takes the largest and goes no further
    6. min_p, then top_k, then top_p, each over what the one before left        jaxpd/filters.py
    7. a draw

Log probabilities are those of the model, before all this. Steps 1 to 6 are `apply_options`, which changes logits; 5
(again) and 7 are `sample_tokens`, the same program for rows with and without options; `account` comes after it. A step
in which no row has options is `sample_tokens` alone.

A draw is the Gumbel-max trick: argmax(logits / temperature + noise). The noise of a token depends on nothing but the
request's seed, the output index and the token id, `fold_in(fold_in(key(seed), output index), token id)`, so neither
the batch, nor the cut of the vocabulary, nor the pool that samples changes a result. Ties go to the lowest token id.

Where the vocabulary is cut over `model`, filters alone need all of it: the logits are gathered, [B, V] float32 on each
device (13 MB for 64 rows of 49k), in steps in which a row asks for a filter.

Dimension key: B rows, V vocabulary (this device's part), D devices of the `model` axis, N likeliest tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpd.batch import StepInputs
from jaxpd.filters import find_cut, is_kept
from jaxpd.request import MAX_LOGPROBS, TokenLogprobs
from jaxpd.slot_options import MOST_COUNTED, NO_TOKEN, Flag, Options, unpack_options
from meshes.sharding import MODEL


class Logprobs(NamedTuple):
    """Log probabilities of one sampling of a batch."""

    sampled_B: jax.Array  # float32, of the token that was sampled
    top_BN: jax.Array  # float32, largest first
    top_ids_BN: jax.Array  # int32


class Sampled(NamedTuple):
    """What a step says: the tokens, and log probabilities where a row asked for them."""

    tokens_B: jax.Array  # int32
    logprobs: Logprobs | None


def sample_tokens(logits_BV: jax.Array, step: StepInputs, *, vocab_size: int, tp: int) -> jax.Array:
    """Token ids [B] int32 of float32 logits [B, V] (padding included; ids at or above `vocab_size` never win)."""
    token_V = _token_ids(logits_BV, tp)
    scores_BV = jax.lax.cond(jnp.any(step.temperatures > 0), _add_noise, lambda x, *_: x, logits_BV, step, token_V)
    scores_BV = jnp.where(token_V < vocab_size, scores_BV, -jnp.inf)
    best_B = jnp.argmax(scores_BV, axis=-1)
    token_B = token_V[best_B]
    if tp == 1:
        return token_B
    score_B = jnp.take_along_axis(scores_BV, best_B[:, None], axis=-1)[:, 0]
    scores_DB = jax.lax.all_gather(score_B, MODEL)  # D devices of the model axis, in the order of token ids
    tokens_DB = jax.lax.all_gather(token_B, MODEL)
    return jnp.take_along_axis(tokens_DB, jnp.argmax(scores_DB, axis=0)[None], axis=0)[0]


def apply_options(
    logits_BV: jax.Array, step: StepInputs, options_SK: jax.Array, counts_SV: jax.Array, *, vocab_size: int, tp: int
) -> jax.Array:
    """What `sample_tokens` is to sample from: float32 logits [B, V] after the options of `step.flags`.

    `options_SK` and `counts_SV` are the pool's tables of slots (`jaxpd.slot_options`). Rows without flags stay as they
    are, bit by bit.
    """
    token_V = _token_ids(logits_BV, tp)
    options = unpack_options(options_SK[step.slots])  # of rows without flags: of whoever had the slot, and unused

    def edit(logits_BV: jax.Array, wanted_B: jax.Array) -> jax.Array:
        logits_BV = logits_BV.at[_places(options.bias_ids, wanted_B, token_V)].add(options.bias_values, mode="drop")
        early_B = wanted_B & (step.output_index < options.min_tokens)
        return logits_BV.at[_places(options.suppressed, early_B, token_V)].set(-jnp.inf, mode="drop")

    def penalise(logits_BV: jax.Array, wanted_B: jax.Array) -> jax.Array:
        return jnp.where(wanted_B[:, None], _penalise(logits_BV, options, counts_SV[step.slots]), logits_BV)

    def filter_(logits_BV: jax.Array, wanted_B: jax.Array) -> jax.Array:
        return _filter(logits_BV, step.temperatures, options, wanted_B, token_V, vocab_size=vocab_size, tp=tp)

    for flag, change in ((Flag.EDIT, edit), (Flag.COUNT, penalise), (Flag.FILTER, filter_)):
        wanted_B = _has(step, flag)
        logits_BV = jax.lax.cond(jnp.any(wanted_B), change, lambda x, _: x, logits_BV, wanted_B)
    return logits_BV


def account(
    logits_BV: jax.Array, tokens_B: jax.Array, step: StepInputs, counts_SV: jax.Array, *, vocab_size: int, tp: int
) -> tuple[jax.Array, Logprobs]:
    """What follows from a sampling: counts [S, V] uint16 with the new tokens of rows with penalties, log probabilities.

    `logits_BV` are the model's own.
    """
    token_V = _token_ids(logits_BV, tp)
    rows, width = len(tokens_B), min(MAX_LOGPROBS, logits_BV.shape[1] * tp)
    nothing = Logprobs(jnp.zeros(rows), jnp.zeros((rows, width)), jnp.zeros((rows, width), jnp.int32))
    logprobs = jax.lax.cond(
        jnp.any(_has(step, Flag.LOGPROBS)),
        lambda x: _logprobs(x, tokens_B, token_V, vocab_size=vocab_size, tp=tp),
        lambda _: nothing,
        logits_BV,
    )
    return _counted(counts_SV, step.slots, tokens_B - token_V[0], _has(step, Flag.COUNT)), logprobs


def _has(step: StepInputs, flag: Flag) -> jax.Array:
    return (step.flags & int(flag)) != 0


def _token_ids(logits_BV: jax.Array, tp: int) -> jax.Array:
    """[V] int32: the ids of this device's part of the vocabulary."""
    token_V = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)
    return token_V if tp == 1 else token_V + jax.lax.axis_index(MODEL) * logits_BV.shape[1]


def _places(token_BN: jax.Array, wanted_B: jax.Array, token_V: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of tokens into this device's logits; out of range for tokens of other devices and rows not wanted."""
    local_BN = token_BN - token_V[0]
    mine_BN = wanted_B[:, None] & (token_BN != NO_TOKEN) & (local_BN >= 0) & (local_BN < len(token_V))
    rows_B1 = jnp.arange(len(token_BN))[:, None]
    return rows_B1, jnp.where(mine_BN, local_BN, len(token_V))


def _penalise(logits_BV: jax.Array, options: Options, counts_BV: jax.Array) -> jax.Array:
    said_BV = (counts_BV & MOST_COUNTED).astype(jnp.float32)
    repetition_B1 = options.repetition[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    out_BV = jnp.where(counts_BV > 0, repeated_BV, logits_BV)  # in the prompt, in the output or in both
    return out_BV - options.frequency[:, None] * said_BV - jnp.where(said_BV > 0, options.presence[:, None], 0.0)


def _counted(counts_SV: jax.Array, slots_B: jax.Array, local_B: jax.Array, wanted_B: jax.Array) -> jax.Array:
    """The counts with one more of each row's token, in place; the bit of the prompt and a full count stay."""
    slots, vocab = counts_SV.shape
    mine_B = wanted_B & (slots_B < slots) & (local_B >= 0) & (local_B < vocab)
    place = jnp.where(mine_B, slots_B, slots), jnp.where(mine_B, local_B, vocab)
    before_B = counts_SV.at[place].get(mode="fill", fill_value=0)
    full_B = (before_B & MOST_COUNTED) == MOST_COUNTED
    return counts_SV.at[place].set(jnp.where(full_B, before_B, before_B + 1).astype(jnp.uint16), mode="drop")


def _filter(
    logits_BV: jax.Array,
    temperatures_B: jax.Array,
    options: Options,
    wanted_B: jax.Array,
    token_V: jax.Array,
    *,
    vocab_size: int,
    tp: int,
) -> jax.Array:
    """Logits of the tokens that are filtered out become -inf."""
    scaled_BV = logits_BV / jnp.where(temperatures_B > 0, temperatures_B, 1.0)[:, None]
    whole_BV = scaled_BV if tp == 1 else jax.lax.all_gather(scaled_BV, MODEL, axis=1, tiled=True)
    cut = find_cut(
        whole_BV[:, :vocab_size],  # without padding, so that its shape, and every sum, is the same on all meshes
        min_p_B=jnp.where(wanted_B, options.min_p, 0.0),
        top_k_B=jnp.where(wanted_B, options.top_k, 0),
        top_p_B=jnp.where(wanted_B, options.top_p, 1.0),
    )
    return jnp.where(is_kept(scaled_BV, token_V, cut) | ~wanted_B[:, None], logits_BV, -jnp.inf)


def _logprobs(logits_BV: jax.Array, token_B: jax.Array, token_V: jax.Array, *, vocab_size: int, tp: int) -> Logprobs:
    true_BV = jnp.where(token_V < vocab_size, logits_BV, -jnp.inf)
    true_BV = jnp.where(true_BV == 0, 0.0, true_BV)  # top_k puts 0 before -0
    most_B = jnp.max(true_BV, axis=-1)
    sum_B = jnp.sum(jnp.exp(true_BV - jnp.where(most_B > -jnp.inf, most_B, 0.0)[:, None]), axis=-1)
    top_BN, where_BN = jax.lax.top_k(true_BV, min(MAX_LOGPROBS, len(token_V)))  # the lower id first among equals
    top_ids_BN = token_V[where_BN]
    local_B = token_B - token_V[0]
    mine_B = (local_B >= 0) & (local_B < len(token_V))
    sampled_B = jnp.take_along_axis(logits_BV, jnp.clip(local_B, 0, len(token_V) - 1)[:, None], axis=-1)[:, 0]
    if tp > 1:
        most_DB, sum_DB = jax.lax.all_gather((most_B, sum_B), MODEL)
        most_B = jnp.max(most_DB, axis=0)
        sum_B = jnp.sum(sum_DB * jnp.exp(most_DB - most_B), axis=0)
        sampled_B = jax.lax.psum(jnp.where(mine_B, sampled_B, 0.0), MODEL)
        every_BN, ids_BN = jax.lax.all_gather((top_BN, top_ids_BN), MODEL, axis=1, tiled=True)
        top_BN, where_BN = jax.lax.top_k(every_BN, min(MAX_LOGPROBS, every_BN.shape[1]))
        top_ids_BN = jnp.take_along_axis(ids_BN, where_BN, axis=-1)
    total_B = most_B + jnp.log(sum_B)
    return Logprobs(sampled_B - total_B, top_BN - total_B[:, None], top_ids_BN)


def _add_noise(logits_BV: jax.Array, step: StepInputs, token_V: jax.Array) -> jax.Array:
    def one_row(logits_V: jax.Array, seed: jax.Array, index: jax.Array, temperature: jax.Array) -> jax.Array:
        noisy_V = logits_V / jnp.where(temperature > 0, temperature, 1.0) + gumbel_noise(seed, index, token_V)
        return jnp.where(temperature > 0, noisy_V, logits_V)

    return jax.vmap(one_row)(logits_BV, step.seeds, step.output_index, step.temperatures)


def gumbel_noise(seed: jax.Array, output_index: jax.Array, token_V: jax.Array) -> jax.Array:
    """Standard Gumbel noise [V] float32 for the given token ids; a pure function of (seed, output index, token id)."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), output_index)
    words_V2 = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, token_V))
    # 24 bits, centred, so that neither 0 nor 1 occurs in float32
    uniform_V = ((words_V2[:, 0] >> 8).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-24)
    return -jnp.log(-jnp.log(uniform_V))


def logprobs_of_row(
    read: Logprobs | None, replica: int, row: int, asked: int | None
) -> tuple[TokenLogprobs, ...] | None:
    """What one row's request asked for of the log probabilities of a step, read to the host."""
    if read is None or asked is None:
        return None
    return (_entry(read, replica, row, asked),)


def scored_logprobs(read: Logprobs, replica: int, count: int, asked: int) -> list[TokenLogprobs]:
    """The first `count` rows of what was scored of a prompt in one replica, read to the host."""
    return [_entry(read, replica, row, asked) for row in range(count)]


def _entry(read: Logprobs, replica: int, row: int, asked: int) -> TokenLogprobs:
    top_N, ids_N = read.top_BN[replica, row, :asked], read.top_ids_BN[replica, row, :asked]
    # a vocabulary smaller than `asked` is followed by its padding, which is impossible
    top = tuple((int(t), float(p)) for t, p in zip(ids_N, top_N, strict=True) if p > -np.inf)
    return TokenLogprobs(logprob=float(read.sampled_B[replica, row]), top=top)
