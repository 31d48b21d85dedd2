"""Calls as Qwen3-Coder writes them, with every argument between marks of its own:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value has no quotes. What it is, the tool's schema says; where that does not, it is JSON if it reads so, else text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serving.parsing.formats import FUNCTION, PARAMETER, ToolFormat
from serving.parsing.ids import new_call_id
from serving.parsing.pieces import Content, Piece, ToolCall

_END_PARAMETER, _END_FUNCTION = "</parameter>", "</function>"


class XmlCall:
    """One call. `mark` stands at the beginning of the text; an argument is given out when it is complete."""

    def __init__(self, form: ToolFormat, mark: str, index: int, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._mark = mark
        self._close = form.close
        self._index = index
        self._schemas = schemas
        self._id = new_call_id(short=False)
        self._name = ""
        self._arguments = 0  # given out
        self._step = self._begin
        self._raw = ""  # read, and content if this is no call
        self._text = ""
        self.rest = ""
        self.over = False
        self.closed = False

    def read(self, text: str, final: bool) -> list[Piece]:
        """Takes more text; `final` when the answer has ended."""
        self._text += text
        out: list[Piece] = []
        while not self.over and self._step(out, final):
            pass
        if final and not self.over:
            if self._step != self._tail:
                out.append(Content(self._raw + self._text))
                self._text = ""
            self.over = True
        if self.over:
            self.rest = self._text
        return out

    # Each step takes what it can of the text; True when the next one has to go on.

    def _begin(self, out: list[Piece], final: bool) -> bool:
        if self._mark != FUNCTION:
            self._text = self._text.removeprefix(self._mark)
            self._raw = self._mark
        self._step = self._function
        return True

    def _function(self, out: list[Piece], final: bool) -> bool:
        text = self._text.lstrip()
        if not text.startswith(FUNCTION):
            return self._unless_partial(text, (FUNCTION,), out)
        name, found, behind = text.removeprefix(FUNCTION).partition(">")
        if not found:
            return False
        self._name = name.strip()
        if not self._name or "<" in name or "\n" in name:
            before, mark, self._text = self._text.partition(FUNCTION)
            self._raw += before + mark  # or it would be found again
            return self._fail(out)
        out.append(ToolCall(self._index, self._id, self._name, "{"))
        self._text, self._raw, self._step = behind, "", self._body
        return True

    def _body(self, out: list[Piece], final: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith(PARAMETER):
            key, found, behind = text.removeprefix(PARAMETER).partition(">")
            value, ended, behind = behind.partition(_END_PARAMETER)
            if not found or not ended:
                return False
            comma = ", " if self._arguments else ""
            pair = f"{json.dumps(key.strip(), ensure_ascii=False)}: {self._value(key.strip(), value)}"
            out.append(ToolCall(self._index, self._id, "", comma + pair))
            self._arguments += 1
            self._text = behind
            return True
        for end in (_END_FUNCTION, self._close):
            if end and text.startswith(end):
                self._text = text.removeprefix(_END_FUNCTION)  # the other mark may stand for both
                out.append(ToolCall(self._index, self._id, "", "}"))
                self._step = self._tail
                return True
        ends = (_END_FUNCTION, self._close) if self._close else (_END_FUNCTION,)
        return self._unless_partial(text, (PARAMETER, *ends), out)

    def _tail(self, out: list[Piece], final: bool) -> bool:
        text = self._text.lstrip()
        if self._close and (text.startswith(self._close) or final and self._close.startswith(text)):
            self._text, self.over, self.closed = text[len(self._close) :], True, True
        elif text and not self._close.startswith(text):
            self._text, self.over = text, True
        return False

    def _unless_partial(self, text: str, marks: tuple[str, ...], out: list[Piece]) -> bool:
        """Waits where the text may become one of the marks; else this is no call, or no more of it."""
        return False if any(mark.startswith(text) for mark in marks) else self._fail(out)

    def _fail(self, out: list[Piece]) -> bool:
        out.append(Content(self._raw))
        self.over = True
        return False

    def _value(self, key: str, text: str) -> str:
        """JSON of a value. One line break on either side is formatting."""
        text = text.removeprefix("\n").removesuffix("\n")
        properties = self._schemas.get(self._name, {}).get("properties", {})
        kind = properties.get(key, {}).get("type") if isinstance(properties.get(key), Mapping) else None
        bare = text.strip()
        if kind == "boolean" and bare in ("True", "False"):
            return bare.lower()
        if kind != "string" and _is_json(bare):
            return bare
        return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
