"""Pieces of answers in OpenAI's shape: tokens as text, log probabilities, usage, finish reasons, timings."""

from __future__ import annotations

import codecs
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpd.request import TokenLogprobs, Usage
from jaxpd.tokenizer import Tokenizer
from serving.messages import Finished
from serving.model import ServedModel

Json = dict[str, Any]


class TokenTexts:
    """How single tokens are written. One that is no whole character is `bytes:\\xe2\\x82`; no two tokens look the same
    because of it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.strips_first_space = tokenizer is not None and tokenizer.strips_first_space
        self.text = functools.lru_cache(maxsize=1 << 16)(self._text)

    def bytes_of(self, token: int) -> bytes:
        """What the token adds to the text, special ones spelled out; nothing where the model has no tokenizer."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token, skip_special_tokens=False)

    def shown_bytes(self, token: int) -> bytes:
        """The same without special tokens, which text does not have."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """The `logprobs` object of completions, chunk by chunk: offsets go on where the last chunk ended."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._drop_space = False
        self.begin()

    def begin(self) -> None:
        """The prompt begins, or the answer: some tokenizers drop the first space of each."""
        self._drop_space = self._texts.strips_first_space

    def chunk(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        """Of these tokens; None stands for the prompt's first, which has nothing before it."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            shown = self._utf8.decode(self._texts.shown_bytes(token))
            if shown and self._drop_space:
                self._drop_space, shown = False, shown.removeprefix(" ")
            self._offset += len(shown)
        text = self._texts.text
        return {
            "tokens": [text(token) for token in tokens],
            "token_logprobs": [None if entry is None else entry.logprob for entry in logprobs],
            "top_logprobs": [
                None if entry is None else {**{text(t): p for t, p in entry.top}, text(token): entry.logprob}
                for token, entry in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


def chat_logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> Json:
    """The `logprobs` object of a chat's choice."""

    def entry(token: int, logprob: float) -> Json:
        return {"token": texts.text(token), "logprob": logprob, "bytes": list(texts.bytes_of(token))}

    content = [
        {**entry(token, of.logprob), "top_logprobs": [entry(t, p) for t, p in of.top]}
        for token, of in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for every token of the prompt but the first, what the model thought of it."""

    def entries(token: int, of: TokenLogprobs) -> Json:
        ranked: dict[int, tuple[float, int | None]] = {t: (p, rank) for rank, (t, p) in enumerate(of.top, start=1)}
        ranked.setdefault(token, (of.logprob, None))
        return {str(t): {"logprob": p, "rank": rank, "decoded_token": texts.text(t)} for t, (p, rank) in ranked.items()}

    return [None, *(entries(token, of) for token, of in zip(tokens[1:], logprobs, strict=True))]


def usage_of(usages: Iterable[Usage]) -> Json:
    """Of a whole answer; one `Usage` a prompt, its samples taken together."""
    prompt, completion, cached = 0, 0, 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def stop_reason(finished: Finished, model: ServedModel) -> int | str | None:
    """The stop string or stop token id that ended the answer; None for EOS and all else."""
    if finished.stop_string is not None:
        return finished.stop_string
    token = finished.stop_token_id
    return None if token in model.eos_token_ids else token


def timings_of(finished: Finished) -> Json:
    """`timings` and `timeline` of a sample, in seconds."""
    moments = finished.timeline or ()
    return {
        "timings": dataclasses.asdict(finished.timings),
        "timeline": [{"stage": m.stage.value, "at_s": m.at_s, "tokens": m.tokens} for m in moments],
    }


def texts_of(model: ServedModel) -> TokenTexts:
    """How the model's tokens are written."""
    return _texts(model.tokenizer)


@functools.lru_cache(maxsize=2)
def _texts(tokenizer: Tokenizer | None) -> TokenTexts:
    return TokenTexts(tokenizer)
