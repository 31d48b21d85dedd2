"""The loop that keeps a cluster as it is wanted, over any launcher.

    every PASS_S seconds, and at once when somebody asks for something:
        look at the processes -> ask the router -> plan -> act

All state is this object's, and its own thread's alone; others read `status()` and leave wishes (`scale`, `end`).
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from jaxpd.errors import Unavailable
from serving.launch.commands import Launch
from serving.launch.reconcile import (
    STOP_GRACE_S,
    Action,
    AtRouter,
    Drain,
    Forget,
    Kill,
    Phase,
    Seen,
    Start,
    Stop,
    Unit,
    applied,
    heard,
    observed,
    plan,
    serves,
)
from serving.launch.router_calls import RouterCalls
from serving.launch.spec import ROUTER, ClusterSpec

logger = logging.getLogger(__name__)

PASS_S = 0.5
KEPT_EVENTS = 500


class Launcher(Protocol):
    """Starts and ends processes somewhere. None of it blocks for long."""

    def start(self, launch: Launch) -> None:
        """A process for `launch.unit`; an earlier one of that unit has ended."""
        ...

    def look(self) -> Mapping[str, Seen]:
        """By unit, everything that was started and not forgotten."""
        ...

    def stop(self, unit: str, grace_s: float) -> None:
        """SIGTERM, SIGKILL after `grace_s` seconds."""
        ...

    def kill(self, unit: str) -> None:
        """SIGKILL."""
        ...

    def forget(self, unit: str) -> None:
        """Its process has ended, or never was."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitStatus:
    """One process, for a person. `trouble` is how its last start ended, or what it waits for."""

    name: str
    role: str
    phase: str
    generation: int
    where: str
    pid: int | None
    address: str | None
    trouble: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """A cluster at one moment. `events` are lines with their number, so that a reader asks on from the last one."""

    name: str
    model: str
    wanted: Mapping[str, int]
    serves: bool
    ended: bool
    http: str | None
    grpc: str | None
    control: str | None
    units: tuple[UnitStatus, ...]
    events: tuple[tuple[int, str], ...] = ()


class Controller:
    """Starts with `start`, ends by itself after `end` when every process has. `found` are units that run already (a
    controller that comes back)."""

    def __init__(
        self,
        spec: ClusterSpec,
        launcher: Launcher,
        router: RouterCalls,
        *,
        secret: str,
        found: tuple[Unit, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted: ClusterSpec | None = spec
        self._spec = spec
        self._launcher = launcher
        self._router = router
        self._secret = secret
        self._clock = clock
        self._units: dict[str, Unit] = {unit.name: unit for unit in found}
        self._ready_roles = {unit.role for unit in found if unit.was_ready}
        self._router_port = 0
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # of _wanted, _spec, _status, _events
        self._events: collections.deque[tuple[int, str]] = collections.deque(maxlen=KEPT_EVENTS)
        self._num_events = 0
        for unit in found:
            if unit.role == ROUTER and unit.was_ready:
                self._keep_ports(unit.seen)
        self._status = self._made_status()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        """Begins the loop."""
        self._thread.start()

    def scale(self, counts: Mapping[str, int]) -> ClusterSpec:
        """Other numbers of workers; returns what is wanted now. Raises InvalidArgument, Unavailable when it ends."""
        with self._lock:
            if self._wanted is None:
                raise Unavailable(f"cluster {self._spec.name} ends; start it anew with jaxpd up")
            self._wanted = self._spec = self._wanted.scaled(counts)
            # nobody may read that the old wish was met
            self._status = dataclasses.replace(self._status, wanted=self._spec.counts, serves=False)
        self._say("wanted now: " + ", ".join(f"{n} {role}" for role, n in self._spec.counts.items() if n))
        self._wake.set()
        return self._spec

    def end(self) -> None:
        """Stops everything, the router first. Idempotent; `ended` tells when it is done."""
        with self._lock:
            self._wanted = None
            self._status = dataclasses.replace(self._status, serves=False)
        self._wake.set()

    def ended(self, timeout_s: float) -> bool:
        """Whether everything has stopped, within `timeout_s` seconds."""
        return self._ended.wait(timeout_s)

    def status(self, after: int = 0) -> Status:
        """As of the last pass, with the events after number `after`."""
        with self._lock:
            return dataclasses.replace(self._status, events=tuple(e for e in self._events if e[0] > after))

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            try:
                self.one_pass()
            except Exception:  # a launcher's trouble must not end the loop that would repair it
                logger.exception("a pass failed; the next one is in %.1f s", PASS_S)
            self._wake.wait(PASS_S)

    def one_pass(self) -> None:
        """Looks once, and does what there is to do."""
        now_s = self._clock()
        self._look(now_s)
        with self._lock:
            wanted = self._wanted
        for action in plan(wanted, tuple(self._units.values()), now_s=now_s):
            self._act(action, now_s)
        with self._lock:
            self._status = self._made_status()
        if wanted is None and not self._units:
            self._ended.set()

    def _look(self, now_s: float) -> None:
        seen = self._launcher.look()
        for name, unit in list(self._units.items()):
            after = observed(unit, seen.get(name, Seen()), now_s=now_s, role_was_ready=unit.role in self._ready_roles)
            if after is None:
                self._say(f"{name} has ended")
                self._launcher.forget(name)
                del self._units[name]
                continue
            self._units[name] = after
            if after.phase is not unit.phase:
                self._note(after, now_s)
        workers = self._workers()
        for name, unit in self._units.items():
            self._units[name] = heard(unit, workers, now_s=now_s)

    def _note(self, unit: Unit, now_s: float) -> None:
        """Says what became of a unit by itself."""
        match unit.phase:
            case Phase.READY:
                self._ready_roles.add(unit.role)
                self._say(f"{unit.name} is ready on {unit.seen.control}")
                if unit.role == ROUTER:
                    self._keep_ports(unit.seen)
            case Phase.DIED:
                self._say(f"{unit.name} {_first(unit.trouble)}; again in {unit.start_again_s - now_s:.1f} s")
            case Phase.FAILED:
                self._say(f"{unit.name} cannot start: {unit.trouble}")

    def _workers(self) -> Mapping[str, AtRouter] | None:
        router = self._units.get(ROUTER)
        if router is None or router.phase is not Phase.READY or router.seen.control is None:
            return None
        try:
            return self._router.workers(router.seen.control)
        except Unavailable as error:
            logger.debug("%s", error)
            return None

    def _act(self, action: Action, now_s: float) -> None:
        unit = self._units.get(action.unit)
        match action:
            case Start():
                launch = Launch(
                    spec=self._spec,
                    unit=action.unit,
                    role=action.role,
                    generation=action.generation,
                    router=action.router,
                    port=self._router_port if action.role == ROUTER else 0,
                    secret=self._secret,
                )
                self._launcher.start(launch)
                self._say(f"{action.unit} starts" + (f" again (start {action.generation})" if unit else ""))
            case Drain():
                if not self._drained(action, unit):
                    return
            case Stop():
                self._say(f"{action.unit} stops: {action.why}")
                self._launcher.stop(action.unit, STOP_GRACE_S)
            case Kill():
                self._say(f"{action.unit} is killed: {action.why}")
                self._launcher.kill(action.unit)
            case Forget():
                self._launcher.forget(action.unit)
        after = applied(unit, action, now_s=now_s)
        if after is None:
            self._units.pop(action.unit, None)
        else:
            self._units[action.unit] = after

    def _drained(self, action: Drain, unit: Unit | None) -> bool:
        """Tells the router; False when it is not there to be told, and the next pass tries again."""
        router = self._units.get(ROUTER)
        if unit is None or unit.seen.control is None or router is None or router.seen.control is None:
            return False
        try:
            self._router.drain(router.seen.control, unit.seen.control, action.draining)
        except Unavailable as error:
            logger.warning("%s cannot be drained yet: %s", action.unit, error)
            return False
        self._say(f"{action.unit} " + ("drains" if action.draining else "is wanted again"))
        return True

    def _keep_ports(self, seen: Seen) -> None:
        """A router that starts again must come back where clients and workers know it."""
        self._router_port = _port(seen.control)
        http, grpc = _port(seen.http), _port(seen.grpc)
        with self._lock:
            self._spec = self._spec.with_ports(http or self._spec.router.port, grpc or self._spec.router.grpc_port)
            self._wanted = self._wanted and self._spec

    def _say(self, text: str) -> None:
        logger.info("%s", text)
        with self._lock:
            self._num_events += 1
            self._events.append((self._num_events, text))

    def _made_status(self) -> Status:
        router = self._units.get(ROUTER, Unit(name=ROUTER, role=ROUTER)).seen
        wanted = self._wanted
        return Status(
            name=self._spec.name,
            model=self._spec.model,
            wanted=self._spec.counts,
            serves=wanted is not None and serves(wanted, tuple(self._units.values())),
            ended=wanted is None and not self._units,
            http=router.http,
            grpc=router.grpc,
            control=router.control,
            units=tuple(
                UnitStatus(
                    name=unit.name,
                    role=unit.role,
                    phase=str(unit.phase),
                    generation=unit.generation,
                    where=unit.seen.where,
                    pid=unit.seen.pid,
                    address=unit.seen.control,
                    trouble=unit.seen.trouble if unit.phase is Phase.STARTING else unit.trouble,
                )
                for unit in sorted(self._units.values(), key=lambda u: (u.role, u.index))
            ),
        )


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _port(address: str | None) -> int:
    digits = (address or "").rpartition(":")[2].rstrip("/")
    return int(digits) if digits.isdigit() else 0
