"""Chat templates: Jinja programs that come with a model, run in a sandbox with the helpers that templates expect."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxpd.errors import InvalidArgument


class ChatTemplate:
    """A compiled template. Raises InvalidArgument when it does not compile."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"the model's chat template does not compile: {error}", field="chat") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, special_tokens: Mapping[str, str]
    ) -> str:
        """The conversation as text. Raises InvalidArgument naming the wrong message, or with what the template says."""
        checked = [_message(i, message) for i, message in enumerate(messages)]
        try:
            return self._template.render(
                **special_tokens,
                messages=checked,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        except Exception as error:  # a template is a program: whatever it raises on these messages is about them
            raise InvalidArgument(f"the model's chat template refuses the messages: {error}", field="chat") from error


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """One message with its content as plain text: templates of text models do not expect a list of parts."""
    if not isinstance(message, Mapping):
        raise InvalidArgument(
            f"chat message {index} is {type(message).__name__}, not an object with role and content", field="chat"
        )
    if not isinstance(message.get("role"), str):
        raise InvalidArgument(f"chat message {index} has no role (system, user or assistant)", field="chat")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = "".join(_part(index, part) for part in content)
    if not isinstance(content, str) and not (content is None and "content" in message):
        raise InvalidArgument(f"chat message {index} needs a content that is text, not {content!r:.40}", field="chat")
    return {**message, "content": content}


def _part(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidArgument(
        f"chat message {index} holds a part of type {kind!r}; this model takes text only", field="chat"
    )


def _tojson(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML, which would put `\\u003c` into the prompt."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; in serving its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
