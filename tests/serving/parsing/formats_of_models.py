"""Small chat templates with the marks of real ones, and what the parsers' tests do with an answer."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from serving.parsing import Content, Piece, Reasoning, ToolCall, make_parser
from serving.parsing.pieces import joined

HERMES = (pathlib.Path(__file__).parents[2] / "data" / "tool_template.jinja").read_text(encoding="utf-8")
_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
_OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

QWEN3 = (
    _TOOLS
    + '{{ "<tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}\\n</tool_call>" if tools else "" }}'
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '').split('</think>')[-1] }}<|im_end|>\n"
    + "{% endfor %}"
    + _OPENED
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
THINKING = _TURNS + _OPENED + "{{ '<think>\n' if add_generation_prompt }}{# until </think> #}"
SMOLLM = _TOOLS + '{{ "Write <tool_call>[{\\"name\\": ...}]</tool_call>" if tools else "" }}' + _TURNS + _OPENED
GRANITE = _TOOLS + '{{ "Write <|tool_call|>[ and a list" if tools else "" }}' + _TURNS + _OPENED
QWEN_CODER = (
    _TOOLS
    + '{{ "<tool_call>\\n<function=f>\\n<parameter=x>\\n...</parameter></function></tool_call>" if tools else "" }}'
    + _TURNS
    + _OPENED
)
LLAMA3 = _TOOLS + '{{ "Respond as {\\"name\\": f, \\"parameters\\": {}}" if tools else "" }}' + _TURNS + _OPENED
LLAMA31 = _TOOLS + "{% if tools %}<|python_tag|>{% endif %}" + _TURNS + _OPENED
MISTRAL = (
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% for m in messages %}"
    "{% if m.tool_calls %}[TOOL_CALLS] [...]{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
MISTRAL_NEW = (
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% for m in messages %}"
    "{% if m.tool_calls %}[TOOL_CALLS]name[ARGS]{}{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
    "{# [THINK] [/THINK] #}"
)
PLAIN = _TURNS + _OPENED

Total = list[tuple[str, ...]]


def total(pieces: Sequence[Piece]) -> Total:
    """What pieces add up to, in order; tool calls as (name, arguments), checked for ids and numbering."""
    out: Total = []
    ids: list[str] = []
    for piece in joined(pieces):
        match piece:
            case Content(text=text):
                out.append(("content", text))
            case Reasoning(text=text):
                out.append(("reasoning", text))
            case ToolCall():
                assert piece.index == len(ids), "one call after the other, each in one go"
                assert piece.name and piece.id and piece.id not in ids
                ids.append(piece.id)
                out.append(("call", piece.name, piece.arguments))
    return out


def parse(template: str | None, texts: Sequence[str], **options: Any) -> Total:
    """What an answer that comes in these pieces adds up to."""
    given = {"tools": True, "prompt_text": "", **options}
    parser = make_parser(template, **given)
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.finish()
    for piece in pieces:
        assert dataclasses.astuple(piece)[-1] or isinstance(piece, ToolCall) and piece.name, "an empty piece"
    out = total(pieces)
    calls = sum(piece[0] == "call" for piece in out)
    if "most_calls" not in given:
        assert parser.tool_calls == calls
    return out


def cuts(text: str) -> Iterable[list[str]]:
    """One by one, in threes, and every cut in two."""
    yield list(text)
    yield [text[at : at + 3] for at in range(0, len(text), 3)]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
