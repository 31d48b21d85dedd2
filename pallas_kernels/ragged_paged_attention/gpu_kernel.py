"""What the decode and the prefill kernel of `gpu.py` share: their sizes, the ring of pages, scores.

Both are warp-specialised. One memory warpgroup reads page ids and asks the TMA unit for keys and values, straight from
the pool, into a ring of shared-memory stages, as far ahead as the ring allows. The compute warpgroups wait for a
stage, multiply with wgmma and give it back: both each stage in prefill, where they hold different queries, and every
other stage in decode. A stage is one block: X tokens of a row's context, in copies of R tokens.

The pool is seen as a matrix of tokens [L * P * K * S, W], which costs nothing; a page of a KV slot is S of its rows.

Dimension key: that of `pallas_kernels.batch`, and I items, G query slots per KV slot, M query rows of an item, X tokens
in a block, R tokens in one copy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu_pages import mosaic_gpu

MASKED = -1e30  # finite, so that a maximum less itself is 0
ROWS = 64  # of a wgmma
LOG2E = math.log2(math.e)
SMEM_PER_BLOCK = 227 * 1024  # of a CUDA block on Hopper
SCRATCH = 2048  # of Mosaic's, for reductions
MOST_STAGES = 8
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40  # 2 * 232 + 40 is what three warpgroups have


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is built for, and the sizes that follow from it."""

    prefill: bool
    head_dim: int  # D
    page_size: int  # S
    group: int  # G
    staged: bool = False  # whether P goes through shared memory: the interpreter multiplies no registers
    itemsize: int = 2

    @property
    def block(self) -> int:
        """X: 64, the least that a wgmma takes as weights at full speed, and more where registers and memory allow."""
        if self.prefill:
            return 128 if self.head_dim <= 128 else 64
        return 64 if self.head_dim <= 128 else 32

    @property
    def copy(self) -> int:
        """R."""
        return min(self.page_size, self.block)

    @property
    def warpgroups(self) -> int:
        """That compute: two, but one where the running output of decode takes the registers of two."""
        return 2 if self.prefill or self.head_dim <= 128 else 1

    @property
    def query_tokens(self) -> int:
        """Most query tokens of an item."""
        return self.warpgroups * ROWS // self.group if self.prefill else 1

    @property
    def rows(self) -> int:
        """M: rows of an item's query matrix, with the padding that is copied."""
        return self.warpgroups * ROWS if self.prefill else -(-self.group // 8) * 8

    @property
    def swizzle(self) -> int:
        """Bytes of the swizzle: the widest that divides both a head and a block, since wgmma sums over either."""
        return math.gcd(self.head_dim * self.itemsize, self.block * self.itemsize, 128)

    @property
    def parts(self) -> int:
        """Parts of a head that P.V is computed in, so that its sum fits in registers next to the running output."""
        return -(-self.head_dim // 128)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the ring."""
        D, item = self.head_dim, self.itemsize
        if self.prefill:  # queries, which the result replaces
            arrays = self.warpgroups * ROWS * D * item
        else:  # two pieces' queries and a part of the float32 result
            arrays = (ROWS + self.rows) * D * item + ROWS * D // self.parts * 4
        if self.staged:
            arrays += self.warpgroups * ROWS * self.block * item
        return SCRATCH + arrays + 4096  # sinks or sums, barriers, padding

    @property
    def stage_bytes(self) -> int:
        return 2 * self.block * self.head_dim * self.itemsize

    @property
    def stages(self) -> int:
        """Stages of the ring: an even number, since the warpgroups of decode take turns with them. 0: they do not fit.

        64 KB to 128 KB under way hide the latency of an SM's share of memory.
        """
        return min((SMEM_PER_BLOCK - self.fixed_bytes) // self.stage_bytes // 2 * 2, MOST_STAGES)

    @property
    def smem_bytes(self) -> int:
        """Upper bound of the shared memory of a CUDA block."""
        return self.fixed_bytes + self.stages * self.stage_bytes


def multiprocessors() -> int:
    """Of the GPU that the program being traced is for; an H100 SXM's, H200's or GH200's where that is not known."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    cores = getattr(described, "num_cores", None) or getattr(jax.local_devices()[0], "core_count", None)
    return cores if isinstance(cores, int) and cores > 1 else 132


def set_registers(shape: Shape, computes: bool) -> None:
    """Gives the compute warpgroups registers of the memory warpgroup's, where three share what two have enough of."""
    if shape.warpgroups == 2:
        n, action = (COMPUTE_REGISTERS, "increase") if computes else (MEMORY_REGISTERS, "decrease")
        mosaic_gpu().set_max_registers(n, action=action)


def tiled(dtype: Any, swizzle: int, *size: int) -> Any:
    """A shared-memory array that TMA writes and wgmma reads."""
    plgpu = mosaic_gpu()

    transforms = (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(size, dtype, transforms=transforms)


def ring(shape: Shape, dtype: Any) -> dict[str, Any]:
    """Scratch that `move` fills."""
    plgpu = mosaic_gpu()

    full = plgpu.Barrier(num_arrivals=shape.block // shape.copy, num_barriers=shape.stages)
    free = plgpu.Barrier(num_arrivals=shape.warpgroups if shape.prefill else 1, num_barriers=shape.stages)
    stages = tiled(dtype, shape.swizzle, shape.stages, shape.block, shape.head_dim)
    return {"k_smem": stages, "v_smem": stages, "k_full": full, "v_full": full, "k_free": free, "v_free": free}


def move(
    shape: Shape, pages: int, kv_slots: int, *, head: Any, row: Any, start: Any, blocks: Any, lowest: Any, highest: Any,
    layer_ref: Any, table_ref: Any, pool_ref: Any, k_smem: Any, v_smem: Any, k_full: Any, v_full: Any, k_free: Any,
    v_free: Any, before: int | jax.Array = 0,
) -> None:  # fmt: skip
    """The memory warpgroup: fetches a row's `blocks` blocks from position `start` on, `before` blocks after the first
    of the ring.

    A page beyond `highest` (the last of the context) or before `lowest` (the first that anyone sees) is replaced by
    that one: what lies there is masked, and its entry in the page table need not be a page.
    """
    plgpu = mosaic_gpu()

    S, D, X, R = shape.page_size, shape.head_dim, shape.block, shape.copy
    base = layer_ref[0] * pages

    @pl.loop(0, blocks)
    def _(b: Any) -> None:
        nth = before + b
        slot = lax.rem(nth, jnp.int32(shape.stages))
        at = []
        for i in range(X // R):
            position = start + b * X + i * R
            page = jnp.minimum(jnp.maximum(lax.div(position, jnp.int32(S)), lowest), highest)
            token = ((base + table_ref[row, page]) * kv_slots + head) * S + lax.rem(position, jnp.int32(S))
            at.append(pl.multiple_of(token, R))
        for smem, full, free, lanes in ((k_smem, k_full, k_free, 0), (v_smem, v_full, v_free, D)):

            @pl.when(nth >= shape.stages)
            def _(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for i in range(X // R):
                source = pool_ref.at[pl.ds(at[i], R), pl.ds(lanes, D)]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(i * R, R)], full.at[slot])


def zero_beyond(shape: Shape, v_smem: Any, first: int | jax.Array, tokens: int, left: jax.Array) -> None:
    """Zeroes those of `tokens` values of a stage, from `first` on, that are not among the stage's first `left`.

    What a page holds beyond the context is some earlier sequence's, and 0 times its NaN would be NaN.
    """
    plgpu = mosaic_gpu()

    size = (tokens, shape.head_dim)
    layout = plgpu.Layout.SMEM_GMEM_COPY(size, v_smem.dtype, shape.swizzle)
    part = v_smem.at[pl.ds(first, tokens)]
    token = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=layout) + first
    values = plgpu.layout_cast(part[...], layout)
    part[...] = jnp.where(token < left, values, jnp.zeros_like(values))


def score(qk: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scores in units of log2, from q . k. tanh by way of exp2, since the hardware's own has 11 bits."""
    if soft_cap is None:
        return qk * (scale * LOG2E)
    return (soft_cap * LOG2E) * (1 - 2 / (1 + jnp.exp2(qk * (2 * LOG2E * scale / soft_cap))))


def spread(x_M: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """A number for each row, along the row."""
    return lax.broadcast_in_dim(x_M, size, [0])
