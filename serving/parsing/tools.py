"""The tools of a request, checked, and what its `tool_choice` asks for.

"auto" or nothing   the model decides: the prompt lists the tools, calls in the answer are parsed
"none"              the prompt lists the tools as before, so that a cached prefix stays one, but nothing is parsed:
                    should the model write a call all the same, it is content
"required"          a grammar makes it call one of the tools or several (`serving.parsing.forced`)
a function by name  the same with that one tool
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxpd.errors import InvalidArgument
from jaxpd.structured import shortened

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10  # of all tools as JSON
MAX_DEPTH = 64  # of a schema; llguidance and Python's own recursion end somewhere above 100
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What a request says about tools.

    `listed` go to the chat template. `parsed`: calls are looked for in the answer. `forced` are the names of which the
    answer has to call some; empty where it need not. `single`: at most one call.
    """

    listed: tuple[Mapping[str, Any], ...] = ()
    parsed: bool = False
    forced: tuple[str, ...] = ()
    single: bool = False

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of every tool by its name."""
        return {tool["function"]["name"]: parameters_of(tool["function"]) for tool in self.listed}

    @property
    def most_calls(self) -> int | None:
        """How many calls the client takes; None for any number."""
        return 1 if self.single else None


def read_tools(tools: Any, tool_choice: Any = None, parallel_tool_calls: Any = None) -> Tools:
    """Checks the three options as they come from JSON; None for what is not set.

    Raises InvalidArgument whose field names the place, such as `tools[2].function.name`.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        _fail("parallel_tool_calls", f"={shortened(parallel_tool_calls)} must be true or false")
    if not tools:
        if tools is not None and not isinstance(tools, Sequence):
            _fail("tools", f"={shortened(tools)} must be a list of tools")
        if tool_choice not in (None, "none", "auto"):
            _fail("tool_choice", f"={shortened(tool_choice)} needs tools to choose from; give tools or leave it out")
        return Tools()
    _check(tools)
    names = tuple(tool["function"]["name"] for tool in tools)
    forced = _chosen(tool_choice, names)
    single = parallel_tool_calls is False or isinstance(tool_choice, Mapping)
    return Tools(listed=tuple(tools), parsed=tool_choice != "none", forced=forced, single=single)


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; without one it takes none."""
    parameters = function.get("parameters")
    return parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def check_schema(schema: Any, field: str) -> None:
    """Raises InvalidArgument unless it is a JSON schema of an object that is not nested too deeply."""
    if not isinstance(schema, Mapping):
        _fail(field, f"={shortened(schema)} must be a JSON schema, an object")
    if _depth(schema) > MAX_DEPTH:
        _fail(field, f" is nested more than {MAX_DEPTH} levels deep; use $ref for what repeats")


def _check(tools: Any) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        _fail("tools", f"={shortened(tools)} must be a list of tools")
    if len(tools) > MAX_TOOLS:
        _fail("tools", f" holds {len(tools)} tools, the limit is {MAX_TOOLS}; leave some out")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            _fail(where, f"={shortened(tool)} must be an object with type and function")
        if tool.get("type", "function") != "function":
            _fail(f"{where}.type", f"={shortened(tool['type'])} is not served; it must be 'function'")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            _fail(f"{where}.function", f"={shortened(function)} must be an object with name and parameters")
        _check_function(function, f"{where}.function")
        if function["name"] in seen:
            _fail(f"{where}.function.name", f"={function['name']!r} is there twice; every tool needs its own name")
        seen.add(function["name"])
    size = len(json.dumps(list(tools), ensure_ascii=False, default=dict).encode("utf-8", "replace"))
    if size > MAX_TOOLS_BYTES:
        _fail("tools", f" has {size} bytes of JSON, the limit is {MAX_TOOLS_BYTES}; shorten descriptions")


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        _fail(f"{where}.name", f"={shortened(name)} must be 1 to 64 letters, digits, underscores and hyphens")
    if description is not None and not isinstance(description, str):
        _fail(f"{where}.description", f"={shortened(description)} must be text")
    if strict is not None and not isinstance(strict, bool):
        _fail(f"{where}.strict", f"={shortened(strict)} must be true or false")
    parameters = function.get("parameters")
    if parameters is not None:
        check_schema(parameters, f"{where}.parameters")
        if parameters and parameters.get("type", "object") != "object":
            _fail(f"{where}.parameters", f" has type {shortened(parameters['type'])}; arguments are an 'object'")
        properties = parameters.get("properties", {})
        if not isinstance(properties, Mapping):
            _fail(f"{where}.parameters.properties", f"={shortened(properties)} must be an object")


def _chosen(choice: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that a choice forces."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return names
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        _fail(
            "tool_choice",
            f"={shortened(choice)} must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}',
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        _fail("tool_choice.function.name", f"={shortened(name)} is none of the tools: {shortened(', '.join(names))}")
    return (name,)


def _depth(value: Any) -> int:
    """How deeply objects and lists are nested, without recursion."""
    level, depth = [value], 0
    while level := [inner for outer in level if isinstance(outer, Mapping | list | tuple) for inner in _inner(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            break
    return depth


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value)


def _fail(field: str, what: str) -> NoReturn:
    raise InvalidArgument(f"{field}{what}", field=field)
