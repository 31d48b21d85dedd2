"""Page movement on Hopper: what `gather_pages/gpu.py` and `scatter_pages/gpu.py` share, written in Mosaic GPU.

Both move tiles, a page of one layer and KV slot, each one contiguous run of bytes on both sides. A fixed number of
blocks, about one a multiprocessor, walk the tiles of one KV slot each (the arrays of the KV slots are separate, so
that the slot has to be known while tracing); a tile goes through shared memory by TMA, in and out, and no register
sees it. `stages` of them are under way at once: half being read, half being written.

Dimension key: that of `pallas_kernels.batch`, and C pieces of a tile (a tile may be larger than a stage), R rows of
128 elements in a piece.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Call

BLOCKS = 132  # multiprocessors of an H100 SXM, H200 or GH200; where there are fewer, the last blocks run second
LANES = 128
MAX_ROWS = 256  # of one TMA box
PIECE_BYTES = 32 * 1024
STAGE_BYTES = 192 * 1024  # of the 227 KiB of shared memory that a block can have
MAX_STAGES = 16
MAX_KV_SLOTS = 32  # each is a branch of the kernel, and a descriptor
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
MIN_JAX = (0, 12)


def mosaic_gpu() -> Any:
    """`jax.experimental.pallas.mosaic_gpu`, untyped: what is in it depends on the version of jax."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def refuse(call: Call) -> str | None:
    """Why the kernels cannot take this call, or None."""
    if jax.__version_info__[:2] < MIN_JAX:
        return f"it needs jax {'.'.join(map(str, MIN_JAX))} or newer, this is {jax.__version__}"
    if call.platform == "gpu" and not any(name in call.chip.replace("-", " ").split() for name in HOPPER):
        return f"it is for Hopper ({', '.join(HOPPER)}) and untested elsewhere, also on Blackwell"
    if call["K"] > MAX_KV_SLOTS:
        return f"it takes at most {MAX_KV_SLOTS} KV slots a device, not {call['K']}"
    if call["N"] == 0:
        return "there is no page to move"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the tiles of a call are cut and handed out."""

    pieces: int  # C
    rows: int  # R
    stages: int
    blocks: int  # for each KV slot

    @property
    def in_flight(self) -> int:
        """Pieces being written at a time; the other stages are being read."""
        return self.stages // 2


def plan(L: int, N: int, K: int, S: int, W: int, itemsize: int) -> Plan:
    """The largest pieces that a stage holds, and as many stages as fit."""
    rows = S * W // LANES
    most = min(MAX_ROWS, PIECE_BYTES // (LANES * itemsize))
    R = max(r for r in range(1, most + 1) if rows % r == 0)
    C = rows // R
    stages = max(2, min(MAX_STAGES, STAGE_BYTES // (R * LANES * itemsize)))
    return Plan(C, R, stages, max(1, min(BLOCKS // K, L * N * C)))


def tiled(array: jax.Array, shape: Plan) -> jax.Array:
    """Any array of whole tiles as [pieces in all, R, 128]: the same bytes in the same order."""
    return array.reshape(-1, shape.rows, LANES)


Address = Callable[[jax.Array], tuple[Any, Any]]


def pump(begin: jax.Array, count: jax.Array, shape: Plan, address: Address, buffers: Any, barriers: Any) -> None:
    """Moves pieces begin, begin + blocks, ... below `count`; `address(i)` is where piece i stands and where it goes.

    Each piece is stored once and in order, so "all but the last n stores have read their buffer" says which stage is
    free again.
    """
    pl, plgpu = importlib.import_module("jax.experimental.pallas"), mosaic_gpu()
    trips = jnp.maximum(count - begin + shape.blocks - 1, 0) // shape.blocks

    def load(trip: jax.Array) -> None:
        stage = jax.lax.rem(trip, jnp.int32(shape.stages))
        source, _ = address(begin + trip * shape.blocks)
        plgpu.copy_gmem_to_smem(source, buffers.at[stage], barriers.at[stage])

    for trip in range(shape.stages):
        pl.when(trip < trips)(lambda trip=trip: load(jnp.int32(trip)))

    def step(trip: jax.Array, carry: None) -> None:
        stage = jax.lax.rem(trip, jnp.int32(shape.stages))
        plgpu.barrier_wait(barriers.at[stage])
        _, target = address(begin + trip * shape.blocks)
        plgpu.copy_smem_to_gmem(buffers.at[stage], target)
        plgpu.wait_smem_to_gmem(shape.in_flight, wait_read_only=True)
        following = trip - shape.in_flight + shape.stages
        pl.when((trip >= shape.in_flight) & (following < trips))(lambda: load(following))

    jax.lax.fori_loop(0, trips, step, None)
    plgpu.wait_smem_to_gmem(0)


def launch(
    body: Callable[..., None], shape: Plan, K: int, dtype: Any, moved_bytes: int, out_type: Any, interpret: bool
) -> Callable[..., Any]:
    """The kernel: `body(slot, block, *refs, buffers, barriers)` in K x blocks blocks.

    `body` is run with the KV slot as a Python int, once for each in the program, of which a block takes one.
    """
    pl, plgpu = importlib.import_module("jax.experimental.pallas"), mosaic_gpu()

    def kernel(*refs: Any) -> None:
        *arrays, buffers, barriers = refs
        slot, block = jax.lax.axis_index("slot"), jax.lax.axis_index("block")
        for k in range(K):
            pl.when(slot == k)(lambda k=k: body(k, block, *arrays, buffers, barriers))

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((shape.stages, shape.rows, LANES), dtype),
            plgpu.Barrier(num_barriers=shape.stages),
        ],
        grid=(K, shape.blocks),
        grid_names=("slot", "block"),
        kernel_name=body.__name__,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * moved_bytes),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
