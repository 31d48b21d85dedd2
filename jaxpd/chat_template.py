"""Chat templates: Jinja programs that come with a model, run in a sandbox with the helpers that templates expect.

    messages, as OpenAI's clients send them
        -> plain text content, arguments of tool calls as objects, keys that are null left out
        -> the template, with `tools`, the options of the request and the model's special tokens as variables
        -> the prompt's text; with `continue_final_message` cut behind the last message's content

A template is a program that somebody else wrote. It reaches nothing outside the sandbox; what it may count to, multiply
and write is bounded.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxpd.errors import InvalidArgument

MAX_RENDERED = 32 << 20  # characters; a million tokens of text have a quarter of it
MAX_COUNTED = 1_000_000  # numbers in all the ranges of one rendering
_RESERVED = ("messages", "tools", "range", "raise_exception", "strftime_now")


class ChatTemplate:
    """A compiled template. Raises InvalidArgument when it does not compile. Safe to use from several threads."""

    def __init__(self, source: str) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"the model's chat template does not compile: {error}", field="chat") from error

    @property
    def takes_tools(self) -> bool:
        """Whether the template looks at `tools` at all."""
        return "tools" in self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, with the assistant's turn opened.

        `options` are variables for the template, such as `enable_thinking`; two of them are ours: with
        `add_generation_prompt` false the assistant's turn is not opened, and with `continue_final_message` true the
        text ends inside the last message. Raises InvalidArgument naming the wrong message, tool or option, or with
        what the template says.
        """
        try:
            variables = _options(options or {}, special_tokens)
            checked = [_message(i, message) for i, message in enumerate(messages)]
            plain_tools = [_plain(tool) for tool in tools] if tools else None
        except RecursionError:
            raise InvalidArgument(
                "the messages, tools or template options are nested too deeply; 100 levels or so work", field="chat"
            ) from None
        going_on = _flag(variables, "continue_final_message", default=False)
        opening = _flag(variables, "add_generation_prompt", default=not going_on)
        if going_on and opening:
            raise InvalidArgument(
                "continue_final_message and add_generation_prompt exclude each other; leave one out",
                field="template_options",
            )
        if tools and not self.takes_tools:
            raise InvalidArgument(
                "tools cannot be used: this model's chat template has no place for them; leave tools out, or describe "
                "them in a message",
                field="tools",
            )
        mark = _mark_end(checked) if going_on else ""
        text = self._run(
            {
                "documents": None,
                **special_tokens,
                **variables,
                "messages": checked,
                "tools": plain_tools,
                "add_generation_prompt": opening,
                "range": _Ranges().make,
            }
        )
        if not mark:
            return text
        before, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidArgument(
                "continue_final_message cannot be used: the model's chat template does not write the last message",
                field="template_options",
            )
        return before.replace(mark, "")

    def _run(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED:
                    raise ValueError(f"it writes more than {MAX_RENDERED} characters")
        except Exception as error:  # a template is a program: whatever it raises on these messages is about them
            raise InvalidArgument(f"the model's chat template refuses the messages: {error}", field="chat") from error
        return "".join(pieces)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which here also looks at what an operator would make before it is made."""

    intercepted_binops = frozenset(["*", "**", "+"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_small(left, 1 << 32) and _small(right, 64)):
            raise ValueError(f"{left!r:.40} ** {right!r:.40} is too large")
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_RENDERED:
                    raise ValueError(f"a text or list is repeated {times!r:.40} times, which is too long")
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            if len(left) + len(right) > MAX_RENDERED:
                raise ValueError("two texts or lists are too long when added")
        return super().call_binop(context, operator, left, right)


def _small(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and abs(value) <= most


class _Ranges:
    """`range` for one rendering: loops inside loops share one budget."""

    def __init__(self) -> None:
        self._left = MAX_COUNTED

    def make(self, *args: int) -> range:
        numbers = range(*args)
        try:
            self._left -= len(numbers)
        except OverflowError:  # longer than a C integer
            self._left = -1
        if self._left < 0:
            raise ValueError(f"it counts further than {MAX_COUNTED}")
        return numbers


def _options(options: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
    for name in options:
        if not isinstance(name, str) or name in _RESERVED or name in special_tokens:
            raise InvalidArgument(
                f"template option {name!r:.60} is the template's own and cannot be set; leave it out",
                field="template_options",
            )
    return {name: _plain(value) for name, value in options.items()}


def _flag(options: dict[str, Any], name: str, *, default: bool) -> bool:
    value = options.pop(name, None)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidArgument(f"template option {name}={value!r:.60} must be true or false", field="template_options")
    return value


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Writes a mark that is in no message behind the last one's content; the text is cut there later."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("content"):
        raise InvalidArgument(
            "continue_final_message needs a last message of role assistant with some content to go on with",
            field="template_options",
        )
    mark = f"\ue000{secrets.token_hex(16)}\ue001"
    last["content"] += mark
    return mark


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """One message with its content as plain text: templates of text models do not expect a list of parts.

    Templates ask whether a key is there, so a key that is null is left out, but for content.
    """
    if not isinstance(message, Mapping):
        raise InvalidArgument(
            f"chat message {index} is {type(message).__name__}, not an object with role and content", field="chat"
        )
    if not isinstance(message.get("role"), str):
        raise InvalidArgument(f"chat message {index} has no role (system, user, assistant or tool)", field="chat")
    others = {key: _plain(value) for key, value in message.items() if value is not None and key != "content"}
    calls = others.pop("tool_calls", None)
    if calls:
        others["tool_calls"] = _calls(index, calls)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = "".join(_part(index, part) for part in content)
    if not isinstance(content, str) and not (content is None and ("content" in message or calls)):
        raise InvalidArgument(f"chat message {index} needs a content that is text, not {content!r:.40}", field="chat")
    return {**others, "content": content}


def _part(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidArgument(
        f"chat message {index} holds a part of type {kind!r}; this model takes text only", field="chat"
    )


def _calls(index: int, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, which clients send as the JSON text they were given."""
    if not isinstance(calls, list):
        raise InvalidArgument(f"chat message {index} has tool_calls that are no list", field="chat")
    out = []
    for number, call in enumerate(calls):
        where = f"chat message {index} has tool_calls[{number}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidArgument(f"{where} without a function that has a name", field="chat")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(
                    f"{where}.function.arguments that are not JSON: {error}; send what the model gave", field="chat"
                ) from None
        if not isinstance(arguments, dict) and arguments is not None:
            raise InvalidArgument(f"{where}.function.arguments that are not an object", field="chat")
        out.append({**call, "function": {**function, "arguments": arguments or {}}})
    return out


def _plain(value: Any) -> Any:
    """A copy in dicts and lists, which is what templates and `tojson` know."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(inner) for inner in value]
    return value


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML, which would put `\\u003c` into the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; in serving its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
