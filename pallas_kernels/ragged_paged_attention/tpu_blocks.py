"""Sizes of the TPU attention kernel: how many query tokens an item has, how many pages a block, and what that costs.

An item is a run of query tokens of one row (one token in a decode step); a block is a run of pages of its context. Both
follow from the shape and the chip: queries until the matrix unit is the limit (a key and value of 4 D bytes in bfloat16
are worth 4 R D operations, and a v5e does 240 a byte, a v6e 560), blocks until enough bytes are under way to hide the
latency of the memory, all within the VMEM that a kernel may use.
"""

from __future__ import annotations

import dataclasses

import numpy as np

MIB = 1 << 20
VMEM_BUDGET = {"TPU v4": 12 * MIB, "TPU v4 lite": 12 * MIB}  # 16 MiB in all; 64 or more in every later chip
VMEM_BUDGET_LATER = 40 * MIB
QUERY_ROWS = 512  # R aimed at in prefill
BLOCK_TOKENS = 512  # X
BYTES_UNDER_WAY = 2 * MIB
MOST_BUFFERS = 8
OUTPUT_BYTES = 2 * MIB  # of the queries of one grid step of a decode program


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What the kernel is compiled for; every field is static."""

    query_tokens: int  # Q: of an item, a power of two; 1 in a decode step
    group: int  # G with rows added, so that Q * G is a whole number of tiles
    items_per_step: int  # items that one step of the grid takes
    pages: int  # C: of a block
    buffers: int  # blocks in VMEM: one that is computed on, the others under way
    cores: int  # parallel chains of items: 2 where one device has two cores

    @property
    def rows(self) -> int:
        """R: rows of an item's query matrix."""
        return self.query_tokens * self.group


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The dimensions of a call, by the dimension key."""

    T: int
    B: int
    N: int
    K: int
    G: int
    D: int
    S: int
    W: int
    pool_bytes: int  # of one number in the pool
    query_bytes: int

    @property
    def decode(self) -> bool:
        """Whether row i is token i."""
        return self.T == self.B

    @property
    def key_lanes(self) -> int:
        """Lanes of the queries: those of the keys where they end with a register, else all (zeros meet the values)."""
        return self.D if self.D % 128 == 0 else self.W

    @property
    def value_lanes(self) -> int:
        """Lanes of the results, likewise."""
        return self.D if self.D % 128 == 0 else self.W


def vmem_budget(chip: str) -> int:
    """Bytes of VMEM that the kernel plans with."""
    return VMEM_BUDGET.get(chip, VMEM_BUDGET_LATER)


def vmem_bytes(sizes: Sizes, blocks: Blocks) -> int:
    """Upper bound of the VMEM in use: pipelined queries and results, the ring of blocks, running sums, scores."""
    rows, X = blocks.rows, blocks.pages * sizes.S
    lanes = sizes.key_lanes + sizes.value_lanes
    piped = 2 * blocks.items_per_step * sizes.K * _tiled(rows, sizes.query_bytes) * lanes * sizes.query_bytes
    ring = blocks.buffers * sizes.K * _tiled(X, sizes.pool_bytes) * sizes.W * sizes.pool_bytes
    running = sizes.K * _tiled(rows, 4) * (sizes.value_lanes + 2 * 128) * 4
    # One KV slot at a time: keys and values in the queries' dtype, scores and weights (also in float32).
    scores = X * sizes.W * (4 + sizes.query_bytes) + 4 * _tiled(rows, 4) * max(X, 128) * 4
    return piped + ring + running + scores


def _tiled(rows: int, itemsize: int) -> int:
    tile = 8 * (4 // itemsize)
    return -(-rows // tile) * tile


def _power_of_two_up_to(limit: int) -> int:
    return 1 << (max(limit, 1).bit_length() - 1)


def choose_blocks(sizes: Sizes, chip: str) -> Blocks | None:
    """Block sizes of a call, or None where even the smallest do not fit the chip's VMEM."""
    cores = 2 if chip in ("TPU v4", "TPU v5", "TPU v5p") else 1  # one JAX device, two cores
    tile = 8 * (4 // sizes.query_bytes)
    pages = max(1, min(sizes.N, BLOCK_TOKENS // sizes.S))
    if sizes.decode:
        query_tokens, group = 1, -(-sizes.G // tile) * tile
        row_bytes = sizes.K * group * (sizes.key_lanes + sizes.value_lanes) * sizes.query_bytes
        items = max(1, min(-(-sizes.B // cores), OUTPUT_BYTES // row_bytes))
    else:
        query_tokens = max(tile, _power_of_two_up_to(min(QUERY_ROWS // sizes.G, 2 * sizes.T - 1)))
        group, items = sizes.G, 1
    while True:
        block_bytes = sizes.K * pages * sizes.S * sizes.W * sizes.pool_bytes
        buffers = max(2, min(MOST_BUFFERS, 1 + -(-BYTES_UNDER_WAY // block_bytes)))
        blocks = Blocks(query_tokens, group, items, pages, buffers, cores)
        if vmem_bytes(sizes, blocks) <= vmem_budget(chip):
            return blocks
        if items > 1:
            items = -(-items // 2)
        elif pages * sizes.S > 128 and pages > 1:
            pages = -(-pages // 2)
        elif not sizes.decode and query_tokens > tile:
            query_tokens //= 2
        elif pages > 1:
            pages = -(-pages // 2)
        else:
            return None


def most_items(sizes: Sizes, blocks: Blocks) -> int:
    """Items that any batch of these sizes has at most: whole runs, and one rest for each row."""
    if sizes.decode:
        return sizes.B
    Q = blocks.query_tokens
    return max(1, min(sizes.T, (sizes.T + sizes.B * (Q - 1)) // Q))


def kv_bytes_read(
    sizes: Sizes, blocks: Blocks, lengths: np.ndarray, contexts: np.ndarray, sliding_window: int | None
) -> int:
    """Bytes of pages that the kernel reads for rows of these query and context lengths: each item the live pages that
    any of its queries sees."""
    page_bytes = sizes.K * sizes.S * sizes.W * sizes.pool_bytes
    pages = 0
    for length, context in zip(map(int, lengths), map(int, contexts), strict=True):
        for done in range(0, length, blocks.query_tokens):
            first = context - length + done
            end = min(first + blocks.query_tokens, context)
            begin = 0 if sliding_window is None else max(0, first - sliding_window + 1)
            pages += -(-end // sizes.S) - begin // sizes.S
    return pages * page_bytes


def pairs_seen(lengths: np.ndarray, contexts: np.ndarray, sliding_window: int | None) -> int:
    """Pairs of a query token and a token that it sees."""
    pairs = 0
    for length, context in zip(map(int, lengths), map(int, contexts), strict=True):
        seen = np.arange(context - length, context) + 1
        pairs += int(np.minimum(seen, sliding_window or context).sum())
    return pairs


def full_batch(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """(query lengths, contexts) [B] of the largest batch: all tokens, evenly over the rows, contexts as long as the
    table."""
    lengths = np.full(sizes.B, sizes.T // sizes.B)
    lengths[: sizes.T % sizes.B] += 1
    contexts = np.maximum(lengths, sizes.N * sizes.S)
    return np.minimum(lengths, contexts), contexts
