"""Grammars that make a model answer as a client demands: with a tool call in the model's own format, or with JSON.

The grammar is llguidance's dialect of Lark. Everything but the arguments is literal text; the arguments are `%json`
with the tool's schema, so that `$ref` finds what it refers to. A mark that is a special token of the model is asked for
as that token. A model that reasons may do so first: always where the prompt has opened its reasoning, else if it likes.

In the XML format a value of type string stands without quotes: its length and its choices are held to the schema, a
`pattern` or `format` is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxpd.errors import InvalidArgument
from jaxpd.grammar import MAX_SPACES
from jaxpd.structured import GRAMMAR, JSON_OBJECT, JSON_SCHEMA, MAX_BYTES, StructuredOutput, shortened
from jaxpd.tokenizer import Tokenizer
from serving.parsing.formats import (
    ARGS,
    FUNCTION,
    PARAMETER,
    Kind,
    ToolFormat,
    begins_inside,
    reasoning_marks,
    tool_format,
)
from serving.parsing.tools import NAME, Tools, check_schema, parameters_of

MAX_CALLS = 16  # in one forced answer
_SPACES = rf"[ \n\r\t]{{1,{MAX_SPACES}}}"
_ONE_LINE = " "  # templates write arguments in one line; small models would fill up what more they are given


def forced_calls(
    tools: Tools, *, template: str | None, prompt_text: str, tokenizer: Tokenizer
) -> StructuredOutput | None:
    """What the answer has to match so that it calls one of `tools.forced`; None where nothing is forced.

    Raises InvalidArgument naming `tool_choice` where the template's format is not known, and `tools` where the schemas
    are too large together.
    """
    if not tools.forced:
        return None
    form = tool_format(template)
    if form is None:
        raise InvalidArgument(
            "tool_choice cannot force a call: this model's chat template names no format for tool calls that is known "
            "here; use tool_choice='auto'",
            field="tool_choice",
        )
    functions = [tool["function"] for tool in tools.listed if tool["function"]["name"] in tools.forced]
    rules = _Rules(tokenizer)
    alternatives = [rules.add(_call(form, function, rules)) for function in functions]
    rules.named["call"] = " | ".join(alternatives)
    most = 1 if tools.single or form.kind is Kind.BARE else MAX_CALLS
    rules.named["start"] = _reasoning(rules, template, prompt_text) + _calls(form, rules, most)
    return _structured(rules, field="tools", what="the schemas of the tools")


def forced_answer(
    response_format: Any, *, template: str | None, prompt_text: str, tokenizer: Tokenizer
) -> StructuredOutput | None:
    """What the answer has to match for OpenAI's `response_format`, as it comes from JSON; None for plain text.

    Raises InvalidArgument naming the place, such as `response_format.json_schema.schema`.
    """
    schema = _answer_schema(response_format)
    if schema is None:
        return None
    rules = _Rules(tokenizer)
    reasoning = _reasoning(rules, template, prompt_text)
    if not reasoning:
        if response_format["type"] == "json_object":
            return StructuredOutput(kind=JSON_OBJECT)
        spec = StructuredOutput(kind=JSON_SCHEMA, text=json.dumps(schema, ensure_ascii=False))
        _check_size(spec, field="response_format.json_schema.schema", what="the schema")
        return spec
    rules.named["start"] = reasoning + _json(schema, _SPACES)
    return _structured(rules, field="response_format.json_schema.schema", what="the schema")


def _answer_schema(response_format: Any) -> Mapping[str, Any] | None:
    where = "response_format"
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    match kind:
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            inner = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
            if not isinstance(inner, Mapping):
                _fail(f"{where}.json_schema", f"={shortened(inner)} must be an object with name and schema")
            name, strict = inner.get("name"), inner.get("strict")
            if not isinstance(name, str) or not NAME.fullmatch(name):
                _fail(
                    f"{where}.json_schema.name",
                    f"={shortened(name)} must be 1 to 64 letters, digits, underscores and hyphens",
                )
            if strict is not None and not isinstance(strict, bool):
                _fail(f"{where}.json_schema.strict", f"={shortened(strict)} must be true or false")
            schema = inner.get("schema", {"type": "object"})
            check_schema(schema, f"{where}.json_schema.schema")
            return dict(schema)
    _fail(f"{where}.type", f"={shortened(kind)} must be 'text', 'json_object' or 'json_schema'")


class _Rules:
    """Rules of a grammar by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.named: dict[str, str] = {}

    def add(self, body: str, options: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{len(self.named)}"
        self.named[name + options] = body
        return name

    def mark(self, text: str) -> str:
        """A mark of the template: its special token, or its text."""
        token_id = self._tokenizer.special_token_id(text)
        return _text(text) if token_id is None else f"<[{token_id}]>"

    def until(self, text: str) -> str:
        """Any text up to and with the first `text`."""
        token_id = self._tokenizer.special_token_id(text)
        if token_id is not None:
            return f"{self.add('/(?s:.*)/')} <[{token_id}]>"
        return self.add("/(?s:.*)/", options=f"[suffix={_text(text)}]")

    def lark(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self.named.items())


def _reasoning(rules: _Rules, template: str | None, prompt_text: str) -> str:
    """What may come, or has to, before the answer proper."""
    marks = reasoning_marks(template)
    if marks is None:
        return ""
    if begins_inside(prompt_text, marks):
        return f"{rules.until(marks.close)} /\\n{{0,2}}/ "
    if prompt_text.rstrip().endswith(marks.close):  # the prompt has closed it: no reasoning is wanted
        return ""
    return f"({rules.mark(marks.open)} {rules.until(marks.close)} /\\n{{0,2}}/)? "


def _calls(form: ToolFormat, rules: _Rules, most: int) -> str:
    """Calls, at most so many, with what stands around all of them and between two."""
    newline, comma = '"\\n" ', '", " '
    close = f" {rules.mark(form.close)}" if form.close else ""

    def several(call: str, between: str) -> str:
        return f"{call} ({between}{call}){{0,{most - 1}}}" if most > 1 else call

    listed = f'"[" {several("call", comma)} "]"'
    match form.kind:
        case Kind.BARE:
            return "call"
        case Kind.BRACKETS if form.named:
            call = rules.add(f"{rules.mark(form.open)} call")
            return several(call, "")
        case Kind.BRACKETS:
            return f'{rules.mark(form.open)} " "? {listed}'
        case Kind.BLOCKS if form.listed:
            return f"{rules.mark(form.open)} {listed}{close}"
        case Kind.XML if form.open == FUNCTION:
            return several("call", newline)
    block = rules.add(f'{rules.mark(form.open)} "\\n" call "\\n"{close}')
    return several(block, newline)


def _call(form: ToolFormat, function: Mapping[str, Any], rules: _Rules) -> str:
    """One call of one function."""
    name, parameters = function["name"], parameters_of(function)
    if form.kind is Kind.XML:
        return _xml_call(name, parameters, rules)
    arguments = _json({"type": "object", **parameters})
    if form.named:
        return f"{_text(name)} {rules.mark(ARGS)} {arguments}"
    return f'{_text(f"""{{"name": "{name}", "{form.key}": """)} {arguments} "}}"'


def _xml_call(name: str, parameters: Mapping[str, Any], rules: _Rules) -> str:
    required = parameters.get("required", ())
    parts = [_text(f"{FUNCTION}{name}>\n")]
    for key, schema in parameters.get("properties", {}).items():
        part = f"{_text(f'{PARAMETER}{key}>' + chr(10))} {_xml_value(schema, parameters, rules)}"
        parts.append(part if key in required else f"({part})?")
    return " ".join([*parts, _text("</function>")])


def _xml_value(schema: Any, root: Mapping[str, Any], rules: _Rules) -> str:
    end = "\n</parameter>\n"
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = {**definitions, **schema} if isinstance(schema, Mapping) else schema
        return f"{_json(value)} {_text(end)}"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        return f"({' | '.join(_text(str(choice)) for choice in choices)}) {_text(end)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        return rules.add(f"/(?s:.{{{least},{'' if most is None else most}}})/", options=f"[suffix={_text(end)}]")
    return rules.until(end)


def _json(schema: Any, spaces: str = _ONE_LINE) -> str:
    if isinstance(schema, Mapping):
        asked = schema.get("x-guidance", {})
        schema = {
            **schema,
            "x-guidance": {"whitespace_pattern": spaces, **asked} if isinstance(asked, Mapping) else asked,
        }
    return f"%json {json.dumps(schema, ensure_ascii=False, default=dict)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _structured(rules: _Rules, *, field: str, what: str) -> StructuredOutput:
    spec = StructuredOutput(kind=GRAMMAR, text=rules.lark())
    _check_size(spec, field=field, what=what)
    return spec


def _check_size(spec: StructuredOutput, *, field: str, what: str) -> None:
    size, limit = len(spec.text.encode("utf-8", "replace")), MAX_BYTES[spec.kind]
    if size > limit:
        _fail(field, f" is too large: {what} take {size} bytes, the limit is {limit}; leave out descriptions")
    try:
        spec.validate()
    except InvalidArgument as error:
        raise InvalidArgument(f"{field}: {error.message}", field=field) from error


def _fail(field: str, what: str) -> NoReturn:
    raise InvalidArgument(f"{field}{what}", field=field)
