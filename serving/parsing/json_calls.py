"""Calls as JSON objects, each with a name and arguments: alone, in a list, or several in a row.

mark -> value -> object --in a list--> next -> value ...
          ^         |                   |
          |         +--> tail <---------+
          +---{------------+--> over
"""

from __future__ import annotations

from collections.abc import Collection

from serving.parsing.formats import held_back
from serving.parsing.ids import new_call_id
from serving.parsing.json_scanner import CallObject
from serving.parsing.pieces import Content, Piece, ToolCall


class JsonCalls:
    """`mark` stands at the beginning of the text and `close` maybe at its end. `names` are the names that are known.

    `short_ids`: this model's template takes ids of nine letters and digits only.
    """

    def __init__(
        self,
        mark: str,
        close: str,
        index: int,
        *,
        keys: Collection[str] | None = None,
        names: Collection[str] | None = None,
        needs_arguments: bool = False,
        short_ids: bool = False,
    ) -> None:
        self._mark = mark
        self._close = close
        self._index = index
        self._keys = keys
        self._names = names
        self._needs_arguments = needs_arguments
        self._short_ids = short_ids
        self._state = "mark"
        self._listed = False
        self._object: CallObject | None = None
        self._id = ""
        self._given = False  # the current call's name is out
        self._raw: list[str] = []  # read since then, and content if this is no call
        self.rest = ""
        self.over = False
        self.closed = False

    def read(self, text: str, final: bool) -> list[Piece]:
        """Takes more text; `final` when the answer has ended."""
        text, self.rest = self.rest + text, ""
        out: list[Piece] = []
        at = 0
        if self._state == "mark":
            at = len(self._mark)
            self._raw.append(self._mark)
            self._state = "value"
        while at < len(text) and not self.over:
            if self._state == "tail" and not text[at].isspace():
                at = self._tail(text, at, final)
                if at < 0:
                    return out
                continue
            if not self._take(text[at], out):
                self._fail(out, text[at:])
                return out
            at += 1
        self._flush(out)
        if self.over:
            self.rest = text[at:]
        elif final:
            self._end(out)
        return out

    def _take(self, char: str, out: list[Piece]) -> bool:
        """One character that is not the closing mark's; False where it cannot stand here."""
        if self._state == "object":
            return self._take_in_object(char, out)
        if char.isspace():
            pass
        elif self._state == "value" and char == "[" and not self._listed and not self._needs_arguments:
            self._listed = True
        elif self._state == "value" and char == "{":
            self._object = CallObject(self._keys)
            self._object.feed(char)
            self._state = "object"
        elif self._state == "next" and char in ",]":
            self._state = "value" if char == "," else "tail"
        else:
            return False
        self._raw.append(char)
        return True

    def _take_in_object(self, char: str, out: list[Piece]) -> bool:
        call = self._object
        assert call is not None
        fine = call.feed(char)
        if call.name is not None and self._names is not None and call.name not in self._names:
            fine = False
        if not fine or call.complete and self._needs_arguments and not call.begun:
            return False
        self._raw.append(char)
        if call.complete:
            self._flush(out)
            self._object, self._given, self._index = None, False, self._index + 1
            self._state = "next" if self._listed else "tail"
        return True

    def _flush(self, out: list[Piece]) -> None:
        """Gives out what is certain of the call under way."""
        call = self._object
        if call is None or call.name is None or (self._names is not None and call.name not in self._names):
            return
        if not (call.begun or call.complete and not self._needs_arguments):
            return
        name = "" if self._given else call.name
        if name:
            self._id = new_call_id(short=self._short_ids)
        out.append(ToolCall(self._index, self._id, name, call.take()))
        self._given = True
        self._raw.clear()

    def _tail(self, text: str, at: int, final: bool) -> int:
        """Behind a call: its closing mark, another call, or something else. Where to go on; -1 to wait for more."""
        behind = text[at:]
        if self._close and (behind.startswith(self._close) or final and self._close.startswith(behind)):
            self.over = self.closed = True
            return at + len(self._close)
        if behind[0] == "{" and self._close and not self._listed:
            self._state = "value"
            return at
        if self._close and not final and held_back(behind, (self._close,)) == len(behind):
            self.rest = behind
            return -1
        self.over = True
        return at

    def _fail(self, out: list[Piece], behind: str) -> None:
        """What was read since the last call came out is content, and so may be what follows."""
        self._flush(out)
        out.append(Content("".join(self._raw)))
        self.rest, self.over = behind, True

    def _end(self, out: list[Piece]) -> None:
        """The answer ended here."""
        if self._state != "tail":
            out.append(Content("".join(self._raw)))
        self.over = True
