"""Chat templates with tools and options: what reaches the template, and what it cannot do."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxpd import chat_template as module
from jaxpd.chat_template import ChatTemplate
from jaxpd.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxpd.errors import InvalidArgument
from jaxpd.text import TextStream, prompt_text, to_prompt_ids
from jaxpd.tokenizer import Tokenizer, byte_alphabet, load_tokenizer

HERMES = (pathlib.Path(__file__).parents[1] / "data" / "tool_template.jinja").read_text(encoding="utf-8")
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"é": {}}}}}


def render(source: str, messages: Any = (USER,), tools: Any = None, **options: Any) -> str:
    return ChatTemplate(source).render(messages, {"bos_token": "<s>"}, tools=tools, options=options)


def make_tokenizer(**options: Any) -> Tokenizer:
    """Ids are bytes; 256 is the special <s>, 257 the special <call>."""
    backend = tokenizers.Tokenizer(models.BPE(dict(byte_alphabet()), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<call>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"}, **options)


def test_a_conversation_with_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"é": [1, null]}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "function_call": None},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
        },
    ]
    assert render(HERMES, messages, [TOOL, {"function": {"name": "put"}}]) == (
        '<|im_start|>system\nBe brief.\nget{"é": {}}\nput{}\n'
        "<tool_call></tool_call><|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get", "arguments": {"é": [1, null]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    twice = [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}] * 2}]
    block = '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert render(HERMES, twice, add_generation_prompt=False) == f"<|im_start|>assistant\na{block * 2}<|im_end|>\n"
    assert render(HERMES) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_what_the_template_sees() -> None:
    seen = json.loads(
        render(
            "{{ [messages, tools] | tojson }}{{ '' if tools else '' }}",
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": ""}}],
                    "name": None,
                    "x": (1, {"y": None}),
                },
            ],
            ({"function": {"name": "f"}},),
        )
    )
    calls = [{"function": {"name": "f", "arguments": {}}}]
    assert seen == [
        [{"role": "assistant", "content": None, "tool_calls": calls, "x": [1, {"y": None}]}],
        [{"function": {"name": "f"}}],
    ]
    template = "{{ 'none' if tools is none else 'some' }} {{ enable_thinking is defined }} {{ documents is none }}"
    assert render(template) == render(template, tools=[]) == "none False True"
    assert render("{{ enable_thinking }} {{ x.y }} {{ bos_token }}", enable_thinking=False, x={"y": 1}) == "False 1 <s>"
    assert (
        render("{{ messages | tojson(ensure_ascii=True) }}", [{"role": "user", "content": "é"}]).count("\\u00e9") == 1
    )


def test_the_callers_messages_stay_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": "a", "tool_calls": [call]}]
    before = json.dumps(messages)
    render("{{ messages[0].tool_calls }}", messages, continue_final_message=False)
    render("{{ messages[0].content }}", messages, continue_final_message=True)
    assert json.dumps(messages) == before


def test_where_the_prompt_ends() -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}[a]{% endif %}"
    assert render(template) == "[user] hi</s>[a]"
    assert render(template, add_generation_prompt=False) == render(template, add_generation_prompt=None)[:-3]
    answer = {"role": "assistant", "content": "s "}
    assert render(template, [USER, answer], continue_final_message=True) == "[user] hi</s>[assistant] s "
    assert render(template, [USER, answer], continue_final_message=False) == "[user] hi</s>[assistant] s</s>[a]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "'messages' is the template's own"),
        ({"tools": []}, "'tools' is the template's own"),
        ({"bos_token": ""}, "'bos_token' is the template's own"),
        ({"raise_exception": 1}, "'raise_exception' is"),
        ({"range": 1}, "'range' is"),
        ({"add_generation_prompt": 1}, "add_generation_prompt=1 must be true or false"),
        ({"continue_final_message": "yes"}, "must be true or false"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"continue_final_message": True}, "last message of role assistant"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        ChatTemplate("x{{ messages[0].content }}").render([USER], {"bos_token": "<s>"}, options=options)
    assert caught.value.field == "template_options"


def test_a_last_message_that_is_not_written_cannot_be_continued() -> None:
    with pytest.raises(InvalidArgument, match="does not write the last message"):
        render("x", [{"role": "assistant", "content": "a"}], continue_final_message=True)


def test_tools_need_a_template_that_knows_them() -> None:
    with pytest.raises(InvalidArgument, match="no place for them") as caught:
        render("{{ messages[0].content }}{# tools #}", tools=[TOOL])
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("x", "no list"),
        ([7], r"tool_calls\[0\] without a function"),
        ([{"function": {}}], r"tool_calls\[0\] without a function"),
        ([{"function": {"name": "a"}}, {"function": {"name": "a", "arguments": "{"}}], r"tool_calls\[1\].*not JSON"),
        ([{"function": {"name": "a", "arguments": "[1]"}}], "not an object"),
        ([{"function": {"name": "a", "arguments": 3}}], "not an object"),
        ([{"function": {"name": "a", "arguments": "[" * 100_000}}], "not JSON"),
    ],
)
def test_bad_tool_calls_name_the_message(calls: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match="chat message 1 .*" + message) as caught:
        render("x", [USER, {"role": "assistant", "content": None, "tool_calls": calls}])
    assert caught.value.field == "chat"


def test_nesting_without_end_is_an_error() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for given in ({"messages": [{**USER, "x": deep}]}, {"tools": [{"a": deep}]}, {"x": deep}):
        with pytest.raises(InvalidArgument, match="nested too deeply"):
            render("{{ tools }}", **given)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 30) %}{% endfor %}",
        "{{ 'x' * (1 << 40) }}{{ 'x' * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(1000) %}{{ 'y' * 100000 }}{% endfor %}",
    ],
)
def test_templates_that_run_away_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RENDERED", 1 << 20)
    with pytest.raises(InvalidArgument, match="refuses the messages|does not compile"):
        render(template)


def test_named_templates(tmp_path: pathlib.Path) -> None:
    tokenizer = make_tokenizer(
        chat_template="plain", named_templates={"tool_use": "{{ tools[0].function.name }}", "rag": "r"}
    )
    assert (tokenizer.template_for(tools=False), tokenizer.template_for(tools=True)) == (
        "plain",
        "{{ tools[0].function.name }}",
    )
    assert tokenizer.render_chat([USER]) == tokenizer.render_chat([USER], tools=[]) == "plain"
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "get"
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == "plain" and loaded.named_templates == tokenizer.named_templates
    (tmp_path / "chat_template.jinja").write_text("newer {{ tools is none }}")
    assert load_tokenizer(tmp_path).render_chat([USER], tools=[TOOL]) == "newer False"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    from_gguf = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256],
            "tokenizer.ggml.scores": [0.0] * 259,
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_templates": ["tool_use", "lost"],
            "tokenizer.chat_template.tool_use": "{{ tools }}",
        },
        where="it",
    )
    assert from_gguf.named_templates == {"tool_use": "{{ tools }}"}


def test_prompts_of_chats_with_tools_and_options() -> None:
    tokenizer = make_tokenizer(chat_template="<s>{{ messages[0].content }}{{ x }}{{ tools[0].function.name }}")
    given: dict[str, Any] = {"tools": [TOOL], "template_options": {"x": "!"}}
    text = prompt_text(tokenizer, [USER], **given)
    assert text == "<s>hi!get"
    ids = to_prompt_ids(tokenizer, chat=[USER], **given)
    assert ids == to_prompt_ids(tokenizer, text=text, add_special_tokens=False) == (256, *b"hi!get")
    assert to_prompt_ids(tokenizer, text="a") == (256, 97)
    for field, wrong in (("tools", {"tools": [TOOL]}), ("template_options", {"template_options": {"x": 1}})):
        for prompt in ({"text": "a"}, {"token_ids": [1]}):
            with pytest.raises(InvalidArgument, match=f"{field} belongs to a chat") as caught:
                to_prompt_ids(tokenizer, **prompt, **wrong)  # type: ignore[arg-type]
            assert caught.value.field == field
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        prompt_text(None, [USER])
    with pytest.raises(InvalidArgument, match="chat is empty"):
        prompt_text(tokenizer, [])


def test_special_tokens_can_be_kept_in_the_text() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.special_token_id("<call>") == 257
    assert tokenizer.special_token_id("a") is tokenizer.special_token_id("<nope>") is None
    stream = TextStream(tokenizer, ["<call>b"], keep=frozenset([257]))
    assert stream.push([97, 257, 256]) == "a"
    assert stream.push([99]) == "<call>c"
    assert stream.push([257, 98]) == "" and stream.stop_string == "<call>b"
