"""Sampling: exact where greedy, the right distribution where random, the same on every cut of the vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpd.batch import StepInputs
from jaxpd.sampling import gumbel_noise, sample_tokens
from meshes.sharding import MODEL


def inputs(rows: int, temperature: float, *, seed: int = 0, index: np.ndarray | None = None) -> StepInputs:
    zeros = jnp.zeros(rows, jnp.int32)
    return StepInputs(
        live_rows=jnp.int32(rows),
        query_starts=jnp.arange(rows + 1, dtype=jnp.int32),
        context_lens=zeros,
        slots=zeros,
        output_index=zeros if index is None else jnp.asarray(index, jnp.int32),
        seeds=jnp.full(rows, seed, jnp.uint32),
        temperatures=jnp.full(rows, temperature, jnp.float32),
        flags=zeros,
        token_ids=zeros,
        page_table=zeros[:, None],
    )


def sample(logits: np.ndarray, step: StepInputs, vocab: int, tp: int = 1) -> np.ndarray:
    local = functools.partial(sample_tokens, vocab_size=vocab, tp=tp)
    if tp == 1:
        return np.asarray(jax.jit(local)(jnp.asarray(logits), step))
    mesh = Mesh(np.asarray(jax.devices()[:tp]), (MODEL,))
    spec = (PartitionSpec(None, MODEL), PartitionSpec())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    return np.asarray(jax.jit(mapped)(jnp.asarray(logits), step))


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_greedy_is_the_lowest_id_among_the_largest_true_logits(tp: int) -> None:
    logits = np.random.default_rng(0).integers(0, 5, (6, 64)).astype(np.float32)
    logits[:, 50:] = 99  # padding of the vocabulary
    assert sample(logits, inputs(6, 0.0), 50, tp).tolist() == logits[:, :50].argmax(-1).tolist()


def test_a_draw_is_the_same_on_every_cut_and_in_every_batch() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    step = inputs(5, 0.9, seed=123, index=np.arange(5))
    one = sample(logits, step, 60)
    assert sample(logits, step, 60, tp=4).tolist() == one.tolist()
    alone = sample(logits[3:4], inputs(1, 0.9, seed=123, index=np.array([3])), 60)
    assert alone[0] == one[3]


def test_a_row_without_temperature_stays_greedy_beside_one_with() -> None:
    logits = np.random.default_rng(2).normal(size=(2, 64)).astype(np.float32)
    step = inputs(2, 0.0)._replace(temperatures=jnp.asarray([0.0, 5.0]))
    assert sample(logits, step, 64)[0] == logits[0].argmax()


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 20,000 draws; 99.9% point of 9 degrees of freedom is 27.9."""
    logits = np.random.default_rng(3).normal(size=10).astype(np.float32) * 1.5
    temperature, draws = 0.8, 20_000
    step = inputs(draws, temperature, seed=11, index=np.arange(draws))
    counts = np.bincount(sample(np.tile(logits, (draws, 1)), step, 10), minlength=10)
    p = np.exp(logits / temperature)
    want = draws * p / p.sum()
    assert ((counts - want) ** 2 / want).sum() < 27.9


def test_noise_differs_by_seed_index_and_token() -> None:
    tokens = jnp.arange(1000)
    base = np.asarray(gumbel_noise(jnp.uint32(1), jnp.int32(0), tokens))
    assert np.isfinite(base).all() and len(np.unique(base)) > 990
    for seed, index in [(2, 0), (1, 1), (2**32 - 1, 0)]:
        other = np.asarray(gumbel_noise(jnp.uint32(seed), jnp.int32(index), tokens))
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1
