"""Holding a request in a stage of its life, for sure: by hooks in the workers, never by sleeping.

    queued               the prefill engine's `reserve` says no to it
    hand-shake           Reserve went out; the answer is held on its way in
    prefill chunk k      steps of the prefill worker are slow; its first pages were offered
    transfer             the port that pages are pulled from is a hole; the first token is with the client
    before first decode  FirstToken is held on its way out; nothing is offered any more
    decoding             steps of the decode worker are slow; tokens of it are with the client

Any worker may be chosen for a request, so all of a role are prepared, and those that were not chosen are disarmed as
soon as it is known who was.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from typing import Any

from tests.cluster.asked import Asked
from tests.cluster.harness import Cluster, until
from tests.cluster.process import Worker
from tests.cluster.reference import answer_to, prompt_of

PROMPT, TOKENS = 200, 24  # 7 chunks of 32
BYSTANDER_PROMPT, BYSTANDER_TOKENS = 20, 40
VERY_LONG_PROMPT, VERY_LONG_TOKENS = 16, 200
REACH_S = 60.0  # the machine may be busy, and programs are compiled when they are first used
CHUNK_S, TOKEN_S = 0.3, 0.1  # steps that are slow

_numbers = itertools.count()


@dataclasses.dataclass(eq=False)
class Scene:
    """A request in a stage, others beside it, and who serves it."""

    cluster: Cluster
    target: Asked
    bystanders: list[Asked]
    p: Worker
    d: Worker
    handoff: int

    @property
    def link(self) -> Any:
        """The control connection between its two workers."""
        return self.p.peers[self.d.name]


def cold() -> dict[str, Any]:
    """Options of a request that finds nothing in any cache, with an id of its own."""
    return {"cache_salt": secrets.token_hex(4), "request_id": f"cell-{next(_numbers)}-{secrets.token_hex(4)}"}


def long_prompt() -> tuple[int, ...]:
    """Of the requests that things happen to."""
    return prompt_of(11, PROMPT, TOKENS)


def short_prompt() -> tuple[int, ...]:
    """Of those beside them."""
    return prompt_of(12, BYSTANDER_PROMPT, BYSTANDER_TOKENS)


def very_long_answer() -> tuple[int, ...]:
    """A prompt of those that keep a worker busy."""
    return prompt_of(13, VERY_LONG_PROMPT, VERY_LONG_TOKENS)


def start_bystanders(cluster: Cluster, *, long: bool = False) -> list[Asked]:
    """Requests that decode, slowly; for 4 s or, if `long`, for 20."""
    for worker in cluster.of("decode"):
        worker.do("slow_steps", seconds=TOKEN_S)
    prompt, tokens = (very_long_answer(), VERY_LONG_TOKENS) if long else (short_prompt(), BYSTANDER_TOKENS)
    bystanders = [cluster.ask(prompt, tokens, **cold()) for _ in range(2)]
    for asked in bystanders:
        asked.wait_tokens(3, REACH_S)
    return bystanders


def reach(cluster: Cluster, stage: str, bystanders: list[Asked], *, acks: bool = True, pulls: bool = False) -> Scene:
    """Sends a request and returns when it is in `stage`.

    Without `acks` those of its pages may be missing; with `pulls` one of them has fallen into a hole, in any stage.
    """
    prefill, decode = cluster.of("prefill"), cluster.of("decode")
    marks = {worker.name: len(worker.events) for worker in cluster.workers.values()}
    for worker in prefill:
        _arm_prefill(worker, stage)
    target = cluster.ask(long_prompt(), TOKENS, **cold())
    p, submitted = _who(target, prefill, marks, leg="PrefillLeg")
    [handoff] = submitted["handoffs"]
    d, _ = _who(target, decode, marks, leg="DecodeLeg", handoffs=[handoff])
    scene = Scene(cluster, target, bystanders, p, d, handoff)

    def hears(worker: Worker, **values: Any) -> None:
        until(lambda: "" if worker.heard(marks[worker.name], **values) else _late(target, stage, values), REACH_S)

    match stage:
        case "queued":
            hears(p, event="held", what="queued")
        case "hand-shake":
            hears(p, event="held", what="Reserved", handoff=handoff)
        case "prefill chunk k":
            hears(p, event="out", what="Piece", handoff=handoff)
        case "transfer":
            target.wait_tokens(1, REACH_S)
            hears(p, event="held", what="pull")
        case "before first decode":
            target.wait_tokens(1, REACH_S)
            hears(p, event="held", what="FirstToken", handoff=handoff)
            if acks:
                until(lambda: p.do("in_use"), REACH_S)
        case "decoding":
            target.wait_tokens(3, REACH_S)
    if pulls:
        hears(p, event="held", what="pull")
    for worker in cluster.workers.values():
        worker.do("disarm")
    assert not target.ended, f"it ended before it was to be held: {target.told()}"
    return scene


def _arm_prefill(worker: Worker, stage: str) -> None:
    match stage:
        case "queued":
            worker.do("hold", what="queued", way="queued")
        case "hand-shake":
            worker.do("hold", what="Reserved", way="in")
        case "prefill chunk k":
            worker.do("slow_steps", seconds=CHUNK_S)
        case "transfer":
            worker.do("transfer", how="hole")
        case "before first decode":
            worker.do("hold", what="FirstToken", way="out")


def _who(target: Asked, workers: list[Worker], marks: dict[str, int], **values: Any) -> tuple[Worker, dict[str, Any]]:
    """The one that was sent this leg."""
    found: list[tuple[Worker, dict[str, Any]]] = []

    def said() -> str:
        for worker in workers:
            if (event := worker.heard(marks[worker.name], event="submit", **values)) is not None:
                found.append((worker, event))
                return ""
        return f"no worker was sent {values}: {target.told()}"

    until(said, REACH_S, every_s=0.02)
    return found[0]


def _late(target: Asked, stage: str, values: dict[str, Any]) -> str:
    assert not target.ended, f"it ended before it was {stage}: {target.told()}"
    return f"it is not {stage} ({values} has not happened): {target.told()}"


def assert_right(asked: Asked) -> None:
    """Its tokens are the oracle's."""
    asked.assert_tokens(answer_to(asked.prompt, asked.max_tokens))
