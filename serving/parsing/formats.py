"""Which marks a model writes, read from the text of its chat template.

    reasoning     <think> </think>, [THINK] [/THINK], <|START_THINKING|> <|END_THINKING|>, <seed:think> </seed:think>
    tool calls
      BLOCKS      <tool_call>{"name": ..., "arguments": {...}}</tool_call>   Hermes, Qwen; also with a list inside
                  <|tool_call|>[...]                                        Granite, Phi
      XML         <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>   Qwen3-Coder
      BRACKETS    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]           Mistral
                  [TOOL_CALLS]NAME[ARGS]{...}                               newer ones
      BARE        {"name": ..., "parameters": {...}}, maybe behind <|python_tag|>   Llama 3

A template that has none of these still gets its tools; what the model then writes stays content.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re

from jaxpd.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Marks:
    """What stands around reasoning."""

    open: str
    close: str


class Kind(enum.Enum):
    """How tool calls are written."""

    BLOCKS = "blocks"
    XML = "xml"
    BRACKETS = "brackets"
    BARE = "bare"


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    `open` begins a call and `close` ends it ("" where nothing does). `listed`: the calls stand in one JSON list.
    `named`: the name stands before the arguments, not in the JSON. `key` is what the arguments are called.
    """

    kind: Kind
    open: str
    close: str = ""
    listed: bool = False
    named: bool = False
    key: str = "arguments"

    @property
    def openers(self) -> tuple[str, ...]:
        """Marks that begin a call; a bare call begins with its brace besides."""
        return (self.open, FUNCTION) if self.kind is Kind.XML and self.open != FUNCTION else (self.open,)

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark that a tokenizer may have as a special token."""
        named = (ARGS, CALL_ID) if self.kind is Kind.BRACKETS else ()
        return tuple(mark for mark in (self.open, self.close, *named) if mark)


REASONING = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<seed:think>", "</seed:think>"),
)
FUNCTION, PARAMETER = "<function=", "<parameter="
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
PYTHON_TAG = "<|python_tag|>"
_BLOCKS = (("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"))
# What stands in a prompt behind a turn: reasoning that was opened before it is over.
_TURN = re.compile(r"<[|\uff5c][^|\uff5c<>]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>|\[/?INST\]|</s>")


@functools.lru_cache(maxsize=32)
def reasoning_marks(template: str | None) -> Marks | None:
    """The marks of reasoning, where the template knows their end."""
    return next((marks for marks in REASONING if template is not None and marks.close in template), None)


@functools.lru_cache(maxsize=32)
def tool_format(template: str | None) -> ToolFormat | None:
    """How the template has tool calls written; None where it says nothing that is known here."""
    if template is None:
        return None
    text = template.replace('\\"', '"').replace("\\n", "\n")
    blocks = next((pair for pair in _BLOCKS if pair[0] in text), None)
    if FUNCTION in text and PARAMETER in text:
        return ToolFormat(Kind.XML, *(blocks or (FUNCTION, "")))
    if blocks is not None:
        listed = re.search(re.escape(blocks[0]) + r"\s*\[", text) is not None
        return ToolFormat(Kind.BLOCKS, *blocks, listed=listed)
    if "[TOOL_CALLS]" in text:
        named = ARGS in text
        return ToolFormat(Kind.BRACKETS, "[TOOL_CALLS]", listed=not named, named=named)
    if PYTHON_TAG in text or ('{"name":' in text and '"parameters":' in text):
        return ToolFormat(Kind.BARE, PYTHON_TAG, key="parameters")
    return None


def begins_inside(prompt_text: str, marks: Marks | None) -> bool:
    """Whether the prompt ends within reasoning, so that the answer goes on with it."""
    if marks is None:
        return False
    _, opened, behind = prompt_text.rpartition(marks.open)
    return bool(opened) and marks.close not in behind and _TURN.search(behind) is None


def marker_token_ids(tokenizer: Tokenizer, template: str | None, *, tools: bool = True) -> frozenset[int]:
    """Special tokens that are marks of this template: the parser needs to see them in the text.

    Those of tool calls are among them only with `tools`: nobody should see them where calls are not parsed. They are
    for `jaxpd.text.TextStream(keep=...)`, which hides all other special tokens.
    """
    reasoning, calls = reasoning_marks(template), tool_format(template) if tools else None
    marks = [*((reasoning.open, reasoning.close) if reasoning else ()), *(calls.marks if calls else ())]
    ids = (tokenizer.special_token_id(mark) for mark in marks)
    return frozenset(token_id for token_id in ids if token_id is not None and token_id not in tokenizer.eos_token_ids)


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    most = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0 and not mark.startswith(text[at:]):
            at = text.find(mark[0], at + 1)
        if at >= 0:
            most = max(most, len(text) - at)
    return most
