"""Structured output: whatever allowed tokens are drawn, the text matches; EOS comes when it may, and only then.

The walks draw among the allowed tokens with fixed seeds, and lean towards tokens that close something, so as to end.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxpd import grammar as module
from jaxpd.checkpoints import resolve
from jaxpd.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxpd.errors import InvalidArgument, Unavailable
from jaxpd.grammar import GrammarCompiler
from jaxpd.progress import SilentProgress
from jaxpd.tokenizer import Tokenizer, load_tokenizer
from tests.jaxpd.grammar_walks import EOS, TINY, VOCAB, allowed, conforms, spec, walk


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def compiler(tiny: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny, VOCAB, EOS)


def sentencepiece(*, prefix: bool) -> Tokenizer:
    """A Llama-like vocabulary; ids 3 to 258 are the bytes, and "a" and "b" have a token besides. EOS is 2."""
    words = ["\u2581", "a", "b", "ba", "ab", "\u2581ab", "\u2581{", "\u2581a", "\n"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * len(words)]),
            "tokenizer.ggml.scores": np.array([0.0] * 259 + [-1.0 - i for i in range(len(words))]),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": prefix,
        },
        where="it",
    )


SHORT = {"type": "string", "maxLength": 8}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": SHORT,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "color": {"enum": ["red", "grün", "\u84dd", None, 7]},
            "at": {
                "type": "object",
                "properties": {"x": {"type": "number", "minimum": -1.5, "maximum": 2}, "ok": {"type": "boolean"}},
                "required": ["x", "ok"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "color", "at"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"v": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{2,5}$"}]}},
        "required": ["v"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"\u00e9 \"key'": SHORT, "opt": SHORT}, "additionalProperties": False},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_json_parses_and_conforms(compiler: GrammarCompiler, tiny: Tokenizer, schema: dict[str, Any]) -> None:
    compiled = compiler.compile(spec("json_schema", schema))
    texts = [tiny.decode(walk(compiled.new_state(), tiny, seed)) for seed in range(25)]
    assert len(set(texts)) > 10
    for text in texts:
        assert conforms(json.loads(text), schema), text


def test_the_checker_sees_what_does_not_conform() -> None:
    good = {"name": "a", "age": 3, "color": None, "at": {"x": 0, "ok": True}}
    assert conforms(good, SCHEMAS[0])
    bad = [{**good, "age": 151}, {**good, "age": True}, {**good, "name": "a" * 9}, {**good, "more": 1}]
    bad += [{**good, "color": "blue"}, {**good, "at": {"x": 3, "ok": True}}, {"name": "a"}, {**good, "at": {"x": 0}}]
    assert not any(conforms(value, SCHEMAS[0]) for value in bad)
    assert not conforms([1], SCHEMAS[1]) and not conforms({"v": "abcd1"}, SCHEMAS[2]) and not conforms([], SCHEMAS[2])


def test_any_object_parses_and_spaces_are_bounded(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    compiled = compiler.compile(spec("json_object"))
    for seed in range(20):
        assert isinstance(json.loads(tiny.decode(walk(compiled.new_state(), tiny, seed))), dict)
    spaces = [32] * module.MAX_SPACES
    assert 32 not in allowed(compiled.new_state([ord("{"), *spaces]))
    compiled.new_state([ord("{"), *spaces, ord("}")])
    pretty = json.dumps({"a": [1, {"b": [None, {}]}]}, indent=4)
    state = compiled.new_state(tiny.encode(pretty))
    assert state.accepting


REGEXES = [r"[A-Z][a-z]{1,5} \d{3}-\d{4}", r"(\+|-)?[0-9]{1,4}(\.[0-9]{1,3})?", r"a|ab|abc\\", r"(?s).{3,6}"]
REGEXES += [r"[äöüß]{2,4}|[\u4e00-\u4eff]{2}|😀{1,2}", r"x/\"y\n{1,2}z", r"[\d.]{4}", "a/\n\tb?", r"(the|hello ){0,3}!"]


@pytest.mark.parametrize("regex", REGEXES)
def test_all_of_the_text_matches_a_regex(compiler: GrammarCompiler, tiny: Tokenizer, regex: str) -> None:
    compiled = compiler.compile(spec("regex", regex))
    for seed in range(25):
        text = tiny.decode(walk(compiled.new_state(), tiny, seed))
        assert re.fullmatch(regex, text), text
        assert "\ufffd" not in text


CHOICES: tuple[str, ...] = (
    "yes",
    "no",
    "yes, but",
    'q"uo\\te\n',
    "näher",
    "\u4f60\u597d",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "a",
)
CHOICES += ("<|im_end|>", "see <s> and </s>", "\x00\u2028|/", "hello the thing", "\u00e9", "e\u0301", "a$b")


def test_a_choice_is_one_of_them_and_all_are_reached(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    compiled = compiler.compile(spec("choice", CHOICES))
    seen = {tiny.decode(walk(compiled.new_state(), tiny, seed)) for seed in range(250)}
    assert seen == set(CHOICES)
    for text in CHOICES:
        state = compiled.new_state(tiny.encode(text) if "<" not in text else list(text.encode()))
        assert state.accepting
        assert state.finished == (not any(other.startswith(text) and other != text for other in CHOICES))


def test_the_mask_is_every_token_that_fits_where_several_texts_can_follow(
    compiler: GrammarCompiler, tiny: Tokenizer
) -> None:
    words = ("the thing", "therein", "a", "an", "anther", "inner", "\u00e9\u00e8", "in")
    compiled = compiler.compile(spec("choice", words))
    for written in ("", "the", "a", "in"):
        left = [word.encode()[len(written) :] for word in words if word.startswith(written)]
        texts = {i: tiny.token_bytes(i) for i in range(VOCAB)}
        want = {i for i, text in texts.items() if text and any(rest.startswith(text) for rest in left)}
        assert allowed(compiled.new_state(list(written.encode()))) - set(EOS) == want
    # one text can follow: the token with which the tokenizer would begin it
    assert allowed(compiled.new_state(list(b"ther"))) == {tiny.encode("ein")[0]}
    # half a character, and the other halves
    assert allowed(compiled.new_state([0xC3])) == {0xA9}


LARK = r"""
start: expr
expr: term | expr OP term
term: NUMBER | "(" expr ")"
OP: /[-+*]/
NUMBER: /[1-9][0-9]{0,2}/
"""


def test_a_grammar_counts_its_brackets(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    compiled = compiler.compile(spec("grammar", LARK))
    texts = [tiny.decode(walk(compiled.new_state(), tiny, seed)) for seed in range(25)]
    assert any("(" in text for text in texts)
    for text in texts:
        assert re.fullmatch(r"[-+*()0-9]+", text)
        assert isinstance(eval(text), int), text  # digits, operators and brackets alone


# ---- other kinds of tokenizers ----


@pytest.mark.parametrize("prefix", [False, True])
def test_what_the_client_sees_matches_with_sentencepiece(prefix: bool) -> None:
    tokenizer = sentencepiece(prefix=prefix)
    assert tokenizer.strips_first_space == prefix
    vocab = tokenizer.vocab_size + 5
    compiler = GrammarCompiler(tokenizer, vocab, tokenizer.eos_token_ids)
    schema = {"type": "object", "properties": {"ab ba": SHORT}, "required": ["ab ba"], "additionalProperties": False}
    cases = [spec("regex", r" ?(ab){1,3}é?| a"), spec("json_schema", schema), spec("choice", ["ab a", " ab", "b ab"])]
    cases += [spec("grammar", 'start: "a" b* " b"\nb: "ba" | "你"')]
    checks: list[Any] = [
        lambda text: re.fullmatch(r" ?(ab){1,3}é?| a", text),
        lambda text: conforms(json.loads(text), schema),
        lambda text: text in ("ab a", " ab", "b ab"),
        lambda text: re.fullmatch("a(ba|你)* b", text),
    ]
    for case, check in zip(cases, checks, strict=True):
        compiled = compiler.compile(case)
        for seed in range(15):
            text = tokenizer.decode(walk(compiled.new_state(), tokenizer, seed, vocab=vocab, eos=(2,)))
            assert check(text), (case, text)
    begins = {tokenizer.token_bytes(i)[:1] for i in allowed(compiler.compile(spec("json_object")).new_state(), vocab)}
    assert begins == ({b" "} if prefix else {b"{"})


def test_tokens_with_the_same_bytes_are_all_allowed() -> None:
    tokenizer = sentencepiece(prefix=False)
    same = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"a"]
    assert len(same) == 2
    state = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,)).compile(spec("regex", "[ab]{2,}")).new_state()
    assert set(same) <= allowed(state, tokenizer.vocab_size)
    for token in same:
        state.accept(token)
    assert state.accepting


@pytest.mark.parametrize("make", [lambda: load_tokenizer(TINY), lambda: sentencepiece(prefix=True)])
def test_forced_text_is_written_without_special_tokens_and_to_the_byte(make: Any) -> None:
    tokenizer = make()
    vocabulary = module._Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    texts = ["hello the thing", "ab", " ab", "  a\n\n b", "\nab", "<|im_end|>", "</s>a", "é你😀", "e\u0301", "", "\x00"]
    for text in texts:
        for given in (text, text.encode()):
            ids = vocabulary(given)
            assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert len(vocabulary("hello the")) < 4 or tokenizer.strips_first_space


@pytest.mark.parametrize("prefix", [False, True])
def test_forced_text_is_written_as_the_tokenizer_would_mid_sentence(prefix: bool) -> None:
    vocabulary = module._Vocabulary(tokenizer := sentencepiece(prefix=prefix), 268, (2,))
    assert [tokenizer.token_bytes(i) for i in vocabulary("aba")] == [b"a", b"ba"]  # longest first would be "ab", "a"


def test_a_vocabulary_that_cannot_write_the_text_says_so() -> None:
    alphabet = {char: i for i, char in enumerate("abc")}
    backend = tokenizers.Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    compiler = GrammarCompiler(Tokenizer(backend), 4, (3,))
    assert allowed(compiler.compile(spec("regex", "[a-z]")).new_state(), 4) == {0, 1, 2}
    with pytest.raises(InvalidArgument, match="no text that this model's tokens can write"):
        compiler.compile(spec("regex", "[x-z]a"))
    state = compiler.compile(spec("regex", "a[x-z]|b")).new_state([0])
    with pytest.raises(InvalidArgument, match="allows nothing after 1 tokens of output"):
        allowed(state, 4)


def test_the_default_model_writes_json_with_its_real_vocabulary() -> None:
    try:
        tokenizer = resolve("smollm2-135m", progress=SilentProgress()).tokenizer()
    except Unavailable as error:
        pytest.skip(f"smollm2-135m is not in the cache and cannot be fetched: {error}")
    vocab, eos = tokenizer.vocab_size, tokenizer.eos_token_ids
    compiler = GrammarCompiler(tokenizer, vocab, eos)
    compiled = compiler.compile(spec("json_schema", SCHEMAS[0]))
    for seed in range(10):
        text = tokenizer.decode(walk(compiled.new_state(), tokenizer, seed, vocab=vocab, eos=eos))
        assert conforms(json.loads(text), SCHEMAS[0])
    answer = tokenizer.encode('{"name": "Zoë", "age": 7, "color": "grün", "at": {"x": 1.25, "ok": true}}')
    assert compiled.new_state(answer).finished
