"""The failure matrix: what goes wrong, when, within which bound the client has an answer, and why some cells are empty.

A cell is a `Bound`, which `play` plays with real processes, or the reason for which it makes no sense. What each stage
means, and how a request is held there, is in stages.py; what each fault does, in strikes.py.
"""

from __future__ import annotations

import dataclasses

STAGES = {
    "queued": "in the prefill worker's queue; the decode worker has been told of it and has not been asked for pages",
    "prefill chunk k": "some pages of the prompt have been offered, most are not computed",
    "hand-shake": "the prefill worker has asked for pages and has no answer",
    "transfer": "the first token is with the client; pages are being pulled",
    "before first decode": "all pages are there; the first token has not reached the decode worker",
    "decoding": "the client has tokens of the decode worker",
}
FAULTS = {
    "client abort": "the client goes away",
    "kill -9 P": "its prefill worker is killed",
    "kill -9 D": "its decode worker is killed",
    "SIGSTOP P": "its prefill worker is stopped and stays so",
    "SIGSTOP D": "its decode worker is stopped and stays so",
    "slow link": "half a second of latency and 50 kB/s on the link that the stage needs",
    "cut link": "the link that the stage needs is reset, and so is whoever tries again",
    "lost ack": "the decode worker's next ack does not arrive",
    "duplicate ack": "acks arrive twice, one of them late",
    "duplicate request id": "another client sends a request with the same id",
    "lease expiry": "the lease of a piece ends before it has been pulled",
    "D full": "no decode worker has a slot (decoding: a page) to give",
    "failed pull": "a pull of the decode worker fails",
}
AIM_S, STOPPED_S, SLOW_S = 5.0, 15.0, 15.0


@dataclasses.dataclass(frozen=True)
class Bound:
    """The client has its answer so many seconds after the fault; `answer` says which."""

    seconds: float = AIM_S
    answer: str = "its tokens"


@dataclasses.dataclass(frozen=True)
class Senseless:
    """Why a cell is empty."""

    reason: str


Cell = Bound | Senseless

LEFT = Bound(answer="none (it has left); nothing is in use")
REFUSED = Bound(answer="INVALID_ARGUMENT for the second, its tokens for the first")
NO_OFFER = Senseless("nothing is offered before a page is computed")
NO_PULL = Senseless("nothing is pulled before a page is offered")
RESERVED = Senseless("pages for the whole prompt, and the slot, were reserved before the first chunk was computed")


def _row(bound: Cell, **others: Cell) -> dict[str, Cell]:
    """A row of the table: `bound` in every stage but those in `others`, by their names with underscores."""
    names = {stage.replace(" ", "_").replace("-", "_"): stage for stage in STAGES}
    return {stage: others.get(name, bound) for name, stage in names.items()}


CELLS: dict[str, dict[str, Cell]] = {
    "client abort": _row(LEFT),
    "kill -9 P": _row(Bound()),
    "kill -9 D": _row(Bound()),
    "SIGSTOP P": _row(Bound(STOPPED_S)),
    "SIGSTOP D": _row(Bound(STOPPED_S)),
    "slow link": _row(Bound(SLOW_S)),
    "cut link": _row(Bound()),
    "lost ack": _row(Bound(), queued=NO_OFFER, hand_shake=NO_OFFER),
    "duplicate ack": _row(Bound(), queued=NO_OFFER, hand_shake=NO_OFFER),
    "duplicate request id": _row(REFUSED),
    "lease expiry": _row(
        Bound(),
        queued=NO_OFFER,
        hand_shake=NO_OFFER,
        before_first_decode=Senseless("the leases have ended with the acks; where an ack was lost, see that row"),
        decoding=Senseless("the leases have ended with the acks; where an ack was lost, see that row"),
    ),
    "D full": _row(
        Bound(answer="its tokens, as soon as there is room"),
        prefill_chunk_k=RESERVED,
        transfer=RESERVED,
        before_first_decode=RESERVED,
        decoding=Bound(60.0, "its tokens, after giving way and being computed again"),
    ),
    "failed pull": _row(
        Bound(),
        queued=NO_PULL,
        hand_shake=NO_PULL,
        before_first_decode=Senseless("every pull has ended: all pages are there"),
        decoding=Senseless("every pull has ended: all pages are there"),
    ),
}

# Of each row the cell that the suite plays every time.
EVERY_TIME = {
    "client abort": "transfer",
    "kill -9 P": "prefill chunk k",
    "kill -9 D": "decoding",
    "SIGSTOP P": "hand-shake",
    "SIGSTOP D": "transfer",
    "slow link": "transfer",
    "cut link": "before first decode",
    "lost ack": "decoding",
    "duplicate ack": "prefill chunk k",
    "duplicate request id": "queued",
    "lease expiry": "transfer",
    "D full": "queued",
    "failed pull": "prefill chunk k",
}


def playable() -> list[tuple[str, str, Bound]]:
    """(fault, stage, bound) of every cell that makes sense, row by row."""
    return [
        (fault, stage, cell)
        for fault, row in CELLS.items()
        for stage, cell in row.items()
        if not isinstance(cell, Senseless)
    ]
