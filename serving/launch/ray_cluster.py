"""How a command reaches a cluster on Ray: it joins Ray, starts a Keeper or finds one by name, asks it, and leaves."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxpd.errors import FailedPrecondition, NotFound
from serving.launch.controller import Status
from serving.launch.ray_launcher import NAMESPACE, Keeper, reason_of
from serving.launch.spec import ClusterSpec

ANSWER_S = 30.0
KEEPER_RESTARTS = -1  # as often as it dies


def ray_module() -> Any:
    """Ray, imported only here. Raises FailedPrecondition without it."""
    if importlib.util.find_spec("ray") is None:
        raise FailedPrecondition(
            "--ray needs Ray on every node; install it with: pip install 'jaxpd[ray]'", field="ray"
        )
    import ray

    return ray


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, joined to its cluster ("auto": the one of this machine) as namespace `jaxpd` until the end of the context.
    What Ray has to say meanwhile goes to stderr: stdout is the command's. Raises FailedPrecondition."""
    ray = ray_module()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise FailedPrecondition(
                f"--address {address or 'auto'}: no Ray cluster ({reason}); start one with: ray start --head",
                field="address",
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


class RayCluster:
    """The cluster of this name on Ray: what commands call. Each call raises NotFound when there is none."""

    def __init__(self, ray: Any, name: str) -> None:
        self._ray = ray
        self._name = name
        try:
            self._keeper = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise NotFound(
                f"no cluster {name} runs on this Ray; start one with: jaxpd up --ray", field="name"
            ) from None

    def status(self, after: int = 0) -> Status:
        """See `Controller.status`."""
        return self._ask(self._keeper.status, after)

    def scale(self, counts: Mapping[str, int]) -> Status:
        """See `Controller.scale`. Raises InvalidArgument as well."""
        return self._ask(self._keeper.scale, dict(counts))

    def end(self) -> Status:
        """See `Controller.end`."""
        return self._ask(self._keeper.end)

    def leave(self) -> None:
        """Removes the Keeper of a cluster that has ended."""
        self._ray.kill(self._keeper)

    def _ask(self, method: Any, *arguments: object) -> Status:
        try:
            answer = self._ray.get(method.remote(*arguments), timeout=ANSWER_S)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise NotFound(f"cluster {self._name} does not answer: {reason_of(error)}", field="name") from None
        assert isinstance(answer, Status)
        return answer


def start_on_ray(ray: Any, spec: ClusterSpec, secret: str) -> RayCluster:
    """Starts the Keeper of a new cluster. Raises FailedPrecondition when there is one of this name."""
    near = ray.get_runtime_context().get_node_id()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    keeper = ray.remote(Keeper).options(
        name=spec.name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=KEEPER_RESTARTS,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(near, soft=True),
    )
    try:
        keeper.remote(spec, secret, near)
    except ValueError:
        raise FailedPrecondition(
            f"cluster {spec.name} runs on this Ray already; change it with jaxpd up --ray --scale, or give another "
            "--name",
            field="name",
        ) from None
    return RayCluster(ray, spec.name)
