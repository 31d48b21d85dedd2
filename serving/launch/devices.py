"""Which accelerators of this machine a process may use: each gets its own, by the variables that JAX's runtimes read.

On Ray this is Ray's business. CUDA counts in CUDA_VISIBLE_DEVICES; for TPU chips the bounds have to be said as well.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping, Sequence

# chips -> the bounds of one process that uses them, as libtpu wants them (1, 2 or 4 chips of a host, or all of it)
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}


def devices_here() -> dict[str, tuple[str, ...]]:
    """ "GPU" and "TPU" -> the ids that this process may hand out."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = tuple(filter(None, visible.split(","))) if visible is not None else _numbered("nvidia[0-9]*")
    chips = os.environ.get("TPU_VISIBLE_CHIPS")
    tpus = tuple(filter(None, chips.split(","))) if chips is not None else _numbered("accel[0-9]*", "vfio/[0-9]*")
    return {kind: ids for kind, ids in (("GPU", gpus), ("TPU", tpus)) if ids}


def environment_for(taken: Mapping[str, Sequence[str]], accelerator: str) -> dict[str, str]:
    """The variables of a process that may use these devices. On CPU JAX is told so, or it would take the first GPU."""
    if accelerator == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    found = {}
    if gpus := taken.get("GPU"):
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if chips := taken.get("TPU"):
        found["TPU_VISIBLE_CHIPS"] = ",".join(chips)
        if bounds := _TPU_BOUNDS.get(len(chips)):
            found |= {"TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}
    return found


class Inventory:
    """Devices of this machine and who has them. CPUs are not counted: the system shares them."""

    def __init__(self, devices: Mapping[str, Sequence[str]]) -> None:
        self._free = {kind: list(ids) for kind, ids in devices.items()}
        self._taken: dict[str, dict[str, list[str]]] = {}

    def take(self, owner: str, resources: Mapping[str, float]) -> dict[str, list[str]] | None:
        """Devices for `owner`; None when there are not enough free ones now."""
        wanted = {kind: int(amount) for kind, amount in resources.items() if kind in ("GPU", "TPU")}
        if any(amount > len(self._free.get(kind, ())) for kind, amount in wanted.items()):
            return None
        self._taken[owner] = {kind: [self._free[kind].pop(0) for _ in range(n)] for kind, n in wanted.items()}
        return self._taken[owner]

    def give_back(self, owner: str) -> None:
        """`owner` has ended. Idempotent."""
        for kind, ids in self._taken.pop(owner, {}).items():
            self._free[kind] = sorted(ids + self._free[kind], key=_number)


def _numbered(*patterns: str) -> tuple[str, ...]:
    for pattern in patterns:
        if names := sorted((path.name for path in pathlib.Path("/dev").glob(pattern)), key=_number):
            return tuple(re.sub(r"\D", "", name) for name in names)
    return ()


def _number(name: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", name)
    return int(digits or 0), name
