"""Structured output: the states of sequences, and what is compiled, shared and refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from jaxpd import grammar as module
from jaxpd.errors import FailedPrecondition, InvalidArgument, JaxpdError, ResourceExhausted
from jaxpd.grammar import GrammarCompiler, GrammarState
from jaxpd.structured import StructuredOutput
from jaxpd.tokenizer import Tokenizer, load_tokenizer
from tests.jaxpd.grammar_walks import EOS, TINY, VOCAB, allowed, spec, walk


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def compiler(tiny: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny, VOCAB, EOS)


# ---- states ----


def stands(state: GrammarState) -> tuple[bool, bool]:
    return state.accepting, state.finished


def test_ends_are_allowed_exactly_where_the_text_is_complete(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("regex", "ab?")).new_state()
    with pytest.raises(RuntimeError, match="EOS token 281 at output index 0 ends an incomplete answer"):
        state.accept(281)
    assert stands(state) == (False, False) and not allowed(state) & set(EOS)
    state.accept(ord("a"))
    assert stands(state) == (True, False) and allowed(state) == {ord("b"), *EOS}
    state.accept(ord("b"))
    assert stands(state) == (True, True) and allowed(state) == set(EOS)
    state.accept(283)
    state.accept(281)  # EOS may repeat where it is ignored
    assert stands(state) == (True, True) and allowed(state) == set(EOS)
    with pytest.raises(RuntimeError, match="token 97 at output index 4"):
        state.accept(97)


def test_nothing_follows_eos_even_where_the_grammar_would_go_on(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("regex", "ab?")).new_state([ord("a"), 283])
    with pytest.raises(RuntimeError, match="token 98 at output index 2 is not allowed"):
        state.accept(ord("b"))


def test_a_grammar_that_asks_for_eos_itself_cannot_end_an_incomplete_answer(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("grammar", 'start: "a" <[283]> "b"')).new_state([ord("a")])
    with pytest.raises(InvalidArgument, match="allows nothing after 1 tokens"):
        allowed(state)
    with pytest.raises(RuntimeError, match="EOS"):
        state.accept(283)


@pytest.mark.parametrize("token", [ord("x"), 280, 282, 286, 290, VOCAB, 10**6, -1])
def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing(compiler: GrammarCompiler, token: int) -> None:
    state = compiler.compile(spec("regex", "a[bc]d")).new_state([ord("a")])
    before = allowed(state)
    with pytest.raises(RuntimeError, match=f"token {token} at output index 1 is not allowed"):
        state.accept(token)
    assert allowed(state) == before == {ord("b"), ord("c")}
    state.accept(ord("b"))
    assert allowed(state) == {ord("d")}


def test_states_are_independent_and_can_be_rebuilt(compiler: GrammarCompiler, tiny: Tokenizer) -> None:
    compiled = compiler.compile(
        spec("json_schema", {"type": "array", "items": {"enum": ["the", 1, None, "é"]}, "minItems": 4})
    )
    one, other = compiled.new_state(), compiled.new_state()
    at_start = allowed(other)
    ids = walk(one, tiny, 3)
    assert allowed(other) == at_start
    step_by_step = compiled.new_state()
    for index, token in enumerate(ids[:30]):
        assert allowed(compiled.new_state(ids[:index])) == allowed(step_by_step)
        step_by_step.accept(token)
    assert len(ids) > 5


def test_a_grammar_that_grows_too_complex_ends_its_sequence_with_a_clear_error(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEXER_STATES", 300)  # that many are needed soon
    state = GrammarCompiler(tiny, VOCAB, EOS).compile(spec("regex", "[abc]*(a[abc]{20}|b[abc]{20})")).new_state()
    random = np.random.default_rng(0)
    with pytest.raises(InvalidArgument, match=r"too complex after \d+ tokens of output; make it simpler \(.*too many"):
        for _ in range(300):
            state.accept(int(random.choice(sorted(allowed(state) & set(b"abc")))))
    assert not any(stands(state))
    with pytest.raises(InvalidArgument, match="too complex"):
        allowed(state)
    with pytest.raises(InvalidArgument, match="too complex"):
        state.accept(ord("a"))


@pytest.mark.parametrize("vocab", [287, 288, 289, 319, 320, 321])
def test_vocabularies_that_fill_their_last_word_and_that_do_not(tiny: Tokenizer, vocab: int) -> None:
    state = GrammarCompiler(tiny, vocab, (283, vocab - 1)).compile(spec("regex", "[ab]c?")).new_state()
    assert allowed(state, vocab) == {ord("a"), ord("b")}
    state.accept(ord("a"))
    assert allowed(state, vocab) == {ord("c"), 283, vocab - 1}


def test_masks_of_the_wrong_shape_are_refused(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("regex", "a")).new_state()
    for wrong in (np.zeros(9, np.int32), np.zeros(10, np.int64), np.zeros((1, 10), np.int32)):
        with pytest.raises(ValueError, match="at least 10 words of int32"):
            state.mask(wrong)
    table = np.zeros((3, 10), np.int32)
    state.mask(table[1])
    assert table[1].any() and not table[0].any() and not table[2].any()


# ---- compiling ----


def test_equal_requests_share_a_grammar_and_threads_may_compile_at_once(tiny: Tokenizer) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, EOS)
    out: list[list[int]] = []

    def work(seed: int) -> None:
        compiled = compiler.compile(spec("regex", f"[a-d]{{{seed % 3 + 1}}}x"))
        out.append(walk(compiled.new_state(), tiny, seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(out) == 12 and all(re.fullmatch("[a-d]{1,3}x", tiny.decode(ids)) for ids in out)
    assert compiler.compile(spec("regex", "[a-d]{1}x")) is compiler.compile(spec("regex", "[a-d]{1}x"))
    first = compiler.compile(spec("regex", "keep"))
    for i in range(module._KEPT - 1):
        compiler.compile(spec("choice", [f"c{i}"]))
    assert compiler.compile(spec("regex", "keep")) is first
    for i in range(module._KEPT):
        compiler.compile(spec("choice", [f"d{i}"]))
    assert compiler.compile(spec("regex", "keep")) is not first


WRONG = [
    ("regex", "a(b", ["does not compile", "unclosed group"]),
    ("regex", r"(?=a)b", ["look-around"]),
    ("regex", r"(a)\1", ["backreference"]),
    ("regex", r"[^\s\S]", ["matches no text"]),
    ("regex", "(" * 4000 + "a" + ")" * 4000, ["does not compile", "nest"]),
    ("json_schema", {"type": "objct"}, ["Invalid type: objct"]),
    ("json_schema", {"not": {"type": "string"}}, ['Unimplemented keys: ["not"]']),
    ("json_schema", {"$ref": "#/$defs/gone"}, ["gone"]),
    ("json_schema", {"$ref": "#"}, ["matches no text"]),
    ("json_schema", '{"type": "string", "maxLength": NaN}', ["does not compile"]),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 4}, ["structured_output"]),
    ("json_schema", {"x-guidance": 3}, ["does not compile"]),
    ("grammar", "start: nothing", ["unknown name", "nothing"]),
    ("grammar", 'begin: "a"', ["start"]),
    ("grammar", '{"grammars": [{"json_schema": {}}]}', ["does not compile"]),
    ("grammar", "start: <|nope|>", ["<|nope|>"]),
    ("grammar", "start: " + "(" * 30_000, ["nested"]),
    ("grammar", 'start: "' + "x" * 5000, ["does not compile"]),
]


@pytest.mark.parametrize(("kind", "text", "words"), WRONG)
def test_errors_in_grammars_say_what_is_wrong(
    compiler: GrammarCompiler, kind: str, text: Any, words: list[str]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(spec(kind, text))
    message = caught.value.message
    assert message.startswith("structured_output") and len(message) < 450 and "\n" not in message
    assert caught.value.field == "structured_output"
    for word in words:
        assert word in message


def test_bad_requests_do_not_reach_the_compiler(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidArgument, match="structured_output.kind"):
        compiler.compile(StructuredOutput(kind="xml"))


def test_long_chains_of_rules_do_not_end_the_process(compiler: GrammarCompiler) -> None:
    """On the usual stack of 8 MB they do: llguidance recurses."""
    rules = "start: a0\n" + "".join(f"a{i}:a{i + 1}\n" for i in range(4500)) + 'a4500:"a"\n'
    state = compiler.compile(spec("grammar", rules)).new_state([ord("a")])
    assert state.finished
    refs: dict[str, Any] = {f"r{i}": {"items": {"$ref": f"#/$defs/r{i + 1}"}} for i in range(1500)}
    schema = json.dumps({"$ref": "#/$defs/r0", "$defs": {**refs, "r1500": {}}}, separators=(",", ":"))
    assert compiler.compile(spec("json_schema", schema)).new_state([ord("["), ord("]")]).accepting


def test_what_takes_too_long_is_refused_and_too_much_at_once_too(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tiny, VOCAB, EOS)
    compiler.compile(spec("regex", "a"))
    slow, go_on = threading.Event(), threading.Event()
    compile_it = compiler._compile

    def held(asked: StructuredOutput) -> Any:
        slow.set()
        assert go_on.wait(60)
        return compile_it(asked)

    monkeypatch.setattr(compiler, "_compile", held)
    monkeypatch.setattr(module, "_COMPILE_S", 0.05)
    for text in ("b", "c"):
        with pytest.raises(InvalidArgument, match="to compile; make it simpler"):
            compiler.compile(spec("regex", text))
    assert slow.is_set()
    with pytest.raises(ResourceExhausted, match="2 other grammars"):
        compiler.compile(spec("regex", "d"))
    monkeypatch.setattr(module, "_COMPILE_S", 60.0)
    go_on.set()
    assert allowed(compiler.compile(spec("regex", "d")).new_state()) == {ord("d")}


def test_models_without_tokenizer_or_eos_are_told() -> None:
    with pytest.raises(FailedPrecondition, match="no tokenizer"):
        GrammarCompiler(None, VOCAB, EOS).compile(spec("json_object"))
    with pytest.raises(FailedPrecondition, match="no EOS"):
        GrammarCompiler(load_tokenizer(TINY), VOCAB, ()).compile(spec("json_object"))


def test_a_missing_package_is_named(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'jaxpd\[structured\]'") as caught:
        GrammarCompiler(tiny, VOCAB, EOS).compile(spec("json_object"))
    assert isinstance(caught.value, JaxpdError)


def test_importing_loads_neither_llguidance_nor_jax() -> None:
    code = "import sys, jaxpd.grammar; sys.exit('llguidance' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
