"""How TPU kernels are interpreted on CPU: simulated memories and semaphores, which find what a plain run would hide."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

SMEM_BYTES = 960 * 1024  # that the scalars of a call may take, of 1 MiB: the rest is the compiler's
_FIELDS = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}


def stays_in_hbm(array: jax.Array, interpret: bool) -> jax.Array:
    """An operand whose DMAs are written for HBM. Its block's memory space alone does not keep it there: where it fits,
    XLA copies it to VMEM ahead of the kernel (seen on TPU7x)."""
    return array if interpret else pltpu.with_memory_space_constraint(array, pltpu.HBM)


def interpret_params(**overrides: Any) -> pltpu.InterpretParams:
    """Parameters under which races are recorded, reads out of bounds raise, and unwritten memory holds NaN."""
    settings: dict[str, Any] = {"detect_races": True, "out_of_bounds_reads": "raise", "uninitialized_memory": "nan"}
    settings |= {"buffer_bounds": "logical", "dma_execution_mode": "on_wait"}
    # With the default of two entries all DMAs of a device share one clock, and whoever waits for one seems to have
    # waited for all: a block read into the buffer that was being computed on went unseen (jax 0.10.2).
    settings |= {"vector_clock_size": 256}
    if "on_race" in _FIELDS:  # jax 0.12 would raise inside a callback and leave `races_found` false; 0.10 only records
        settings["on_race"] = "warn"
    return pltpu.InterpretParams(**(settings | overrides))


def races_found() -> bool:
    """Whether the last interpreted kernel had a race: wait for its result first. False before any ran."""
    # No public name for it yet: jax 0.10.2 and 0.12 keep it at the same place.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(getattr(interpret_pallas_call.races, "races_found", False))


def reset_interpreter() -> None:
    """Needed after a kernel raised (an out-of-bounds read, say) before another is interpreted in this process."""
    pltpu.reset_tpu_interpret_mode_state()
