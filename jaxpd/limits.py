"""The memory plan: from what a user asked for and what the devices have, to the limits that are used and shown.

Pure arithmetic, done before any weight is read. What cannot fit fails here, with flag values that would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpd.batch import BatchShape
from jaxpd.config import NEVER, EngineConfig
from jaxpd.errors import FailedPrecondition, InvalidArgument
from jaxpd.models.config import ModelConfig
from jaxpd.models.decoder import abstract_params
from jaxpd.models.layout import ModelLayout
from meshes.sharding import ShardingRules
from meshes.spec import MeshSpec
from pallas_kernels.names import AUTO

MIB = 1 << 20
CPU_POOL_BYTES = 1024 * MIB  # default KV memory of one pool on CPU, over all its virtual devices
CPU_RUNTIME_BYTES = 600 * MIB  # Python, JAX and the compiled programs; a bound that the memory benchmark checks
ACCELERATOR_SHARE = 0.9  # of a device's memory; the rest is the runtime's and fragmentation
PREFILL_ROWS = 8  # prompts in one prefill step of one replica
SMALLEST_PREFILL_BUCKET = 16
REMEMBERED = 4  # with a prefix cache: times the pages that can be in use, where there is memory for it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What there is: bytes per device on an accelerator, of the host on CPU (where all virtual devices share it)."""

    platform: str
    device_bytes: int | None  # None: one host's memory for all of them
    host_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Limits of one pool. Pages, rows and tokens are per replica, bytes per device."""

    role: str
    spec: MeshSpec
    rows: int  # sequences in one step
    max_tokens: int  # tokens in one step
    num_pages: int
    page_bytes: int
    weight_bytes: int
    shapes: tuple[BatchShape, ...]

    @property
    def mesh_flag(self) -> str:
        """The flag that gives this pool's mesh, where one process has all roles."""
        return "--mesh" if self.role == "mixed" else f"--{self.role}-mesh"

    @property
    def kv_bytes(self) -> int:
        """Bytes of the page pool on one device."""
        return self.num_pages * self.page_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits an engine runs with."""

    model: str
    dtype: str
    memory: Memory
    max_model_len: int
    page_size: int
    max_queued_requests: int
    prefix_cache: bool
    reserve_tokens: int
    local_prefill: int | None  # most uncached tokens of a prompt that a decode pool computes; None: as it pays
    prefill: tuple[PoolLimits, ...]
    decode: tuple[PoolLimits, ...]
    mixed: tuple[PoolLimits, ...] = ()  # pools that do both, in the modes that share one

    @property
    def pools(self) -> tuple[PoolLimits, ...]:
        """All pools, prefill first."""
        return self.prefill + self.decode + self.mixed

    @property
    def meshes(self) -> dict[str, tuple[str, ...]]:
        """Role -> the mesh spec of each of its pools; only roles that have pools."""
        roles = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {role: tuple(str(pool.spec) for pool in pools) for role, pools in roles.items() if pools}

    @property
    def host_weight_bytes(self) -> int:
        """Host bytes of the weights on CPU: devices with equal shares use one buffer (checkpoints.placement)."""
        return sum({p.spec.tp: p.weight_bytes * p.spec.tp for p in self.pools}.values())

    @property
    def host_kv_bytes(self) -> int:
        """Host bytes of all page pools on CPU."""
        return sum(p.kv_bytes * p.spec.num_devices for p in self.pools)

    def plan_lines(self) -> list[str]:
        """The memory plan for a person, one line a pool."""
        lines = []
        for pool in self.pools:
            tokens = pool.num_pages * self.page_size
            lines.append(
                f"{pool.role:<8}{pool.spec!s:>5}  per device: weights {_size(pool.weight_bytes)} | "
                f"KV {_size(pool.kv_bytes)} = {pool.num_pages} pages x {self.page_size} = {tokens:,} tokens each | "
                f"{pool.rows} sequences, {pool.max_tokens} tokens a step"
            )
        if self.memory.device_bytes is None:
            lines.append(
                f"in all weights {_size(self.host_weight_bytes)} (equal shares are stored once on CPU) + "
                f"KV {_size(self.host_kv_bytes)}, of {_size(self.memory.host_bytes)} free host memory; "
                f"longest sequence {self.max_model_len:,} tokens; {self.dtype}"
            )
        else:
            lines.append(
                f"of {_size(self.memory.device_bytes)} per device; longest sequence {self.max_model_len:,} tokens; "
                f"{self.dtype}"
            )
        return lines


def _size(count: int) -> str:
    if 0 < count < MIB:
        return f"{-(-count // 1024)} KiB"
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / MIB:.0f} MiB"


def weight_bytes_per_device(config: ModelConfig, tp: int, dtype: Any, rules: ShardingRules) -> int:
    """Bytes of the decoder's parameters on each of `tp` devices."""
    total = 0
    for param in abstract_params(config, tp, dtype)[1].values():
        cut = any(axis is not None for axis in rules.spec(param.get_metadata("axes")))
        total += param.size // (tp if cut else 1) * np.dtype(dtype).itemsize
    return total


def make_limits(
    name: str,
    config: ModelConfig,
    asked: EngineConfig,
    prefill: Sequence[MeshSpec],
    decode: Sequence[MeshSpec],
    memory: Memory,
    mixed: Sequence[MeshSpec] = (),
) -> Limits:
    """Limits for a model on the given meshes, those of one role alone for a worker's engine.

    Raises FailedPrecondition with values that fit, or InvalidArgument.
    """
    cpu = memory.platform == "cpu"
    dtype = asked.dtype or ("float32" if cpu else "bfloat16")
    rows = asked.max_num_seqs or (16 if cpu else 64)
    if asked.max_model_len is not None and asked.max_model_len > config.max_position:
        raise InvalidArgument(
            f"--max-model-len {asked.max_model_len} is above the {config.max_position} positions {name} was made for",
            field="max_model_len",
        )
    rules = ShardingRules()
    sizes = []
    for role, specs in (("prefill", prefill), ("decode", decode), ("mixed", mixed)):
        for spec in specs:
            layout = ModelLayout(config, spec.tp)
            page = math.prod(layout.page_shape(1, asked.page_size)) // spec.tp * np.dtype(dtype).itemsize
            sizes.append((role, spec, page, weight_bytes_per_device(config, spec.tp, np.dtype(dtype), rules)))
    budgets = [_kv_budget(asked, memory, spec, weights) for _, spec, _, weights in sizes]
    fits = min(budget // page for budget, (_, _, page, _) in zip(budgets, sizes, strict=True)) * asked.page_size
    max_len = asked.max_model_len or min(config.max_position, fits // 128 * 128 or fits or 2 * asked.page_size)
    needed_pages = -(-max_len // asked.page_size)
    if fits < max_len or fits < 2 * asked.page_size:
        worst = max(page for _, _, page, _ in sizes) * needed_pages
        shorter = f", or --max-model-len {fits}" if fits >= 2 * asked.page_size else ""
        raise FailedPrecondition(
            f"one sequence of --max-model-len {max_len} tokens needs {_size(worst)} of KV memory per device and there "
            f"is room for {max(fits, 0)} tokens. Set --kv-memory {-(-worst // MIB)}MiB{shorter}, or a mesh with more "
            "devices",
            field="max_model_len",
        )
    tokens = min(asked.max_num_batched_tokens or (512 if cpu else 2048), max(max_len, SMALLEST_PREFILL_BUCKET))
    pools = []
    for (role, spec, page, weights), budget in zip(sizes, budgets, strict=True):
        pool_rows = min(PREFILL_ROWS, rows) if role == "prefill" else rows
        useful = needed_pages * pool_rows  # more pages could never be in use at once
        if asked.prefix_cache:
            useful *= REMEMBERED
        pools.append(
            PoolLimits(
                role=role,
                spec=spec,
                rows=pool_rows,
                max_tokens=max(tokens, pool_rows + 1),
                num_pages=min(budget // page, useful),
                page_bytes=page,
                weight_bytes=weights,
                shapes=_shapes(role, tokens, pool_rows, needed_pages),
            )
        )
    limits = Limits(
        model=name,
        dtype=dtype,
        memory=memory,
        max_model_len=max_len,
        page_size=asked.page_size,
        max_queued_requests=asked.max_queued_requests,
        prefix_cache=asked.prefix_cache,
        reserve_tokens=asked.reserve_tokens,
        local_prefill=_local_prefill(asked.local_prefill),
        prefill=tuple(p for p in pools if p.role == "prefill"),
        decode=tuple(p for p in pools if p.role == "decode"),
        mixed=tuple(p for p in pools if p.role == "mixed"),
    )
    _check_host(limits)
    return limits


def _local_prefill(asked: str) -> int | None:
    return None if asked == AUTO else 0 if asked == NEVER else int(asked)


def _kv_budget(asked: EngineConfig, memory: Memory, spec: MeshSpec, weight_bytes: int) -> int:
    if asked.kv_memory is not None:
        return asked.kv_memory
    if memory.device_bytes is None:
        return CPU_POOL_BYTES // spec.num_devices
    return int(memory.device_bytes * ACCELERATOR_SHARE) - weight_bytes


def _shapes(role: str, tokens: int, rows: int, table: int) -> tuple[BatchShape, ...]:
    """Buckets: 16, 64, 128, 256 ... tokens for prompts, 1, 8, 16, 32 ... rows for decodes.

    A decode pool has two for prompts: it computes what gave way again, and prompts that are not worth a hand-off.

    Every program costs seconds to compile and, on CPU with 30 layers, about 80 MB to hold; matrix products of 4 and
    of 8 rows differ by 5 to 25% only (SmolLM2's shapes, 2-core CPU).
    """
    counts = sorted({rows} | {1 << i for i in range(rows.bit_length()) if 1 << i < rows and i not in (1, 2)})
    decodes = tuple(BatchShape(count, count, table) for count in counts)
    steps = sorted({tokens} | {t for t in (16, 64, *(128 << i for i in range(16))) if t < tokens})
    if role == "decode":
        steps = sorted({min(64, tokens), tokens})
    # a prompt bucket must differ from a decode bucket: more tokens than rows
    prompts = tuple(dict.fromkeys(BatchShape(max(t, rows + 1), rows, table) for t in steps))
    return prompts if role == "prefill" else decodes + prompts


def _check_host(limits: Limits) -> None:
    """On CPU all devices share the host's memory."""
    memory = limits.memory
    if memory.device_bytes is not None:
        for pool in limits.pools:
            if pool.weight_bytes + pool.kv_bytes > memory.device_bytes:
                raise FailedPrecondition(
                    f"the {pool.role} mesh {pool.spec} needs {_size(pool.weight_bytes)} of weights and "
                    f"{_size(pool.kv_bytes)} of KV per device, and a device has {_size(memory.device_bytes)}; "
                    f"use more tensor parallelism ({pool.mesh_flag} {pool.spec.tp * 2}x{pool.spec.dp}) "
                    f"or a smaller --kv-memory",
                    field=pool.mesh_flag.lstrip("-").replace("-", "_"),
                )
        return
    one_by_one = "--prefill-mesh 1x1 --decode-mesh 1x1"
    weights, kv = limits.host_weight_bytes, limits.host_kv_bytes
    total = weights + kv + CPU_RUNTIME_BYTES
    if total <= memory.host_bytes:
        return
    devices = sum(p.spec.num_devices for p in limits.pools)
    left = memory.host_bytes - weights - CPU_RUNTIME_BYTES
    needed = max(p.page_bytes for p in limits.pools) * -(-limits.max_model_len // limits.page_size)
    if left // devices >= needed:
        cure = f"set --kv-memory {left // devices // MIB}MiB (per device)"
    else:
        cure = (
            f"use fewer data replicas, for example {'--mesh 1x1' if limits.mixed else one_by_one} "
            f"--max-model-len {min(limits.max_model_len, 1024)}, or a smaller model"
        )
    raise FailedPrecondition(
        f"weights {_size(weights)} + KV {_size(kv)} + runtime {_size(CPU_RUNTIME_BYTES)} = {_size(total)} on {devices} "
        f"virtual devices, and the host has {_size(memory.host_bytes)} free; {cure}",
        field="kv_memory",
    )
