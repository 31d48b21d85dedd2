"""The host's side of structured output: which tokens may come next, so that the answer matches what was asked for.

    StructuredOutput -> GrammarCompiler.compile -> Grammar        one a request; equal ones are compiled once
                        Grammar.new_state       -> GrammarState   one a sequence
                        GrammarState.mask       -> words of bits  before each sampling; `jaxpd.mask` applies them
                        GrammarState.accept                       after it, with the token that was sampled

The work is llguidance's (`pip install 'jaxpd[structured]'`), which walks the vocabulary as a tree of bytes. The bytes
of tokens are those of `jaxpd.tokenizer`, the same that make the text, so that what is matched is what the client sees.
Special tokens have no text and are never allowed, but for EOS, which is allowed exactly where the answer may end.
Where only one text can follow, such as the name of a required key, llguidance allows the one token with which the
tokenizer would begin it, and none of the shorter tokens that would do as well.

Between the parts of a JSON value at most MAX_SPACES spaces and newlines may stand: small models else write them without
end. A schema's own `"x-guidance": {"whitespace_pattern": ...}` goes before that.

Cost, measured with the 49,152 tokens of SmolLM2 on a 2-core x86 machine busy with other work (median and 90th
percentile in microseconds over random walks; three runs agree within half): `mask` 12 and 25 for any JSON object, 12
and 36 for a schema of nested objects, 12 and 19 for a short regular expression, 14 and 27 for 1,000 choices, 19 and 165
for `.{0,200}`; `accept` 3 and 6, where text was forced 40; a new state 16 and 23. Compiling these takes 1 to 28 ms, the
first time 0.8 to 1 s, in which the vocabulary is read. A step of the worst expressions that compile took 22 ms, before
llguidance gave up on them.
"""

from __future__ import annotations

import collections
import functools
import json
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxpd.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from jaxpd.structured import CHOICE, GRAMMAR, JSON_OBJECT, REGEX, WORD, StructuredOutput, mask_words
from jaxpd.tokenizer import Tokenizer

MAX_SPACES = 32
_JSON_OPTIONS = {"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_SPACES}}}"}
_COMPILE_S = 10.0
_COMPILING = 2  # at once
_STACK_BYTES = 256 << 20  # address space, of which a rare deep grammar touches tens of MB
_KEPT = 64  # compiled grammars
_LEXER_STATES = 50_000  # of one sequence, 1 to 2 kB each; common grammars need a few hundred

_stack_size_lock = threading.Lock()


class GrammarCompiler:
    """Compiles what requests ask for, for one model. Safe to use from several threads.

    The vocabulary is read when the first grammar is compiled.
    `vocab_size` is the model's; ids at or above it, and ids that the tokenizer does not know, are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = tuple(dict.fromkeys(i for i in eos_ids if 0 <= i < vocab_size))
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_COMPILING)
        self._kept: collections.OrderedDict[StructuredOutput, Grammar] = collections.OrderedDict()
        self._vocabulary: Any = None  # llguidance.LLTokenizer

    def compile(self, spec: StructuredOutput) -> Grammar:
        """The grammar of a request. Takes milliseconds, rarely seconds, and does not hold the interpreter's lock.

        Raises InvalidArgument for what does not compile within _COMPILE_S seconds, FailedPrecondition for a model
        without tokenizer or EOS and when llguidance is not installed, ResourceExhausted when others take all slots.
        """
        spec.validate()
        with self._lock:
            if spec in self._kept:
                self._kept.move_to_end(spec)
                return self._kept[spec]
        grammar = self._compile_aside(spec)
        with self._lock:
            self._kept[spec] = grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compile_aside(self, spec: StructuredOutput) -> Grammar:
        """Compiles in a thread of its own, which may take long and has the stack for deep recursion.

        llguidance recurses over chains of rules and references; on a stack of 8 MB, 3,000 of them end the process.
        """
        if not self._slots.acquire(timeout=_COMPILE_S):
            raise ResourceExhausted(
                f"structured_output waited {_COMPILE_S:.0f} s for {_COMPILING} other grammars to compile; try later",
                field="structured_output",
            )
        done: list[Grammar | BaseException] = []

        def work() -> None:
            try:
                done.append(self._compile(spec))
            except BaseException as error:  # a panic in llguidance is none of Exception; raised below
                done.append(error)
            finally:
                self._slots.release()

        thread = threading.Thread(target=work, name="jaxpd-grammar", daemon=True)
        try:
            with _stack_size_lock:
                before = threading.stack_size(_STACK_BYTES)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
        except BaseException:
            self._slots.release()
            raise
        thread.join(_COMPILE_S)
        if not done:
            raise _invalid(f"takes longer than {_COMPILE_S:.0f} s to compile; make it simpler")
        if isinstance(done[0], Exception):
            raise done[0]
        if isinstance(done[0], BaseException):
            raise _invalid(f"cannot be compiled: {_brief(str(done[0]))}") from done[0]
        return done[0]

    def _compile(self, spec: StructuredOutput) -> Grammar:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        assert self._tokenizer is not None
        llguidance = _llguidance()
        parts: list[dict[str, Any]] = [{**_source(spec, llguidance), "name": "answer"}]
        if self._tokenizer.strips_first_space:
            # The first space of the text is dropped (`jaxpd.text`), so it is asked for: behind it stands what is shown.
            parts.insert(0, {"lark_grammar": 'start: " " @answer'})
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, json.dumps({"grammars": parts}), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds grammars that match nothing, and takes the slow first step
        if matcher.is_error():
            error = matcher.get_error()
            if error.startswith("NoExtension"):
                raise _invalid("matches no text that this model's tokens can write; change it so that one matches")
            raise _invalid(f"does not compile: {_brief(error)}")
        return Grammar(matcher, self.vocab_size, self.eos_ids)

    def _read_vocabulary(self) -> Any:
        if self._tokenizer is None:
            raise FailedPrecondition(
                "structured_output needs the text of tokens, and this model has no tokenizer; save tokenizer.json into "
                "its folder, or leave structured_output out",
                field="structured_output",
            )
        if not self.eos_ids:
            raise FailedPrecondition(
                "structured_output needs a token that ends the answer, and this model has no EOS; add eos_token_id to "
                "its config.json, or leave structured_output out",
                field="structured_output",
            )
        vocabulary = _Vocabulary(self._tokenizer, self.vocab_size, self.eos_ids)
        return _llguidance().LLTokenizer(vocabulary, eos_token=list(self.eos_ids))


class Grammar:
    """A compiled grammar, shared by the sequences of all requests that asked for the same."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher  # at the beginning, and never moved
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._lock = threading.Lock()

    def new_state(self, token_ids: Iterable[int] = ()) -> GrammarState:
        """The state of a sequence whose output so far is `token_ids`. Raises RuntimeError if they are not allowed."""
        with self._lock:
            state = GrammarState(self._matcher.deep_copy(), self._vocab_size, self._eos_ids)
        for token_id in token_ids:
            state.accept(token_id)
        return state


class GrammarState:
    """Where one sequence stands in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._accepted = 0
        self._ended = False  # by EOS

    @property
    def finished(self) -> bool:
        """Whether nothing but an end can follow; the sequence need not wait for an EOS."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def accepting(self) -> bool:
        """Whether the output so far is complete, though more may be allowed to follow."""
        return self._ended or self._matcher.is_accepting()

    def mask(self, into_W: np.ndarray) -> None:
        """Sets the bits of the tokens that may come next, in int32 words; at least one bit is set.

        Raises InvalidArgument when no token can follow, or when llguidance gives up on a grammar that is too complex;
        the sequence cannot go on.
        """
        words = mask_words(self._vocab_size)
        if into_W.dtype != np.int32 or into_W.ndim != 1 or len(into_W) < words:
            raise ValueError(f"a mask needs at least {words} words of int32, not {into_W.dtype}{into_W.shape}")
        if self.finished:
            into_W[:] = 0
        else:
            # one bit more than tokens, so a word more where the vocabulary fills its last
            into_W[:words] = np.frombuffer(self._matcher.compute_bitmask(), np.int32, count=words)
            into_W[words:] = 0
        bits_W = into_W.view(np.uint32)
        may_end = self.accepting
        for token_id in self._eos_ids:
            bit = np.uint32(1 << token_id % WORD)
            if may_end:
                bits_W[token_id // WORD] |= bit
            else:
                bits_W[token_id // WORD] &= ~bit
        if not may_end and (self._matcher.is_error() or not into_W.any()):
            self._give_up()

    def accept(self, token_id: int) -> None:
        """Moves on behind a token that was sampled. Raises RuntimeError, and stays, if it was not allowed.

        Raises InvalidArgument when llguidance gives up on a grammar that is too complex.
        """
        if token_id in self._eos_ids:
            if not self.accepting:
                raise RuntimeError(f"EOS token {token_id} at output index {self._accepted} ends an incomplete answer")
            self._ended = True
        else:
            known = 0 <= token_id < self._vocab_size
            if self.finished or not known or self._matcher.try_consume_tokens([token_id]) != 1:
                if self._matcher.is_error():
                    self._give_up()
                raise RuntimeError(f"token {token_id} at output index {self._accepted} is not allowed by the grammar")
        self._accepted += 1

    def _give_up(self) -> None:
        where = f"after {self._accepted} tokens of output"
        error = self._matcher.get_error()
        if error and not error.startswith("NoExtension"):
            raise _invalid(f"is too complex {where}; make it simpler ({_brief(error)})")
        raise _invalid(f"allows nothing {where} that this model's tokens can write; change it")


class _Vocabulary:
    """What llguidance asks of a tokenizer. It reads these attributes once, and calls it for texts that are forced."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._backend = tokenizer.backend
        ids = range(vocab_size)
        self.tokens = [tokenizer.token_bytes(i, skip_special_tokens=False) for i in ids]
        # llguidance puts them where no text leads
        special = {i for i in ids if self.tokens[i] and not tokenizer.token_bytes(i)} | set(eos_ids)
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_ids[0]
        self._text_of = [b"" if i in special else self.tokens[i] for i in ids]
        self._id_of = {data: i for i, data in reversed([*enumerate(self._text_of)]) if data}
        self._longest = max(map(len, self._id_of), default=0)
        self._encode = functools.lru_cache(maxsize=1024)(self._encode_anew)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens, none special, that stand for exactly this text, as the tokenizer would write it mid-sentence."""
        return self._encode(text.encode() if isinstance(text, str) else bytes(text))

    def _encode_anew(self, data: bytes) -> list[int]:
        text = data.decode("utf-8", "replace")
        # Some tokenizers put a space before the first word; behind the newline they do not.
        for before in ("", "\n"):
            ids = self._backend.encode(before + text, add_special_tokens=False).ids
            lead = len(before.encode())
            while lead and ids:
                piece = self._bytes(ids[0])
                if piece.lstrip(b" ") not in (b"", b"\n"):
                    break
                lead, ids = lead - piece.count(b"\n"), ids[1:]
            if b"".join(map(self._bytes, ids)) == data:
                return ids
        return self._longest_first(data)

    def _bytes(self, token_id: int) -> bytes:
        return self._text_of[token_id] if token_id < len(self._text_of) else b""

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                if (found := self._id_of.get(data[at : at + size])) is not None:
                    ids.append(found)
                    at += size
                    break
            else:
                return ids  # no token begins with this byte: nothing can follow, and `GrammarState.mask` says so
        return ids


def _source(spec: StructuredOutput, llguidance: Any) -> dict[str, Any]:
    """One of the grammars in llguidance's own format."""
    if spec.kind == GRAMMAR:
        return {"lark_grammar": spec.text}
    if spec.kind == REGEX:
        return {"lark_grammar": f"start: /{llguidance.regex_to_lark(spec.text, 'd')}/"}
    if spec.kind == CHOICE:  # one terminal: half the time of as many rules
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, dict.fromkeys(spec.choices)))}"}
    schema = {"type": "object"} if spec.kind == JSON_OBJECT else json.loads(spec.text)
    asked = schema.get("x-guidance", {})
    options = {**_JSON_OPTIONS, **asked} if isinstance(asked, dict) else asked
    return {"json_schema": {**schema, "x-guidance": options}}


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise FailedPrecondition(
            "structured_output needs the package llguidance, which is not installed; "
            "pip install 'jaxpd[structured]' and start again, or leave structured_output out",
            field="structured_output",
        ) from error
    return llguidance


def _invalid(what: str) -> InvalidArgument:
    return InvalidArgument(f"structured_output {what}", field="structured_output")


def _brief(error: str, most: int = 300) -> str:
    """llguidance's message on one line. It repeats the grammar: of a long one what is wrong is kept and little else."""
    lines = [" ".join(line.split()) for line in error.replace("<non-verbose/>", "").splitlines()]
    if sum(map(len, lines)) > most:
        lines = [line for index, line in enumerate(lines) if index == 0 or line.startswith("error:")]
        half = most // len(lines) // 2
        lines = [line if len(line) <= 2 * half else f"{line[:half]} ... {line[-half:]}" for line in lines]
    return " ".join(filter(None, lines))
