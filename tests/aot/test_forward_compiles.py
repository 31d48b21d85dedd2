"""The whole `forward` of known models, compiled for TPUs that are not there with our kernels in it.

What is read from the optimised HLO and from `memory_analysis()`: nothing as large as the page pool is written but in
place, the pool is donated, each layer holds its two kernels, and temporary memory stays within the activations.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.aot_forward import CompiledForward, ForwardCase, cases, model_config

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_forward_compiles_in_place(case: ForwardCase, compiled: Callable[[ForwardCase], CompiledForward]) -> None:
    program = compiled(case)
    assert program.pool_makers == ()
    assert program.aliased_bytes >= program.pool_bytes
    assert len(program.kernels) == 2 * case.layers
    assert all(kernel.target == "tpu_custom_call" and kernel.vmem_bytes for kernel in program.kernels)
    assert program.temporary_bytes <= program.activation_bytes


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("smollm2-135m", 134.5e6), ("llama-3.1-8b", 8.03e9), ("qwen3-8b", 8.19e9), ("gemma-3-4b", 3.88e9)],
)
def test_the_configs_have_the_published_sizes(model: str, parameters: float) -> None:
    assert model_config(model).num_parameters() == pytest.approx(parameters, rel=0.003)


def test_every_model_mesh_and_phase_is_there_at_full_depth() -> None:
    full = {(c.model, c.chip, str(c.mesh), c.role) for c in cases() if c.layers == model_config(c.model).num_layers}
    assert len(full) == 4 * 4
