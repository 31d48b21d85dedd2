"""Server-sent events, from bytes as they come: https://html.spec.whatwg.org/multipage/server-sent-events.html

Lines end in LF, CRLF or CR, in any mixture; a read may end in the middle of a line, of a CRLF or of a character.
Comments and the fields event, id and retry mean nothing to us. Data that the stream ends in the middle of is no event.
"""

from __future__ import annotations

MOST_BYTES = 16 * 2**20  # of one event: more is a server that sends no events


class TooLong(ValueError):
    """An event of more than MOST_BYTES."""


class Events:
    """`feed(bytes)` gives the data of the events that became whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._first = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[str]:
        """Data of each event, its lines joined by LF; what is no UTF-8 is replaced. Raises TooLong."""
        if self._after_cr and chunk:  # the CR ended a line already; a LF right after it ends none
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r") if chunk else self._after_cr
        text = self._rest + chunk
        if self._first and text:
            if len(text) < 3 and b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            self._first = False
            text = text.removeprefix(b"\xef\xbb\xbf")
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        if len(self._rest) + sum(map(len, self._data)) > MOST_BYTES:
            raise TooLong(f"one event of more than {MOST_BYTES} bytes")
        return events
