"""How sequences get from where they are computed to where they decode: the part in which engines differ.

    InProcess    in_process.py      both kinds of pools here, KV goes from mesh to mesh; or mixed ones, nothing moves
    PrefillSide  remote/prefill.py  pools of role prefill here, decode engines elsewhere
    DecodeSide   remote/decode.py   pools of role decode here, prefill engines elsewhere

An engine has one of them, and asks it about everything that concerns more than one pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from jaxpd.errors import JaxpdError
from jaxpd.handoff import Chunk
from jaxpd.policies.chunking import Costs
from jaxpd.pool import Pool
from jaxpd.request import Event, FinishReason, Leg
from jaxpd.sequence import Sequence


class Ends(Protocol):
    """Where sequences end: the engine. From any thread."""

    def finish(
        self, seq: Sequence, reason: FinishReason, *, stop_token: int | None = None, error: JaxpdError | None = None
    ) -> list[Event]:
        """Frees everything the sequence owns and returns its last event; none if it has ended before."""
        ...

    def emit(self, events: list[Event]) -> None:
        """Sends events on."""

    def wake(self) -> None:
        """Something changed that may let the pools go on."""


class Mover(Protocol):
    """Called from any thread unless it says otherwise; never blocks."""

    @property
    def staging_bytes(self) -> int:
        """Bytes that are on their way, or charged for what is about to be."""
        ...

    @property
    def crossed_bytes(self) -> int:
        """Bytes that have crossed since the start."""
        ...

    @property
    def failures(self) -> Mapping[str, int]:
        """Sequences whose hand-off failed here, by reason, beside those that the pools count."""
        ...

    def check(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        """Raises InvalidArgument for a leg that this engine cannot serve. Nothing is kept."""

    def begin(self, samples: Seq[Sequence], leg: Leg | None) -> None:
        """Takes the samples of a new request; those that are another's siblings come by `route` later."""

    def route(self, seq: Sequence) -> None:
        """Puts a sequence into the queue of the pool where it starts."""

    def given_up(self) -> bool:
        """Whether no pool can serve anything, since device steps do not end."""
        ...

    def pool_given_up(self, pool: Pool, error: JaxpdError, waiting: Seq[Sequence]) -> None:
        """A pool's requests were answered; so must be those in `waiting` (QUEUED) that need it."""

    def reserve(self, seq: Sequence, pool: Pool) -> bool:
        """Reserves all that the sequence needs to be computed in `pool`, and where it decodes; False: not now."""
        ...

    def costs(self) -> Costs:
        """What prefill and hand-off take, as measured so far."""
        ...

    def send(self, seq: Sequence, pool: Pool, chunk: Chunk) -> None:
        """Sends pages of a prompt to where it decodes. From the pool's thread."""

    def settled(self, chunk: Chunk) -> None:
        """Pages that came are in the decode pool's, or were dropped. From that pool's thread."""

    def hand_off(self, seq: Sequence) -> None:
        """Gives a sequence whose first token is out to where it decodes. From the thread of the pool that has it."""

    def aborting(self, seqs: Seq[Sequence]) -> None:
        """Their abort was asked for: those that no pool has are ended here."""

    def ended(self, seq: Sequence) -> None:
        """A sequence is finished and its pages are free."""

    def close(self) -> None:
        """Ends what is on its way."""
