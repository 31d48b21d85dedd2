"""Sampling on the device, the same on every mesh: greedy, and temperature with a seed.

A draw is the Gumbel-max trick: argmax(logits / temperature + noise). The noise of a token depends on nothing but the
request's seed, the output index and the token id, `fold_in(fold_in(key(seed), output index), token id)`, so neither
the batch, nor the cut of the vocabulary, nor the pool that samples changes a result. Ties go to the lowest token id.

Dimension key: B rows, V vocabulary (this device's part).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpd.batch import StepInputs
from meshes.sharding import MODEL


def sample_tokens(logits_BV: jax.Array, step: StepInputs, *, vocab_size: int, tp: int) -> jax.Array:
    """Token ids [B] int32 of float32 logits [B, V] (padding included; ids at or above `vocab_size` never win)."""
    local_V = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)
    if tp > 1:
        local_V = local_V + jax.lax.axis_index(MODEL) * logits_BV.shape[1]
    scores_BV = jax.lax.cond(jnp.any(step.temperatures > 0), _add_noise, lambda x, *_: x, logits_BV, step, local_V)
    scores_BV = jnp.where(local_V < vocab_size, scores_BV, -jnp.inf)
    best_B = jnp.argmax(scores_BV, axis=-1)
    token_B = local_V[best_B]
    if tp == 1:
        return token_B
    score_B = jnp.take_along_axis(scores_BV, best_B[:, None], axis=-1)[:, 0]
    scores_DB = jax.lax.all_gather(score_B, MODEL)  # D devices of the model axis, in the order of token ids
    tokens_DB = jax.lax.all_gather(token_B, MODEL)
    return jnp.take_along_axis(tokens_DB, jnp.argmax(scores_DB, axis=0)[None], axis=0)[0]


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
