"""Plays one cell of the failure matrix and judges it: the four things that must hold whatever goes wrong.

1. The client has a definite answer within the cell's bound, counted from the fault.
2. Pages, slots and staging of the workers that are left are back to what they were.
3. The tokens of the other requests are the oracle's, those of its own workers included.
4. The next request is served, with the fault still there.

Then the fault is taken away, and the cluster has to be whole again before the next cell.
"""

from __future__ import annotations

import dataclasses
import time

from tests.cluster.fullness import play_full
from tests.cluster.harness import Cluster
from tests.cluster.matrix import AIM_S, LEFT, STOPPED_S, Bound
from tests.cluster.process import Worker
from tests.cluster.stages import Scene, assert_right, cold, reach, short_prompt, start_bystanders
from tests.cluster.strikes import LEASE_S, STRIKES, Strike

OTHERS_S = 60.0  # for answers of those beside it, which are slow on purpose
WHOLE_S = 60.0  # for the cluster to be whole, when the fault is gone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """What a cell took, in seconds: to the answer, to nothing in use, and to an answer to the next request."""

    fault: str
    stage: str
    answer_s: float
    baseline_s: float
    next_s: float


def play(cluster: Cluster, fault: str, stage: str, bound: Bound) -> Played:
    """Raises AssertionError where the cell is not as it must be. The cluster is whole afterwards, or of no use."""
    _whole(cluster)
    bystanders = start_bystanders(cluster, long=fault == "D full" and stage != "decoding")
    if fault == "D full":
        answer_s = play_full(cluster, stage, bystanders, bound.seconds)
        lost: list[Worker] = []
        strike, scene = None, None
    else:
        strike = STRIKES[fault]
        strike.before(cluster, stage)
        scene = reach(cluster, stage, bystanders, acks=fault != "lost ack", pulls=fault == "lease expiry")
        answer_s = _strike(scene, strike, stage, bound)
        lost = strike.lost(scene)
    _calm(cluster, lost)
    for asked in bystanders:
        asked.wait(OTHERS_S)
        assert_right(asked)
    bound_s = STOPPED_S if bound.seconds > AIM_S else AIM_S
    baseline_s = cluster.baseline(bound_s + (LEASE_S if fault == "lost ack" else 0.0), but=lost)
    next_s = _next(cluster)
    if strike is not None and scene is not None:
        strike.undo(scene)
    _whole(cluster)
    return Played(fault=fault, stage=stage, answer_s=answer_s, baseline_s=baseline_s, next_s=next_s)


def _strike(scene: Scene, strike: Strike, stage: str, bound: Bound) -> float:
    """Seconds from the fault to the answer, which is judged."""
    strike.strike(scene, stage)
    lost = strike.lost(scene)
    began_s = time.monotonic()
    if strike.goes_on:
        for worker in scene.cluster.workers.values():
            worker.do("release")
        scene.p.do("transfer", how="open")
    _calm(scene.cluster, lost)
    scene.target.wait(bound.seconds)
    assert scene.target.ended_s is not None
    if bound is not LEFT:
        assert_right(scene.target)
    if scene.p not in lost:
        scene.p.do("transfer", how="open")  # a pull has its memory until it has settled, whoever gave it up
    return max(scene.target.ended_s - began_s, 0.0)


def _next(cluster: Cluster) -> float:
    asked = cluster.ask(short_prompt(), 8, **cold())
    began_s = time.monotonic()
    asked.wait(STOPPED_S)
    assert_right(asked)
    assert asked.ended_s is not None
    return asked.ended_s - began_s


def _calm(cluster: Cluster, lost: list[Worker]) -> None:
    """Steps take as long as they take."""
    for worker in cluster.workers.values():
        if worker not in lost:
            worker.do("slow_steps", seconds=0)


def _whole(cluster: Cluster) -> None:
    """No hook does anything, every worker is ready, and nothing is in use."""
    for worker in cluster.workers.values():
        assert worker.alive, f"{worker.name} has ended:\n{worker.tail()}"
        worker.do("clear")
    cluster.wait_ready(WHOLE_S)
    cluster.baseline(WHOLE_S)
