"""The table has a cell for every fault and stage, and the suite plays one of each row."""

from __future__ import annotations

from tests.cluster.matrix import CELLS, EVERY_TIME, FAULTS, STAGES, Bound, Senseless, playable


def test_every_cell_is_a_bound_or_a_reason() -> None:
    assert list(CELLS) == list(FAULTS) and all(list(row) == list(STAGES) for row in CELLS.values())
    cells = [cell for row in CELLS.values() for cell in row.values()]
    assert len(cells) == 13 * 6
    assert all(cell.reason for cell in cells if isinstance(cell, Senseless))
    assert len(playable()) == sum(isinstance(cell, Bound) for cell in cells) == 63


def test_the_suite_plays_one_cell_of_each_row() -> None:
    assert list(EVERY_TIME) == list(FAULTS)
    assert {(fault, stage) for fault, stage in EVERY_TIME.items()} <= {(fault, stage) for fault, stage, _ in playable()}
