"""JSON read character by character: whether it is still right, where it ends, and the one call inside it.

A model's JSON is cut into tokens anywhere and may break off. A line break or tab inside a string, which JSON forbids
and models write, is taken and escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
ESCAPED = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}  # what JSON strings cannot hold as it is


class JsonScanner:
    """Checks one JSON value. `state` is what has to come next; `done` once the outermost object or list is closed."""

    def __init__(self) -> None:
        self.state = "value"
        self.stack: list[str] = []
        self.in_key = False
        self._word = ""  # of the number or literal being read, or the digits of \u

    @property
    def done(self) -> bool:
        """Whether the value is complete; a number or a literal needs something around it to be."""
        return self.state == "done"

    def feed(self, char: str) -> bool:
        """Takes the next character; False, and nothing taken, where JSON cannot go on so."""
        match self.state:
            case "string":
                if char == '"':
                    self.state = "colon" if self.in_key else self._behind()
                elif char == "\\":
                    self.state = "escape"
                return True
            case "escape":
                self.state, self._word = ("hex", "") if char == "u" else ("string", "")
                return char in '"\\/bfnrtu'
            case "hex":
                self._word += char
                if len(self._word) == 4:
                    self.state = "string"
                return char in "0123456789abcdefABCDEF"
            case "number":
                if char in "0123456789+-.eE":
                    self._word += char
                    return True
                if not _NUMBER.fullmatch(self._word):
                    return False
                self.state = self._behind()
            case "literal":
                self._word += char
                if self._word in _LITERALS:
                    self.state = self._behind()
                return any(literal.startswith(self._word) for literal in _LITERALS)
        return char in _SPACE or self._structure(char)

    def _behind(self) -> str:
        return "comma" if self.stack else "done"

    def _structure(self, char: str) -> bool:
        state = self.state
        if char in "]}" and self.stack:
            if self.stack[-1] != ("[" if char == "]" else "{") or state not in ("comma", "first", "first key"):
                return False
            self.stack.pop()
            self.state = self._behind()
        elif char == "," and state == "comma":
            self.state = "value" if self.stack[-1] == "[" else "key"
        elif char == ":" and state == "colon":
            self.state = "value"
        elif char == '"' and state in ("key", "first key", "value", "first"):
            self.in_key = "key" in state
            self.state = "string"
        elif state not in ("value", "first"):
            return False
        elif char in "{[":
            self.stack.append(char)
            self.state = "first key" if char == "{" else "first"
        elif char in "-0123456789":
            self.state, self._word = "number", char
        elif char in "tfn":
            self.state, self._word = "literal", char
        else:
            return False
        return True


class CallObject:
    """One object with a name and arguments, read as it comes: `take` what is new of the arguments once there is a name.

    `keys` are the keys that the object may have; None for any.
    """

    def __init__(self, keys: Collection[str] | None = None) -> None:
        self._json = JsonScanner()
        self._keys = keys
        self._key = ""
        self._text = ""  # of a key or of a value that is a string
        self._kind = ""  # the first character of the value being read; "" between values
        self._streaming = False  # that value is the arguments
        self._new: list[str] = []
        self.name: str | None = None
        self.begun = False  # there are arguments, and they are an object
        self.complete = False

    def feed(self, char: str) -> bool:
        """Takes the next character; False where this can be no call, and then the object is of no more use."""
        scanner = self._json
        before, depth = scanner.state, len(scanner.stack)
        if not scanner.feed(char):
            return False
        if depth == 0:
            return char == "{"
        inside = before in ("string", "escape", "hex")
        if self._kind:
            return self._in_value(char, inside)
        if inside:
            self._text += char
            return scanner.state != "colon" or self._key_ends()
        if scanner.state == "string" and scanner.in_key:
            self._text = char
        elif before == "value" and char not in _SPACE:
            self._kind, self._text = char, ""
            self._streaming = char == "{" and self._is_arguments()
            self.begun = self.begun or self._streaming
            return self._in_value(char, False)
        return not scanner.done or self._ends()

    def take(self) -> str:
        """The new text of the arguments."""
        new, self._new = "".join(self._new), []
        return new

    def _key_ends(self) -> bool:
        self._key = json.loads(self._text, strict=False)
        return self._keys is None or self._key in self._keys

    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self.begun

    def _in_value(self, char: str, inside: bool) -> bool:
        """More of a value, or what ends it."""
        ended = len(self._json.stack) <= 1 and self._json.state in ("comma", "key", "done")
        plain = ESCAPED.get(char, char) if inside else char
        if self._streaming:
            self._new.append(plain)
        elif self._kind == '"':
            self._text += plain
        if not ended:
            return True
        kind, self._kind, streamed, self._streaming = self._kind, "", self._streaming, False
        return (streamed or self._value_ends(kind)) and (not self._json.done or self._ends())

    def _value_ends(self, kind: str) -> bool:
        if self._key == "name" and self.name is None:
            self.name = _decoded(self._text) if kind == '"' else None
            return bool(self.name)
        if not self._is_arguments() or kind == "n":
            return True
        if kind != '"' or (text := _decoded(self._text)) is None:
            return False
        text = text.strip() or "{}"  # an object as text: some models write it so
        self.begun = _is_object(text)
        self._new.append(text)
        return self.begun

    def _ends(self) -> bool:
        if not self.begun:
            self._new.append("{}")
        self.complete = self.name is not None
        return self.complete


def _decoded(text: str) -> str | None:
    """A JSON string's value; None for one with half of a surrogate pair, which no answer could carry."""
    value: str = json.loads(text)
    return value if not any("\ud800" <= char <= "\udfff" for char in value) else None


def _is_object(text: str) -> bool:
    scanner = JsonScanner()
    return text[:1] == "{" and all(map(scanner.feed, text)) and scanner.done
