"""Structured output as requests ask for it: what is refused before anything is compiled, and how that reads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.structured import MAX_BYTES, MAX_CHOICES, StructuredOutput, shortened

GOOD = [
    StructuredOutput(kind="json_object"),
    StructuredOutput(kind="json_schema", text='{"type": "object"}'),
    StructuredOutput(kind="regex", text="a+"),
    StructuredOutput(kind="choice", choices=("yes", "no", "é" * 10)),
    StructuredOutput(kind="grammar", text='start: "a"'),
    StructuredOutput(kind="regex", text="a" * MAX_BYTES["regex"]),
    StructuredOutput(kind="choice", choices=tuple(f"c{i}" for i in range(MAX_CHOICES))),
]


@pytest.mark.parametrize("spec", GOOD, ids=lambda spec: spec.kind)
def test_good_ones_pass_and_are_keys(spec: StructuredOutput) -> None:
    spec.validate()
    assert {spec: 1}[StructuredOutput(kind=spec.kind, text=spec.text, choices=spec.choices)] == 1


BAD = [
    (dict(kind="xml"), "kind", ["'xml'", "json_schema, regex"]),
    (dict(kind="json_object", text="{}"), "text", ["'{}'", "must be empty", "leave it out"]),
    (dict(kind="choice", choices=("a",), text="a"), "text", ["must be empty"]),
    (dict(kind="regex"), "text", ["must not be empty", "give the regex"]),
    (dict(kind="json_schema"), "text", ["give the json schema"]),
    (dict(kind="regex", text="a", choices=("a",)), "choices", ["holds 1 strings", "use kind=choice"]),
    (dict(kind="choice"), "choices", ["holds 0 strings", "1 to 1000"]),
    (dict(kind="choice", choices=("a",) * 1001), "choices", ["holds 1001 strings", "1 to 1000", "regex"]),
    (dict(kind="choice", choices=("a", "")), "choices", ["empty string", "leave it out"]),
    (dict(kind="choice", choices=("a" * 40_000, "é" * 13_000)), "choices", ["66000 bytes", "65536"]),
    (dict(kind="regex", text="a" * 8193), "text", ["8193 bytes", "8192", "aaa...aaa"]),
    (dict(kind="regex", text="é" * 4097), "text", ["8194 bytes"]),
    (dict(kind="grammar", text="a" * 65_537), "text", ["65537 bytes", "65536"]),
    (dict(kind="grammar", text="\ud800"), "text", ["surrogate"]),
    (dict(kind="choice", choices=("\udfff",)), "choices", ["surrogate"]),
    (dict(kind="json_schema", text="{'a': 1}"), "text", ["does not parse", "line 1 column 2"]),
    (dict(kind="json_schema", text="[" * 60_000), "text", ["nested deeper than 100 levels"]),
    (dict(kind="json_schema", text="true"), "text", ["must be a JSON object"]),
]


@pytest.mark.parametrize(("fields", "field", "words"), BAD)
def test_bad_ones_name_field_value_limit_and_cure(fields: dict[str, object], field: str, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        StructuredOutput(**fields).validate()  # type: ignore[arg-type]
    assert caught.value.field == f"structured_output.{field}"
    assert f"structured_output.{field}" in caught.value.message
    assert len(caught.value.message) < 400
    for word in words:
        assert word in caught.value.message


def test_values_are_shortened_in_the_middle() -> None:
    assert shortened("abc") == "'abc'"
    long = shortened("a" * 500 + "z" * 500)
    assert long.startswith("'aaa") and long.endswith("zzz'") and "..." in long and len(long) < 90


def test_requests_can_be_checked_without_the_compiler() -> None:
    code = "import sys, jaxpd.structured; sys.exit('llguidance' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
