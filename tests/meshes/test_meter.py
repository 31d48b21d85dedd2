"""Costs from measurements."""

from __future__ import annotations

import pytest

from meshes.transfer.meter import LATEST, Meter


def filled(*runs: tuple[float, float]) -> tuple[float, float]:
    meter = Meter()
    for units, seconds in runs:
        meter.record(units, seconds)
    return meter.fit()


def test_a_line_through_runs_of_many_sizes() -> None:
    assert filled(*((n, 0.5 + 0.01 * n) for n in (10, 20, 50, 100))) == pytest.approx((0.5, 0.01))


def test_what_cannot_be_told_apart_counts_as_per_unit() -> None:
    assert filled() == (0.0, 0.0)
    assert filled((100, 2.0), (100, 4.0)) == pytest.approx((0.0, 0.03))


def test_neither_part_is_negative() -> None:
    fixed, per_unit = filled((10, 3.0), (100, 1.0))
    assert (fixed, per_unit) == (2.0, 0.0)
    fixed, per_unit = filled((50, 1.0), (100, 3.0))
    assert fixed == 0.0 and per_unit == pytest.approx(4 / 150)


def test_old_runs_are_forgotten() -> None:
    meter = Meter()
    for _ in range(LATEST):
        meter.record(10, 99.0)
    for i in range(LATEST):
        meter.record(10 + i, 1.0 + 0.1 * (10 + i))
    assert meter.fit() == pytest.approx((1.0, 0.1))
