"""The grid of kernel calls that `make aot` compiles for chips that are not there, and how one is compiled.

A grid of every head size, group, page size, dtype and option on every chip would be 100,000 programs, and one takes 1
to 6 s of a core. This one walks all lists at once, each with its own stride, in 20 cases: every head size meets every
pair of dtypes (5 and 4 are coprime). A GPU takes all of them, a TPU one half and its sibling the other; each half has
every value of every list.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu_resources import compile_for_gpu
from benchmarks.hlo import kernel_calls
from meshes.chips import CHIPS, find_chip
from meshes.spec import MeshSpec
from meshes.topology import compile_only_mesh, compiling_for
from pallas_kernels import gather_pages as gather_folder
from pallas_kernels import ragged_paged_attention as attention_folder
from pallas_kernels import scatter_pages as scatter_folder
from pallas_kernels import write_pages as write_folder
from pallas_kernels.batch import lanes, ragged_batch
from pallas_kernels.checks import EIGHT_BIT
from pallas_kernels.names import GPU, TPU

HEAD_SIZES = (64, 80, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
DTYPES = (("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn"))
KV_SLOTS = (2, 1, 8, 3)
FEATURES = ("", "window", "soft cap", "sinks", "window, soft cap, sinks")
OPERATIONS = {
    "ragged_paged_attention": attention_folder,
    "write_pages": write_folder,
    "gather_pages": gather_folder,
    "scatter_pages": scatter_folder,
}
SECOND_HALF = ("v5p", "v6e")
LAYERS, PAGES = 4, 64
DECODE_ROWS, PREFILL_ROWS, PREFILL_TOKENS, TABLE = 16, 4, 256, 16
MOVED_PAGES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel call on one chip."""

    chip: str
    operation: str
    phase: str  # "decode", "prefill"; "" where pages are moved
    head_size: int
    group: int
    kv_slots: int
    page_size: int
    operand: str  # dtype of the queries, keys and values
    pool: str  # dtype of the pages
    features: str = ""

    @property
    def implementation(self) -> str:
        """The kernel that must take the call."""
        return TPU if find_chip(self.chip).platform == "tpu" else GPU

    @property
    def shape(self) -> str:
        """The call in short."""
        dtypes = self.pool if self.operand == self.pool else f"{self.operand} on {self.pool}"
        group = f" G={self.group}" if self.operation == "ragged_paged_attention" else ""
        extra = f", {self.features}" if self.features else ""
        return f"D={self.head_size} K={self.kv_slots}{group} S={self.page_size}, {dtypes}{extra}"

    def __str__(self) -> str:
        return f"{self.chip} {self.operation} {self.phase} {self.shape}".replace("  ", " ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case. Bytes are of one kernel call; None where the compiler does not say."""

    status: str  # "compiled", "refused" (by a check, with its reason), "absent" (no such kernel yet), "failed"
    reason: str = ""
    seconds: float = 0.0
    vmem_bytes: int | None = None
    vmem_limit_bytes: int | None = None
    shared_memory_bytes: int | None = None  # of a block: what the launch asks for, and what is fixed
    registers: int | None = None  # of a thread
    spilled_bytes: int | None = None  # of a thread


def _cases(chip: str, operation: str, phase: str) -> Iterable[Case]:
    moves = not phase
    first = 10 if chip in SECOND_HALF and not moves else 0
    for i in range(first, first + (6 if moves else 20 if find_chip(chip).platform == "gpu" else 10)):
        operand, pool = DTYPES[i % 4]
        yield Case(
            chip=chip,
            operation=operation,
            phase=phase,
            head_size=HEAD_SIZES[i % 5],
            group=GROUPS[(3 * i + 3) % 8] if operation == "ragged_paged_attention" else 1,
            kv_slots=KV_SLOTS[(i + i // 4) % 4],
            page_size=PAGE_SIZES[(i + i // 6 + 1) % 6],
            operand=pool if moves else operand,
            pool=pool,
            features=FEATURES[(i + i // 5) % 5] if operation == "ragged_paged_attention" else "",
        )


def grid() -> list[Case]:
    """All cases."""
    return [
        case
        for chip in CHIPS
        for operation, phase in (
            ("ragged_paged_attention", "decode"),
            ("ragged_paged_attention", "prefill"),
            ("write_pages", "decode"),
            ("write_pages", "prefill"),
            ("gather_pages", ""),
            ("scatter_pages", ""),
        )
        for case in _cases(chip, operation, phase)
    ]


def _call(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """(function, abstract arguments, donated arguments) of a case."""
    K, S, D, W = case.kv_slots, case.page_size, case.head_size, lanes(case.head_size)
    pages = jax.ShapeDtypeStruct((LAYERS, PAGES, K, S, W), case.pool)
    name = case.implementation
    if case.operation in ("gather_pages", "scatter_pages"):
        ids = jax.ShapeDtypeStruct((MOVED_PAGES,), jnp.int32)
        if case.operation == "gather_pages":
            return lambda p, i: gather_folder.gather_pages(p, i, implementation=name), (pages, ids), ()
        heads = (jax.ShapeDtypeStruct((LAYERS, MOVED_PAGES, S, W), case.pool),) * K
        return lambda p, i, h: scatter_folder.scatter_pages(p, i, h, implementation=name), (pages, ids, heads), (0,)
    rows = DECODE_ROWS if case.phase == "decode" else PREFILL_ROWS
    tokens = rows if case.phase == "decode" else PREFILL_TOKENS
    scales = jax.ShapeDtypeStruct((2, K), jnp.float32) if case.pool in EIGHT_BIT else None
    meta = (
        jax.ShapeDtypeStruct((rows + 1,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, TABLE), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )

    def batch_of(starts: jax.Array, contexts: jax.Array, table: jax.Array) -> Any:
        return ragged_batch(starts, contexts, table, num_tokens=tokens, page_size=S, num_pages=PAGES)

    if case.operation == "write_pages":
        kv = jax.ShapeDtypeStruct((tokens, K, D), case.operand)

        def write(p: Any, starts: Any, contexts: Any, table: Any, layer: Any, k: Any, v: Any, s: Any) -> Any:
            batch = batch_of(starts, contexts, table)
            return write_folder.write_pages(p, layer, k, v, batch, kv_scales_2K=s, implementation=name)

        return write, (pages, *meta, kv, kv, scales), (0,)
    H = K * case.group
    sinks = jax.ShapeDtypeStruct((H,), jnp.float32) if "sinks" in case.features else None

    def attend(p: Any, starts: Any, contexts: Any, table: Any, layer: Any, q: Any, s: Any, sinks_H: Any) -> Any:
        return attention_folder.ragged_paged_attention(
            q, p, layer, batch_of(starts, contexts, table), scale=D**-0.5,
            sliding_window=100 if "window" in case.features else None,
            soft_cap=30.0 if "soft cap" in case.features else None,
            sinks_H=sinks_H, kv_scales_2K=s, implementation=name,
        )  # fmt: skip

    return attend, (pages, *meta, jax.ShapeDtypeStruct((tokens, H, D), case.operand), scales, sinks), ()


def compile_case(case: Case) -> Outcome:
    """Compiles one case to the end. Never raises."""
    if case.implementation not in [i.name for i in OPERATIONS[case.operation].IMPLEMENTATIONS]:
        return Outcome(status="absent", reason=f"{case.operation} has no {case.implementation}")
    start = time.perf_counter()
    try:
        function, arguments, donated = _call(case)
        mesh = compile_only_mesh(case.chip, MeshSpec(1, 1))
        placed = jax.tree.map(lambda a: a.update(sharding=NamedSharding(mesh, PartitionSpec())), arguments)

        def lower() -> jax.stages.Lowered:
            with compiling_for(mesh):
                return jax.jit(function, donate_argnums=donated).lower(*placed)

        resources: dict[str, Any] = {}
        if case.implementation == GPU:
            text, resources = compile_for_gpu(lower)
        else:
            text = lower().compile().as_text() or ""
    except Exception as error:  # noqa: BLE001 - whatever the compiler says belongs in the table
        return Outcome(
            status="refused" if _by_a_check(error) else "failed",
            reason=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}",
            seconds=time.perf_counter() - start,
        )
    seconds = time.perf_counter() - start
    calls = kernel_calls(text)
    if not calls:
        return Outcome(status="failed", reason="the program holds no kernel call", seconds=seconds)
    return Outcome(
        status="compiled",
        seconds=seconds,
        vmem_bytes=max((c.vmem_bytes for c in calls if c.vmem_bytes is not None), default=None),
        vmem_limit_bytes=max((c.vmem_limit_bytes for c in calls if c.vmem_limit_bytes is not None), default=None),
        **resources,
    )


def interleaved(cases: Iterable[Case]) -> list[Case]:
    """TPU and GPU cases by turns: GPU programs compile one at a time (`gpu_resources`)."""
    cases = list(cases)
    tpu, gpu = ([c for c in cases if (c.implementation == GPU) == wanted] for wanted in (False, True))
    places = [(i / len(tpu), c) for i, c in enumerate(tpu)] + [(i / len(gpu), c) for i, c in enumerate(gpu)]
    return [case for _, case in sorted(places, key=lambda place: place[0])]


def _by_a_check(error: Exception) -> bool:
    """A ValueError that the dispatcher or a check of the arguments raised, and nobody deeper."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = ("dispatch.py", "validate.py", "checks.py")
    return type(error) is ValueError and bool(frames) and _is_ours(frames[-1].filename, ours)


def _is_ours(filename: str, names: tuple[str, ...]) -> bool:
    path = pathlib.PurePath(filename)
    return "pallas_kernels" in path.parts and path.name in names
