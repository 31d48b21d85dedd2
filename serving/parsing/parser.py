"""One answer from its text to pieces.

    beginning --opening mark--> thinking --closing mark--> between --+
        |                          ^                                 v
        +--anything else-----------|------------------------> content --opening mark--> calls --end--> between
                        (prompt ends inside reasoning)

Text is held back only while it may be a mark, or white space in front of one. White space around reasoning and calls is
formatting and is dropped. Reasoning stands at the beginning of an answer and nowhere else.

A call is given out from the moment when its name is known and its arguments have begun. What turns out to be no call
comes out as content, with its marks; of a call that breaks off or goes wrong later, the part that is not yet given out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from serving.parsing.bracket_calls import NamedCall
from serving.parsing.formats import Kind, Marks, ToolFormat, begins_inside, held_back, reasoning_marks, tool_format
from serving.parsing.json_calls import JsonCalls
from serving.parsing.pieces import Content, Parser, Piece, Reasoning, ToolCall, joined
from serving.parsing.xml_calls import XmlCall

_BARE_KEYS = frozenset(["name", "parameters", "arguments", "type", "id"])


class CallReader(Protocol):
    """Reads from an opening mark to where the calls behind it end."""

    rest: str  # text that is not read yet, or is none of this reader's once it is over
    over: bool
    closed: bool  # by the closing mark, where the format has one

    def read(self, text: str, final: bool) -> list[Piece]:
        """Takes more text; `final` when the answer has ended."""


def make_parser(
    template: str | None,
    *,
    tools: bool,
    prompt_text: str,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
    most_calls: int | None = None,
) -> Parser:
    """A parser for one answer to `prompt_text`, which `template` wrote.

    Calls are looked for only with `tools`. `schemas` are the tools' parameters by name: values in the XML format get
    their types from them, and a bare call (Llama 3) has to name one of them. Calls after `most_calls` are dropped.
    """
    marks = reasoning_marks(template)
    return _Parser(
        marks,
        begins_inside(prompt_text, marks),
        tool_format(template) if tools else None,
        schemas or {},
        most_calls,
    )


class _Parser:
    def __init__(
        self,
        marks: Marks | None,
        inside: bool,
        calls: ToolFormat | None,
        schemas: Mapping[str, Mapping[str, Any]],
        most_calls: int | None,
    ) -> None:
        self._marks = marks
        self._calls = calls
        self._schemas = schemas
        self._most_calls = most_calls
        self._text = ""  # not given out yet
        self._state: Callable[[list[Piece], bool], bool] = self._beginning
        if inside:
            self._state = self._thinking
        elif marks is None:
            self._state = self._content
        self._begun = False  # some of the reasoning or content was given out
        self._opened = ""  # the mark of the call under way
        self._reader: CallReader | None = None
        self._calls_before = 0  # that call
        self._owed = ""  # the closing mark of a call that ended without it
        self.tool_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Takes the next text and returns what became certain."""
        return self._run(text, final=False)

    def finish(self) -> list[Piece]:
        """The answer has ended: returns what was held back."""
        return self._run("", final=True)

    def _run(self, text: str, *, final: bool) -> list[Piece]:
        self._text += text
        out: list[Piece] = []
        while self._state(out, final):
            pass
        if self._most_calls is not None:
            out = [piece for piece in out if not isinstance(piece, ToolCall) or piece.index < self._most_calls]
        return joined(out)

    # Each state takes what it can of the text; True when another state has to go on.

    def _beginning(self, out: list[Piece], final: bool) -> bool:
        assert self._marks is not None
        text = self._text.lstrip()
        if text.startswith(self._marks.open):
            self._text, self._state = text.removeprefix(self._marks.open), self._thinking
        elif self._marks.open.startswith(text) and not final:
            return False
        else:
            self._state = self._content
        return True

    def _thinking(self, out: list[Piece], final: bool) -> bool:
        assert self._marks is not None
        if not self._begun:
            self._text = self._text.lstrip()
        before, found, behind = self._text.partition(self._marks.close)
        if found:
            out.append(Reasoning(before.rstrip()))
            self._text, self._state, self._begun = behind, self._between, False
            return True
        out.append(Reasoning(self._certain((self._marks.close,), final)))
        return False

    def _between(self, out: list[Piece], final: bool) -> bool:
        separators = " \t\n\r;" if self._calls and self._calls.kind is Kind.BARE and self.tool_calls else None
        self._text = self._text.lstrip(separators)
        if not self._text:
            return False
        self._state, self._begun = self._content, False
        return True

    def _content(self, out: list[Piece], final: bool) -> bool:
        if self._calls is None:
            out.append(Content(self._text))
            self._text = ""
            return False
        marks = (*self._calls.openers, *((self._owed,) if self._owed else ()))
        if self._calls.kind is Kind.BARE and not self._begun:
            text = self._text.lstrip()
            if not text and not final:
                return False
            if text.startswith("{"):
                self._begin_call("", out)
                return True
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        if not found:
            out.append(Content(self._certain(marks, final)))
            return False
        at, mark = min(found)
        out.append(Content(self._text[:at].rstrip()))
        self._text = self._text[at:]
        if mark == self._owed:
            self._text, self._owed, self._state = self._text.removeprefix(mark), "", self._between
        else:
            self._begin_call(mark, out)
        return True

    def _begin_call(self, mark: str, out: list[Piece]) -> None:
        self._reader, self._calls_before = None, self.tool_calls
        self._opened, self._owed, self._state = mark, "", self._call

    def _call(self, out: list[Piece], final: bool) -> bool:
        assert self._calls is not None
        reader = self._reader or self._new_reader(final)
        if reader is None:
            return False
        self._reader = reader
        pieces = reader.read(self._text, final)
        self._text = ""
        out += pieces
        begun = [piece.index + 1 for piece in pieces if isinstance(piece, ToolCall)]
        self.tool_calls = max(self.tool_calls, *begun, 0)
        if not reader.over:
            return False
        self._text = reader.rest
        failed = bool(pieces) and isinstance(pieces[-1], Content)
        if self.tool_calls > self._calls_before and not reader.closed:
            self._owed = self._calls.close
        self._state, self._begun = (self._content if failed else self._between), failed
        return True

    def _new_reader(self, final: bool) -> CallReader | None:
        """The reader for the call that begins here; None while that cannot be told."""
        assert self._calls is not None
        index, mark = self.tool_calls, self._opened
        match self._calls.kind:
            case Kind.XML:
                return XmlCall(self._calls, mark, index, self._schemas)
            case Kind.BRACKETS:
                behind = self._text.removeprefix(mark).lstrip()
                if not behind and not final:
                    return None
                if behind[:1] not in ("[", "{"):
                    return NamedCall(mark, index)
                return JsonCalls(mark, "", index, short_ids=True)
            case Kind.BLOCKS:
                return JsonCalls(mark, self._calls.close, index)
        names = frozenset(self._schemas) or None
        return JsonCalls(mark, "", index, keys=_BARE_KEYS, names=names, needs_arguments=True)

    def _certain(self, marks: tuple[str, ...], final: bool) -> str:
        """What can be given out of the text; the rest stays."""
        keep = 0 if final else held_back(self._text, marks)
        certain = self._text[: len(self._text) - keep]
        if not final:
            certain = certain.rstrip()
        self._text = self._text[len(certain) :]
        self._begun = self._begun or bool(certain)
        return certain
