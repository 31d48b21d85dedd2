"""Calls as newer Mistral models write them: [TOOL_CALLS]NAME[ARGS]{...}, maybe with [CALL_ID]ID before [ARGS]."""

from __future__ import annotations

import re

from serving.parsing.formats import ARGS, CALL_ID
from serving.parsing.ids import new_call_id
from serving.parsing.json_scanner import ESCAPED, JsonScanner
from serving.parsing.pieces import Content, Piece, ToolCall

_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class NamedCall:
    """One call. `mark` stands at the beginning of the text."""

    def __init__(self, mark: str, index: int) -> None:
        self._mark = mark
        self._index = index
        self._id = ""
        self._name = ""
        self._step = self._begin
        self._json = JsonScanner()
        self._raw = mark  # read, and content if this is no call
        self._text = ""
        self.rest = ""
        self.over = False
        self.closed = True  # nothing closes such a call

    def read(self, text: str, final: bool) -> list[Piece]:
        """Takes more text; `final` when the answer has ended."""
        self._text += text
        out: list[Piece] = []
        while not self.over and self._step(out, final):
            pass
        if final and not self.over:
            if self._step != self._arguments:
                out.append(Content(self._raw + self._text))
            self._text, self.over = "", True
        if self.over:
            self.rest = self._text
        return out

    # Each step takes what it can of the text; True when the next one has to go on.

    def _begin(self, out: list[Piece], final: bool) -> bool:
        self._text = self._text.removeprefix(self._mark).lstrip()
        self._step = self._read_name
        return True

    def _read_name(self, out: list[Piece], final: bool) -> bool:
        if (name := self._word(self._text)) is None:
            return False
        if not name:
            return self._fail(out)
        self._name, self._step = name, self._read_marks
        self._skip(len(name))
        return True

    def _read_marks(self, out: list[Piece], final: bool) -> bool:
        """[CALL_ID] with its id and [ARGS]; both may be missing."""
        if self._text.startswith(CALL_ID):
            if (call_id := self._word(self._text.removeprefix(CALL_ID))) is None:
                return False
            self._id = call_id
            self._skip(len(CALL_ID) + len(call_id))
            return True
        if any(mark.startswith(self._text) for mark in (CALL_ID, ARGS) if mark != self._text):
            return False
        if self._text.startswith(ARGS):
            self._skip(len(ARGS))
        self._step = self._read_brace
        return True

    def _read_brace(self, out: list[Piece], final: bool) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] != "{":
            return self._fail(out)
        self._text, self._raw, self._step = text, "", self._arguments
        self._id = self._id or new_call_id(short=True)
        out.append(ToolCall(self._index, self._id, self._name, ""))
        return True

    def _arguments(self, out: list[Piece], final: bool) -> bool:
        taken: list[str] = []
        for char in self._text:
            inside = self._json.state == "string"
            if not self._json.feed(char):
                out.append(ToolCall(self._index, self._id, "", "".join(taken)))
                self._text = self._text[len(taken) :]
                return self._fail(out)
            taken.append(ESCAPED.get(char, char) if inside else char)
            if self._json.done:
                self.over = True
                break
        self._text = self._text[len(taken) :]
        out.append(ToolCall(self._index, self._id, "", "".join(taken)))
        return False

    @staticmethod
    def _word(text: str) -> str | None:
        """The name or id that `text` begins with; None while it may go on."""
        match = _NAME.match(text)
        assert match is not None
        return None if match.end() == len(text) else match.group()

    def _skip(self, count: int) -> None:
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _fail(self, out: list[Piece]) -> bool:
        out.append(Content(self._raw))
        self.over = True
        return False
