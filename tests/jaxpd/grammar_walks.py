"""Random answers under a grammar, and a checker of JSON schemas, for the tests of structured output."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from jaxpd.grammar import GrammarState
from jaxpd.structured import StructuredOutput, mask_words
from jaxpd.tokenizer import Tokenizer

TINY = pathlib.Path(__file__).parents[1] / "data" / "tiny" / "smollm2"
VOCAB = 291  # of the tiny model; its tokenizer has 284
EOS = (283, 281)
CLOSING = frozenset(b'"}])')


def spec(kind: str, text: Any = "") -> StructuredOutput:
    if kind == "choice":
        return StructuredOutput(kind=kind, choices=tuple(text))
    return StructuredOutput(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


def allowed(state: GrammarState, vocab: int = VOCAB) -> set[int]:
    words = np.full(mask_words(vocab) + 2, 0x55555555, np.int32)  # more words than needed, and not empty
    state.mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
    assert bits.max(initial=0) < vocab
    return set(bits.tolist())


def walk(state: GrammarState, tokenizer: Tokenizer, seed: int, *, vocab: int = VOCAB, eos: Any = EOS) -> list[int]:
    """Tokens without EOS of one random answer."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(600):
        may = allowed(state, vocab)
        ends = may & set(eos)
        assert ends == (set(eos) if state.accepting else set())
        if state.finished:
            assert may == set(eos)
            break
        if ends and random.random() < 0.2:
            state.accept(min(ends))
            assert allowed(state, vocab) == set(eos)
            break
        plain = sorted(may - ends)
        closing = [i for i in plain if CLOSING & set(tokenizer.token_bytes(i))]
        token = int(random.choice(closing if closing and random.random() < 0.4 else plain))
        assert tokenizer.token_bytes(token), "a token without text"
        state.accept(token)
        ids.append(token)
    else:
        pytest.fail("no end after 600 tokens: " + tokenizer.decode(ids))
    return ids


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """A checker of the few keywords that are used here."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
    }
    kind = schema.get("type")
    checks = [
        kind is None or isinstance(value, kinds[kind]) and (kind == "boolean") == isinstance(value, bool),
        "enum" not in schema or value in schema["enum"],
        "anyOf" not in schema or any(conforms(value, option) for option in schema["anyOf"]),
    ]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        checks += [conforms(value[key], known[key]) for key in known.keys() & value.keys()]
        checks += [set(schema.get("required", ())) <= value.keys()]
        checks += [schema.get("additionalProperties", True) or value.keys() <= known.keys()]
    if isinstance(value, list):
        checks += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))]
        checks += [conforms(item, schema.get("items", {})) for item in value]
    if isinstance(value, str):
        checks += [len(value) <= schema.get("maxLength", len(value))]
        checks += [re.search(schema.get("pattern", ""), value) is not None]
    if isinstance(value, int | float):
        checks += [schema.get("minimum", value) <= value <= schema.get("maximum", value)]
    return all(checks)
