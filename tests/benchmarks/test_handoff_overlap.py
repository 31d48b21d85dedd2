"""The plan and the figures of the benchmark of the hand-off's overlap; no engine and no program runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.handoff_overlap import arguments, command_of, in_turns, rows_of, transfer_times
from benchmarks.handoff_overlap_report import against, groups_of, spread, table, verdict
from benchmarks.layer_groups import cuts, group_params

ABOUT = {"name": "machine", "packages": {"jax": "1"}, "date": "today", "cores_used_by_others": 0.25}


def row(variant: str, first: list[float], exposed: list[float], *, part: str = "layers", **more: Any) -> dict[str, Any]:
    ready = [a + b for a, b in zip(first, exposed, strict=True)]
    times = {"first_ms": first, "exposed_ms": exposed, "ready_ms": ready, "longest_ms": exposed}
    sent = {"transfers": [2] * len(first), "mb": [23.6] * len(first)}
    return {"part": part, "link_mb_s": 50.0, "variant": variant, **times, **sent, **more}


def test_every_variant_has_its_turn_in_each_round_and_another_begins() -> None:
    turns = list(in_turns(3, [0.0, 50.0], ["a", "b", "c"]))
    rounds = [turns[i : i + 6] for i in range(0, 18, 6)]
    assert all(sorted(of) == sorted((link, name) for link in (0.0, 50.0) for name in "abc") for of in rounds)
    assert [of[0][1] for of in rounds] == ["a", "b", "c"]


@pytest.mark.parametrize(("layers", "groups"), [(30, 1), (30, 10), (30, 4), (2, 2)])
def test_cuts_cover_everything_once_and_evenly(layers: int, groups: int) -> None:
    found = cuts(layers, groups)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(layers))
    sizes = [stop - start for start, stop in found]
    assert len(sizes) == groups and max(sizes) - min(sizes) <= 1


def test_more_groups_than_layers_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 cannot be cut into 3"):
        cuts(2, 3)


def test_a_group_has_its_own_layers_from_zero_and_all_that_is_no_layers() -> None:
    names = ("embed", "final_norm", "layers.0.w_o", "layers.1.w_o", "layers.2.w_o", "layers.11.w_o")
    params: dict[str, Any] = {name: np.asarray(i) for i, name in enumerate(names)}
    found = group_params(params, 1, 3)
    assert {name: int(value) for name, value in found.items()} == {
        "embed": 0, "final_norm": 1, "layers.0.w_o": 3, "layers.1.w_o": 4,
    }  # fmt: skip
    assert int(group_params(params, 11, 12)["layers.0.w_o"]) == 5


def test_transfers_are_added_up() -> None:
    assert transfer_times([(2e6, 0.1), (1e6, 0.3)]) == {"transfers": 2, "mb": 3.0, "longest_ms": 300.0}


def test_rows_keep_the_order_of_the_rounds() -> None:
    runs = {(0.0, "a"): [{"first_ms": 1.0}, {"first_ms": 3.0}], (0.0, "b"): [{"first_ms": 2.0}, {"first_ms": 4.0}]}
    assert rows_of("layers", runs) == [
        {"part": "layers", "link_mb_s": 0.0, "variant": "a", "first_ms": [1.0, 3.0]},
        {"part": "layers", "link_mb_s": 0.0, "variant": "b", "first_ms": [2.0, 4.0]},
    ]


def test_a_verdict_needs_three_rounds_that_agree() -> None:
    base = row("one program", [100.0, 200.0, 150.0], [50.0, 50.0, 50.0])
    sooner, later = row("a", [90.0, 195.0, 140.0], [50.0, 50.0, 50.0]), row("b", [101.0] * 3, [150.0] * 3)
    mixed = row("c", [90.0, 200.0, 160.0], [50.0, 50.0, 50.0])
    assert against(sooner, base) == [-10.0, -5.0, -10.0]
    assert [verdict(of, base) for of in (sooner, later, mixed)] == ["wins", "loses", "no difference seen"]
    assert verdict(row("a", [1.0, 1.0], [1.0, 1.0]), row("one program", [9.0, 9.0], [9.0, 9.0])) == "too few rounds"
    assert spread([3.0, 1.0, 8.0], sign=True) == "+3 (+1 to +8)"


def test_the_table_begins_with_the_baseline_and_compares_a_small_last_chunk_twice() -> None:
    second = {"second_ms": [400.0] * 3}
    rows = [
        row("chunks", [100.0] * 3, [25.0] * 3, part="chunks", **second),
        row("chunks, small last", [120.0] * 3, [10.0] * 3, part="chunks", policy_chooses_it=True, **second),
        row("in one piece at the end", [100.0] * 3, [200.0] * 3, part="chunks", **second),
    ]
    [(_, _, base, mine)] = groups_of(rows)
    assert base is rows[2] and mine[0] is base
    lines = table(rows, ABOUT, "run it").splitlines()[-3:]
    assert lines[0].startswith("| 50 MB/s, whole transfer 200 | in one piece at the end | 2 | 100 (100 to 100) |")
    assert "| -175 (-175 to -175) | wins |" in lines[1]
    assert "| wins; against chunks +5 (+5 to +5): loses; the policy chooses it | 400 (400 to 400) |" in lines[2]


def test_the_command_that_is_written_down_repeats_the_run() -> None:
    given = ["--quick", "--links", "0", "12.5", "--prefill-mesh", "2x1", "--groups", "2", "3"]
    args = arguments(given)
    assert (args.rounds, args.prompt, args.groups, args.out) == (1, 192, [2, 3], None)
    again = arguments(command_of(args).split()[3:])
    assert command_of(again) == command_of(args)
    assert arguments([]).out.name == "results"
