"""Rotary position embedding with the scalings of `RopeConfig`, in the half-split convention of Hugging Face weights."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpd.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32 radians per position. Llama 3 scaling after the Llama 3.1 release (see RopeConfig)."""
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        inv = inv / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / inv
        blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blend = np.clip(blend, 0.0, 1.0)
        inv = inv * (blend + (1.0 - blend) / rope.factor)
    return inv.astype(np.float32)


def rope_tables(rope: RopeConfig, head_dim: int, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, 1, head_dim / 2] float32 for int32 positions [T]; computed once a step, shared by the layers."""
    angles = positions_T.astype(jnp.float32)[:, None, None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_THD: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + D/2) of every head; float32 inside, the dtype of `x` outside."""
    cos, sin = tables
    first, second = jnp.split(x_THD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_THD.dtype)
