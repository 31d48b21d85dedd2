"""Every sampling option against a plain NumPy sampler: exactly where deterministic, by chi-square where random."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpd.batch import BatchShape, Row, pack, unpack
from jaxpd.errors import InvalidArgument
from jaxpd.request import MAX_LOGIT_BIASES, SamplingParams
from jaxpd.sampling import Logprobs, account, apply_options, sample_tokens
from jaxpd.slot_options import (
    IN_PROMPT,
    MAX_SUPPRESSED,
    MOST_COUNTED,
    Flag,
    counts_row,
    flags_of,
    options_row,
    unpack_options,
)
from meshes.sharding import MODEL
from tests.jaxpd import numpy_sampler as plain

VOCAB, PADDED = 60, 64
BUCKET = 64
EOS = (7, 55)
TPS = (1, 4)


@functools.cache
def program(tp: int, rows: int) -> Callable[..., Any]:
    """apply, sample and account of a batch in one: (changed logits, tokens, counts, log probabilities)."""

    def local(logits_BV: jax.Array, options_SK: jax.Array, counts_SV: jax.Array, head_M: jax.Array) -> tuple:
        step = unpack(BatchShape(0, rows, 0), head_M)
        of = {"vocab_size": VOCAB, "tp": tp}
        changed_BV = apply_options(logits_BV, step, options_SK, counts_SV, **of)
        tokens_B = sample_tokens(changed_BV, step, **of)
        return (changed_BV, tokens_B, *account(logits_BV, tokens_B, step, counts_SV, **of))

    if tp == 1:
        return jax.jit(local)
    mesh, cut = Mesh(np.asarray(jax.devices()[:tp]), (MODEL,)), P(None, MODEL)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(cut, P(), cut, P()), out_specs=(cut, P(), cut, P()), check_vma=False
    )
    return jax.jit(mapped)


def padded(rows: list[np.ndarray]) -> np.ndarray:
    """A table of BUCKET slots."""
    return np.pad(np.stack(rows), ((0, BUCKET - len(rows)), (0, 0)))


class Batch:
    """Rows as an engine would give them to the device: row i in slot i, unless a slot is named."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.options: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self.logits: list[np.ndarray] = []

    def add(
        self,
        logits_V: np.ndarray,
        params: SamplingParams,
        *,
        prompt: Sequence[int] = (),
        outputs: Sequence[int] = (),
        index: int | None = None,
    ) -> None:
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
        self.logits.append(logits_V)
        self.options.append(options_row(params, sorted(ending)))
        self.counts.append(counts_row(prompt, outputs, PADDED))
        self.rows.append(
            Row(
                token_ids=[],
                context_len=1,
                pages=np.zeros(0, np.int32),
                slot=len(self.rows),
                output_index=len(outputs) if index is None else index,
                seed=params.seed or 0,
                temperature=params.temperature,
                flags=flags_of(params),
            )
        )

    def run(self, tp: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray, Logprobs]:
        """Changed logits of the true vocabulary, tokens, counts, log probabilities. The batch has room for BUCKET."""
        live = len(self.rows)
        logits_BV = np.full((BUCKET, PADDED), 99, np.float32)  # padding of the vocabulary must never be seen
        logits_BV[:live, :VOCAB] = self.logits
        head = pack(BatchShape(0, BUCKET, 0), [self.rows])[0]
        out = program(tp, BUCKET)(logits_BV, padded(self.options), padded(self.counts), head)
        changed, tokens, counts, logprobs = jax.device_get(out)
        assert not counts[live:].any()
        return changed[:live, :VOCAB], tokens[:live], counts[:live], Logprobs(*(x[:live] for x in logprobs))


def random_params(rng: np.random.Generator, **fixed: Any) -> SamplingParams:
    """Each option on or off by chance."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    some = rng.choice(VOCAB, 12, replace=False).tolist()
    options: dict[str, Any] = {
        "temperature": maybe(float(rng.uniform(0.3, 2.0)), 0.0),
        "top_k": maybe(int(rng.integers(1, 80)), 0),
        "top_p": maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        "min_p": maybe(float(rng.uniform(0.0, 0.6)), 0.0),
        "repetition_penalty": maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        "presence_penalty": maybe(float(rng.uniform(-2, 2)), 0.0),
        "frequency_penalty": maybe(float(rng.uniform(-2, 2)), 0.0),
        "logit_bias": maybe(dict(zip(some, rng.uniform(-9, 9, 12).tolist(), strict=True)), {}),
        "min_tokens": maybe(int(rng.integers(1, 8)), 0),
        "logprobs": maybe(int(rng.integers(0, 21)), None),
        "stop_token_ids": tuple(rng.choice(VOCAB, 3).tolist()),
        "ignore_eos": bool(rng.random() < 0.5),
        "seed": int(rng.integers(2**32)),
        **fixed,
    }
    params = SamplingParams(**options)
    params.validate(vocab_size=VOCAB)
    return params


def random_batch(seed: int, rows: int, **fixed: Any) -> tuple[Batch, list[dict[str, Any]]]:
    """A batch of rows with random options, half of them with many equal logits, and what each row was made of."""
    rng = np.random.default_rng(seed)
    batch, made = Batch(), []
    for i in range(rows):
        logits_V = (rng.normal(size=VOCAB) * 3).astype(np.float32)
        row = {
            "logits_V": np.round(logits_V / 2) if i % 2 else logits_V,
            "params": random_params(rng, **fixed),
            "prompt": rng.choice(VOCAB, 20).tolist(),
            "outputs": rng.choice(VOCAB, int(rng.integers(0, 9))).tolist() * 2,
        }
        batch.add(**row)
        made.append(row)
    return batch, made


@pytest.mark.parametrize("tp", TPS)
def test_greedy_rows_with_penalties_bias_and_min_tokens_equal_the_plain_sampler(tp: int) -> None:
    batch, made = random_batch(0, 64, temperature=0.0)
    changed, tokens, _, _ = batch.run(tp)
    for i, row in enumerate(made):
        want = plain.changed_logits(**row, eos=EOS)
        np.testing.assert_allclose(changed[i], want, rtol=1e-5, atol=1e-5)
        assert tokens[i] == changed[i].argmax(), "the lowest id among the largest"
        assert want[tokens[i]] > want.max() - 1e-4
    assert sum(plain.changed_logits(**row, eos=EOS).argmax() != row["logits_V"].argmax() for row in made) > 30


@pytest.mark.parametrize("tp", TPS)
def test_filters_keep_what_the_plain_sampler_keeps(tp: int) -> None:
    """Ties included: of equal logits the lower ids stay."""
    off: dict[str, Any] = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "min_tokens": 0,
    }
    batch, made = random_batch(1, 64, temperature=0.8, **off)
    changed, tokens, _, _ = batch.run(tp)
    sizes = set()
    for i, row in enumerate(made):
        kept = plain.kept_tokens(row["logits_V"], row["params"])
        assert np.flatnonzero(changed[i] > -np.inf).tolist() == sorted(kept), row["params"]
        assert (changed[i][kept] == row["logits_V"][kept]).all()
        assert tokens[i] in kept
        sizes.add(len(kept))
    assert len(sizes) > 12


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(
    ("logits_V", "options", "kept"),
    [
        (np.zeros(VOCAB), {"top_k": 3}, [0, 1, 2]),
        (np.zeros(VOCAB), {"top_p": 0.049}, [0, 1, 2]),  # 60 equal ones: 3 make 0.05
        (np.zeros(VOCAB), {"top_p": 1e-6}, [0]),
        (np.zeros(VOCAB), {"top_k": 10, "top_p": 0.35}, [0, 1, 2, 3]),  # top-p over the ten that are left
        (np.zeros(VOCAB), {"min_p": 1.0}, list(range(VOCAB))),
        (np.arange(VOCAB), {"min_p": 1.0}, [VOCAB - 1]),
        (np.arange(VOCAB), {"top_k": 1}, [VOCAB - 1]),
        (np.arange(VOCAB), {"top_k": VOCAB}, list(range(VOCAB))),
        (np.arange(VOCAB), {"top_k": 2**31 - 1}, list(range(VOCAB))),
        (-np.arange(VOCAB) - 5.0, {"top_k": 2}, [0, 1]),
        (np.where(np.arange(VOCAB) % 2, 0.0, -0.0), {"top_k": 5}, [0, 1, 2, 3, 4]),  # -0 is 0
        (np.arange(VOCAB) * 1e30, {"top_p": 0.99}, [VOCAB - 1]),
    ],
)
def test_corners_of_the_filters(tp: int, logits_V: np.ndarray, options: dict[str, Any], kept: list[int]) -> None:
    batch = Batch()
    batch.add(logits_V.astype(np.float32), SamplingParams(temperature=1.0, **options))
    changed, tokens, _, _ = batch.run(tp)
    assert np.flatnonzero(changed[0] > -np.inf).tolist() == kept
    assert tokens[0] in kept


def test_a_filter_never_brings_back_a_suppressed_token() -> None:
    batch = Batch()
    logits_V = np.zeros(VOCAB, np.float32)
    logits_V[list(EOS)] = 50
    for seed in range(64):
        batch.add(logits_V, SamplingParams(temperature=1.0, top_k=59, top_p=0.999, min_tokens=1, seed=seed))
    _, tokens, _, _ = batch.run()
    assert not set(tokens.tolist()) & set(EOS) and len(set(tokens.tolist())) > 20


COMBINATIONS: list[dict[str, Any]] = [
    {"top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.6, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {3: 2.5, 11: -100.0}, "min_tokens": 6, "top_p": 0.95, "repetition_penalty": 0.7},
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: "+".join(options))
def test_draws_follow_the_plain_samplers_distribution(options: dict[str, Any]) -> None:
    """20,480 draws of one request's step with as many seeds; chi-square below its 99.9% point."""
    rng = np.random.default_rng(5)
    logits_V = np.full(VOCAB, -1e9, np.float32)
    logits_V[:16] = rng.normal(size=16) * 1.5
    params = SamplingParams(temperature=0.9, **options)
    said: dict[str, Any] = {"prompt": [1, 2, 3, 4], "outputs": [2, 2, 5]}
    want = plain.probabilities(plain.changed_logits(logits_V, params, **said, eos=EOS), params)
    draws, rows = 20_480, 1024
    batch = Batch()
    for _ in range(rows):
        batch.add(logits_V, params, **said)
    run = program(1, rows)
    logits_BV = jnp.asarray(np.pad(np.stack(batch.logits), ((0, 0), (0, PADDED - VOCAB))))
    tables = jnp.asarray(np.stack(batch.options)), jnp.asarray(np.stack(batch.counts))
    counts = np.zeros(VOCAB)
    for start in range(0, draws, rows):
        head = pack(BatchShape(0, rows, 0), [batch.rows])[0]
        fields = BatchShape(0, rows, 0).fields()["seeds"]
        head[fields[0] : sum(fields)] = np.arange(start, start + rows)
        counts += np.bincount(run(logits_BV, *tables, head)[1], minlength=VOCAB)
    possible = want * draws > 5
    assert counts[want == 0].sum() == 0
    assert counts[~possible].sum() <= 5 * (~possible & (want > 0)).sum() + 10
    statistic = ((counts - want * draws)[possible] ** 2 / (want * draws)[possible]).sum()
    freedom = possible.sum() - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is about normal; 3.09 is its 99.9% point
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (statistic, limit)


@pytest.mark.parametrize("tp", TPS)
def test_logprobs_are_the_models_own(tp: int) -> None:
    batch, made = random_batch(2, 48, logprobs=20)
    _, tokens, _, logprobs = batch.run(tp)
    for i, row in enumerate(made):
        want = plain.log_softmax(row["logits_V"])
        assert logprobs.sampled_B[i] == pytest.approx(want[tokens[i]], abs=1e-4)
        best = sorted(range(VOCAB), key=lambda token, want=want: (-want[token], token))[:20]  # type: ignore[misc]
        assert logprobs.top_ids_BN[i].tolist() == best
        np.testing.assert_allclose(logprobs.top_BN[i], want[best], rtol=0, atol=1e-4)


def test_every_cut_of_the_vocabulary_gives_the_same() -> None:
    batch, made = random_batch(3, 64)
    changed, tokens, counts, logprobs = batch.run(1)
    changed4, tokens4, counts4, logprobs4 = batch.run(4)
    assert tokens4.tolist() == tokens.tolist()
    assert (changed4 == changed).all() and (counts4 == counts).all()
    assert (logprobs4.top_ids_BN == logprobs.top_ids_BN).all()
    np.testing.assert_allclose(logprobs4.sampled_B, logprobs.sampled_B, atol=1e-5)


@pytest.mark.parametrize("tp", TPS)
def test_a_row_does_not_depend_on_the_others(tp: int) -> None:
    batch, made = random_batch(4, 24)
    changed, tokens, _, logprobs = batch.run(tp)
    for i, row in enumerate(made):
        alone = Batch()
        alone.add(**row)
        changed1, tokens1, _, logprobs1 = alone.run(tp)
        assert (changed1[0] == changed[i]).all() and tokens1[0] == tokens[i]
        if row["params"].logprobs is not None:
            assert logprobs1.sampled_B[0] == pytest.approx(logprobs.sampled_B[i], abs=1e-5)
            assert logprobs1.top_ids_BN[0].tolist() == logprobs.top_ids_BN[i].tolist()


@pytest.mark.parametrize("tp", TPS)
def test_only_rows_with_penalties_are_counted(tp: int) -> None:
    batch = Batch()
    logits_V = np.zeros(VOCAB, np.float32)
    for token, params in [
        (50, SamplingParams(presence_penalty=0.5)),
        (20, SamplingParams(logprobs=1)),
        (50, SamplingParams(repetition_penalty=1.01)),
        (3, SamplingParams(frequency_penalty=0.0001)),
    ]:
        batch.add(np.where(np.arange(VOCAB) == token, 9.0, logits_V), params, prompt=[50, 2], outputs=[3])
    batch.counts[3][3] = MOST_COUNTED  # full: stays, and does not run over into the bit of the prompt
    before = np.stack(batch.counts).astype(int)
    _, tokens, counts, _ = batch.run(tp)
    assert tokens.tolist()[:3] == [50, 20, 50]
    want = before.copy()
    want[0, 50] += 1
    want[2, 50] += 1
    if tokens[3] != 3:
        want[3, tokens[3]] += 1
    assert (counts == want).all()
    assert counts[0, 50] == IN_PROMPT + 1 and counts[0, 2] == IN_PROMPT


def test_rows_of_slots_are_read_as_they_were_written() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1.0,
        frequency_penalty=0.5, min_tokens=3, max_tokens=9, logit_bias={4: -2.5, 1: 7.0}, logprobs=0,
    )  # fmt: skip
    read = unpack_options(jnp.asarray(np.stack([options_row(params, [5, 6]), options_row(SamplingParams(), [5])])))
    assert read.top_k.tolist() == [4, 0] and read.top_p.tolist() == [0.25, 1] and read.min_p.tolist() == [0.125, 0]
    assert read.repetition.tolist() == [1.5, 1] and read.presence.tolist() == [-1, 0]
    assert read.frequency.tolist() == [0.5, 0] and read.min_tokens.tolist() == [3, 0]
    assert read.suppressed[0, :3].tolist() == [5, 6, 2**31 - 1] and (read.suppressed[1] == 2**31 - 1).all()
    assert read.bias_ids[0, :3].tolist() == [4, 1, 2**31 - 1] and read.bias_values[0, :3].tolist() == [-2.5, 7, 0]
    assert flags_of(params) == Flag.EDIT | Flag.COUNT | Flag.FILTER | Flag.LOGPROBS
    assert flags_of(SamplingParams(temperature=1.0, max_tokens=3, stop_token_ids=(1,))) == Flag(0)
    assert flags_of(SamplingParams(temperature=0.0, top_k=5, top_p=0.5)) == Flag(0), "greedy needs no filter"
    with pytest.raises(InvalidArgument, match=f"min_tokens=3 with 129 tokens .* limit is {MAX_SUPPRESSED}"):
        options_row(params, range(129))
    many = SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0))
    assert (options_row(many, [])[-MAX_LOGIT_BIASES:].view(np.float32) == 1).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": -1}, "top_k=-1 must be between 0"),
        ({"top_k": 2**31}, "top_k=2147483648 must be between 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p=nan must be"),
        ({"min_p": -0.1}, "min_p=-0.1 must be between 0"),
        ({"min_p": 1.5}, "min_p=1.5 must be between 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be between 0.01 and 100"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be between -2 and 2"),
        ({"frequency_penalty": -3.0}, "frequency_penalty=-3.0 must be between -2 and 2"),
        ({"min_tokens": -1}, "min_tokens=-1 must be between 0 and max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 must be between 0 and max_tokens, that is 8"),
        ({"logprobs": 21}, "logprobs=21 must be between 0 and 20"),
        ({"logprobs": -1}, "logprobs=-1 must be between 0 and 20"),
        ({"logit_bias": {60: 1.0}}, "logit_bias holds token 60, which is outside the vocabulary 0..59"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds token -1"),
        ({"logit_bias": {1: 100.5}}, "logit_bias holds 100.5 for token 1; a bias must be between -100 and 100"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias holds nan for token 1"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "logit_bias holds 301 tokens, the limit is 300"),
    ],
)
def test_values_out_of_range_are_refused_with_their_limits(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**options).validate(vocab_size=VOCAB)
    assert str(caught.value).startswith(says)
    assert caught.value.field == next(iter(options))
