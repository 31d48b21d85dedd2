"""The life of one sequence inside the engine, as a table of states.

    QUEUED --reserve--> PREFILLING --first token, offer--> OFFERED --settled--> SETTLED --accept--> DECODING
       |                     |                                |                    |                   |
       +---------------------+--------------- abort, error, stop, length ----------+-------------------+--> FINISHED

- QUEUED: waits in the prefill pool's queue; owns nothing.
- PREFILLING: owns pages in the prefill pool, a decode replica's pages and slot, and a share of the staging bound. Its
  prefill pages go back as soon as the gather into staging is dispatched.
- OFFERED: its KV is in staging, an immutable copy, and crosses to the decode mesh.
- SETTLED: every piece has arrived without error; waits for the decode pool's thread to scatter it.
- DECODING: owns pages and a slot in the decode pool, nothing else.
- FINISHED: owns nothing; its `FinishEvent` is out.

In a pool that prefills and decodes there is no hand-off: PREFILLING --first token--> DECODING, on the same pages and
slot, which both leases stand for.

Each state belongs to one thread (the pool's, or the transfer's), and only that thread moves a sequence on. Other
threads may set `abort_requested`, which every owner looks at before it moves on.
"""

from __future__ import annotations

import dataclasses
import enum
import time

import numpy as np

from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixLease
from jaxpd.request import FinishReason, Request, Timings
from jaxpd.slot_options import flags_of, options_row


class State(enum.Enum):
    """Where a sequence is; see the module docstring."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    OFFERED = "offered"
    SETTLED = "settled"
    DECODING = "decoding"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.OFFERED, State.DECODING, State.FINISHED}),
    State.OFFERED: frozenset({State.SETTLED, State.FINISHED}),
    State.SETTLED: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of one request. Counters are in tokens; times are `time.monotonic()` seconds.

    Raises InvalidArgument for options that the device has no room for.
    """

    request: Request
    eos_ids: frozenset[int]
    chain: Chain  # names of its full pages; knows no token where the prefix cache is off
    state: State = State.QUEUED
    outputs: list[int] = dataclasses.field(default_factory=list)  # tokens read back so far
    cached: int = 0  # tokens whose KV has been dispatched in the pool it is in
    sampled: int = 0  # output tokens whose sampling has been dispatched (at most one step ahead of `outputs`)
    prefill_lease: PrefixLease | None = None
    decode_lease: PrefixLease | None = None
    hit_tokens: int = 0  # of the prompt, that were in the prefill pool's cache
    decode_target: tuple[int, int] = (0, 0)  # decode pool, replica
    prefill_replica: int = 0
    staging_bytes: int = 0
    abort_requested: bool = False
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    flags: int = dataclasses.field(init=False)  # slot_options.Flag: what its samplings use
    options: np.ndarray | None = dataclasses.field(init=False, default=None)  # its row, where they need one

    def __post_init__(self) -> None:
        params = self.request.params
        flags = flags_of(params)
        self.flags = int(flags)  # operations of an enum would take microseconds a row and step
        if flags.needs_slot:
            ending = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_ids)
            self.options = options_row(params, sorted(ending))

    def move(self, state: State) -> None:
        """Goes to `state`. Raises RuntimeError when the table does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.request.request_id}: no way from {self.state.value} to {state.value}")
        self.state = state
        self.mark(state.value)

    def mark(self, what: str) -> None:
        """Records when something happened, the first time it does."""
        self.times.setdefault(what, time.monotonic())

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def max_len(self) -> int:
        """Most tokens this sequence can ever hold in a cache."""
        return self.prompt_len + self.request.params.max_tokens

    @property
    def prompt_left(self) -> int:
        """Prompt tokens whose KV has not been dispatched."""
        return max(self.prompt_len - self.cached, 0)

    @property
    def wants_tokens(self) -> bool:
        """Whether another sampling may be dispatched."""
        return self.state is not State.FINISHED and self.sampled < self.request.params.max_tokens

    def add_output(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Takes one read-back token; (reason, stop token) when it was the last one."""
        params = self.request.params
        self.outputs.append(token)
        if self.chain.length:
            self.chain.extend((token,))
        now = time.monotonic()
        if len(self.outputs) <= 2:
            self.times.setdefault(f"token{len(self.outputs)}", now)
        self.times["last_token"] = now
        if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
            return FinishReason.STOP, token
        if len(self.outputs) >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def release(self) -> None:
        """Gives back all pages and slots: the one place where a sequence's pages are freed for good."""
        for lease in (self.prefill_lease, self.decode_lease):
            if lease is not None:
                lease.release()

    def timings(self) -> Timings:
        """The stages it went through, in seconds."""
        t = self.times

        def span(start: str, end: str) -> float | None:
            return t[end] - t[start] if start in t and end in t else None

        arrival = self.request.arrival_s
        return Timings(
            queue_s=t["prefilling"] - arrival if "prefilling" in t else None,
            prefill_s=span("prefilling", "token1"),
            transfer_s=span("offered", "decoding"),
            transfer_exposed_s=span("token1", "decoding"),
            decode_s=span("decoding", "last_token"),
            ttft_s=t["token1"] - arrival if "token1" in t else None,
            ttst_s=t["token2"] - arrival if "token2" in t else None,
        )
