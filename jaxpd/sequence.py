"""The life of one sequence inside the engine, as a table of states.

              +---------------------------- preempted -------------------------------+
              v                                                                      |
    QUEUED --reserve--> PREFILLING --first token--> OFFERED --last pages in--> DECODING
       |                     |                         |                         |
       +---------------------+------- abort, error, stop, length ----------------+--> FINISHED

- QUEUED: waits in a pool's queue; owns nothing.
- PREFILLING: owns pages in the pool that computes it, and, where it will be handed off, a decode replica's pages and
  slot and a share of the staging bound. Full pages of its prompt cross to the decode replica while later chunks
  compute (`jaxpd.handoff`). Its prefill pages go back as soon as the last gather into staging is dispatched.
- OFFERED: its first token is out; what has not crossed yet is on its way.
- DECODING: every page is in the decode pool's; owns pages and a slot there, nothing else.
- FINISHED: owns nothing; its `FinishEvent` is out.

In a pool that prefills and decodes there is no hand-off: PREFILLING --first token--> DECODING, on the same pages and
slot, which both leases stand for. A sequence that is preempted there gives everything back and is QUEUED again, to be
computed from the tokens it has (`fill_len` of them) like any prompt. So is one that comes with tokens that another
engine has made (`Request.outputs`), from the beginning and on both sides of a hand-off: its "first token" is then the
first one behind those.

Each state belongs to one thread (of the pool that has it: OFFERED to the decode pool's), and only that thread moves a
sequence on. Other threads may set `abort_requested`, which every owner looks at before it moves on.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixLease
from jaxpd.errors import HandoffFailed, InvalidArgument, JaxpdError
from jaxpd.grammar import GrammarState
from jaxpd.life import Life, Stage
from jaxpd.policies.queueing import Rank
from jaxpd.request import FinishReason, Request, TokenLogprobs
from jaxpd.slot_options import flags_of, options_row


class State(enum.Enum):
    """Where a sequence is; see the module docstring."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    OFFERED = "offered"
    DECODING = "decoding"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.QUEUED, State.OFFERED, State.DECODING, State.FINISHED}),
    State.OFFERED: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.QUEUED, State.FINISHED}),
    State.FINISHED: frozenset(),
}
_STAGES = {State.PREFILLING: Stage.ADMITTED, State.OFFERED: Stage.PREFILL_END, State.DECODING: Stage.DECODE_START}


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of one request. Counters are in tokens.

    Raises InvalidArgument for options that the device has no room for, and for `request.outputs` behind which nothing
    can come: they end it, or its grammar forbids them.
    """

    request: Request
    eos_ids: frozenset[int]
    chain: Chain  # names of the full pages of all its tokens; knows none where the prefix cache is off
    sample: int = 0
    seed: int = 0
    grammar: GrammarState | None = None  # where its output stands in what it has to match; new ones are at the start
    siblings: list[Sequence] = dataclasses.field(default_factory=list)  # of sample 0: those that wait for its prompt
    state: State = State.QUEUED
    life: Life = dataclasses.field(default_factory=Life)
    outputs: list[int] = dataclasses.field(init=False)  # tokens known so far: the request's own, and those read back
    cached: int = 0  # tokens whose KV has been dispatched in the pool it is in
    sampled: int = dataclasses.field(init=False)  # output tokens dispatched (at most one step ahead of `outputs`)
    prefill_lease: PrefixLease | None = None
    decode_lease: PrefixLease | None = None
    hit_tokens: int = 0  # of the prompt, that were in the cache of the pool that computed it first
    decode_target: tuple[int, int] = (0, 0)  # decode pool, replica
    prefill_replica: int = 0
    staging_bytes: int = 0  # charged for what has not been offered yet
    sent_pages: int = 0  # of the `fill_len` tokens, offered or there already
    landed_pages: int = 0  # of those, in the decode replica's pages (counted by the decode pool's thread)
    transfer_error: HandoffFailed | None = None  # why it cannot be taken over (set by the decode pool's thread)
    passed: int = 0  # later requests that were admitted before it
    abort_requested: bool = False
    failure: JaxpdError | None = None  # why, where it is not its client's wish
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)  # read so far
    max_tokens: int = dataclasses.field(init=False)  # as in the request: asked for at every step
    ending: frozenset[int] = dataclasses.field(init=False)  # tokens that end it
    flags: int = dataclasses.field(init=False)  # slot_options.Flag: what its samplings use
    options: np.ndarray | None = dataclasses.field(init=False, default=None)  # its row, where they need one
    fill_len: int = dataclasses.field(init=False)  # tokens to compute before it can sample (again)
    capacity: int = 0  # tokens that its pages in the pool it is in have room for

    def __post_init__(self) -> None:
        params = self.request.params
        self.max_tokens = params.max_tokens
        self.ending = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        flags = flags_of(params)
        self.flags = int(flags)  # operations of an enum would take microseconds a row and step
        if flags.needs_slot:
            self.options = options_row(params, sorted(self.ending))
        self.outputs = list(self.request.outputs)
        self.sampled = len(self.outputs)
        self.fill_len = self.prompt_len + len(self.outputs)
        if self.outputs:
            self._check_outputs()
        self.life.mark(Stage.ARRIVED, at_s=self.request.arrival_s)

    def _check_outputs(self) -> None:
        """Moves the grammar behind the outputs that it comes with. Raises InvalidArgument where that is the end."""
        for index, token in enumerate(self.outputs):
            if token in self.ending:
                raise InvalidArgument(
                    f"outputs holds token {token} at index {index}, which ends the answer; take it as it is",
                    field="outputs",
                )
            if self.grammar is None:
                continue
            try:
                self.grammar.accept(token)
            except RuntimeError as error:
                raise InvalidArgument(f"outputs do not match structured_output: {error}", field="outputs") from error
            if self.grammar.finished:
                raise InvalidArgument(
                    f"outputs complete structured_output at index {index}, and nothing can follow; take the answer as "
                    "it is",
                    field="outputs",
                )

    def move(self, state: State) -> None:
        """Goes to `state`. Raises RuntimeError when the table does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.request.request_id}: no way from {self.state.value} to {state.value}")
        before, self.state = self.state, state
        if state is State.QUEUED:
            self.life.mark(Stage.PREEMPTED, tokens=self.cached)
        elif state in _STAGES:
            if before is State.PREFILLING and state is State.DECODING:
                self.life.mark(Stage.PREFILL_END)
            self.life.mark(_STAGES[state])

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def rank(self) -> Rank:
        """Its place in the order of service."""
        return self.request.priority, self.request.arrival_s

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def prompt_left(self) -> int:
        """Tokens to compute before it can sample, whose KV has not been dispatched."""
        return max(self.fill_len - self.cached, 0)

    @property
    def to_score(self) -> int:
        """Tokens of the prompt, from `cached` on, that are to be scored: the log probability of what follows each."""
        if self.request.params.prompt_logprobs is None or self.sample or self.sampled or self.outputs:
            return 0
        return max(self.prompt_len - 1 - self.cached, 0)

    @property
    def wants_tokens(self) -> bool:
        """Whether another sampling may be dispatched."""
        return self.sampled < self.max_tokens and self.state is not State.FINISHED

    def reserved_len(self, reserve_tokens: int) -> int:
        """Tokens to have room for before it is computed: all that it has, and at most `reserve_tokens` more."""
        return self.fill_len + min(self.request.params.max_tokens - len(self.outputs), reserve_tokens)

    def scores(self) -> tuple[TokenLogprobs, ...] | None:
        """The log probabilities of its prompt, where they are asked for; complete once its first token is sampled."""
        if self.request.params.prompt_logprobs is None or self.sample:
            return None
        return tuple(self.prompt_logprobs)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens `[start, stop)` of prompt and outputs."""
        prompt = self.request.prompt_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        return (*prompt[start:], *self.outputs[max(start - len(prompt), 0) : stop - len(prompt)])

    def preempt(self) -> None:
        """Gives all its pages back and is QUEUED; `refill` before it is computed again."""
        self.move(State.QUEUED)
        self.release()
        self.prefill_lease = self.decode_lease = None
        self.cached = 0

    def refill(self) -> None:
        """Everything that it has sampled is read by now, and is to be computed before it samples again."""
        assert self.sampled == len(self.outputs), "a preempted sequence is admitted after its last step was read"
        self.fill_len = self.prompt_len + len(self.outputs)

    def add_output(self, token: int, at_s: float) -> tuple[FinishReason, int | None] | None:
        """Takes one read-back token; (reason, stop token) when it was the last one.

        Raises InvalidArgument where a grammar turns out to be too complex, RuntimeError for a token that it forbids.
        """
        outputs = self.outputs
        outputs.append(token)
        if self.chain.length:
            self.chain.extend((token,))
        self.life.token_times.append(at_s)
        if self.grammar is not None:
            self.grammar.accept(token)
        if token in self.ending:
            return FinishReason.STOP, token
        if self.grammar is not None and self.grammar.finished:
            return FinishReason.STOP, token if token in self.eos_ids else None
        if len(outputs) >= self.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def release(self) -> None:
        """Gives back all pages and slots: the one place where a sequence's pages are freed for good."""
        for lease in (self.prefill_lease, self.decode_lease):
            if lease is not None:
                lease.release()
