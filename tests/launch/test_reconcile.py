"""The rules by which processes are started and ended, on a clock and in a world of this file."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.launch import reconcile
from serving.launch.reconcile import AtRouter, Drain, Kill, Phase, Seen, Start, Stop, Unit
from serving.launch.spec import ROLES, ROUTER, ClusterSpec, RoleSpec

READY_S = 3.0  # a process is ready so long after its start
LEAVES_S = 1.0  # and ends so long after SIGTERM


@dataclasses.dataclass
class Process:
    start_s: float
    address: str
    router: str | None
    term_s: float | None = None
    exit_code: int | None = None
    draining: bool = False
    idle: bool = True
    silent: bool = False


class World:
    """Processes that behave, until they are told not to; a pass every half second."""

    def __init__(self, spec: ClusterSpec | None) -> None:
        self.spec = spec
        self.now_s = 0.0
        self.units: dict[str, Unit] = {}
        self.processes: dict[str, Process] = {}
        self.done: list[reconcile.Action] = []
        self.router_port = 7000
        self.was_ready: set[str] = set()
        self._started = 0

    def run(self, duration_s: float) -> World:
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            self.one_pass()
            self.now_s += 0.5
        return self

    def one_pass(self) -> None:
        for name, unit in list(self.units.items()):
            after = reconcile.observed(
                unit, self.seen(name), now_s=self.now_s, role_was_ready=unit.role in self.was_ready
            )
            if after is None:
                del self.units[name], self.processes[name]
                continue
            if after.phase is Phase.READY:
                self.was_ready.add(unit.role)
            self.units[name] = reconcile.heard(after, self.at_router(), now_s=self.now_s)
        for action in reconcile.plan(self.spec, tuple(self.units.values()), now_s=self.now_s):
            self.act(action)

    def act(self, action: reconcile.Action) -> None:
        self.done.append(action)
        process = self.processes.get(action.unit)
        match action:
            case Start():
                assert process is None or process.exit_code is not None, f"two processes of {action.unit}"
                self._started += 1
                port = self.router_port if action.role == ROUTER else 8000 + self._started
                self.processes[action.unit] = Process(self.now_s, f"h:{port}", action.router)
            case Drain() if process is not None:
                process.draining = action.draining
            case Stop() if process is not None:
                process.term_s = process.term_s or self.now_s
            case Kill() if process is not None:
                process.exit_code = -9
            case reconcile.Forget():
                self.processes.pop(action.unit, None)
        after = reconcile.applied(self.units.get(action.unit), action, now_s=self.now_s)
        self.units.pop(action.unit, None)
        if after is not None:
            self.units[action.unit] = after

    def seen(self, name: str) -> Seen:
        process = self.processes[name]
        if process.exit_code is None and process.term_s is not None and self.now_s >= process.term_s + LEAVES_S:
            process.exit_code = 0
        if process.exit_code is not None:
            return Seen(exited=True, exit_code=process.exit_code)
        ready = self.now_s >= process.start_s + READY_S
        known = ready or name == ROUTER
        return Seen(running=True, ready=ready, control=process.address if known else None)

    def at_router(self) -> dict[str, AtRouter] | None:
        router = self.units.get(ROUTER)
        if router is None or router.phase is not Phase.READY or self.processes[ROUTER].exit_code is not None:
            return None
        return {
            p.address: AtRouter(state="gone" if p.silent else "draining" if p.draining else "ready", idle=p.idle)
            for name, p in self.processes.items()
            if name != ROUTER and p.exit_code is None and self.now_s >= p.start_s + READY_S
        }

    def kill(self, name: str, code: int = -9) -> None:
        self.processes[name].exit_code = code

    def names(self, phase: Phase = Phase.READY) -> set[str]:
        return {unit.name for unit in self.units.values() if unit.phase is phase}


def cluster(prefill: int = 1, decode: int = 1) -> ClusterSpec:
    return ClusterSpec(model="m", prefill=RoleSpec(count=prefill), decode=RoleSpec(count=decode))


def serves(world: World) -> bool:
    assert world.spec is not None
    return reconcile.serves(world.spec, world.units.values())


def test_all_that_is_wanted_starts_and_nothing_more_happens() -> None:
    world = World(cluster(prefill=1, decode=2)).run(10)
    assert world.names() == {"router", "prefill-0", "decode-0", "decode-1"} and serves(world)
    assert [type(a) for a in world.done] == [Start] * 4
    assert {p.router for name, p in world.processes.items() if name != ROUTER} == {"h:7000"}


def test_it_does_not_serve_before_the_router_has_every_worker() -> None:
    world = World(cluster()).run(10)
    assert serves(world)
    world.processes["decode-0"].silent = True
    world.run(1)
    assert not serves(world)


def test_what_dies_starts_again_after_a_pause_that_grows_and_is_forgotten() -> None:
    world = World(cluster()).run(10)
    pauses = []
    for _ in range(9):
        world.kill("decode-0")
        died_s = world.now_s
        while world.processes["decode-0"].exit_code is not None:
            world.run(0.5)
        pauses.append(world.processes["decode-0"].start_s - died_s)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert world.units["decode-0"].generation == 10 and world.units["prefill-0"].generation == 1
    world.run(READY_S + reconcile.STEADY_S + 1)
    world.kill("decode-0")
    world.run(5)
    assert world.names() == {"router", "prefill-0", "decode-0"}
    assert world.units["decode-0"].deaths == 1


def test_a_start_that_can_never_work_is_not_tried_again_but_one_that_did_work_is() -> None:
    world = World(cluster()).run(2)
    world.kill("decode-0", code=2)
    world.run(60)
    assert world.names(Phase.FAILED) == {"decode-0"} and world.units["decode-0"].generation == 1
    assert "exit code 2" in world.units["decode-0"].trouble
    world.kill("prefill-0", code=2)
    world.run(10)
    assert "prefill-0" in world.names()


def test_scaling_down_drains_the_youngest_and_stops_it_when_it_is_idle() -> None:
    world = World(cluster(decode=3)).run(10)
    world.processes["decode-2"].idle = False
    world.spec = cluster(decode=2)
    world.run(20)
    assert world.processes["decode-2"].draining and world.processes["decode-2"].term_s is None
    world.processes["decode-2"].idle = True
    world.run(5)
    assert world.names() == {"router", "prefill-0", "decode-0", "decode-1"} == set(world.units)


def test_a_worker_that_stays_busy_is_stopped_after_the_drain_timeout() -> None:
    world = World(dataclasses.replace(cluster(decode=2), drain_timeout_s=20)).run(10)
    world.processes["decode-1"].idle = False
    assert world.spec is not None
    world.spec = world.spec.scaled({"decode": 1})
    world.run(19)
    assert "decode-1" in world.units
    world.run(5)
    assert "decode-1" not in world.units


def test_a_draining_worker_is_taken_back_before_another_one_starts() -> None:
    world = World(cluster(decode=2)).run(10)
    world.processes["decode-1"].idle = False
    world.spec = cluster(decode=1)
    world.run(5)
    before = len([a for a in world.done if isinstance(a, Start)])
    world.spec = cluster(decode=3)
    world.run(10)
    assert not world.processes["decode-1"].draining
    assert world.names() == {"router", "prefill-0", "decode-0", "decode-1", "decode-2"}
    assert len([a for a in world.done if isinstance(a, Start)]) == before + 1


def test_a_router_that_was_started_again_is_told_again_who_drains() -> None:
    world = World(cluster(decode=2)).run(10)
    world.processes["decode-1"].idle = False
    world.spec = cluster(decode=1)
    world.run(5)
    world.kill(ROUTER)
    world.processes["decode-1"].draining = False  # the new router knows nothing of it
    world.run(10)
    assert world.processes["decode-1"].draining and world.units["decode-1"].phase is Phase.DRAINING


def test_what_does_not_run_goes_before_what_does() -> None:
    world = World(cluster(decode=2)).run(10)
    world.kill("decode-0")
    world.spec = cluster(decode=1)
    world.run(5)
    assert set(world.units) == {"router", "prefill-0", "decode-1"}
    assert not any(isinstance(a, Drain) for a in world.done)


def test_workers_follow_a_router_that_came_back_elsewhere() -> None:
    world = World(cluster()).run(10)
    world.router_port = 7777
    world.kill(ROUTER)
    world.run(15)
    assert serves(world)
    assert {p.router for name, p in world.processes.items() if name != ROUTER} == {"h:7777"}


def test_workers_stay_when_the_router_comes_back_where_it_was() -> None:
    world = World(cluster()).run(10)
    world.kill(ROUTER)
    world.run(15)
    assert serves(world) and world.units[ROUTER].generation == 2
    assert world.units["decode-0"].generation == 1 and not any(isinstance(a, Stop) for a in world.done)


def test_a_worker_that_hangs_is_killed_but_not_for_a_router_that_is_away() -> None:
    world = World(cluster()).run(10)
    world.processes["decode-0"].silent = True
    world.run(reconcile.SILENCE_S - 2)
    assert not any(isinstance(a, Kill) for a in world.done)
    world.run(10)
    assert [a.unit for a in world.done if isinstance(a, Kill)] == ["decode-0"]
    assert "decode-0" in world.names() and world.units["decode-0"].generation == 2


def test_a_start_that_never_ends_is_killed_unless_it_waits_for_its_place() -> None:
    spec = dataclasses.replace(cluster(), start_timeout_s=10)
    running = Unit(name="decode-0", role="decode", seen=Seen(running=True), router="h:1")
    waiting = dataclasses.replace(running, name="decode-1", seen=Seen(trouble="waits for a node with GPU=8"))
    router = Unit(name=ROUTER, role=ROUTER, seen=Seen(running=True, control="h:1"))  # for as long as it has no workers
    kills = [a for a in reconcile.plan(spec, (router, running, waiting), now_s=11) if isinstance(a, Kill)]
    assert [kill.unit for kill in kills] == ["decode-0"]


def test_the_end_stops_the_router_first_and_kills_what_does_not_go() -> None:
    world = World(cluster(decode=2)).run(10)
    world.done.clear()
    world.spec = None
    world.run(0.5)
    assert [a.unit for a in world.done if isinstance(a, Stop)] == [ROUTER]
    world.run(10)
    assert not world.units and not world.processes
    stuck = Unit(name="decode-0", role="decode", phase=Phase.STOPPING)
    assert [type(a) for a in reconcile.plan(None, (stuck,), now_s=reconcile.STOP_GRACE_S)] == [Kill]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_what_is_wanted_is_there_in_the_end(data: st.DataObject) -> None:
    world = World(cluster())
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(("kill", "exit", "scale", "busy", "silent", "wait"))):
            case "kill" | "exit" as how if world.processes:
                world.kill(data.draw(st.sampled_from(sorted(world.processes))), -9 if how == "kill" else 1)
            case "scale":
                world.spec = cluster(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
            case "busy" | "silent" as what if world.processes:
                process = world.processes[data.draw(st.sampled_from(sorted(world.processes)))]
                process.idle = process.idle and what == "silent"
                process.silent = process.silent or what == "silent"
        world.run(data.draw(st.sampled_from((0.5, 1.0, 4.0, 20.0))))
    for process in world.processes.values():
        process.idle = True
    world.run(2 * reconcile.SILENCE_S + 2 * reconcile.MAX_BACKOFF_S)
    assert serves(world), world.units
    assert world.spec is not None
    by_role = {role: sum(u.role == role for u in world.units.values()) for role in ROLES}
    assert by_role == world.spec.counts


@pytest.mark.parametrize(("code", "words"), [(-9, "killed by signal 9"), (1, "exit code 1"), (None, "lost")])
def test_an_end_has_words(code: int | None, words: str) -> None:
    assert reconcile.ending(Seen(exited=True, exit_code=code)) == words
