"""What is forced comes true: random walks through the grammar of every format parse back to calls that validate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxpd.errors import InvalidArgument
from jaxpd.grammar import GrammarCompiler
from jaxpd.structured import StructuredOutput
from jaxpd.text import TextStream
from jaxpd.tokenizer import Tokenizer, byte_alphabet, load_tokenizer
from serving.parsing import Tools, forced_answer, forced_calls, marker_token_ids, read_tools
from serving.parsing.formats import reasoning_marks
from tests.jaxpd.grammar_walks import TINY, conforms
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
    parse,
)
from tests.serving.parsing.walks import random_answer

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "[THINK]", "[/THINK]"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "unit": {"enum": ["C", "F"], "type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "at": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop-all"}},
]


def tokenizer(special: Sequence[str] = (), added: Sequence[str] = ()) -> Tokenizer:
    """Tokens of one byte, one EOS, and marks as special tokens or as added tokens that show."""
    backend = tokenizers.Tokenizer(models.BPE(dict(byte_alphabet()), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", *special])
    backend.add_tokens(list(added))
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


KINDS = {
    "text": tokenizer(),
    "special": tokenizer(special=MARKS),
    "added": tokenizer(added=MARKS),
    "tiny": load_tokenizer(TINY),  # tokens of several letters
}
COMPILERS = {kind: GrammarCompiler(one, one.vocab_size, one.eos_token_ids) for kind, one in KINDS.items()}


def texts_of(spec: StructuredOutput, kind: str, template: str, count: int = 10) -> list[str]:
    """Random answers under a grammar, as the front would see them: marks visible, other special tokens not."""
    grammar = COMPILERS[kind].compile(spec)
    out = []
    for seed in range(count):
        ids = random_answer(grammar.new_state(), KINDS[kind], seed)
        stream = TextStream(KINDS[kind], keep=marker_token_ids(KINDS[kind], template))
        out.append(stream.push(ids) + stream.finish())
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(template, id=name)
        for name, template in {
            "hermes": HERMES,
            "qwen3": QWEN3,
            "smollm": SMOLLM,
            "granite": GRANITE,
            "coder": QWEN_CODER,
            "llama3": LLAMA3,
            "llama31": LLAMA31,
            "mistral": MISTRAL,
            "mistral_new": MISTRAL_NEW,
        }.items()
    ],
)
def test_a_forced_call_parses_and_validates(template: str, kind: str) -> None:
    tools = read_tools(TOOLS, "required")
    spec = forced_calls(tools, template=template, prompt_text="", tokenizer=KINDS[kind])
    assert spec is not None
    seen: set[str] = set()
    for text in texts_of(spec, kind, template):
        pieces = parse(template, [text], schemas=tools.schemas)
        calls = [piece for piece in pieces if piece[0] == "call"]
        assert 1 <= len(calls) <= 16, text
        assert {piece[0] for piece in pieces} <= {"call", "reasoning"}, text
        for _, name, arguments in calls:
            seen.add(name)
            value = json.loads(arguments)
            if name == "stop-all":
                assert value == {}
            else:
                days = value.pop("days")
                assert 1 <= days <= 14 and isinstance(days, int), text
                shape = {**WEATHER, "required": ["city"]}
                assert conforms(value, shape), text
    assert seen == {"get_weather", "stop-all"}


def accepts(spec: StructuredOutput | None, text: str) -> bool:
    """Whether an answer may begin so."""
    assert spec is not None
    try:
        COMPILERS["text"].compile(spec).new_state(KINDS["text"].encode(text))
    except RuntimeError:
        return False
    return True


def test_what_a_grammar_does_not_allow() -> None:
    def forced(template: str, **options: Any) -> StructuredOutput | None:
        tools = read_tools(TOOLS, "required", **options)
        return forced_calls(tools, template=template, prompt_text="", tokenizer=KINDS["text"])

    stop = '<tool_call>\n{"name": "stop-all", "arguments": {}}\n</tool_call>'
    assert accepts(forced(HERMES), "\n".join([stop] * 16))
    assert not accepts(forced(HERMES), "\n".join([stop] * 16) + "\n")
    assert not accepts(forced(HERMES, parallel_tool_calls=False), stop + "\n")
    assert accepts(forced(HERMES), stop.replace("{}", "{ }")) and not accepts(
        forced(HERMES), stop.replace("{}", "{  }")
    )
    assert not accepts(forced(HERMES), "I ") and not accepts(forced(HERMES), stop.replace("stop-all", "stop"))
    day = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n"
    unit = "<parameter=unit>\nC\n</parameter>\n"
    days = "<parameter=days>\n14\n</parameter>\n</function>\n</tool_call>"
    assert accepts(forced(QWEN_CODER), day + unit + days) and accepts(forced(QWEN_CODER), day + days)
    assert not accepts(forced(QWEN_CODER), day + unit + unit)
    assert not accepts(forced(QWEN_CODER), day + unit.replace("C", "K"))
    assert not accepts(forced(QWEN_CODER), day.replace("Bonn", "Bremen"))
    assert not accepts(forced(QWEN_CODER), day + "</function>")


def test_one_tool_by_name_and_one_call() -> None:
    choice = {"type": "function", "function": {"name": "stop-all"}}
    for template in (HERMES, MISTRAL, MISTRAL_NEW, QWEN_CODER):
        by_name = forced_calls(read_tools(TOOLS, choice), template=template, prompt_text="", tokenizer=KINDS["text"])
        single = forced_calls(
            read_tools(TOOLS, "required", False), template=template, prompt_text="", tokenizer=KINDS["text"]
        )
        assert by_name is not None and single is not None
        for text in texts_of(by_name, "text", template, 3):
            [call] = [piece for piece in parse(template, [text]) if piece[0] != "reasoning"]
            assert call[:2] == ("call", "stop-all") and json.loads(call[2]) == {}
        for text in texts_of(single, "text", template, 4):
            assert sum(piece[0] == "call" for piece in parse(template, [text])) == 1, text


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_comes_before_what_is_forced(kind: str) -> None:
    prompt = "<|im_start|>assistant\n<think>\n"
    template = THINKING + HERMES
    tools = read_tools(TOOLS, {"type": "function", "function": {"name": "stop-all"}})
    spec = forced_calls(tools, template=template, prompt_text=prompt, tokenizer=KINDS[kind])
    assert spec is not None
    for text in texts_of(spec, kind, template):
        assert "</think>" in text
        pieces = parse(template, [text], prompt_text=prompt)
        assert {piece[0] for piece in pieces} <= {"reasoning", "call"}
        assert pieces[-1][:2] == ("call", "stop-all") and json.loads(pieces[-1][2]) == {}
    answer = forced_answer({"type": "json_object"}, template=THINKING, prompt_text=prompt, tokenizer=KINDS[kind])
    assert answer is not None
    for text in texts_of(answer, kind, THINKING):
        [content] = [p[1] for p in parse(THINKING, [text], prompt_text=prompt, tools=False) if p[0] == "content"]
        assert isinstance(json.loads(content), dict)


def test_reasoning_that_the_prompt_has_closed_is_over() -> None:
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    spec = forced_answer(asked, template=QWEN3, prompt_text=closed, tokenizer=KINDS["text"])
    assert spec == StructuredOutput(kind="json_schema", text=json.dumps(schema))
    assert reasoning_marks(QWEN3) is not None
    may_think = forced_answer(asked, template=QWEN3, prompt_text="", tokenizer=KINDS["text"])
    assert may_think is not None and may_think.kind == "grammar"


def test_plain_answers() -> None:
    def asked(value: Any) -> StructuredOutput | None:
        return forced_answer(value, template=PLAIN, prompt_text="", tokenizer=KINDS["text"])

    assert asked(None) is asked({"type": "text"}) is None
    assert asked({"type": "json_object"}) == StructuredOutput(kind="json_object")
    without_schema = asked({"type": "json_schema", "json_schema": {"name": "x"}})
    assert without_schema == StructuredOutput(kind="json_schema", text='{"type": "object"}')


NESTED: Any = {"type": "object"}
for _ in range(40):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        ({"type": "xml"}, "response_format.type", "'xml' must be 'text'"),
        ("json", "response_format.type", "'json' must be"),
        ({"type": "json_schema"}, "response_format.json_schema", "None must be an object"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name", "1 to 64"),
        ({"type": "json_schema", "json_schema": {"name": "a b"}}, "response_format.json_schema.name", "'a b'"),
        ({"type": "json_schema", "json_schema": {"name": "a", "strict": 1}}, "response_format.json_schema.strict", "1"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
            "response_format.json_schema.schema",
            "JSON schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": NESTED}},
            "response_format.json_schema.schema",
            "64 levels",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"description": "x" * 70_000}}},
            "response_format.json_schema.schema",
            "too large",
        ),
    ],
)
def test_bad_response_formats_name_the_place(value: Any, field: str, message: str) -> None:
    for template in (PLAIN, QWEN3):
        with pytest.raises(InvalidArgument, match=message) as caught:
            forced_answer(value, template=template, prompt_text="", tokenizer=KINDS["text"])
        assert caught.value.field == field


def test_what_cannot_be_forced() -> None:
    forced = read_tools(TOOLS, "required")
    assert forced_calls(Tools(), template=HERMES, prompt_text="", tokenizer=KINDS["text"]) is None
    with pytest.raises(InvalidArgument, match="names no format for tool calls") as caught:
        forced_calls(forced, template=PLAIN, prompt_text="", tokenizer=KINDS["text"])
    assert caught.value.field == "tool_choice"
    large = {
        "type": "function",
        "function": {"name": "a", "parameters": {"type": "object", "description": "x" * 70_000}},
    }
    with pytest.raises(InvalidArgument, match="too large") as caught:
        forced_calls(read_tools([large], "required"), template=HERMES, prompt_text="", tokenizer=KINDS["text"])
    assert caught.value.field == "tools"


def test_marks_that_are_special_tokens_stay_visible() -> None:
    special = KINDS["special"]
    ids = marker_token_ids(special, MISTRAL_NEW)
    assert ids == {special.special_token_id(mark) for mark in ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")}
    thinking = {special.special_token_id(mark) for mark in ("[THINK]", "[/THINK]")}
    assert marker_token_ids(special, MISTRAL_NEW, tools=False) == thinking
    assert marker_token_ids(KINDS["added"], MISTRAL_NEW) == marker_token_ids(special, PLAIN) == frozenset()
    answer = special.encode('[TOOL_CALLS]f[ARGS]{"a": 1}</s><think>')
    stream = TextStream(special, keep=ids)
    assert stream.push(answer) + stream.finish() == '[TOOL_CALLS]f[ARGS]{"a": 1}'
