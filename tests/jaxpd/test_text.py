"""Streams of text: every cut into tokens gives the same text, and stop strings hold across every border."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxpd.errors import InvalidArgument
from jaxpd.text import TextStream, to_prompt_ids
from jaxpd.tokenizer import Tokenizer, byte_alphabet


class CountingTokenizer(Tokenizer):
    """Knows how many tokens it was asked to decode."""

    decoded = 0

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        self.decoded += 1
        return super().token_bytes(token_id, skip_special_tokens=skip_special_tokens)


def make_tokenizer(**options: Any) -> CountingTokenizer:
    """Ids 0 to 255 are the bytes, 256 is "ab", 257 is the special </s>."""
    vocab = dict(byte_alphabet())
    vocab["ab"] = 256
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return CountingTokenizer(backend, special_tokens={"eos_token": "</s>"}, **options)


TOKENIZER = make_tokenizer()


def run(stream: TextStream, pushes: Sequence[Sequence[int]]) -> list[str]:
    return [*(stream.push(ids) for ids in pushes), stream.finish()]


def cut(ids: Sequence[int], at: Sequence[int]) -> list[Sequence[int]]:
    borders = [0, *sorted(at), len(ids)]
    return [ids[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def test_never_half_a_character() -> None:
    assert run(TextStream(TOKENIZER), [[byte] for byte in "é😀a".encode()]) == ["", "é", "", "", "", "😀", "a", ""]
    assert run(TextStream(TOKENIZER), [[0xE2, 0x82]]) == ["", "\ufffd"]
    assert run(TextStream(TOKENIZER), [[0xE2], [0x82], [97]]) == ["", "", "\ufffda", ""]


@given(st.lists(st.integers(0, 257), max_size=40), st.data())
def test_the_pieces_are_the_decoded_text(ids: list[int], data: st.DataObject) -> None:
    """Any ids, also ones whose bytes are no UTF-8, in any batches."""
    at = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    stream = TextStream(TOKENIZER)
    pieces = run(stream, cut(ids, at))
    assert "".join(pieces) == TOKENIZER.decode(ids) == stream.text
    assert not stream.stopped


def reference_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that ends first (the longest of those that end there), by trying every end."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=5), max_size=3), st.integers(0))
@example("aaab", ["aab"], 0)  # the text falls back onto a shorter beginning of the stop string
@example("bab", ["ab", "bab", "b "], 1)  # two end at once: the longest counts
def test_stop_strings_across_every_border(text: str, stop: list[str], seed: int) -> None:
    ids = TOKENIZER.encode(text)
    at = [border for border in range(len(ids)) if random.Random(f"{seed} {border}").random() < 0.5]
    stream = TextStream(TOKENIZER, stop)
    expected, string = reference_stop(text, stop)
    shown = ""
    for piece in run(stream, cut(ids, at)):
        shown += piece
        assert expected.startswith(shown), "text was shown that should have been held back"
    assert (shown, stream.text, stream.stop_string) == (expected, expected, string)


def test_holds_back_no_more_than_it_must() -> None:
    stream = TextStream(TOKENIZER, ["\n\nUser:"])
    assert stream.push(b"one\n") == "one"
    assert stream.push(b"two\n\nUs") == "\ntwo"
    assert stream.push(b"e") == ""
    assert stream.push(b"d") == "\n\nUsed"
    assert stream.push(b"\n\nUser: leak") == ""
    assert stream.stopped and stream.stop_string == "\n\nUser:"
    assert stream.push(b"more") == stream.finish() == ""
    assert stream.text == "one\ntwo\n\nUsed"


def test_what_is_held_back_comes_out_at_the_end() -> None:
    stream = TextStream(TOKENIZER, ["END"])
    assert stream.push(b"the EN") == "the "
    assert stream.finish() == "EN"
    late = TextStream(TOKENIZER, ["\ufffd"])
    assert run(late, [b"a\xe2"]) == ["a", ""]
    assert late.stopped


def test_special_tokens_are_not_shown() -> None:
    assert run(TextStream(TOKENIZER), [[97, 257], [257, 98]]) == ["a", "b", ""]


def test_the_space_in_front_is_dropped_once() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"\u2581": 0, "a": 1}, []))
    backend.decoder = decoders.Metaspace()
    assert run(TextStream(Tokenizer(backend)), [[], [0], [1], [0, 1]]) == ["", "", "a", " a", ""]


def test_every_token_is_decoded_once() -> None:
    tokenizer = make_tokenizer()
    stream = TextStream(tokenizer, ["never there"])
    for _ in range(5000):
        stream.push([0xE2])  # bytes that never become a character
        stream.push([97])
    stream.finish()
    assert tokenizer.decoded == 10_000
    assert stream.text == "\ufffda" * 5000


def test_empty_stop_string() -> None:
    with pytest.raises(InvalidArgument, match="empty string"):
        TextStream(TOKENIZER, [""])


# ---- prompts ----


def test_prompts_in_their_three_forms() -> None:
    chat = make_tokenizer(chat_template="{{ messages[0].content }}</s>")
    assert to_prompt_ids(chat, text="ab</s>") == (256, 257)
    assert to_prompt_ids(None, token_ids=[3, 1]) == (3, 1)
    assert to_prompt_ids(chat, chat=[{"role": "user", "content": "ab"}]) == (256, 257)


@pytest.mark.parametrize(
    ("given_", "field", "message"),
    [
        ({}, "prompt", "exactly one of text, token_ids and chat; got none"),
        ({"text": "a", "chat": []}, "prompt", "got text and chat"),
        ({"text": ""}, "text", "text is empty"),
        ({"token_ids": []}, "token_ids", "token_ids is empty"),
        ({"chat": []}, "chat", "chat is empty"),
        ({"token_ids": [1, "2"]}, "token_ids", "holds '2'"),
        ({"token_ids": [True]}, "token_ids", "holds True"),
        ({"token_ids": [1.0]}, "token_ids", "holds 1.0"),
        ({"text": 3}, "text", "text is int"),
        ({"text": "\ud800"}, "text", "surrogate"),
        ({"chat": [{"role": "user", "content": "a"}]}, "chat", "no chat template"),
    ],
)
def test_bad_prompts_name_their_field(given_: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        to_prompt_ids(TOKENIZER, **given_)
    assert caught.value.field == field


def test_a_model_without_tokenizer() -> None:
    with pytest.raises(InvalidArgument, match="give token_ids instead of text"):
        to_prompt_ids(None, text="a")
