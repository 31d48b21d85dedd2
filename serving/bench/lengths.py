"""Lengths of prompts and answers: a number, or a distribution to draw from.

128    uniform:32:128    normal:256:64    lognormal:256:200
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxpd.errors import InvalidArgument

KINDS = ("uniform", "normal", "lognormal")
HOW = "write a number of tokens, uniform:LOW:HIGH, normal:MEAN:STD or lognormal:MEAN:STD, such as normal:256:64"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """`fixed` has its length in `a`; `uniform` draws from a to b, both included; the others have mean a and standard
    deviation b (of the lengths, also for lognormal), before what is below one token becomes one token.
    """

    kind: str
    a: float
    b: float = 0.0

    def draw(self, rng: np.random.Generator) -> int:
        """One length in tokens, at least 1."""
        match self.kind:
            case "uniform":
                return int(rng.integers(int(self.a), int(self.b) + 1))
            case "normal":
                return max(1, round(rng.normal(self.a, self.b)))
            case "lognormal":
                variance = math.log1p((self.b / self.a) ** 2)
                return max(1, round(rng.lognormal(math.log(self.a) - variance / 2, math.sqrt(variance))))
        return int(self.a)

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind}:{self.a:g}:{self.b:g}"


def parse_lengths(text: str, *, flag: str) -> Lengths:
    """What `text` says. Raises InvalidArgument naming `flag`."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if kind not in (*KINDS, "fixed") or len(values) != (1 if kind == "fixed" else 2):
        raise _wrong(flag, text, f"is no length; {HOW}")
    if not all(math.isfinite(value) and value >= 0 for value in values) or values[0] < 1:
        raise _wrong(flag, text, "must begin with a length of at least 1 token")
    if kind in ("fixed", "uniform") and any(value != int(value) for value in values):
        raise _wrong(flag, text, "must have whole numbers of tokens")
    if kind == "uniform" and values[1] < values[0]:
        raise _wrong(flag, text, "must have its smaller number first")
    return Lengths(kind, *values)


def _wrong(flag: str, text: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{flag} {text} {what}", field=flag.lstrip("-").replace("-", "_"))
