"""The mask of structured output against NumPy, on every cut of the vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpd.mask import apply_mask
from jaxpd.structured import EVERYTHING, mask_words
from meshes.sharding import MODEL


def masked(logits_BV: np.ndarray, mask_BW: np.ndarray, tp: int) -> np.ndarray:
    local = functools.partial(apply_mask, tp=tp)
    if tp > 1:
        mesh = Mesh(np.asarray(jax.devices()[:tp]), (MODEL,))
        specs = (PartitionSpec(None, MODEL), PartitionSpec())
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, MODEL), check_vma=False)
    return np.asarray(jax.jit(local)(jnp.asarray(logits_BV), jnp.asarray(mask_BW)))


def by_numpy(logits_BV: np.ndarray, mask_BW: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(mask_BW.view(np.uint8), axis=1, bitorder="little").astype(bool)
    allowed = np.zeros(logits_BV.shape, bool)
    known = min(bits.shape[1], logits_BV.shape[1])
    allowed[:, :known] = bits[:, :known]
    return np.where(allowed, logits_BV, np.float32(-np.inf))


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("part", [1, 32, 50, 97])  # tokens a device: parts begin at and inside words
def test_equals_numpy_on_every_cut(tp: int, part: int) -> None:
    vocab = part * tp
    random = np.random.default_rng(vocab)
    logits = random.normal(size=(3, vocab)).astype(np.float32)
    words = random.integers(-(2**31), 2**31, (3, mask_words(vocab)), np.int32)
    words[1] = EVERYTHING
    words[2] = np.int32(-(2**31))  # the sign bit alone: the last token of every word
    out = masked(logits, words, tp)
    np.testing.assert_array_equal(out, by_numpy(logits, words))
    assert (out[1].view(np.int32) == logits[1].view(np.int32)).all()


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_tokens_beyond_the_words_are_not_allowed_and_words_beyond_the_tokens_do_not_matter(tp: int) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 150)).astype(np.float32)
    for words in (2, 9):
        mask = np.full((2, words), EVERYTHING, np.int32)
        out = masked(logits, mask, tp)
        assert np.isfinite(out).sum(1).tolist() == [min(150, words * 32)] * 2
        np.testing.assert_array_equal(out, by_numpy(logits, mask))


def test_a_free_row_keeps_every_bit_of_its_logits() -> None:
    odd = np.array([[-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-45, -3.5]], np.float32)
    out = masked(odd, np.full((1, 1), EVERYTHING, np.int32), 1)
    assert (out.view(np.int32) == odd.view(np.int32)).all()


def test_words_of_a_vocabulary() -> None:
    assert [mask_words(vocab) for vocab in (1, 32, 33, 49152)] == [1, 1, 2, 1536]
