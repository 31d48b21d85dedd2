"""Every format, whole and at every cut: the same pieces; nothing is lost, and no mark is shown."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.parsing import Content, Reasoning, ToolCall, make_parser
from serving.parsing.formats import REASONING, Marks, reasoning_marks, tool_format
from tests.serving.parsing.formats_of_models import (
    GRANITE,
    HERMES,
    LLAMA3,
    LLAMA31,
    MISTRAL,
    MISTRAL_NEW,
    PLAIN,
    QWEN3,
    QWEN_CODER,
    SMOLLM,
    THINKING,
    Total,
    cuts,
    parse,
)

A = '{"name": "get", "arguments": {"city": "Köln", "n": [1, -2.5e3]}}'
ARGS_A = '{"city": "Köln", "n": [1, -2.5e3]}'
B = '{"arguments": {}, "name": "put_b"}'
LLAMA_A = '{"type": "function", "name": "get", "parameters": {"city": "Köln"}}'
SCHEMAS = {
    "get": {
        "properties": {
            "city": {"type": "string"},
            "n": {"type": "integer"},
            "far": {"type": "boolean"},
            "at": {"type": "object"},
        }
    },
    "put_b": {},
}
CODER = (
    "<tool_call>\n<function=get>\n<parameter=city>\n12\nlines </tool\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    '<parameter=far>True</parameter>\n<parameter=at>\n{"x": 1}\n</parameter>\n</function>\n</tool_call>'
)
CODER_ARGS = '{"city": "12\\nlines </tool", "n": 3, "far": true, "at": {"x": 1}}'

GOOD: dict[str, tuple[str, str, dict[str, Any], Total]] = {
    "plain text": (PLAIN, " a <tool_call> b\n", {}, [("content", " a <tool_call> b\n")]),
    "text with a template that has tools": (
        HERMES,
        "\n 2 < 3 {x} <tool> \n",
        {},
        [("content", "\n 2 < 3 {x} <tool> \n")],
    ),
    "hermes": (HERMES, f"<tool_call>\n{A}\n</tool_call>", {}, [("call", "get", ARGS_A)]),
    "hermes, two and text": (
        HERMES,
        f"I look.\n\n<tool_call>\n{A}\n</tool_call>\n\n<tool_call>{B}</tool_call>\nDone. ",
        {},
        [("content", "I look."), ("call", "get", ARGS_A), ("call", "put_b", "{}"), ("content", "Done. ")],
    ),
    "hermes without closing marks": (
        HERMES,
        f"<tool_call>{A}<tool_call>{B}",
        {},
        [("call", "get", ARGS_A), ("call", "put_b", "{}")],
    ),
    "hermes, two in one block": (
        HERMES,
        f"<tool_call>{A}\n{B}</tool_call>",
        {},
        [("call", "get", ARGS_A), ("call", "put_b", "{}")],
    ),
    "hermes, one brace too many": (
        HERMES,
        f"<tool_call>{A}}}\n</tool_call>!",
        {},
        [("call", "get", ARGS_A), ("content", "}"), ("content", "!")],
    ),
    "arguments as text": (
        HERMES,
        '<tool_call>{"name": "get", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
        {},
        [("call", "get", '{"a": "\\u00e9"}')],
    ),
    "no arguments, null, parameters, other keys": (
        HERMES,
        '<tool_call>{"name": "a"}</tool_call><tool_call>{"id": 7, "name": "b", "arguments": null}</tool_call>'
        '<tool_call>{"x": [{"name": "no"}], "name": "c", "parameters": {"name": "d"}, "y": "}"}</tool_call>',
        {},
        [("call", "a", "{}"), ("call", "b", "{}"), ("call", "c", '{"name": "d"}')],
    ),
    "a line break inside a string": (
        HERMES,
        '<tool_call>{"name": "get", "arguments": {"a": "x\ny\t{"}}</tool_call>',
        {},
        [("call", "get", '{"a": "x\\ny\\t{"}')],
    ),
    "a list in a block": (
        SMOLLM,
        f"<tool_call>[{A}, {B}]</tool_call>",
        {},
        [("call", "get", ARGS_A), ("call", "put_b", "{}")],
    ),
    "granite": (GRANITE, f"<|tool_call|>[{A}]", {}, [("call", "get", ARGS_A)]),
    "qwen3": (
        QWEN3,
        f"<think>\nwell, <tool_call>?\n</think>\n\nLet me.\n<tool_call>\n{A}\n</tool_call>",
        {},
        [("reasoning", "well, <tool_call>?"), ("content", "Let me."), ("call", "get", ARGS_A)],
    ),
    "empty reasoning": (QWEN3, "<think>\n\n</think>\n\nhi", {}, [("content", "hi")]),
    "reasoning later is content": (QWEN3, "a <think>b</think>", {}, [("content", "a <think>b</think>")]),
    "reasoning that breaks off": (QWEN3, "\n<think> so\n </thi", {}, [("reasoning", "so\n </thi")]),
    "white space only": (QWEN3, "\n \n", {}, [("content", "\n \n")]),
    "the prompt opened the reasoning": (
        THINKING,
        "\nhm \n</think>\n\nyes",
        {"prompt_text": "<|im_start|>assistant\n<think>\n", "tools": False},
        [("reasoning", "hm"), ("content", "yes")],
    ),
    "the prompt is inside reasoning": (
        THINKING,
        "ly</think>yes",
        {"prompt_text": "<|im_start|>assistant\n<think>\nSlow", "tools": False},
        [("reasoning", "ly"), ("content", "yes")],
    ),
    "somebody else wrote the mark": (
        THINKING,
        "yes </thi",
        {"prompt_text": "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", "tools": False},
        [("content", "yes </thi")],
    ),
    "the prompt closed the reasoning": (
        QWEN3,
        "yes",
        {"prompt_text": "<|im_start|>assistant\n<think>\n\n</think>\n\n"},
        [("content", "yes")],
    ),
    "calls are not asked for": (
        QWEN3,
        f"<think>a</think><tool_call>{A}</tool_call> ",
        {"tools": False},
        [("reasoning", "a"), ("content", f"<tool_call>{A}</tool_call> ")],
    ),
    "only the first call": (
        HERMES,
        f"<tool_call>{A}</tool_call><tool_call>{B}</tool_call>",
        {"most_calls": 1},
        [("call", "get", ARGS_A)],
    ),
    "llama": (LLAMA3, f"\n{LLAMA_A}", {}, [("call", "get", '{"city": "Köln"}')]),
    "llama, several": (
        LLAMA31,
        f'<|python_tag|>{LLAMA_A}; {{"name": "put_b", "parameters": {{}}}}',
        {"schemas": SCHEMAS},
        [("call", "get", '{"city": "Köln"}'), ("call", "put_b", "{}")],
    ),
    "llama, JSON that is no call": (LLAMA3, '{"answer": {"name": 1}} ', {}, [("content", '{"answer": {"name": 1}} ')]),
    "llama, nothing to call": (LLAMA3, '{"name": "get"}', {}, [("content", '{"name": "get"}')]),
    "llama, not a tool": (
        LLAMA3,
        '{"parameters": {"a": 1}, "name": "Bob"}',
        {"schemas": SCHEMAS},
        [("content", '{"parameters": {"a": 1}, "name": "Bob"}')],
    ),
    "llama, a brace later": (LLAMA3, f"see {LLAMA_A}", {}, [("content", f"see {LLAMA_A}")]),
    "llama, code": (LLAMA31, "<|python_tag|>f(x=1)", {}, [("content", "<|python_tag|>f(x=1)")]),
    "mistral": (
        MISTRAL,
        f"[TOOL_CALLS] [{A}, {B}]",
        {},
        [("call", "get", ARGS_A), ("call", "put_b", "{}")],
    ),
    "mistral, one object": (MISTRAL, f"So: [TOOL_CALLS]{A}", {}, [("content", "So:"), ("call", "get", ARGS_A)]),
    "mistral, newer": (
        MISTRAL_NEW,
        f"[THINK]hm[/THINK]ok[TOOL_CALLS]get[ARGS]{ARGS_A}[TOOL_CALLS]put_b[CALL_ID]abc123def[ARGS] {{}}\nend",
        {},
        [
            ("reasoning", "hm"),
            ("content", "ok"),
            ("call", "get", ARGS_A),
            ("call", "put_b", "{}"),
            ("content", "end"),
        ],
    ),
    "mistral, no mark before the arguments": (
        MISTRAL_NEW,
        '[TOOL_CALLS]get{"a": "\n"}',
        {},
        [("call", "get", '{"a": "\\n"}')],
    ),
    "qwen coder": (
        QWEN_CODER,
        f"On it.\n{CODER}\n{CODER}",
        {"schemas": SCHEMAS},
        [("content", "On it."), *[("call", "get", CODER_ARGS)] * 2],
    ),
    "qwen coder without the outer mark": (
        QWEN_CODER,
        "<function=put_b>\n<parameter=x y>\n[1]\n</parameter></function>.",
        {},
        [("call", "put_b", '{"x y": [1]}'), ("content", ".")],
    ),
    "qwen coder, text that looks like a number": (
        QWEN_CODER,
        "<function=get><parameter=city>12</parameter><parameter=n> 12\n</parameter><parameter=b>x</parameter>"
        "</function>",
        {"schemas": SCHEMAS},
        [("call", "get", '{"city": "12", "n": 12, "b": "x"}')],
    ),
    "qwen coder, inner end left out": (
        QWEN_CODER,
        "<tool_call><function=put_b></tool_call><tool_call><function=get><parameter=a>NaN</parameter></function>",
        {},
        [("call", "put_b", "{}"), ("call", "get", '{"a": "NaN"}')],
    ),
}

BAD: dict[str, tuple[str, str, Total]] = {
    "no JSON": (HERMES, "<tool_call> oh </tool_call>", [("content", "<tool_call> oh </tool_call>")]),
    "a mark and no more": (HERMES, "x\n<tool_call>", [("content", "x"), ("content", "<tool_call>")]),
    "no name": (HERMES, '<tool_call>{"arguments": {"a": 1}}', [("content", '<tool_call>{"arguments": {"a": 1}}')]),
    "a name that is none": (HERMES, '<tool_call>{"name": 3, "a": 1}', [("content", '<tool_call>{"name": 3, "a": 1}')]),
    "breaks off before the arguments": (
        HERMES,
        '<tool_call>{"name": "get", "arg',
        [("content", '<tool_call>{"name": "get", "arg')],
    ),
    "breaks off in the arguments": (
        HERMES,
        '<tool_call>{"name": "get", "arguments": {"a": "b',
        [("call", "get", '{"a": "b')],
    ),
    "breaks off in the closing mark": (HERMES, f"<tool_call>{A}\n</tool_", [("call", "get", ARGS_A)]),
    "goes wrong in the arguments": (
        HERMES,
        '<tool_call>{"name": "get", "arguments": {"a": 01}}</tool_call> so',
        [("call", "get", '{"a": 01'), ("content", "}}"), ("content", "so")],
    ),
    "no object for arguments": (
        HERMES,
        '<tool_call>{"name": "a", "arguments": [1]}',
        [("content", '<tool_call>{"name": "a", "arguments": [1]}')],
    ),
    "text for arguments": (
        HERMES,
        '<tool_call>{"name": "a", "arguments": "[1]"}',
        [("content", '<tool_call>{"name": "a", "arguments": "[1]"}')],
    ),
    "half of a surrogate pair": (
        HERMES,
        '<tool_call>{"name": "\\ud800"}',
        [("content", '<tool_call>{"name": "\\ud800"}')],
    ),
    "wrong, then right": (
        HERMES,
        f"<tool_call>{{nope}}<tool_call>{A}</tool_call>",
        [("content", "<tool_call>{nope}"), ("call", "get", ARGS_A)],
    ),
    "an empty list": (MISTRAL, "[TOOL_CALLS] []", [("content", "[TOOL_CALLS] []")]),
    "a list that breaks off": (MISTRAL, f"[TOOL_CALLS] [{A}, {{", [("call", "get", ARGS_A), ("content", ", {")]),
    "no name before the mark": (MISTRAL_NEW, "[TOOL_CALLS][ARGS]{}", [("content", "[TOOL_CALLS][ARGS]{}")]),
    "no arguments behind the mark": (MISTRAL_NEW, "[TOOL_CALLS]get[ARGS]x", [("content", "[TOOL_CALLS]get[ARGS]x")]),
    "half a mark": (MISTRAL_NEW, "[TOOL_CALLS]get[AR", [("content", "[TOOL_CALLS]get[AR")]),
    "wrong in the named arguments": (
        MISTRAL_NEW,
        '[TOOL_CALLS]a[ARGS]{"b":]',
        [("call", "a", '{"b":'), ("content", "]")],
    ),
    "no function": (QWEN_CODER, "<tool_call>\nget</tool_call>", [("content", "<tool_call>\nget</tool_call>")]),
    "no name of the function": (QWEN_CODER, "<function=>a", [("content", "<function=>a")]),
    "a value that breaks off": (
        QWEN_CODER,
        "<function=a>\n<parameter=x>1</parameter>\n<parameter=y>\n2",
        [("call", "a", '{"x": 1'), ("content", "\n<parameter=y>\n2")],
    ),
    "something between the values": (
        QWEN_CODER,
        "<function=a>\n12</function>",
        [("call", "a", "{"), ("content", "\n12</function>")],
    ),
}


def merged(pieces: Total) -> Total:
    """Content around a place where a closing mark was dropped counts as one."""
    out: Total = []
    for piece in pieces:
        if out and piece[0] == "content" == out[-1][0]:
            out[-1] = ("content", out[-1][1] + piece[1])
        else:
            out.append(piece)
    return out


@pytest.mark.parametrize("name", GOOD)
def test_every_format_at_every_cut(name: str) -> None:
    template, text, options, expected = GOOD[name]
    assert merged(parse(template, [text], **options)) == merged(expected)
    for texts in cuts(text):
        assert merged(parse(template, texts, **options)) == merged(expected), texts


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_call_comes_out_as_content(name: str) -> None:
    template, text, expected = BAD[name]
    for texts in ([text], *cuts(text)):
        assert merged(parse(template, texts)) == merged(expected), texts


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "\n",
        " ",
    ]
    + ["<function=f>", "<parameter=x>", "</parameter>", "</function>", A, B, LLAMA_A, ARGS_A, A[:30], A[30:], "{", "}"]
    + [
        "[",
        "]",
        ",",
        ";",
        '"',
        '"name": ',
        '{"name": "f", "arguments": ',
        "ab",
        "é",
        "<",
        "</",
        "[T",
        "\\",
        "1e",
        "nul",
    ]
)
TEMPLATES = [PLAIN, HERMES, QWEN3, SMOLLM, QWEN_CODER, LLAMA3, LLAMA31, MISTRAL, MISTRAL_NEW]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(TEMPLATES), st.lists(FRAGMENTS, max_size=12), st.integers(0, 2**32), st.booleans())
def test_any_mix_of_marks_is_the_same_at_any_cut(template: str, parts: list[str], seed: int, inside: bool) -> None:
    text = "".join(parts)
    options = {"prompt_text": "<think>" if inside else "", "schemas": SCHEMAS if seed % 2 else None}
    random_ = random.Random(seed)
    borders = sorted({0, len(text), *(random_.randrange(len(text) + 1) for _ in range(random_.randrange(12)))})
    texts = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    whole = merged(parse(template, [text], **options))
    assert merged(parse(template, texts, **options)) == whole == merged(parse(template, list(text), **options))
    if not any(piece[0] == "call" for piece in whole):  # then nothing is missing but marks of reasoning and white space
        missing = len("".join(text.split())) - sum(len("".join(piece[1].split())) for piece in whole)
        marks = reasoning_marks(template) or Marks("", "")
        assert missing in {0, len(marks.open), len(marks.close), len(marks.open + marks.close)}


@settings(max_examples=150, deadline=None)
@given(st.text('ab<>{}[]/tholcanik_ \n"', max_size=60), st.sampled_from(TEMPLATES))
def test_text_without_marks_is_content(text: str, template: str) -> None:
    form = tool_format(template)
    marks = [*(form.openers if form else ()), *(m.open for m in REASONING)]
    pieces = merged(parse(template, list(text)))
    if not any(mark in text for mark in marks):
        assert "".join(piece[1] for piece in pieces) == text


def test_what_is_certain_comes_at_once() -> None:
    parser = make_parser(QWEN3, tools=True, prompt_text="")
    assert parser.push("<think>\nI") == [Reasoning("I")]
    assert parser.push(" think </th") == [Reasoning(" think")]
    assert parser.push("is") == [Reasoning(" </this")]
    assert parser.push("</think>\n\nHello <tool") == [Content("Hello")]
    assert parser.push("box> ") == [Content(" <toolbox>")]
    assert parser.push('\n<tool_call>\n{"name": "get", "argu') == []
    assert parser.tool_calls == 0
    [begun] = parser.push('ments": {"ci')
    assert isinstance(begun, ToolCall) and (begun.index, begun.name, begun.arguments) == (0, "get", '{"ci')
    assert parser.tool_calls == 1
    assert parser.push('ty": 1') == [ToolCall(0, begun.id, "", 'ty": 1')]
    assert parser.push("}}\n</tool") == [ToolCall(0, begun.id, "", "}")]
    assert parser.push("_call>\n") == parser.finish() == []


def test_ids_are_what_templates_take() -> None:
    def first(template: str, text: str) -> ToolCall:
        parser = make_parser(template, tools=True, prompt_text="")
        [call] = parser.push(text) + parser.finish()
        assert isinstance(call, ToolCall)
        return call

    assert first(HERMES, f"<tool_call>{A}</tool_call>").id.startswith("call_")
    for template, text in ((MISTRAL, f"[TOOL_CALLS] [{A}]"), (MISTRAL_NEW, "[TOOL_CALLS]a[ARGS]{}")):
        assert len(first(template, text).id) == 9 and first(template, text).id.isalnum()
    assert first(MISTRAL_NEW, "[TOOL_CALLS]a[CALL_ID]abc123def[ARGS]{}").id == "abc123def"


def test_a_long_answer_is_read_in_linear_time() -> None:
    """Twice the text in about twice the time would be too noisy a test: the bound is ten times what was measured."""
    start = time.perf_counter()
    arguments = json.dumps({"a": "x" * 100_000})
    text = f'{"word " * 20_000}<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    pieces = parse(HERMES, [text[at : at + 4] for at in range(0, len(text), 4)])
    assert pieces[1:] == [("call", "f", arguments)]
    assert time.perf_counter() - start < 10
