"""Mesh specs: what parses, and what the errors say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.spec import MAX_DEVICES, MeshSpec, format_mesh_specs, parse_mesh_specs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x1", [(8, 1)]),
        ("4x1,4x1", [(4, 1), (4, 1)]),
        ("1X8", [(1, 8)]),
        (" 2 x 3 , 01x4 ", [(2, 3), (1, 4)]),
        ("3x1", [(3, 1)]),
    ],
)
def test_parses(text: str, expected: list[tuple[int, int]]) -> None:
    assert parse_mesh_specs(text) == tuple(MeshSpec(tp, dp) for tp, dp in expected)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not parse"),
        ("8", "has 1 factor:"),
        ("8x", "does not parse"),
        ("x8", "does not parse"),
        ("8x1,", "does not parse"),
        ("8x1 4x1", "does not parse"),
        ("8*1", "does not parse"),
        ("8x1.5", "does not parse"),
        ("-8x1", "does not parse"),
        ("٨x1", "does not parse"),
        ("tp8", "does not parse"),
        ("0x1", "at least 1"),
        ("8x0", "at least 1"),
        ("8x1x2", "pipeline parallelism"),
        ("8x1x2x1", "4 factors"),
        ("1000000x1", f"more than {MAX_DEVICES}"),
        ("300x300", f"more than {MAX_DEVICES}"),
        ("9" * 5000 + "x1", f"more than {MAX_DEVICES}"),
    ],
)
def test_refuses_and_says_what_was_given_the_form_and_an_example(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="expected TPxDP") as error:
        parse_mesh_specs(text, name="--prefill-mesh")
    message = str(error.value)
    assert says in message
    assert message.startswith("--prefill-mesh ") and text[:40] in message and '"8x1"' in message
    assert len(message) < 300


def test_one_bad_pool_refuses_all() -> None:
    with pytest.raises(ValueError, match='"4x1,4"'):
        parse_mesh_specs("4x1,4")


@pytest.mark.parametrize(("tp", "dp"), [(0, 1), (1, -1), (MAX_DEVICES, 2)])
def test_a_spec_itself_refuses_what_cannot_be(tp: int, dp: int) -> None:
    with pytest.raises(ValueError, match=f"{tp}x{dp}"):
        MeshSpec(tp, dp)


@given(st.lists(st.tuples(st.integers(1, 256), st.integers(1, 256)), min_size=1, max_size=5))
def test_str_and_parse_are_inverse(pairs: list[tuple[int, int]]) -> None:
    specs = tuple(MeshSpec(tp, dp) for tp, dp in pairs)
    assert parse_mesh_specs(format_mesh_specs(specs)) == specs
    assert [s.num_devices for s in specs] == [tp * dp for tp, dp in pairs]


@given(st.text(alphabet="0123456789xX, -.a", max_size=12))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    try:
        specs = parse_mesh_specs(text)
    except ValueError as error:
        assert "expected TPxDP" in str(error)
    else:
        assert specs and all(1 <= s.num_devices <= MAX_DEVICES for s in specs)
