"""What a parser makes of an answer: pieces of reasoning, of content and of tool calls, in the order of the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """More of one tool call. `arguments` is new JSON text; `name` comes with the first piece and is then empty."""

    index: int
    id: str
    name: str
    arguments: str


Piece = Content | Reasoning | ToolCall


class Parser(Protocol):
    """Reads one answer as it grows. However the text is cut, the pieces add up to the same."""

    @property
    def tool_calls(self) -> int:
        """How many calls have begun."""

    def push(self, text: str) -> list[Piece]:
        """Takes the next text and returns what became certain."""

    def finish(self) -> list[Piece]:
        """The answer has ended: returns what was held back."""


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece, empty ones left out."""
    if len(pieces) == 1 and isinstance(pieces[0], Content | Reasoning):  # most tokens
        return [*pieces] if pieces[0].text else []
    out: list[Piece] = []
    for piece in pieces:
        match (out[-1] if out else None, piece):
            case (_, Content(text="") | Reasoning(text="") | ToolCall(name="", arguments="")):
                pass
            case (Content(text=before), Content(text=text)):
                out[-1] = Content(before + text)
            case (Reasoning(text=before), Reasoning(text=text)):
                out[-1] = Reasoning(before + text)
            case (ToolCall() as last, ToolCall(index=index, name="")) if last.index == index:
                out[-1] = dataclasses.replace(last, arguments=last.arguments + piece.arguments)
            case _:
                out.append(piece)
    return out
