"""The whole `forward` of known models, compiled for TPUs that are not there: model shapes, meshes and buckets.

Shapes come from the models' published `config.json` (`model_configs/`, only the fields that shape a program); there
are no weights. Limits and buckets are those that `jaxpd serve` would choose on such devices, with `PAGE_SIZE` and
`MAX_LEN`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import jax.numpy as jnp

from benchmarks.hlo import KernelCall, kernel_calls, makers_of
from jaxpd.activations import activations
from jaxpd.batch import BatchShape
from jaxpd.config import EngineConfig
from jaxpd.limits import Memory, make_limits
from jaxpd.models.config import ModelConfig, from_hf
from jaxpd.models.layout import ModelLayout
from jaxpd.programs import ProgramSpec, lower_forward
from meshes.chips import find_chip
from meshes.sharding import ShardingRules
from meshes.spec import MeshSpec
from meshes.topology import compile_only_mesh
from pallas_kernels.batch import lanes
from pallas_kernels.names import TPU
from pallas_kernels.ragged_paged_attention.tpu import padded_items
from pallas_kernels.ragged_paged_attention.tpu_blocks import Sizes, choose_blocks

CONFIGS = pathlib.Path(__file__).parent / "model_configs"
MODELS = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
MESHES = {"v5e": (("prefill", MeshSpec(8, 1)), ("decode", MeshSpec(4, 2))),
          "v6e": (("prefill", MeshSpec(8, 1)), ("decode", MeshSpec(2, 4)))}  # fmt: skip
PAGE_SIZE = 64
MAX_LEN = 8192
FEW_LAYERS = 2
EVERY_BUCKET = ("llama-3.1-8b", "smollm2-135m")


def model_config(name: str, layers: int | None = None) -> ModelConfig:
    """The decoder of a model, cut to its first `layers` layers where that is given."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return from_hf(raw if layers is None else {**raw, "num_hidden_layers": layers})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardCase:
    """One bucket of one pool."""

    model: str
    chip: str
    role: str
    mesh: MeshSpec
    shape: BatchShape
    num_pages: int  # of one replica
    layers: int

    def __str__(self) -> str:
        return f"{self.model}-{self.chip}-{self.mesh}-{self.shape}-l{self.layers}"

    @property
    def spec(self) -> ProgramSpec:
        """What the pool's programs are made for, on devices that only compile."""
        return ProgramSpec(
            config=model_config(self.model, self.layers),
            mesh=compile_only_mesh(self.chip, self.mesh),
            dtype=jnp.dtype(jnp.bfloat16),
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            num_slots=64,
            shapes=(self.shape,),
            rules=ShardingRules(),
            kernels=TPU,
        )

    def compile(self) -> Any:
        """The executable."""
        return lower_forward(self.spec, self.shape).compile()


def pool_cases(model: str, chip: str, role: str, mesh: MeshSpec, layers: int | None = None) -> list[ForwardCase]:
    """All buckets of a pool's own phase, smallest first (a decode pool has two for prompts besides)."""
    config = model_config(model, layers)
    memory = Memory(platform="tpu", device_bytes=find_chip(chip).hbm_bytes, host_bytes=0)
    asked = EngineConfig(page_size=PAGE_SIZE, max_model_len=min(MAX_LEN, config.max_position))
    limits = make_limits(model, config, asked, (mesh,), (mesh,), memory)
    pool = limits.prefill[0] if role == "prefill" else limits.decode[0]
    return [
        ForwardCase(model=model, chip=chip, role=role, mesh=mesh, shape=shape, num_pages=pool.num_pages,
                    layers=config.num_layers)
        for shape in pool.shapes
        if role == "prefill" or shape.rows == shape.tokens
    ]  # fmt: skip


def cases() -> list[ForwardCase]:
    """Each model's pools at full depth in the largest bucket; the smaller buckets with `FEW_LAYERS` layers, the least
    that share a pool, on v5e: all of them of `EVERY_BUCKET`, else the smallest. A full 8B model takes half a minute
    of a core to compile."""
    found = []
    for model in MODELS:
        for chip, pools in MESHES.items():
            for role, mesh in pools:
                found.append(pool_cases(model, chip, role, mesh)[-1])
                if chip == "v5e":
                    smaller = pool_cases(model, chip, role, mesh, FEW_LAYERS)[:-1]
                    found += smaller if model in EVERY_BUCKET else smaller[:1]
    return found


IN_PLACE = {"parameter", "bitcast", "tuple", "get-tuple-element", "while", "opt-barrier"}  # nothing is written by these
HLO_DTYPE = "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledForward:
    """What the compiler made of a case. Bytes are of one device."""

    case: ForwardCase
    seconds: float
    pool_bytes: int
    pool_makers: tuple[str, ...]  # instructions that write an array as large as the pool: lines of HLO
    aliased_bytes: int  # arguments that a result takes the place of
    temporary_bytes: int
    activation_bytes: int  # what we allow for it
    kernels: tuple[KernelCall, ...]

    def row(self) -> dict[str, Any]:
        """For the table."""
        case = self.case
        return {
            "model": case.model, "chip": case.chip, "mesh": str(case.mesh), "bucket": str(case.shape),
            "layers": case.layers, "seconds": self.seconds, "kernels": len(self.kernels),
            "vmem_bytes": max((k.vmem_bytes or 0 for k in self.kernels), default=0),
            "pool_bytes": self.pool_bytes, "pool_copies": len(self.pool_makers),
            "temporary_bytes": self.temporary_bytes, "activation_bytes": self.activation_bytes,
        }  # fmt: skip


def compile_forward(case: ForwardCase) -> CompiledForward:
    """Compiles a case and reads what became of it."""
    start = time.perf_counter()
    compiled = case.compile()
    seconds = time.perf_counter() - start
    text, memory, spec = compiled.as_text(), compiled.memory_analysis(), case.spec
    layout = spec.layout
    L, P, K, S, W = layout.page_shape(spec.num_pages, spec.page_size)
    local = (L, P, K // layout.tp, S, W)
    return CompiledForward(
        case=case,
        seconds=seconds,
        pool_bytes=math.prod(local) * spec.dtype.itemsize,
        pool_makers=tuple(
            one.line.strip()
            for one in makers_of(text, HLO_DTYPE, local)
            if one.operation not in IN_PLACE and not (one.operation == "custom-call" and one.aliases_an_operand)
        ),
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        activation_bytes=allowed_bytes(case, layout, spec.dtype.itemsize),
        kernels=tuple(kernel_calls(text)),
    )


def allowed_bytes(case: ForwardCase, layout: ModelLayout, itemsize: int) -> int:
    """The activations of the bucket, with the items of the attention kernel on that chip."""
    sizes = Sizes(
        T=case.shape.tokens, B=case.shape.rows, N=case.shape.table, K=layout.heads.kv_per_device, G=layout.heads.group,
        D=layout.config.head_dim, S=PAGE_SIZE, W=lanes(layout.config.head_dim), pool_bytes=itemsize,
        query_bytes=itemsize,
    )  # fmt: skip
    chip = find_chip(case.chip)
    blocks = choose_blocks(sizes, chip.device_kind)
    assert blocks is not None
    items = padded_items(sizes, blocks) * sizes.K * blocks.rows * (sizes.key_lanes + sizes.value_lanes) * itemsize
    return activations(
        layout, case.shape, replicas=case.mesh.dp, itemsize=itemsize, item_bytes=items, vmem_bytes=chip.vmem_bytes
    ).most
