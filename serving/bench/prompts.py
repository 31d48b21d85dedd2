"""Prompts of a wanted length: token ids where the server takes them, else text made of words whose cost is known.

Each piece of a prompt has a random generator of its own, seeded by its key: equal pieces are equal wherever they stand,
and a shorter piece is the beginning of a longer one. That is what a prefix cache finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from serving.bench.records import Piece

# Short, common and spelled one way only: most vocabularies have each of them, with the space before it, as one token.
WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point home "
    "water room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city community name president "
    "team minute idea body information back parent face others level office door health person art history "
    "party result change morning reason research moment air teacher force education foot boy age policy music "
    "market sense nation plan college interest experience effect use class control field development role "
    "effort rate heart show leader light voice mind price report decision son view relationship town road arm "
    "difference value building action season society tax director position player record paper space ground "
    "form event official matter center couple site project activity star table need court oil situation cost "
    "industry figure street image phone data picture practice piece land product doctor wall patient worker "
    "news test movie north love support technology a b c d e f g h i j k l m n o p q r s t u v w x y z".split()
)


@dataclasses.dataclass(frozen=True)
class Words:
    """Words that cost `cost` tokens each, and what a prompt costs on top of them (a template, a BOS)."""

    words: tuple[str, ...]
    cost: float = 1.0
    overhead: float = 0.0

    def text(self, pieces: Sequence[Piece], *, seed: int, salt: int) -> str:
        """A text that costs about as many tokens as the pieces say, `overhead` included: the last piece pays it."""
        chosen: list[str] = []
        for number, piece in enumerate(pieces, 1):
            tokens = piece.tokens - (self.overhead if number == len(pieces) else 0)
            count = max(1 if number == len(pieces) else 0, round(tokens / self.cost))
            chosen += [self.words[i] for i in _draw(piece, len(self.words), count, seed, salt)]
        return " ".join(chosen)


def cheapest(costs: Sequence[int]) -> tuple[tuple[str, ...], int]:
    """Of WORDS, whose costs in tokens these are: those of the lowest cost that at least 16 of them have.

    Without such a cost, as with a vocabulary of a handful of tokens, the commonest one.
    """
    counts = {cost: costs.count(cost) for cost in sorted(set(costs)) if cost > 0}
    cost = next((cost for cost, count in counts.items() if count >= 16), max(counts, key=lambda cost: counts[cost]))
    return tuple(word for word, its in zip(WORDS, costs, strict=True) if its == cost), cost


def token_ids(pieces: Sequence[Piece], vocabulary: np.ndarray | int, *, seed: int, salt: int) -> np.ndarray:
    """int64 [sum of the pieces' tokens], drawn from `vocabulary`: ids, or how many there are."""
    size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    drawn = np.concatenate([_draw(piece, size, piece.tokens, seed, salt) for piece in pieces])
    return drawn if isinstance(vocabulary, int) else vocabulary[drawn]


def _draw(piece: Piece, size: int, count: int, seed: int, salt: int) -> np.ndarray:
    return np.random.default_rng([seed, salt, *piece.key]).integers(0, size, count)
