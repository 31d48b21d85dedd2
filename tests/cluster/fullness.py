"""Decode workers without room: no slot for one more, or no page for what decodes there already."""

from __future__ import annotations

import time

from tests.cluster.asked import Asked
from tests.cluster.harness import Cluster, until
from tests.cluster.process import Worker
from tests.cluster.stages import REACH_S, TOKENS, VERY_LONG_TOKENS, assert_right, cold, long_prompt, very_long_answer

SLOTS = 8  # two decode workers with four each
PAGES = 40  # of each; four of the long answers want 56
WAITS_S = 1.5  # a request that has no room, before there is some


def play_full(cluster: Cluster, stage: str, bystanders: list[Asked], bound_s: float) -> float:
    """One cell of the row; the seconds from the moment when there is room to the answer."""
    return _pages_run_out(cluster, bound_s) if stage == "decoding" else _no_slot(cluster, stage, bystanders, bound_s)


def _no_slot(cluster: Cluster, stage: str, bystanders: list[Asked], bound_s: float) -> float:
    """It waits, holding nothing but its place, and goes on as soon as others have left."""
    if stage == "queued":
        occupants = [_occupant(cluster) for _ in range(SLOTS - len(bystanders))]
        for asked in occupants:
            asked.wait_tokens(3)
        target = cluster.ask(long_prompt(), TOKENS, **cold())
    else:
        target, occupants = _full_meanwhile(cluster)
    time.sleep(WAITS_S)
    assert not target.ended and not target.tokens, f"there was no room for it: {target.told()}"
    for asked in occupants:
        asked.leave()
    began_s = time.monotonic()
    target.wait(bound_s)
    assert_right(target)
    assert target.ended_s is not None
    return target.ended_s - began_s


def _full_meanwhile(cluster: Cluster) -> tuple[Asked, list[Asked]]:
    """A request that asks for pages just when the last slot has been taken, and those who have taken it."""
    decode = cluster.of("decode")
    marks = {worker: len(worker.events) for worker in decode}
    for worker in decode:
        worker.do("hold", what="Reserve", way="in")
    target = cluster.ask(long_prompt(), TOKENS, **cold())

    def asked() -> list[Worker]:
        return [worker for worker in decode if worker.heard(marks[worker], event="held", what="Reserve")]

    until(lambda: "" if asked() else "nobody was asked", REACH_S)
    [d] = asked()
    others = [worker for worker in decode if worker is not d]
    for worker in decode:
        worker.do("disarm")
    for worker in others:
        cluster.drain(worker)
    occupants = [_occupant(cluster) for _ in range(SLOTS // len(decode))]

    def free_slots() -> int:
        return sum(replica.free_slots for replica in cluster.reading(d).replicas)

    until(lambda: "" if free_slots() == 0 else f"{free_slots()} slots are free", REACH_S)
    for worker in others:
        cluster.drain(worker, False)
    d.do("release")
    return target, occupants


def _occupant(cluster: Cluster) -> Asked:
    return cluster.ask(very_long_answer(), VERY_LONG_TOKENS, **cold())


def _pages_run_out(cluster: Cluster, bound_s: float) -> float:
    """More than the pages hold decodes at once: some give way, are computed again, and nobody's tokens change."""
    for worker in cluster.of("decode"):
        worker.do("slow_steps", seconds=0)
    before = _preempted(cluster)
    began_s = time.monotonic()
    requests = [_occupant(cluster) for _ in range(SLOTS)]
    for asked in requests:
        asked.wait(bound_s - (time.monotonic() - began_s))
        assert_right(asked)
    took_s = time.monotonic() - began_s
    until(lambda: "" if _preempted(cluster) > before else "nobody had to give way", 5.0)
    return took_s


def _preempted(cluster: Cluster) -> int:
    return sum(replica.preempted for info in cluster.listed() for replica in info.reading.replicas)
