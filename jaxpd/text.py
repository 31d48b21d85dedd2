"""Text around the engine, which speaks token ids only: prompts to ids, and a stream of ids to text.

    ids -> bytes of each token -> UTF-8, held back while a character is incomplete
        -> held back while it may be the beginning of a stop string -> text that may be shown

Every step costs the length of its new text, however long the answer already is.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpd.errors import InvalidArgument
from jaxpd.tokenizer import Tokenizer


class TextStream:
    """Detokenizes one sequence as it grows. The pieces that `push` and `finish` return add up to its text.

    A stop string ends the text before it, wherever token borders fall; nothing of it, and nothing behind it, is ever
    returned. Of several stop strings the one that is complete first counts, and of those the longest. Special tokens
    are hidden, but for those in `keep`: marks that a parser of the text has to see.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._keep = keep
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.strips_first_space
        self._matchers = [_Matcher(string) for string in dict.fromkeys(stop)]
        self._held = ""  # decoded, and possibly the beginning of a stop string
        self._shown: list[str] = []
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the new text that is safe to show, often "". Ignored once stopped."""
        keep, bytes_of = self._keep, self._tokenizer.token_bytes
        pieces = [bytes_of(token_id, skip_special_tokens=token_id not in keep) for token_id in token_ids]
        return self._take(self._utf8.decode(b"".join(pieces)))

    def finish(self) -> str:
        """The sequence has ended: returns what was held back (an incomplete character becomes U+FFFD)."""
        shown = self._take(self._utf8.decode(b"", final=True))
        if self.stopped:
            return shown
        held, self._held = self._held, ""
        self._shown.append(held)
        return shown + held

    def _take(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        if self._drop_space:
            self._drop_space, text = False, text.removeprefix(" ")
        safe = self._until_stop(text) if self._matchers else text
        self._shown.append(safe)
        return safe

    def _until_stop(self, text: str) -> str:
        start = len(self._held)
        self._held += text
        for at, char in enumerate(text, start + 1):
            complete = [matcher.string for matcher in self._matchers if matcher.feed(char)]
            if complete:
                self.stop_string = max(complete, key=len)
                safe, self._held = self._held[: at - len(self.stop_string)], ""
                return safe
        keep = max(matcher.matched for matcher in self._matchers)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe


class AnswerText:
    """The text of one answer as its tokens come: without the tokens that end it, up to a stop string.

    `hidden` are the ids that end an answer: they belong to its ids and never to its text. `shown` are special tokens
    that its text shows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str],
        hidden: frozenset[int],
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = TextStream(tokenizer, stop, keep=shown)
        self._hidden = hidden
        self._searching = bool(stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stream.stop_string

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stream.stopped

    @property
    def text(self) -> str:
        """All text returned so far."""
        return self._stream.text

    def push(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Takes the next tokens: how many of them belong to the answer (fewer when one completes a stop string), and
        the new text that is safe to show."""
        if self.stop_string is not None:
            return 0, ""
        if not self._searching:
            return len(token_ids), self._stream.push(i for i in token_ids if i not in self._hidden)
        texts = []
        for count, token in enumerate(token_ids, start=1):  # one by one, to find the token that completes it
            if token not in self._hidden:
                texts.append(self._stream.push((token,)))
            if self._stream.stopped:
                return count, "".join(texts)
        return len(token_ids), "".join(texts)

    def finish(self) -> str:
        """The answer has ended: the text that was held back."""
        return self._stream.finish()


class _Matcher:
    """How much of `string` the text ends with, kept up to date char by char (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, string: str) -> None:
        if not string:
            raise InvalidArgument("stop holds an empty string, which would stop at once; leave it out", field="stop")
        self.string = string
        self.matched = 0
        # _border[n]: length of the longest proper border (both prefix and suffix) of string[:n].
        self._border = [0, 0]
        for char in string[1:]:
            self._border.append(self._extend(self._border[-1], char))

    def feed(self, char: str) -> bool:
        """Takes the next character; True when the text now ends with the whole string."""
        self.matched = self._extend(self.matched, char)
        return self.matched == len(self.string)

    def _extend(self, matched: int, char: str) -> int:
        while matched and (matched == len(self.string) or self.string[matched] != char):
            matched = self._border[matched]
        return matched + 1 if self.string[matched] == char else 0


def to_prompt_ids(
    tokenizer: Tokenizer | None,
    *,
    text: str | None = None,
    token_ids: Sequence[int] | None = None,
    chat: Sequence[Mapping[str, Any]] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Token ids of a prompt given in exactly one of three forms; `tokenizer` may be None for token ids.

    Text gets the special tokens that the model expects (BOS) unless `add_special_tokens` is false, chat its template
    with the assistant's turn opened, and token ids are taken as they are. `tools` and `template_options` are for chat.
    Raises InvalidArgument naming the field for none or several forms, an empty prompt, or one that needs what the model
    lacks.
    """
    given = {"text": text, "token_ids": token_ids, "chat": chat}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        got = " and ".join(named) or "none"
        raise InvalidArgument(f"a prompt is exactly one of text, token_ids and chat; got {got}", field="prompt")
    for field, option in (("tools", tools), ("template_options", template_options)):
        if option and chat is None:
            raise InvalidArgument(f"{field} belongs to a chat and not to {named[0]}; leave it out", field=field)
    if not given[named[0]]:
        raise InvalidArgument(f"prompt {named[0]} is empty; give at least one token", field=named[0])
    if token_ids is not None:
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise InvalidArgument(f"token_ids holds {token_id!r:.40}, which is not an integer", field="token_ids")
        return tuple(token_ids)
    if tokenizer is None:
        raise _no_tokenizer(named[0])
    if chat is not None:
        return tuple(tokenizer.apply_chat_template(chat, tools=tools, options=template_options))
    if not isinstance(text, str):
        raise InvalidArgument(f"text is {type(text).__name__}, not a string", field="text")
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def prompt_text(
    tokenizer: Tokenizer | None,
    chat: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat's prompt: as `text` with `add_special_tokens=False` it gives the ids that the chat gives.

    Raises InvalidArgument as `to_prompt_ids` does.
    """
    if tokenizer is None:
        raise _no_tokenizer("chat")
    if not chat:
        raise InvalidArgument("prompt chat is empty; give at least one message", field="chat")
    return tokenizer.render_chat(chat, tools=tools, options=template_options)


def _no_tokenizer(field: str) -> InvalidArgument:
    return InvalidArgument(f"this model has no tokenizer; give token_ids instead of {field}", field=field)
