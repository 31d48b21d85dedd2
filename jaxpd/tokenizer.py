"""Text to token ids and back, and chat templates: one class over the `tokenizers` package.

Encoding is the package's. Decoding is ours and goes by bytes: every token stands for some bytes, and text is those
bytes as UTF-8, so that a character in three tokens comes out whole, one broken byte spoils only itself (the package's
byte fallback replaces the whole run), and a stream can be decoded token by token (`jaxpd.text`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxpd.chat_template import ChatTemplate
from jaxpd.errors import InvalidArgument, NotFound

_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer with its special tokens and chat template. Safe to use from several threads.

    `special_tokens` maps roles such as `bos_token` to their text; templates see them under these names.
    `named_templates` are templates beside `chat_template`, of which `tool_use` is the one for requests with tools.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        named_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        backend.no_truncation()  # saved with some tokenizers: it would cut prompts without a word
        backend.no_padding()
        self.chat_template = chat_template
        self.named_templates = dict(named_templates or {})
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_text = {i: token.content for i, token in added.items()}
        self._to_bytes, self.strips_first_space = _byte_decoder(backend)
        eos = self.special_tokens.get("eos_token")
        eos_id = backend.token_to_id(eos) if eos is not None else None
        ids = [*eos_token_ids] if eos_id is None else [eos_id, *eos_token_ids]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def template_for(self, *, tools: bool) -> str | None:
        """The source of the chat template that a request with or without tools is written with."""
        return self.named_templates.get("tool_use", self.chat_template) if tools else self.chat_template

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so; None where there is none, or it is an ordinary token."""
        token_id = self.backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a prompt, such as BOS.

        Special tokens spelled out in `text` become those tokens. Raises InvalidArgument for text that is not Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidArgument("text holds half of a surrogate pair, which is no character", field="text") from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary stand for nothing."""
        data = b"".join(self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in ids)
        text = data.decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token adds to the text; none for a special token that is skipped or an unknown id."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        return self._bytes_of(token_id)

    @functools.cached_property
    def _bytes_of(self) -> Callable[[int], bytes]:
        @functools.lru_cache(maxsize=1 << 16)
        def of(token_id: int) -> bytes:
            if token_id in self._added_text:
                return self._to_bytes(self._added_text[token_id], True)
            token = self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            return b"" if token is None else self._to_bytes(token, False)

        return of

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises InvalidArgument for bad messages or a model without a chat template."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options)
        return self.encode(text, add_special_tokens=False)  # the template writes BOS itself

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text behind `apply_chat_template`; `tools` and `options` are those of `ChatTemplate.render`."""
        source = self.template_for(tools=bool(tools))
        if source is None:
            raise InvalidArgument("this model has no chat template; send the prompt as text or token ids", field="chat")
        if add_generation_prompt is not None:
            options = {"add_generation_prompt": add_generation_prompt, **(options or {})}
        return _compiled(source).render(messages, self.special_tokens, tools=tools, options=options)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which `load_tokenizer` makes the same tokenizer."""
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = dict(self.special_tokens)
        if self.named_templates:
            default = {} if self.chat_template is None else {"default": self.chat_template}
            named = {**self.named_templates, **default}
            config["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        config["eos_token_ids"] = list(self.eos_token_ids)
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def load_tokenizer(folder: Path, *, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, and tokenizer_config.json, special_tokens_map.json and
    chat_template.jinja where they exist.

    Raises NotFound when there is no tokenizer.json, InvalidArgument when a file is corrupt.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFound(
            f"{folder} has no tokenizer.json, so the model takes and gives token ids only; "
            "save the tokenizer in its fast format into that folder"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise InvalidArgument(f"{path} is not a tokenizer that can be read: {error}") from error
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    special = {role: text for role in _SPECIAL_ROLES if (text := _content(config.get(role))) is not None}
    template = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.pop("default", next(iter(named.values()), None))
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():  # the newer place; what is named in the older one is not of the same age
        template, named = jinja.read_text(encoding="utf-8"), {}
    ids = [*config.get("eos_token_ids", ()), *eos_token_ids]
    return Tokenizer(backend, chat_template=template, named_templates=named, special_tokens=special, eos_token_ids=ids)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path} is corrupt: {error}") from error


def _content(token: Any) -> str | None:
    """A special token is written as text or as an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


# ---- tokens to bytes ----

_ToBytes = Callable[[str, bool], bytes]  # (token, is it an added token) -> bytes


def _byte_decoder(backend: tokenizers.Tokenizer) -> tuple[_ToBytes, bool]:
    """How the tokenizer's decoder turns one token into bytes, and whether it drops the text's first space.

    Raises InvalidArgument naming a decoder that is no such map.
    """
    if backend.decoder is None:  # the package joins tokens with spaces
        return (lambda token, added: b" " + token.encode()), True
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    replacements: list[tuple[str, str]] = []
    byte_level = byte_fallback = strip = False
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            strip |= step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and step["stop"] == 0:
            strip |= step["start"] == 1
        elif kind != "Fuse":
            raise InvalidArgument(
                f"unsupported tokenizer decoder {kind}; supported are byte-level and SentencePiece ones"
            )
    alphabet = byte_alphabet()

    def to_bytes(token: str, added: bool) -> bytes:
        if byte_level and not added:
            known = [alphabet.get(char) for char in token]
            return token.encode() if None in known else bytes(known)  # type: ignore[arg-type]
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes, strip


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: itself where it prints, else the next character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
