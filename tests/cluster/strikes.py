"""What goes wrong in a scene: one `Strike` a fault, and what of it depends on the stage. (`D full` is in fullness.py.)

before   with the bystanders decoding, before the request is sent
strike   when it is in its stage: the fault; from its end on the client's bound runs
undo     when everything has been judged: the cluster is as it was
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from jaxpd.errors import InvalidArgument
from tests.cluster.harness import Cluster, until
from tests.cluster.process import Worker
from tests.cluster.stages import Scene

LATENCY_S, BYTES_PER_S = 0.5, 50_000.0
LEASE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Strike:
    """One fault. `lost`: the worker that is not there any more after it, so that nothing is asked of it."""

    strike: Callable[[Scene, str], None]
    before: Callable[[Cluster, str], None] = lambda cluster, stage: None
    lost: Callable[[Scene], list[Worker]] = lambda scene: []
    undo: Callable[[Scene], None] = lambda scene: None
    goes_on: bool = False  # the workers can go on with the request: what the stage holds is let go


def leave(scene: Scene, stage: str) -> None:
    """What holds the request goes on holding it, but for the network: a pull ends when it has arrived."""
    scene.target.leave()
    if stage == "transfer":
        scene.p.do("transfer", how="open")


def kill_prefill(scene: Scene, stage: str) -> None:
    scene.p.kill()


def kill_decode(scene: Scene, stage: str) -> None:
    scene.d.kill()


def stop_prefill(scene: Scene, stage: str) -> None:
    scene.p.stop()


def stop_decode(scene: Scene, stage: str) -> None:
    scene.d.stop()


def restart(scene: Scene) -> None:
    scene.cluster.restart(*(w for w in scene.cluster.workers.values() if not w.alive))


def slow_link(scene: Scene, stage: str) -> None:
    """The link that the request needs next."""
    slow = {"latency_s": LATENCY_S, "bytes_per_s": BYTES_PER_S}
    match stage:
        case "queued":
            assert scene.p.link is not None
            scene.p.link.slow(**slow)
        case "decoding":
            assert scene.d.link is not None
            scene.d.link.slow(**slow)
        case _:
            scene.link.slow(**slow)
    if stage in ("prefill chunk k", "transfer"):
        scene.p.do("transfer", how="slow", **slow)


def cut_link(scene: Scene, stage: str) -> None:
    """The link that the request needs next is reset, and stays cut."""
    match stage:
        case "queued":
            assert scene.p.link is not None
            scene.p.link.cut()
        case "decoding":
            assert scene.d.link is not None
            scene.d.link.cut()
        case "transfer":
            scene.p.do("transfer", how="cut")
        case _:
            scene.link.cut()


def heal_links(scene: Scene) -> None:
    for worker in scene.cluster.workers.values():
        for link in (worker.link, *worker.peers.values()):
            if link is not None:
                link.heal()
        worker.do("transfer", how="heal")


def lose_acks(cluster: Cluster, stage: str) -> None:
    for worker in cluster.of("prefill"):
        worker.do("lease", seconds=LEASE_S)
    for worker in cluster.of("decode"):
        worker.do("drop", what="Ack", way="out")


def outlive_the_lease(scene: Scene, stage: str) -> None:
    """The ack is lost already, or will be when the pages are let go; the lease ends while it waits for the rest."""
    if stage in ("prefill chunk k", "before first decode"):
        lease_runs_out(scene, stage)


def double_acks(cluster: Cluster, stage: str) -> None:
    for worker in cluster.of("decode"):
        worker.do("duplicate", what="Ack", way="out")


def late_ack(scene: Scene, stage: str) -> None:
    """One more, long after the first; where pages still wait to be pulled, all of theirs will come twice."""
    if stage != "transfer":
        until(lambda: "" if scene.d.do("repeat", what="Ack", way="out") else "no ack yet", 10.0)


def same_id(scene: Scene, stage: str) -> None:
    second = scene.cluster.ask(scene.target.prompt, 4, request_id=scene.target.options["request_id"])
    second.wait(5.0)
    assert isinstance(second.error, InvalidArgument) and "in use" in second.error.message, second.told()
    assert not second.tokens


def short_leases(cluster: Cluster, stage: str) -> None:
    for worker in cluster.of("prefill"):
        worker.do("lease", seconds=LEASE_S)
        worker.do("transfer", how="hole")


def lease_runs_out(scene: Scene, stage: str) -> None:
    """That time is not the client's to wait; the prompt is not computed by the end of it."""
    if stage == "prefill chunk k":
        scene.p.do("slow_steps", seconds=LEASE_S / 2)
    time.sleep(LEASE_S)


def fail_pull(scene: Scene, stage: str) -> None:
    """Those under way, or the next one."""
    under_way = scene.d.do("fail_pulls")
    assert under_way or stage == "prefill chunk k"


STRIKES: dict[str, Strike] = {
    "client abort": Strike(leave),
    "kill -9 P": Strike(kill_prefill, lost=lambda scene: [scene.p], undo=restart),
    "kill -9 D": Strike(kill_decode, lost=lambda scene: [scene.d], undo=restart),
    "SIGSTOP P": Strike(stop_prefill, lost=lambda scene: [scene.p], undo=lambda scene: scene.p.cont()),
    "SIGSTOP D": Strike(stop_decode, lost=lambda scene: [scene.d], undo=lambda scene: scene.d.cont()),
    "slow link": Strike(slow_link, undo=heal_links, goes_on=True),
    "cut link": Strike(cut_link, undo=heal_links),
    "lost ack": Strike(outlive_the_lease, before=lose_acks, goes_on=True),
    "duplicate ack": Strike(late_ack, before=double_acks, goes_on=True),
    "duplicate request id": Strike(same_id, goes_on=True),
    "lease expiry": Strike(lease_runs_out, before=short_leases),
    "failed pull": Strike(fail_pull, goes_on=True),
}
