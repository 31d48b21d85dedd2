"""Pictures for notebooks: what the bars and squares are made of, and that a PNG comes out."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from jaxpd.errors import FailedPrecondition, InvalidArgument, Unavailable
from jaxpd.life import Moment, Stage
from serving import pictures
from serving.pictures import Bar, live, meshes, stretches, timeline

PNG = b"\x89PNG\r\n\x1a\n"
HANDED_OFF = (
    Moment(Stage.ARRIVED, 0.0),
    Moment(Stage.ADMITTED, 0.1),
    Moment(Stage.PREFILL_START, 0.11),
    Moment(Stage.CHUNK, 0.12, 128),
    Moment(Stage.OFFERED, 0.5),
    Moment(Stage.CHUNK, 0.6, 40),
    Moment(Stage.PREFILL_END, 1.0),
    Moment(Stage.TRANSFERRED, 1.02),
    Moment(Stage.ACCEPTED, 1.03),
    Moment(Stage.DECODE_START, 1.04),
    Moment(Stage.FINISHED, 2.0),
)


def snapshot(holds: list[list[list[int]]]) -> dict[str, Any]:
    """A reading of a 2x1 prefill pool with 10 pages and a 1x2 decode pool with 8 a replica; `holds` by sequence."""
    prefill = {"role": "prefill", "mesh": "2x1", "tp": 2, "dp": 1, "replicas": [{"free": 4, "total": 10}]}
    decode = {"role": "decode", "mesh": "1x2", "tp": 1, "dp": 2}
    decode["replicas"] = [{"free": 8, "total": 8}, {"free": 3, "total": 8}]
    return {"pools": [prefill, decode], "sequences": [{"holds": held} for held in holds]}


def test_a_life_becomes_bars() -> None:
    parts = stretches(HANDED_OFF)
    assert set(parts.bars) == {
        Bar("queue", 0.0, 0.1),
        Bar("prefill", 0.1, 1.0),
        Bar("transfer", 0.5, 1.03),
        Bar("decode", 1.04, 2.0),
    }
    assert parts.exposed == (Bar("transfer", 1.0, 1.04),)
    assert parts.chunks == ((0.12, 128), (0.6, 40))
    assert parts.first_token_s == 1.0


def test_what_gave_way_waits_again_and_is_no_second_first_token() -> None:
    life = (
        *HANDED_OFF[:-1],
        Moment(Stage.PREEMPTED, 1.5, 170),
        Moment(Stage.ADMITTED, 1.7),
        Moment(Stage.DECODE_START, 1.9),
        Moment(Stage.FINISHED, 2.0),
    )
    parts = stretches(life)
    assert Bar("decode", 1.04, 1.5) in parts.bars
    assert Bar("queue", 1.5, 1.7) in parts.bars
    assert Bar("prefill", 1.7, 1.9) in parts.bars
    assert Bar("decode", 1.9, 2.0) in parts.bars
    assert parts.exposed == (Bar("transfer", 1.0, 1.04),)
    assert timeline(life).png.startswith(PNG)


def test_a_life_without_an_end_is_drawn_to_its_last_moment() -> None:
    assert stretches(HANDED_OFF[:5]).bars == (
        Bar("queue", 0.0, 0.1),
        Bar("prefill", 0.1, 0.5),
        Bar("transfer", 0.5, 0.5),
    )
    assert timeline(HANDED_OFF[:1]).png.startswith(PNG)


def test_moments_and_json_draw_the_same_picture() -> None:
    tokens = [1.0 + 0.05 * i for i in range(20)]
    as_json = [{"stage": m.stage.value, "at_s": m.at_s, "tokens": m.tokens} for m in HANDED_OFF]
    assert timeline(HANDED_OFF, tokens) == timeline(as_json, tokens)
    late = [time + 7.0 for time in tokens]  # a clock of its own, which meets the server's at the first token
    assert timeline(HANDED_OFF, late) == timeline(HANDED_OFF, tokens)
    assert timeline(HANDED_OFF, tokens[:1]) != timeline(HANDED_OFF, tokens)


def test_a_pool_that_does_both_has_no_transfer() -> None:
    shared = [m for m in HANDED_OFF if m.stage not in (Stage.OFFERED, Stage.TRANSFERRED, Stage.ACCEPTED)]
    parts = stretches(shared)
    assert {bar.row for bar in parts.bars} == {"queue", "prefill", "decode"}
    assert not parts.exposed
    assert timeline(shared).png.startswith(PNG)


def test_an_answer_without_a_timeline_says_how_to_get_one() -> None:
    with pytest.raises(InvalidArgument, match="want_timeline=True"):
        timeline(())


def test_pages_are_filled_reserved_or_free() -> None:
    first, second = [[0, 0, 4, 3], [1, 1, 4, 1]], [[0, 0, 4, 4]]  # two pages of the prompt are shared
    prefill, decode = pictures._pools(snapshot([first, second]))
    assert [(r.filled, r.used, r.total) for r in prefill.replicas] == [(6, 6, 10)]
    assert [(r.filled, r.used, r.total) for r in decode.replicas] == [(0, 0, 8), (1, 5, 8)]


def test_the_picture_is_of_the_fullest_moment() -> None:
    empty, full = snapshot([]), snapshot([[[0, 0, 6, 6], [1, 1, 5, 5]]])
    drawn = meshes([(0.0, empty), (1.0, full), (2.0, empty)])
    assert drawn.png.startswith(PNG)
    assert drawn != meshes([(0.0, empty), (1.0, empty), (2.0, empty)])
    assert len(repr(drawn)) < 80  # no bytes in a notebook


def test_more_pages_than_squares() -> None:
    many = snapshot([[[0, 0, 6, 6]]])
    many["pools"][0]["replicas"] = [{"free": 1_000_000, "total": 1_234_567}]
    assert meshes([(0.0, many)]).png.startswith(PNG)


def test_a_starting_server_has_no_meshes_yet() -> None:
    with pytest.raises(InvalidArgument, match="ready server"):
        meshes([(0.0, {"pools": [], "sequences": []})])


def test_a_picture_is_saved(tmp_path: Any) -> None:
    drawn = timeline(HANDED_OFF)
    drawn.save(tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes() == drawn.png == drawn._repr_png_()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FailedPrecondition, match=r"jaxpd\[bench\]"):
        timeline(HANDED_OFF)


def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="is the server running"):
        live("http://127.0.0.1:1")
