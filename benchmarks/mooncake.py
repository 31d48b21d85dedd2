"""Mooncake's request traces, and what caches could find in them at best.

One JSON object a line: `input_length`, and `hash_ids` with one id for every 512 tokens, equal ids for equal prefixes.
There are no tokens in them, so a block's tokens are made from its id: block `b` holds tokens 512 b to 512 b + 511, the
last block of a prompt as many as the prompt's length says.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from jaxpd.cache.keys import Chain

BLOCK = 512  # tokens for each id
SOURCE = "https://github.com/kvcache-ai/Mooncake, folder FAST25-release/traces"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request of a trace."""

    length: int  # tokens
    blocks: tuple[int, ...]  # one id for every 512 tokens, the last block may be shorter

    def tokens(self) -> np.ndarray:
        """Token ids, int64 [length]."""
        starts = np.asarray(self.blocks, np.int64) * BLOCK
        return (starts[:, None] + np.arange(BLOCK)).reshape(-1)[: self.length]


def read(path: pathlib.Path) -> list[Prompt]:
    """The requests of a trace. Raises SystemExit where it is not one."""
    prompts: list[Prompt] = []
    before: dict[int, int | None] = {}  # id -> the id that it follows
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}; the traces are at {SOURCE}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            prompt = Prompt(int(row["input_length"]), tuple(row["hash_ids"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}, line {number}: not a Mooncake trace ({error!r}); see {SOURCE}") from error
        if len(prompt.blocks) != -(-prompt.length // BLOCK):
            raise SystemExit(f"{path}, line {number}: {len(prompt.blocks)} ids for {prompt.length} tokens")
        last = None
        for block in prompt.blocks:
            if before.setdefault(block, last) != last:
                raise SystemExit(f"{path}, line {number}: id {block} follows {last}, and {before[block]} elsewhere")
            last = block
        prompts.append(prompt)
    if not prompts:
        raise SystemExit(f"{path}: no requests in it; see {SOURCE}")
    return prompts


def infinite(prompts: Sequence[Prompt], page_size: int) -> int:
    """Pages that a cache which never evicts finds, from the block ids alone: no hashes, no pages, no tokens."""
    kept: dict[int, int] = {}  # block id -> tokens of its longest part in whole pages so far
    hit = 0
    for prompt in prompts:
        lengths = [min(BLOCK, prompt.length - i * BLOCK) for i in range(len(prompt.blocks))]
        known = 0
        for block, length in zip(prompt.blocks, lengths, strict=True):
            here = min(kept.get(block, 0), length)
            known += here
            if here < BLOCK:
                break
        hit += min(known, prompt.length - 1) // page_size
        for block, length in zip(prompt.blocks, lengths, strict=True):
            kept[block] = max(kept.get(block, 0), length // page_size * page_size)
    return hit


def infinite_blocks(prompts: Sequence[Prompt]) -> int:
    """Blocks that were seen before, up to a prompt's first new one; half-full ones count as well."""
    seen: set[int] = set()
    hit = 0
    for prompt in prompts:
        hit += next((i for i, block in enumerate(prompt.blocks) if block not in seen), len(prompt.blocks))
        seen.update(prompt.blocks)
    return hit


def clairvoyant(chains: Sequence[Chain], num_pages: int) -> int:
    """Pages found when what is evicted is what is wanted last (Belady), one request at a time."""
    never = len(chains)
    wanted: list[list[int]] = [[] for _ in chains]  # for each page of each request: the next request that wants it
    later: dict[bytes, int] = {}
    for number in range(len(chains) - 1, -1, -1):
        wanted[number] = [later.get(key, never) for key in chains[number].keys]
        later.update(dict.fromkeys(chains[number].keys, number))
    next_use: dict[bytes, int] = {}  # of what is in the pool
    heap: list[tuple[int, int, bytes]] = []  # (-next use, -depth, key), out of date where next_use says otherwise
    hit = 0
    for number, chain in enumerate(chains):
        pages = -(-chain.length // chain.page_size)
        if pages > num_pages:
            continue
        limit = (chain.length - 1) // chain.page_size
        hit += next((i for i, key in enumerate(chain.keys[:limit]) if key not in next_use), limit)
        for key in chain.keys:
            next_use.pop(key, None)
        while len(next_use) + pages > num_pages:
            use, _, key = heapq.heappop(heap)
            if next_use.get(key) == -use:
                del next_use[key]
        for depth, (key, use) in enumerate(zip(chain.keys, wanted[number], strict=True)):
            next_use[key] = use
            heapq.heappush(heap, (-use, -depth, key))
    return hit


def conversations(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` requests of the conversations that begin first, in the order of the trace.

    A conversation is the requests with the same second block (of a prompt with one block, the same first), for the
    first block may be a system prompt that many share. The last conversation may be cut.
    """
    groups: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.blocks[min(1, len(prompt.blocks) - 1)], []).append(number)
    picked: list[int] = []
    for group in groups.values():
        picked += group[: count - len(picked)]
    return [prompts[number] for number in sorted(picked)]


def scaled(prompt: Prompt, by: int, vocabulary: int) -> list[int]:
    """Token ids below `vocabulary` of the prompt with its length, and that of each block, divided by `by`.

    A block's tokens are random, from its id, so that equal blocks stay equal. A prompt keeps one token at least.
    """
    size = BLOCK // by
    length = max(1, prompt.length // by)
    blocks = prompt.blocks[: -(-length // size)]
    tokens = np.concatenate([np.random.default_rng(block).integers(0, vocabulary, size) for block in blocks])
    return [int(token) for token in tokens[:length]]
