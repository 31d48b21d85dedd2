"""The life of one sequence, as it happened: the one record that timings, metrics and traces are made of.

    arrived -> admitted -> prefill_start -> chunk* -> prefill_end -> decode_start -> finished
                  ^                           \\                        /               or failed, from anywhere
                  |                            offered -> transferred -> accepted
                  +------------------------------- preempted

`offered` to `accepted` happen where prefill and decode have meshes of their own, and overlap with the chunks: `offered`
is when the first pages start to cross, `transferred` when the last have arrived, `accepted` when they are in the
decode pool's pages. All times are `time.monotonic()` seconds of this process.
"""

from __future__ import annotations

import dataclasses
import enum
import time

from jaxpd.request import Timings


class Stage(enum.StrEnum):
    """What can happen to a sequence."""

    ARRIVED = "arrived"
    ADMITTED = "admitted"
    PREFILL_START = "prefill_start"
    CHUNK = "chunk"  # of the prompt dispatched; `tokens` of it
    PREFILL_END = "prefill_end"  # the first token was read
    OFFERED = "offered"
    TRANSFERRED = "transferred"
    ACCEPTED = "accepted"
    DECODE_START = "decode_start"
    PREEMPTED = "preempted"  # `tokens` are to be computed again
    FINISHED = "finished"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened."""

    stage: Stage
    at_s: float
    tokens: int = 0


@dataclasses.dataclass(eq=False)
class Life:
    """Everything that happened to one sequence, in order; `reason` says why it ended."""

    moments: list[Moment] = dataclasses.field(default_factory=list)
    token_times: list[float] = dataclasses.field(default_factory=list)  # when each output token was read
    reason: str | None = None

    def mark(self, stage: Stage, *, tokens: int = 0, at_s: float | None = None) -> None:
        """Records that something happened now (or `at_s`)."""
        self.moments.append(Moment(stage, time.monotonic() if at_s is None else at_s, tokens))

    def first(self, stage: Stage) -> float | None:
        """When it happened the first time; None: never."""
        return next((m.at_s for m in self.moments if m.stage is stage), None)

    def count(self, stage: Stage) -> int:
        """How often it happened."""
        return sum(m.stage is stage for m in self.moments)

    def timings(self) -> Timings:
        """Where the time went. What was computed again after a preemption counts as decoding."""
        at = {stage: self.first(stage) for stage in Stage}
        tokens = self.token_times

        def span(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else end - start

        first, second, last = (tokens[0], tokens[1] if len(tokens) > 1 else None, tokens[-1]) if tokens else (None,) * 3
        handed_off = at[Stage.ACCEPTED] is not None
        return Timings(
            queue_s=span(at[Stage.ARRIVED], at[Stage.ADMITTED]),
            prefill_s=span(at[Stage.ADMITTED], first),
            transfer_s=span(at[Stage.OFFERED], at[Stage.ACCEPTED]),
            transfer_exposed_s=span(first, at[Stage.DECODE_START]) if handed_off else None,
            decode_s=span(at[Stage.DECODE_START], last),
            ttft_s=span(at[Stage.ARRIVED], first),
            ttst_s=span(at[Stage.ARRIVED], second),
        )
