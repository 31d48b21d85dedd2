"""What an answer has to match, as flags give it."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from jaxpd.cli.structured import from_flags
from jaxpd.errors import InvalidArgument, JaxpdError, NotFound
from jaxpd.structured import StructuredOutput

SCHEMA = '{"type": "object"}'
GRAMMAR = 'start: "yes" | "no"\n'


def test_each_flag_gives_its_kind(tmp_path: pathlib.Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(SCHEMA)
    grammar.write_text(GRAMMAR)
    assert from_flags(None, None, None, None) is None is from_flags(None, None, [], None)
    for given in (SCHEMA, str(schema)):
        assert from_flags(given, None, None, None) == StructuredOutput(kind="json_schema", text=SCHEMA)
    assert from_flags(f" {SCHEMA}", None, None, None) == StructuredOutput(kind="json_schema", text=f" {SCHEMA}")
    assert from_flags(None, "a+", None, None) == StructuredOutput(kind="regex", text="a+")
    assert from_flags(None, None, ["b", "a"], None) == StructuredOutput(kind="choice", choices=("b", "a"))
    assert from_flags(None, None, None, grammar) == StructuredOutput(kind="grammar", text=GRAMMAR)


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        ((SCHEMA, "a", None, None), InvalidArgument, "--json-schema and --regex cannot go together"),
        ((None, None, ["a"], pathlib.Path("g")), InvalidArgument, "--choice and --grammar cannot go together"),
        (("none.json", None, None, None), NotFound, "--json-schema none.json does not exist; .* or write {"),
        ((None, None, None, pathlib.Path("none.lark")), NotFound, "--grammar none.lark does not exist"),
        ((None, None, None, pathlib.Path(".")), InvalidArgument, "--grammar . cannot be read: Is a directory"),
        (("latin.json", None, None, None), InvalidArgument, "--json-schema latin.json is not UTF-8"),
    ],
)
def test_what_cannot_be_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, flags: Any, error: type[JaxpdError], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    with pytest.raises(error, match=says):
        from_flags(*flags)
