"""Causal attention of a ragged batch over its paged KV cache.

`ragged_paged_attention` is the door: it checks the call and hands it to the implementation that `dispatch` picks.
`reference.py` is plain XLA and runs everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.dispatch import choose, implementations
from pallas_kernels.names import AUTO
from pallas_kernels.ragged_paged_attention import gpu, tpu
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention as _xla
from pallas_kernels.ragged_paged_attention.validate import validate

IMPLEMENTATIONS = implementations(
    _xla, tpu=(tpu.ragged_paged_attention, tpu.refuse), gpu=(gpu.ragged_paged_attention, gpu.refuse)
)


def ragged_paged_attention(
    q_THD: jax.Array,
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    kv_scales_2K: jax.Array | None = None,
    implementation: str = AUTO,
) -> jax.Array:
    """Attention of each query token over its own sequence up to itself; returns [T, H, D], dtype of `q_THD`.

    q_THD: [T, H, D] float; H = K * group query slots, slot h reads KV slot h // group.
    pages_LPKSW: [L, P, K, S, W] pool with the keys in lanes [0, D), the values in [D, 2 D); this step's tokens are
        already in it (`write_pages`). Its dtype may be narrower than float32; scores, softmax and sums are float32.
    layer: which L, a Python int or an int32 scalar.
    batch: shapes as in `RaggedBatch`. A program with T == B is a decode step: row i is token i.
    scale: factor on q . k, before the cap.
    sliding_window: each token sees this many tokens, itself the last of them; None is all.
    soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None is no cap.
    sinks_H: [H] float32, attention sinks: one more score (scaled and capped already) in each head's softmax, whose
        value is zero (Xiao et al., arXiv:2309.17453, in the learned form).
    kv_scales_2K: [2, K] float32, with int8 and float8_e4m3fn pages: a key is its stored number times `[0, k]`, a value
        times `[1, k]`. They are multiplied into q and the result here, so that no implementation sees them.
    implementation: "auto" or a name from IMPLEMENTATIONS.

    Padding tokens give zeros. Slots outside a row's context are never seen, whatever they hold. Raises ValueError,
    which names argument, value and limit, for shapes or options that do not fit, or an implementation that cannot run.
    """
    validate(
        q_THD, pages_LPKSW, layer, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
        sinks_H=sinks_H, kv_scales_2K=kv_scales_2K,
    )  # fmt: skip
    T, H, D = q_THD.shape
    _, _, K, S, W = pages_LPKSW.shape
    B, N = batch.page_table.shape
    shapes = {"T": T, "B": B, "N": N, "H": H, "K": K, "D": D, "S": S, "W": W}
    chosen = choose(
        "ragged_paged_attention", IMPLEMENTATIONS, implementation,
        dtype=pages_LPKSW.dtype, operand=q_THD.dtype, shapes=shapes,
    )  # fmt: skip

    return _run(
        q_THD, pages_LPKSW, jnp.asarray(layer, jnp.int32), batch, sinks_H, kv_scales_2K,
        run=chosen.run, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip


# One trace for all layers that are alike, instead of one for each.
@functools.partial(jax.jit, static_argnames=("run", "scale", "sliding_window", "soft_cap"))
def _run(
    q_THD: jax.Array,
    pages_LPKSW: jax.Array,
    layer: jax.Array,
    batch: RaggedBatch,
    sinks_H: jax.Array | None,
    kv_scales_2K: jax.Array | None,
    *,
    run: Callable[..., jax.Array],
    **options: Any,
) -> jax.Array:
    def scaled(x_THD: jax.Array, of: int) -> jax.Array:
        if kv_scales_2K is None:
            return x_THD
        group = x_THD.shape[1] // pages_LPKSW.shape[2]
        return (x_THD.astype(jnp.float32) * jnp.repeat(kv_scales_2K[of], group)[:, None]).astype(x_THD.dtype)

    return scaled(run(scaled(q_THD, 0), pages_LPKSW, layer, batch, sinks_H=sinks_H, **options), 1)
