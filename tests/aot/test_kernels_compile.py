"""Every kernel, over the grid of shapes, compiles to the end for every chip we name, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.aot_grid import OPERATIONS, Case, Outcome, grid
from meshes.chips import CHIPS, find_chip

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]
CALLS = [("ragged_paged_attention", "decode"), ("ragged_paged_attention", "prefill"), ("write_pages", "decode"),
         ("write_pages", "prefill"), ("gather_pages", ""), ("scatter_pages", "")]  # fmt: skip


@pytest.mark.parametrize("case", grid(), ids=str)
def test_compiles_or_is_refused_by_a_check(case: Case, outcome_of: Callable[[Case], Outcome]) -> None:
    outcome = outcome_of(case)
    if outcome.status == "absent":
        pytest.skip(outcome.reason)
    assert outcome.status in ("compiled", "refused"), outcome.reason
    assert outcome.reason or outcome.status == "compiled"
    if outcome.status == "refused":
        return
    chip = find_chip(case.chip)
    if chip.platform == "tpu":
        assert outcome.vmem_bytes is not None and outcome.vmem_bytes <= chip.vmem_bytes
        if outcome.vmem_limit_bytes is not None:
            assert outcome.vmem_bytes <= outcome.vmem_limit_bytes <= chip.vmem_bytes
    else:
        assert outcome.shared_memory_bytes is not None and outcome.shared_memory_bytes <= chip.shared_memory_bytes
        assert outcome.registers is not None and 0 < outcome.registers <= 255
        assert outcome.spilled_bytes is not None  # the table shows it: slow, not wrong


@pytest.mark.parametrize(("operation", "phase"), CALLS)
def test_the_grid_reaches_every_value_on_every_chip(operation: str, phase: str) -> None:
    for chip in CHIPS:
        cases = [c for c in grid() if (c.chip, c.operation, c.phase) == (chip, operation, phase)]
        assert {c.head_size for c in cases} == {64, 80, 96, 128, 256}
        assert {c.page_size for c in cases} == {8, 16, 32, 64, 128, 256}
        assert {c.pool for c in cases} == {"bfloat16", "float32", "int8", "float8_e4m3fn"}
        if operation == "ragged_paged_attention":
            assert {c.group for c in cases} == set(range(1, 9))
            assert {f for c in cases for f in c.features.split(", ")} == {"", "window", "soft cap", "sinks"}
    for platform in ("tpu", "gpu") if phase else ():
        chips = [name for name, chip in CHIPS.items() if chip.platform == platform]
        cases = [c for c in grid() if (c.operation, c.phase) == (operation, phase) and c.chip in chips]
        assert len({(c.head_size, c.pool) for c in cases}) == 20


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.platform == "tpu"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_tpu_kernel_refuses_no_plain_call(
    chip: str, operation: str, outcome_of: Callable[[Case], Outcome], request: pytest.FixtureRequest
) -> None:
    """bfloat16 throughout: any head size, group and page size, with and without window, soft cap and sinks."""
    wanted = [c for c in grid() if (c.chip, c.operation, c.pool) == (chip, operation, "bfloat16")]
    selected = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    for case in wanted:
        if case in selected:
            outcome = outcome_of(case)
            assert outcome.status in ("compiled", "absent"), f"{case}: {outcome.reason}"
