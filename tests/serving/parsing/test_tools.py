"""Tools and tool_choice as clients send them: what is taken, and errors that name the place."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpd.errors import InvalidArgument
from serving.parsing import Tools, read_tools

GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}, "strict": None}}
PUT = {"type": "function", "function": {"name": "put_b-2", "description": "puts"}}
NESTED: Any = {}
for _ in range(70):
    NESTED = {"items": [NESTED]}


def test_choices() -> None:
    assert read_tools(None) == read_tools([]) == read_tools([], "none", True) == Tools()
    auto = read_tools([GET, PUT])
    assert auto == read_tools([GET, PUT], "auto", True) == Tools(listed=(GET, PUT), parsed=True)
    assert auto.schemas == {
        "get": {"type": "object"},
        "put_b-2": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    assert (auto.most_calls, read_tools([GET], None, False).most_calls) == (None, 1)
    assert read_tools([GET, PUT], "none") == Tools(listed=(GET, PUT))
    assert read_tools([GET, PUT], "required").forced == ("get", "put_b-2")
    by_name = read_tools([GET, PUT], {"type": "function", "function": {"name": "get"}})
    assert (by_name.forced, by_name.single) == (("get",), True)


def function(**keys: Any) -> list[Any]:
    return [GET, {"type": "function", "function": {"name": "f", **keys}}]


@pytest.mark.parametrize(
    ("tools", "choice", "field", "message"),
    [
        ({"a": 1}, None, "tools", "must be a list"),
        (7, None, "tools", "must be a list"),
        ("get", None, "tools", "must be a list"),
        ([GET] * 129, None, "tools", "holds 129 tools, the limit is 128"),
        ([7], None, "tools[0]", "7 must be an object"),
        ([GET, {"type": "retrieval"}], None, "tools[1].type", "'retrieval' is not served"),
        ([GET, {"type": "function"}], None, "tools[1].function", "None must be an object"),
        (function(name="a b"), None, "tools[1].function.name", "'a b' must be 1 to 64"),
        (function(name="x" * 65), None, "tools[1].function.name", "1 to 64"),
        (function(name="a\n"), None, "tools[1].function.name", "1 to 64"),
        (function(name=None), None, "tools[1].function.name", "None must be"),
        (function(name="get"), None, "tools[1].function.name", "there twice"),
        (function(description=3), None, "tools[1].function.description", "must be text"),
        (function(strict="yes"), None, "tools[1].function.strict", "true or false"),
        (function(parameters=[]), None, "tools[1].function.parameters", "JSON schema"),
        (function(parameters={"type": "string"}), None, "tools[1].function.parameters", "'object'"),
        (function(parameters={"properties": 3}), None, "tools[1].function.parameters.properties", "an object"),
        (function(parameters=NESTED), None, "tools[1].function.parameters", "64 levels"),
        (function(description="x" * 300_000), None, "tools", "shorten descriptions"),
        (None, "required", "tool_choice", "needs tools"),
        ([GET], "any", "tool_choice", "'any' must be"),
        ([GET], {"type": "allowed_tools"}, "tool_choice", "must be 'auto'"),
        ([GET], {"type": "function", "function": {"name": "put"}}, "tool_choice.function.name", "'put' is none of"),
        ([GET], {"type": "function"}, "tool_choice.function.name", "None is none of"),
    ],
)
def test_errors_name_the_place(tools: Any, choice: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        read_tools(tools, choice)
    assert caught.value.field == field
    with pytest.raises(InvalidArgument, match="parallel_tool_calls"):
        read_tools([GET], None, "no")
