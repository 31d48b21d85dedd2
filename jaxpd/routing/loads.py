"""Requests for the simulation: made up here, or made of a trace's rows.

A prompt is known by the keys of its full pages, equal keys for equal beginnings, as jaxpd/cache/keys.py makes them and
as Mooncake's traces hold them (one id for 512 tokens). There are no tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request. `keys` are those of the prompt's full pages."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    keys: tuple[bytes, ...]


def conversations(
    count: int,
    *,
    rate: float,
    page_size: int = 512,
    prompts: int = 6,
    prompt_pages: int = 8,
    turns: float = 3.0,
    turn_pages: int = 4,
    answer_tokens: int = 100,
    think_s: float = 20.0,
    seed: int = 0,
) -> list[Arrival]:
    """`count` requests of conversations, about `rate` a second, Poisson.

    Each conversation begins with one of `prompts` system prompts of `prompt_pages` pages, the k-th as often as 1 / k
    (Zipf), and has `turns` turns on average (geometric), each of which adds 1 to 2 * `turn_pages` - 1 pages to
    everything before it, `think_s` seconds after the last on average.
    """
    draw = random.Random(seed)
    weights = [1 / (k + 1) for k in range(prompts)]
    arrivals: list[Arrival] = []
    at_s, talk = 0.0, 0
    while len(arrivals) < 2 * count:  # conversations that began; their later turns overlap with the next
        at_s += draw.expovariate(rate / turns)
        which = draw.choices(range(prompts), weights)[0]
        keys = [f"s{which}.{i}".encode() for i in range(prompt_pages)]
        now_s, go_on = at_s, True
        while go_on:
            keys += [f"t{talk}.{len(keys) + i}".encode() for i in range(draw.randint(1, 2 * turn_pages - 1))]
            tokens = len(keys) * page_size + draw.randrange(page_size)
            arrivals.append(Arrival(now_s, max(tokens, 1), 1 + int(draw.expovariate(1 / answer_tokens)), tuple(keys)))
            now_s += draw.expovariate(1 / think_s)
            go_on = draw.random() < 1 - 1 / turns
        talk += 1
    return sorted(arrivals, key=lambda arrival: arrival.at_s)[:count]


def of_blocks(rows: Iterable[tuple[float, int, int, Sequence[int]]], *, page_size: int, rate: float) -> list[Arrival]:
    """Requests of (seconds, prompt tokens, answer tokens, ids of its pages); times are divided by `rate`."""
    return [
        Arrival(at_s / rate, tokens, answer, tuple(b"%d" % block for block in blocks[: tokens // page_size]))
        for at_s, tokens, answer, blocks in rows
    ]
