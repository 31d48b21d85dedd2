"""The failure matrix with real processes: one cell of each row every time, all of them by `make failures`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.cluster.conftest import Clusters
from tests.cluster.matrix import CELLS, EVERY_TIME, Bound, playable
from tests.cluster.play import play


def play_in(clusters: Clusters, fault: str, stage: str, bound: Bound, cells: list[dict[str, Any]]) -> None:
    """Plays a cell; one that fails gets the next one a new cluster."""
    cell: dict[str, Any] = {"fault": fault, "stage": stage, "outcome": "failed"}
    try:
        cell |= dataclasses.asdict(play(clusters.get(), fault, stage, bound))
        cell["outcome"] = "passed"
    except BaseException as error:
        cell["error"] = str(error)
        clusters.discard(error)
        raise
    finally:
        cells.append(cell)


@pytest.mark.heavy
@pytest.mark.parametrize(("fault", "stage"), EVERY_TIME.items(), ids=lambda name: name.replace(" ", "-"))
def test_one_cell_of_each_row(clusters: Clusters, fault: str, stage: str) -> None:
    bound = CELLS[fault][stage]
    assert isinstance(bound, Bound)
    play_in(clusters, fault, stage, bound, [])


@pytest.mark.failures
@pytest.mark.parametrize(("fault", "stage", "bound"), playable(), ids=lambda name: str(name).replace(" ", "-"))
def test_every_cell(clusters: Clusters, record: list[dict[str, Any]], fault: str, stage: str, bound: Bound) -> None:
    play_in(clusters, fault, stage, bound, record)
