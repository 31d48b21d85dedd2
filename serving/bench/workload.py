"""What is asked for: a list of calls, drawn from distributions or read from a trace.

    Workload + Arrivals -> calls() -> Call ... -> the backend makes their prompts (`prompts`)

A call's lengths and times depend on the seed and its number alone: the probes of a search for goodput ask for the same
lengths again, with other tokens (the backend's `salt`), so that no cache answers them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxpd.errors import InvalidArgument
from serving.bench.arrivals import DEFAULT_REQUESTS, Arrivals, offsets
from serving.bench.lengths import Lengths
from serving.bench.records import Call, Piece
from serving.bench.traces import BLOCK, Row, Trace

_OWN, _SHARED, _BLOCK, _WARM = range(4)  # first part of a piece's key: whose tokens they are
MOST_TOKENS = 2**24  # of one prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths come from `trace` where there is one. `shared_prefix_len` tokens stand before the prompt's own, one of
    `num_prefixes` each. Raises InvalidArgument for what cannot be.
    """

    input_len: Lengths = Lengths("fixed", 256)
    output_len: Lengths = Lengths("fixed", 64)
    shared_prefix_len: int = 0
    num_prefixes: int = 1
    trace: Trace | None = None
    trace_speed: float = 1.0
    length_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix_len <= MOST_TOKENS:
            raise InvalidArgument(
                f"--shared-prefix-len {self.shared_prefix_len} must be between 0 and {MOST_TOKENS} tokens",
                field="shared_prefix_len",
            )
        if self.num_prefixes < 1:
            raise InvalidArgument(f"--num-prefixes {self.num_prefixes} must be at least 1", field="num_prefixes")
        if self.seed < 0:
            raise InvalidArgument(f"--seed {self.seed} must be 0 or more", field="seed")
        for flag, value in (("trace-speed", self.trace_speed), ("length-scale", self.length_scale)):
            if not 0 < value < math.inf:
                raise InvalidArgument(f"--{flag} {value:g} must be a number above 0", field=flag.replace("-", "_"))
        if self.length_scale != 1 and self.trace is not None and self.trace.kind == "sharegpt":
            raise InvalidArgument(
                f"--length-scale {self.length_scale:g} cannot shorten the texts of a ShareGPT trace; leave it out, or "
                "take a trace of lengths (Mooncake, Azure)",
                field="length_scale",
            )

    def timed(self, arrivals: Arrivals) -> bool:
        """Whether the trace says when requests arrive."""
        return self.trace is not None and self.trace.rows[0].at_s is not None and arrivals.rate is None


def number_of_calls(workload: Workload, arrivals: Arrivals) -> int | None:
    """How many calls a run makes; None: as many as its duration has room for.

    Raises InvalidArgument where the trace has fewer than --num-requests.
    """
    count = arrivals.count()
    if workload.trace is None:
        if count is None and arrivals.duration_s is None:
            return DEFAULT_REQUESTS
        return count
    rows = workload.trace.rows
    if arrivals.num_requests is not None and arrivals.num_requests > len(rows):
        raise InvalidArgument(
            f"--num-requests {arrivals.num_requests} is more than the {len(rows)} requests of the trace; ask for fewer",
            field="num_requests",
        )
    if workload.timed(arrivals):
        if arrivals.duration_s is not None:
            end_s = arrivals.duration_s * workload.trace_speed
            rows = tuple(row for row in rows if row.at_s is not None and row.at_s <= end_s)
        return len(rows) if count is None else min(count, len(rows))
    if count is None:
        return len(rows) if arrivals.duration_s is not None else min(DEFAULT_REQUESTS, len(rows))
    return min(count, len(rows))


def calls(workload: Workload, arrivals: Arrivals, *, turn: int = 0) -> Iterator[Call]:
    """The calls of one run, in the order of their times; endless where the duration alone bounds them.

    Run number `turn` of several takes other texts of a trace that has texts.
    """
    count = number_of_calls(workload, arrivals)
    due: Iterator[float | None] = itertools.repeat(None)
    if workload.timed(arrivals):
        assert workload.trace is not None
        due = iter([(row.at_s or 0.0) / workload.trace_speed for row in workload.trace.rows])
    elif arrivals.by_clock:
        assert arrivals.rate is not None and count is not None
        due = iter(offsets(arrivals.rate, count, burstiness=arrivals.burstiness, seed=workload.seed).tolist())
    for index in range(count) if count is not None else itertools.count():
        if workload.trace is None:
            yield _synthetic(workload, index, next(due))
        else:
            rows = workload.trace.rows
            shift = turn * (count or 0) if workload.trace.kind == "sharegpt" else 0
            yield _from_row(workload, rows[(index + shift) % len(rows)], index, next(due))


def warm_up_calls(workload: Workload, count: int) -> list[Call]:
    """`count` calls of the workload's lengths, due at once, whose tokens no other call has."""
    made = itertools.islice(calls(workload, Arrivals(rate=math.inf)), count)
    return [
        dataclasses.replace(call, pieces=(Piece((_WARM, call.index), max(1, call.input_len)),), text=None)
        for call in made
    ]


def _synthetic(workload: Workload, index: int, due_s: float | None) -> Call:
    rng = np.random.default_rng([workload.seed, 2, index])
    own, output = workload.input_len.draw(rng), workload.output_len.draw(rng)
    pieces = [Piece((_OWN, index), own)]
    if workload.shared_prefix_len:
        pieces.insert(0, Piece((_SHARED, int(rng.integers(workload.num_prefixes))), workload.shared_prefix_len))
    return Call(
        index=index,
        due_s=due_s,
        input_len=sum(piece.tokens for piece in pieces),
        output_len=output,
        pieces=tuple(pieces),
    )


def _from_row(workload: Workload, row: Row, index: int, due_s: float | None) -> Call:
    scale = workload.length_scale
    length, output = max(1, round(row.input_len * scale)), max(1, round(row.output_len * scale))
    if row.prompt is not None:
        return Call(index=index, due_s=due_s, input_len=row.input_len, output_len=output, text=row.prompt)
    pieces, begin = list[Piece](), 0
    for number, block in enumerate(row.blocks, 1):
        end = min(round(number * BLOCK * scale), length)
        if end > begin:
            pieces.append(Piece((_BLOCK, block % 2**64), end - begin))
            begin = end
    if begin < length:  # no ids, or too few of them
        pieces.append(Piece((_OWN, index), length - begin))
    return Call(index=index, due_s=due_s, input_len=length, output_len=output, pieces=tuple(pieces))
