"""Where `jaxpd generate` takes its prompts from: four flags, and the forms of a prompt file.

A prompt file is JSON: a list of prompts, or an object whose `prompts` is such a list. A prompt is an object with one of
`prompt_ids` (token ids), `text` or `chat` (messages with `role` and `content`); other keys are left alone. Where a
prompt has both its ids and the text they came from, the ids are what runs.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxpd.cli.options import parse_token_ids
from jaxpd.errors import InvalidArgument, NotFound

FORMS = ("prompt_ids", "text", "chat")

# What jaxpd.LLM takes as a prompt: text, token ids, or chat messages.
PromptInput = str | tuple[int, ...] | tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt; exactly one of the three is set. `label` is how messages name it."""

    label: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[dict[str, Any], ...] | None = None

    @property
    def value(self) -> PromptInput:
        """The one that is set."""
        for value in (self.token_ids, self.text, self.chat):
            if value is not None:
                return value
        raise InvalidArgument(f"{self.label} is empty; give text, prompt_ids or chat", field="prompt")


def from_flags(
    prompt: str | None, prompt_ids: str | None, chat: str | None, prompt_file: pathlib.Path | None
) -> list[Prompt]:
    """The prompts that the flags name. Raises InvalidArgument unless exactly one of the four is given."""
    flags = {"--prompt": prompt, "--prompt-ids": prompt_ids, "--chat": chat, "--prompt-file": prompt_file}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) != 1:
        got = f"got {' and '.join(given)}" if given else "got none"
        raise InvalidArgument(f"give exactly one of {', '.join(flags)}; {got}", field="prompt")
    if prompt is not None:
        return [Prompt("--prompt", text=prompt)]
    if prompt_ids is not None:
        return [Prompt("--prompt-ids", token_ids=parse_token_ids(prompt_ids))]
    if chat is not None:
        return [Prompt("--chat", chat=({"role": "user", "content": chat},))]
    assert prompt_file is not None
    return from_file(prompt_file)


def from_file(path: pathlib.Path) -> list[Prompt]:
    """The prompts of a prompt file. Raises NotFound or InvalidArgument that name the file, the prompt and the cure."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"--prompt-file {path} does not exist", field="prompt_file") from None
    except OSError as error:
        raise InvalidArgument(f"--prompt-file {path} cannot be read: {error.strerror}", field="prompt_file") from None
    except ValueError as error:  # bad JSON and bad UTF-8
        raise InvalidArgument(f"--prompt-file {path} is not JSON: {error}", field="prompt_file") from None
    items = content.get("prompts") if isinstance(content, dict) else content
    if not isinstance(items, list) or not items:
        raise InvalidArgument(
            f"--prompt-file {path} must hold a list of prompts, or an object whose `prompts` is such a list, with at "
            "least one prompt in it",
            field="prompt_file",
        )
    return [_parse(item, f"--prompt-file {path}: prompt {i}") for i, item in enumerate(items)]


def _parse(item: Any, label: str) -> Prompt:
    form = next((f for f in FORMS if isinstance(item, dict) and f in item), None)
    if form is None:
        raise InvalidArgument(f"{label} must be an object with one of {', '.join(FORMS)}", field="prompt_file")
    value = item[form]
    if form == "prompt_ids":
        if _all_of(value, int):
            return Prompt(label, token_ids=tuple(value))
        raise InvalidArgument(f"{label}: prompt_ids must be a list of whole numbers", field="prompt_file")
    if form == "text":
        if isinstance(value, str):
            return Prompt(label, text=value)
        raise InvalidArgument(f"{label}: text must be a string", field="prompt_file")
    if _all_of(value, dict):
        return Prompt(label, chat=tuple(value))
    raise InvalidArgument(
        f"{label}: chat must be a list of messages such as " + '{"role": "user", "content": "Hello"}',
        field="prompt_file",
    )


def _all_of(value: Any, kind: type) -> bool:
    return isinstance(value, Sequence) and all(type(v) is kind for v in value)
