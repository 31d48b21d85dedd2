"""Random ragged batches over a poisoned page pool, for tests and benchmarks that compare with the oracle.

Everything that no query may see is as wrong as it can be: slots beyond the contexts hold NaN (in int8 pages the largest
number), unused entries of the page tables lie far out of range. Pages are shared between rows and come in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.batch import RaggedBatch, lanes, ragged_batch
from pallas_kernels.checks import EIGHT_BIT
from pallas_kernels.ragged_paged_attention.oracle import ragged_paged_attention_oracle

LAYERS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shapes and dtypes of a call, by the dimension key of `pallas_kernels.batch`."""

    tokens: int  # T
    rows: int  # B
    kv_slots: int  # K
    group: int  # H / K
    head_dim: int  # D
    page_size: int = 16  # S
    table: int = 8  # N
    pages: int = 24  # P
    dtype: str = "float32"
    kv_dtype: str | None = None  # None: that of the queries


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    shape: Shape
    q_THD: jax.Array
    pages_LPKSW: jax.Array
    layer: int
    batch: RaggedBatch
    sinks_H: jax.Array
    kv_scales_2K: jax.Array | None

    def expected(self, *, sinks: bool = False, **options: Any) -> np.ndarray:
        """[T, H, D] float64: the oracle's result on the (dequantised) values."""
        pages_LPKSW = np.asarray(self.pages_LPKSW.astype(jnp.float32))
        if self.kv_scales_2K is not None:
            D = self.shape.head_dim
            scale_KW = np.ones((self.shape.kv_slots, lanes(D)), np.float32)
            scale_KW[:, :D], scale_KW[:, D : 2 * D] = np.asarray(self.kv_scales_2K)[..., None]
            pages_LPKSW = pages_LPKSW * scale_KW[:, None, :]
        sinks_H = np.asarray(self.sinks_H) if sinks else None
        q_THD = np.asarray(self.q_THD.astype(jnp.float32))
        return ragged_paged_attention_oracle(q_THD, pages_LPKSW, self.layer, self.batch, sinks_H=sinks_H, **options)


def random_case(shape: Shape, lengths: Sequence[int], contexts: Sequence[int], seed: int) -> Case:
    """A call for rows of these query lengths and contexts; missing rows are unused."""
    rng = np.random.default_rng(seed)
    kv_dtype = shape.kv_dtype or shape.dtype
    empty = [0] * (shape.rows - len(lengths))
    lengths, contexts = [*lengths, *empty], [*contexts, *empty]
    table_BN = rng.choice(np.array([-1, 2**31 - 1], np.int32), (shape.rows, shape.table))
    seen_PS = np.zeros((shape.pages, shape.page_size), bool)
    for row, context in enumerate(contexts):
        used = -(-context // shape.page_size)
        table_BN[row, :used] = rng.choice(shape.pages, used, replace=used > shape.pages)
        for pos in range(context):
            seen_PS[table_BN[row, pos // shape.page_size], pos % shape.page_size] = True
    size = (LAYERS, shape.pages, shape.kv_slots, shape.page_size, lanes(shape.head_dim))
    values = rng.standard_normal(size, dtype=np.float32)
    poison = np.nan
    if kv_dtype in EIGHT_BIT:
        values, poison = values * 20, 127 if kv_dtype == "int8" else np.nan
    pages_LPKSW = jnp.asarray(np.where(seen_PS[None, :, None, :, None], values, poison)).astype(kv_dtype)
    H = shape.kv_slots * shape.group
    q_THD = rng.standard_normal((shape.tokens, H, shape.head_dim), dtype=np.float32) * 2
    batch = ragged_batch(
        jnp.asarray(np.cumsum([0, *lengths]), jnp.int32), jnp.asarray(contexts, jnp.int32), jnp.asarray(table_BN),
        num_tokens=shape.tokens, page_size=shape.page_size, num_pages=shape.pages,
    )  # fmt: skip
    scales_2K = jnp.asarray(rng.uniform(0.02, 0.08, (2, shape.kv_slots)), jnp.float32)
    return Case(
        shape, jnp.asarray(q_THD, shape.dtype), pages_LPKSW, int(rng.integers(LAYERS)), batch,
        jnp.asarray(rng.standard_normal(H), jnp.float32), scales_2K if kv_dtype in EIGHT_BIT else None,
    )  # fmt: skip


def relative_error(got_THD: jax.Array, expected_THD: np.ndarray) -> float:
    """Largest difference over the largest expected value."""
    difference = np.abs(np.asarray(got_THD.astype(jnp.float32), np.float64) - expected_THD).max()
    return float(difference / max(np.abs(expected_THD).max(), 1e-3))
