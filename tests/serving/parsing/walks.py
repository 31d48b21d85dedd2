"""Random answers under a grammar that end soon: closing characters are preferred, and now and then a whole mark."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpd.grammar import GrammarState
from jaxpd.structured import mask_words
from jaxpd.tokenizer import Tokenizer

_CLOSING = frozenset(b'"}]<>/\n')
_ENDINGS = ("</think>", "[/THINK]", "\n</parameter>\n")
_MOST = 3000


def random_answer(state: GrammarState, tokenizer: Tokenizer, seed: int) -> list[int]:
    """Token ids without EOS."""
    random = np.random.default_rng(seed)
    words = np.zeros(mask_words(tokenizer.vocab_size), np.int32)
    ids: list[int] = []
    while len(ids) < _MOST:
        state.mask(words)
        may = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
        ends = [int(i) for i in may if i in tokenizer.eos_token_ids]
        if ends and (len(ends) == len(may) or random.random() < 0.5):
            return ids
        others = [int(i) for i in may if i not in tokenizer.eos_token_ids]
        if random.random() < 0.1 and _write(state, tokenizer.encode(str(random.choice(_ENDINGS))), ids):
            continue
        closing = [i for i in others if _CLOSING & set(tokenizer.token_bytes(i)) or not tokenizer.token_bytes(i)]
        token = int(random.choice(closing if closing and random.random() < 0.5 else others))
        state.accept(token)
        ids.append(token)
    pytest.fail(f"no end after {_MOST} tokens: " + tokenizer.decode(ids, skip_special_tokens=False))


def _write(state: GrammarState, wanted: list[int], ids: list[int]) -> bool:
    """Writes as much of `wanted` as is allowed; whether anything was."""
    before = len(ids)
    words = np.zeros(1024, np.int32)
    for token in wanted:
        state.mask(words)
        if not words[token // 32] >> token % 32 & 1:
            break
        state.accept(token)
        ids.append(token)
    return len(ids) > before
