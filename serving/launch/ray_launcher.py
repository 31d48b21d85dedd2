"""A cluster on Ray: Ray places, watches and isolates; what runs is the same as anywhere.

    `jaxpd up --ray` --ray.init--> Keeper (detached actor, named) : the controller's loop
                                      |  one actor a process, SPREAD over the nodes that have its resources
                                      +--> Host (detached actor) --owns--> python -m jaxpd worker ...
                                      +--> Host                  --owns--> python -m jaxpd router ...

A Host takes the resources of its worker (CPU, GPU, TPU or any name) and Ray sets which devices it may see; its process
inherits that, and ends with it. What happens when something dies:

    the process      its Host says so; the controller starts another one, after a pause that grows
    the Host         its process ends with it (tether.py); the same
    a node           the same, on other nodes, if they have the resources; else it waits for them
    the Keeper       nothing stops; Ray starts it again, and it finds its Hosts by name

The Keeper writes the wanted numbers into the Hosts, so that one that is started again knows them.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from serving.launch.commands import Launch, arguments, free_port, joined, tied
from serving.launch.controller import Controller, Status
from serving.launch.devices import environment_for
from serving.launch.local import write_secret
from serving.launch.process import Owned
from serving.launch.reconcile import Phase, Seen, Unit
from serving.launch.router_calls import GrpcRouterCalls
from serving.launch.spec import ROLES, ROUTER, ClusterSpec, default_resources

NAMESPACE = "jaxpd"
FINDING_S = 10.0


def accelerator_of(resources: Mapping[str, float]) -> str:
    """What the nodes of a Ray cluster have: "tpu" before "gpu" before "cpu"."""
    return next((kind.lower() for kind in ("TPU", "GPU") if resources.get(kind, 0) > 0), "cpu")


def actor_options(ray: Any, resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's words for what one worker takes."""
    named = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": named or None}


class Host:
    """The actor that owns one process, on the node where Ray has placed it."""

    def __init__(self, launch: Launch, accelerator: str, memo: tuple[int, dict[str, int]]) -> None:
        import ray

        host = launch.spec.node_host or ray.util.get_node_ip_address()
        self._launch = launch
        self._memo = memo
        self._folder = tempfile.TemporaryDirectory(prefix="jaxpd-")  # 0700
        secret_file = write_secret(pathlib.Path(self._folder.name), launch.secret)
        port = free_port(host, launch.port) if launch.role == ROUTER else 0
        cpu_only = launch.role == ROUTER or accelerator == "cpu"
        self._owned = Owned(
            tied(arguments(launch, host=host, port=port, secret_file=str(secret_file))),
            environment={
                **os.environ,
                **environment_for({}, "cpu" if cpu_only else accelerator),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **launch.spec.environment,
            },
            log=sys.stderr,
            where=f"{host} ({ray.get_runtime_context().get_node_id()[:8]})",
            control=joined(host, port) if port else None,
        )

    def look(self) -> Seen:
        """Of its process."""
        return self._owned.look()

    def stop(self, grace_s: float) -> None:
        """SIGTERM, SIGKILL later."""
        self._owned.stop(grace_s)

    def remember(self, memo: tuple[int, dict[str, int]]) -> None:
        """The wanted numbers of workers, with the number of the wish."""
        self._memo = memo

    def found(self) -> tuple[Launch, Seen, tuple[int, dict[str, int]]]:
        """What a Keeper that was started again needs to know."""
        return self._launch, self._owned.look(), self._memo


@dataclasses.dataclass
class _Placed:
    """An actor, the question it was last asked, and what it said last."""

    actor: Any
    asked: Any
    seen: Seen


class RayLauncher:
    """Hosts. See `serving.launch.controller.Launcher`."""

    def __init__(self, ray: Any, spec: ClusterSpec, near: str) -> None:
        self._ray = ray
        self._name = spec.name
        self._near = near  # the node where the router should be
        self._accelerator = spec.accelerator or accelerator_of(ray.cluster_resources())
        self._placed: dict[str, _Placed] = {}
        self.memo: tuple[int, dict[str, int]] = (0, spec.counts)

    def start(self, launch: Launch) -> None:
        """See `Launcher`."""
        ray = self._ray
        self.forget(launch.unit)
        if launch.role == ROUTER:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(self._near, soft=True)}
            waiting = "waits for its node"
        else:
            resources = default_resources(launch.spec.role(launch.role), self._accelerator)
            options = actor_options(ray, resources) | {"scheduling_strategy": "SPREAD"}
            waiting = "waits for a node with " + ", ".join(f"{kind}={n:g}" for kind, n in resources.items())
        # the moment makes the name another one than that of a Host whose end Ray has not noticed yet
        name = f"{self._name}/{launch.unit}/{launch.generation}/{time.time_ns()}"
        actor = (
            ray.remote(Host)
            .options(name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=0, **options)
            .remote(launch, self._accelerator, self.memo)
        )
        self._placed[launch.unit] = _Placed(actor, actor.look.remote(), Seen(trouble=waiting))

    def look(self) -> Mapping[str, Seen]:
        """See `Launcher`. Nobody is waited for: an answer that is not there yet is the last one's."""
        for placed in self._placed.values():
            if placed.seen.exited or not self._ray.wait([placed.asked], timeout=0)[0]:
                continue
            try:
                placed.seen = self._ray.get(placed.asked)
                placed.asked = placed.actor.look.remote()
            except self._ray.exceptions.RayActorError as error:
                placed.seen = _lost(placed.seen, f"lost with its actor: {reason_of(error)}")
            except self._ray.exceptions.RayTaskError as error:
                placed.seen = _lost(placed.seen, f"its actor failed: {error.cause}")
        return {name: placed.seen for name, placed in self._placed.items()}

    def stop(self, unit: str, grace_s: float) -> None:
        """See `Launcher`. One that has no place yet is given up."""
        placed = self._placed[unit]
        if placed.seen.running:
            placed.actor.stop.remote(grace_s)
        else:
            self.kill(unit)

    def kill(self, unit: str) -> None:
        """See `Launcher`. The process ends with its actor."""
        placed = self._placed[unit]
        self._ray.kill(placed.actor)
        placed.seen = _lost(placed.seen, "killed")

    def forget(self, unit: str) -> None:
        """See `Launcher`."""
        if (placed := self._placed.pop(unit, None)) is not None:
            self._ray.kill(placed.actor)

    def remember(self, counts: Mapping[str, int]) -> None:
        """Writes the wish into every Host."""
        self.memo = (self.memo[0] + 1, dict(counts))
        for placed in list(self._placed.values()):  # the controller's thread starts others meanwhile, with this memo
            placed.actor.remember.remote(self.memo)

    def adopt(self, now_s: float) -> tuple[Unit, ...]:
        """The Hosts of an earlier Keeper, as units; the newest memo of theirs is this one's."""
        ray = self._ray
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE
        ]
        asked = {}
        for name in names:
            if name.startswith(f"{self._name}/"):
                try:
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                except ValueError:  # it has just ended
                    continue
                asked[actor.found.remote()] = actor
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=FINDING_S) if asked else ([], [])
        for question in silent:  # still without a place, or stuck: its unit is started anew
            ray.kill(asked[question])
        units: dict[str, Unit] = {}
        for question in answered:
            actor = asked[question]
            try:
                launch, seen, memo = ray.get(question)
            except ray.exceptions.RayError:  # it died meanwhile: its unit is missing, and is started anew
                continue
            self.memo = max(self.memo, memo, key=lambda m: m[0])
            if launch.unit in units and launch.generation <= units[launch.unit].generation:
                ray.kill(actor)
                continue
            self._placed[launch.unit] = _Placed(actor, actor.look.remote(), seen)
            units[launch.unit] = Unit(
                name=launch.unit,
                role=launch.role,
                generation=launch.generation,
                phase=Phase.READY if seen.ready else Phase.STARTING,
                since_s=now_s,
                heard_s=now_s,
                was_ready=seen.ready,
                router=launch.router,
                seen=seen,
            )
        return tuple(units.values())


class Keeper:
    """The actor that holds the controller. It is in no node's way: it takes no resources."""

    def __init__(self, spec: ClusterSpec, secret: str, near: str) -> None:
        import ray

        from serving.logs import set_up

        set_up()
        self._launcher = RayLauncher(ray, spec, near)
        found = self._launcher.adopt(time.monotonic())
        counts = self._launcher.memo[1]
        ending = not any(counts.values())
        self._controller = Controller(
            spec if ending else spec.scaled(counts),
            self._launcher,
            GrpcRouterCalls(spec, secret),
            secret=secret,
            found=found,
        )
        if ending:
            self._controller.end()
        self._controller.start()

    def status(self, after: int = 0) -> Status:
        """See `Controller.status`."""
        return self._controller.status(after)

    def scale(self, counts: Mapping[str, int]) -> Status:
        """See `Controller.scale`."""
        self._launcher.remember(self._controller.scale(counts).counts)
        return self._controller.status()

    def end(self) -> Status:
        """See `Controller.end`."""
        self._launcher.remember(dict.fromkeys(ROLES, 0))
        self._controller.end()
        return self._controller.status()


def _lost(seen: Seen, why: str) -> Seen:
    return dataclasses.replace(seen, running=False, ready=False, exited=True, exit_code=None, trouble=why)


def reason_of(error: BaseException) -> str:
    """The sentence of one of Ray's errors that tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("The actor is dead")), lines[0] if lines else repr(error))[
        :300
    ]
