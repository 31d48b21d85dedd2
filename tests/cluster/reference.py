"""What a cluster of the tiny model has to answer: prompts, and the greedy tokens of the float64 oracle for them.

A prompt is drawn anew where two logits are so near that float32 may choose the other one: all answers here are exact.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from types import ModuleType

import numpy as np

DATA = pathlib.Path(__file__).parent.parent / "data"
MODEL = DATA / "tiny" / "smollm2"
VOCAB = 283  # what comes behind are special tokens
LEAST_GAP = 1e-3  # float32 logits are within 1e-4 of the oracle's


@functools.cache
def _oracle() -> tuple[ModuleType, object, object]:
    spec = importlib.util.spec_from_file_location("numpy_decoder", DATA / "numpy_decoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, *module.load(MODEL)


@functools.lru_cache(maxsize=4096)
def greedy(prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], float]:
    """The answer to a prompt, EOS ignored, and its smallest gap between the two largest logits."""
    module, config, weights = _oracle()
    ids, gaps = module.greedy(config, weights, list(prompt), count)
    return tuple(ids), float(min(gaps))


@functools.lru_cache(maxsize=4096)
def prompt_of(seed: int, length: int, count: int, *, start: tuple[int, ...] = ()) -> tuple[int, ...]:
    """`length` random tokens, the first of them `start`, to which the next `count` tokens are beyond doubt."""
    rng = np.random.default_rng([seed, length, count])
    for _ in range(200):
        prompt = (*start, *rng.integers(0, VOCAB, length - len(start)).tolist())
        if greedy(prompt, count)[1] >= LEAST_GAP:
            return prompt
    raise AssertionError(f"no prompt of {length} tokens has {count} clear answers; ask for fewer")


def answer_to(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The greedy tokens."""
    return greedy(prompt, count)[0]
