"""How TPU kernels are interpreted on CPU: simulated memories and semaphores, which find what a plain run would hide."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import tpu as pltpu


def interpret_params(**overrides: Any) -> pltpu.InterpretParams:
    """Parameters under which races are recorded, reads out of bounds raise, and unwritten memory holds NaN."""
    settings: dict[str, Any] = {"detect_races": True, "out_of_bounds_reads": "raise", "uninitialized_memory": "nan"}
    return pltpu.InterpretParams(**(settings | overrides))


def races_found() -> bool:
    """Whether the last interpreted kernel had a race."""
    # No public name for it yet: jax 0.10.2 and 0.12 keep it at the same place.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found
