"""What is wanted, what there is -> what to do. Pure: no process, no network, no clock of its own.

    (nothing) --Start--> STARTING --ready--> READY --Drain--> DRAINING --idle, or too long--> STOPPING --> (nothing)
                          |  ^ |               ^ |   taken back |                               ^
                          |  | |               +-|--------------+                               |
                          |  | +-----ended-------+--> DIED: waits, then Start                   |
                          |  +-------------------------+            what is not wanted: Stop ---+
                          +-- ended by an error that another start would meet again --> FAILED

A unit is a worker or the router, by name (`decode-1`); each start of it is another `generation`. A worker knows its
router by an address: when the router comes back at another one, the workers are started anew.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

from serving.launch.spec import ROLES, ROUTER, ClusterSpec

BACKOFF_S = 0.5  # after the first death; twice as much after each
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # ready for so long, and earlier deaths are forgotten
STOP_GRACE_S = 35.0  # from SIGTERM on; a worker or router takes at most 30 s by itself (--shutdown-timeout)
SILENCE_S = 60.0  # a process that lives, but of which its router has not heard for so long, is started anew
NEVER_AGAIN = 2  # exit code of an error that names a flag, a file or a limit


class Phase(enum.StrEnum):
    """See the drawing above."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    DIED = "died"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What a launcher sees of a process. `control` is where it listens; `http` and `grpc` are a router's."""

    running: bool = False  # False while it waits for a place
    ready: bool = False
    control: str | None = None
    http: str | None = None
    grpc: str | None = None
    exited: bool = False
    exit_code: int | None = None  # None: lost with its node or actor
    where: str = ""  # the node, for a person
    pid: int | None = None
    trouble: str = ""  # its last words, or what it waits for


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtRouter:
    """What the router says of a worker; `idle` when nothing of it runs or waits to be fetched."""

    state: str  # "connecting", "joining", "ready", "draining" or "gone"
    idle: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One process that there is, was, or will be again. Times are seconds of the caller's clock."""

    name: str
    role: str
    generation: int = 1
    phase: Phase = Phase.STARTING
    since_s: float = 0.0  # in this phase
    deaths: int = 0  # in a row
    was_ready: bool = False  # this generation
    router: str | None = None  # the address that it was started with
    heard_s: float = 0.0  # when the router last had it
    seen: Seen = Seen()
    at_router: AtRouter | None = None
    trouble: str = ""  # of the last death

    @property
    def index(self) -> int:
        """Its number among those of its role."""
        return int(self.name.rpartition("-")[2]) if self.role != ROUTER else 0

    @property
    def start_again_s(self) -> float:
        """When a unit that died may start again."""
        return self.since_s + min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(max(self.deaths - 1, 0), 16))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Starts a process of this unit; `router` is None for the router itself."""

    unit: str
    role: str
    generation: int
    router: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drain:
    """The router gives it nothing new (`draining`), or does again."""

    unit: str
    draining: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """SIGTERM."""

    unit: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL. A unit that is wanted dies of it and starts again."""

    unit: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forget:
    """No process, and none is wanted any more."""

    unit: str


Action = Start | Drain | Stop | Kill | Forget


def observed(unit: Unit, seen: Seen, *, now_s: float, role_was_ready: bool) -> Unit | None:
    """The unit after a look at its process; None when it was to go and is gone."""
    if unit.phase in (Phase.DIED, Phase.FAILED):
        return unit
    if seen.exited:
        if unit.phase in (Phase.STOPPING, Phase.DRAINING):
            return None
        hopeless = seen.exit_code == NEVER_AGAIN and not role_was_ready
        steady = unit.phase is Phase.READY and now_s - unit.since_s >= STEADY_S
        return dataclasses.replace(
            unit,
            phase=Phase.FAILED if hopeless else Phase.DIED,
            since_s=now_s,
            deaths=1 if steady else unit.deaths + 1,
            seen=seen,
            at_router=None,
            trouble=seen.trouble or ending(seen),
        )
    if unit.phase is Phase.STARTING and seen.ready:
        return dataclasses.replace(unit, phase=Phase.READY, since_s=now_s, was_ready=True, heard_s=now_s, seen=seen)
    return dataclasses.replace(unit, seen=seen)


def heard(unit: Unit, workers: Mapping[str, AtRouter] | None, *, now_s: float) -> Unit:
    """The unit after the router has said whom it has, by address; None where it did not answer: nobody's fault but
    its own."""
    if unit.role == ROUTER or workers is None:
        return dataclasses.replace(unit, heard_s=now_s)
    at_router = workers.get(unit.seen.control or "")
    alive = at_router is not None and at_router.state in ("joining", "ready", "draining")
    return dataclasses.replace(unit, at_router=at_router, heard_s=now_s if alive else unit.heard_s)


def plan(spec: ClusterSpec | None, units: Sequence[Unit], *, now_s: float) -> list[Action]:
    """The next actions; all are safe to repeat. `spec` None: everything is to end, the router first, so that it can
    finish what it has."""
    if spec is None:
        return _ending(units, now_s)
    actions: list[Action] = [*_overdue(spec, units, now_s)]
    router = next((unit for unit in units if unit.role == ROUTER), None)
    if router is None:
        return [*actions, Start(unit=ROUTER, role=ROUTER, generation=1, router=None)]
    if router.phase is Phase.DIED and now_s >= router.start_again_s:
        actions.append(Start(unit=ROUTER, role=ROUTER, generation=router.generation + 1, router=None))
    address = router.seen.control if router.phase in (Phase.STARTING, Phase.READY) else None
    for role in ROLES:
        actions += _of_role(role, spec.role(role).count, [u for u in units if u.role == role], address, now_s)
    return actions


def applied(unit: Unit | None, action: Action, *, now_s: float) -> Unit | None:
    """The unit after the action was carried out; None when it is no more."""
    match action:
        case Start():
            deaths, trouble = (unit.deaths, unit.trouble) if unit is not None else (0, "")
            return Unit(
                name=action.unit,
                role=action.role,
                generation=action.generation,
                since_s=now_s,
                deaths=deaths,
                router=action.router,
                heard_s=now_s,
                trouble=trouble,
            )
        case Forget():
            return None
        case Drain() if unit is not None:
            phase = Phase.DRAINING if action.draining else Phase.READY
            return unit if unit.phase is phase else dataclasses.replace(unit, phase=phase, since_s=now_s, heard_s=now_s)
        case Stop() if unit is not None and unit.phase is not Phase.STOPPING:
            return dataclasses.replace(unit, phase=Phase.STOPPING, since_s=now_s)
        case _:
            return unit


def serves(spec: ClusterSpec, units: Iterable[Unit]) -> bool:
    """Whether what is wanted is there: the router and as many workers as the spec says, ready, and nothing on its way
    out."""
    ready: dict[str, int] = dict.fromkeys((*ROLES, ROUTER), 0)
    for unit in units:
        if unit.phase is not Phase.READY:
            return False
        if unit.role != ROUTER and (unit.at_router is None or unit.at_router.state != "ready"):
            return False
        ready[unit.role] += 1
    return ready == {**spec.counts, ROUTER: 1}


def ending(seen: Seen) -> str:
    """How a process ended, in words."""
    if seen.exit_code is None:
        return "lost"
    return f"killed by signal {-seen.exit_code}" if seen.exit_code < 0 else f"exit code {seen.exit_code}"


def _of_role(role: str, wanted: int, units: Sequence[Unit], router: str | None, now_s: float) -> list[Action]:
    active = [u for u in units if u.phase not in (Phase.DRAINING, Phase.STOPPING)]
    draining = sorted((u for u in units if u.phase is Phase.DRAINING), key=lambda unit: unit.index)
    actions: list[Action] = []
    if router is not None:
        for unit in active:
            if unit.router != router and unit.phase in (Phase.STARTING, Phase.READY):
                actions.append(Stop(unit=unit.name, why=f"the router has moved to {router}"))
        active = [u for u in active if not any(a.unit == u.name for a in actions)]
    surplus = len(active) - wanted
    for unit in sorted(active, key=_worth)[: max(surplus, 0)]:
        if unit.phase in (Phase.DIED, Phase.FAILED):
            actions.append(Forget(unit=unit.name))
        elif unit.phase is Phase.STARTING:
            actions.append(Stop(unit=unit.name, why="not wanted any more"))
        else:
            actions.append(Drain(unit=unit.name, draining=True))
        active.remove(unit)
    missing = max(-surplus, 0)
    for unit in draining[:missing]:
        actions.append(Drain(unit=unit.name, draining=False))
    missing = max(missing - len(draining), 0)
    if router is None:
        return actions
    taken = {u.index for u in units}
    free = (index for index in range(len(taken) + missing) if index not in taken)
    for index in (next(free) for _ in range(missing)):
        actions.append(Start(unit=f"{role}-{index}", role=role, generation=1, router=router))
    for unit in active:
        if unit.phase is Phase.DIED and now_s >= unit.start_again_s:
            actions.append(Start(unit=unit.name, role=role, generation=unit.generation + 1, router=router))
    return actions


def _worth(unit: Unit) -> tuple[int, int]:
    """Those that go first are small: what does not run, then what starts, then the youngest."""
    order = {Phase.FAILED: 0, Phase.DIED: 0, Phase.STARTING: 1}
    return order.get(unit.phase, 2), -unit.index


def _overdue(spec: ClusterSpec, units: Sequence[Unit], now_s: float) -> list[Action]:
    """What waits for something that has come, or has not for too long."""
    actions: list[Action] = []
    for unit in units:
        age_s = now_s - unit.since_s
        if unit.phase is Phase.DRAINING:
            at_router = unit.at_router
            if at_router is not None and at_router.state == "draining" and at_router.idle:
                actions.append(Stop(unit=unit.name, why="drained"))
            elif age_s >= spec.drain_timeout_s:
                actions.append(Stop(unit=unit.name, why=f"still busy after {spec.drain_timeout_s:g} s"))
            elif now_s - unit.heard_s >= SILENCE_S:
                actions.append(Stop(unit=unit.name, why="the router has lost it"))
            elif at_router is not None and at_router.state == "ready":
                actions.append(Drain(unit=unit.name, draining=True))
        elif unit.phase is Phase.STOPPING and age_s >= STOP_GRACE_S:
            actions.append(Kill(unit=unit.name, why=f"still there {STOP_GRACE_S:g} s after SIGTERM"))
        elif unit.phase is Phase.STARTING and unit.seen.running and age_s >= spec.start_timeout_s:
            if unit.role == ROUTER:
                continue  # it waits for workers, not for itself
            actions.append(Kill(unit=unit.name, why=f"not ready after {spec.start_timeout_s:g} s"))
        elif unit.phase is Phase.READY and now_s - unit.heard_s >= SILENCE_S:
            actions.append(Kill(unit=unit.name, why=f"the router has not heard of it for {SILENCE_S:g} s"))
    return actions


def _ending(units: Sequence[Unit], now_s: float) -> list[Action]:
    router = [unit for unit in units if unit.role == ROUTER and unit.phase not in (Phase.DIED, Phase.FAILED)]
    actions: list[Action] = []
    for unit in units:
        if unit.phase in (Phase.DIED, Phase.FAILED):
            actions.append(Forget(unit=unit.name))
        elif unit.phase is not Phase.STOPPING:
            if unit.role == ROUTER or not router or unit.phase is Phase.STARTING:
                actions.append(Stop(unit=unit.name, why="the cluster ends"))
        elif now_s - unit.since_s >= STOP_GRACE_S:
            actions.append(Kill(unit=unit.name, why=f"still there {STOP_GRACE_S:g} s after SIGTERM"))
    return actions
