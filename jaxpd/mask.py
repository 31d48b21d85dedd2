"""The device's side of structured output: tokens that a grammar does not allow become impossible.

`jaxpd.structured` says how a mask is laid out.

Dimension key: B rows, V vocabulary (this device's part), W words of the whole vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpd.structured import WORD
from meshes.sharding import MODEL


def apply_mask(logits_BV: jax.Array, mask_BW: jax.Array, *, tp: int) -> jax.Array:
    """Float32 logits [B, V]: as they were where the bit of the token in `mask_BW` (int32, all of it) is set, else -inf.

    Rows whose words are all EVERYTHING stay as they are, bit by bit. Tokens beyond the last word are not allowed.
    Inside `shard_map` the vocabulary is cut over `model` into `tp` parts; the mask is the same on every device.
    """
    vocab = logits_BV.shape[1]
    offset = 0 if tp == 1 else jax.lax.axis_index(MODEL) * vocab
    # A part may begin inside a word: its words are cut out first, then its bits. Words, then bits, and no gather: a
    # gather of V words a row is slow on TPUs.
    count = vocab // WORD + 2
    missing = max(vocab * (tp - 1) // WORD + count - mask_BW.shape[1], 0)  # so that dynamic_slice never moves its start
    padded_BW = jnp.pad(mask_BW, ((0, 0), (0, missing)))
    mine_BW = jax.lax.dynamic_slice_in_dim(padded_BW, offset // WORD, count, axis=1)
    words_BW = jax.lax.bitcast_convert_type(mine_BW, jnp.uint32)
    bits_BW32 = (words_BW[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    bits_BX = bits_BW32.reshape(len(mask_BW), count * WORD)
    allowed_BV = jax.lax.dynamic_slice_in_dim(bits_BX, offset % WORD, vocab, axis=1)
    return jnp.where(allowed_BV != 0, logits_BV, -jnp.inf)
