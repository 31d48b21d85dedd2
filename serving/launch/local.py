"""A cluster of processes on this machine: `jaxpd up` without Ray.

The command that started it owns them all and stays; they end with it. Its folder, which only its user can read, holds
the cluster's secret, a log for each process, and the socket by which `jaxpd up --scale` and `jaxpd down` reach it.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import stat
import tempfile
from collections.abc import Mapping
from typing import TextIO

from jaxpd.errors import FailedPrecondition
from serving.launch.commands import Launch, arguments, free_port, joined, tied
from serving.launch.devices import Inventory, devices_here, environment_for
from serving.launch.process import Owned
from serving.launch.reconcile import Seen
from serving.launch.spec import ROUTER, ClusterSpec, default_resources

HOST = "127.0.0.1"


def cluster_folder(name: str) -> pathlib.Path:
    """The folder of the cluster of this name, made where it is not there. Raises FailedPrecondition when it is
    somebody else's."""
    parent = pathlib.Path(tempfile.gettempdir()) / f"jaxpd-{os.getuid()}"
    for folder in (parent, parent / name):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise FailedPrecondition(f"{folder} must be a folder that only this user can use; remove it")
    return parent / name


def write_secret(folder: pathlib.Path, secret: str) -> pathlib.Path:
    """The file that `--cluster-secret-file` names, readable by this user alone."""
    path = folder / "secret"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    return path


def new_secret() -> str:
    """What workers and router of one cluster know each other by: 256 random bits."""
    return secrets.token_hex(32)


class LocalLauncher:
    """Processes of this one. See `serving.launch.controller.Launcher`."""

    def __init__(
        self,
        folder: pathlib.Path,
        spec: ClusterSpec,
        *,
        secret: str,
        devices: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        found = devices_here() if devices is None else devices
        self._accelerator = spec.accelerator or next((k.lower() for k in ("TPU", "GPU") if found.get(k)), "cpu")
        self._host = spec.node_host or HOST
        self._folder = folder
        self._secret_file = write_secret(folder, secret)
        self._inventory = Inventory(found)
        self._owned: dict[str, Owned] = {}
        self._waiting: dict[str, tuple[Launch, str]] = {}
        self._given_up: set[str] = set()  # stopped before there was room for them
        self._logs: dict[str, TextIO] = {}

    def start(self, launch: Launch) -> None:
        """See `Launcher`. Without enough free devices it waits for them, as it would on Ray."""
        self._owned.pop(launch.unit, None)
        self._inventory.give_back(launch.unit)
        self._begin(launch)

    def look(self) -> Mapping[str, Seen]:
        """See `Launcher`."""
        for name, owned in self._owned.items():
            if owned.look().exited:
                self._inventory.give_back(name)
        for launch, _ in list(self._waiting.values()):
            self._begin(launch)
        waiting = {name: Seen(where=self._host, trouble=why) for name, (_, why) in self._waiting.items()}
        waiting |= {name: Seen(exited=True, exit_code=0, where=self._host) for name in self._given_up}
        return waiting | {name: owned.look() for name, owned in self._owned.items()}

    def stop(self, unit: str, grace_s: float) -> None:
        """See `Launcher`."""
        if (owned := self._owned.get(unit)) is not None:
            owned.stop(grace_s)
        else:
            self._give_up(unit)

    def kill(self, unit: str) -> None:
        """See `Launcher`."""
        if (owned := self._owned.get(unit)) is not None:
            owned.kill()
        else:
            self._give_up(unit)

    def forget(self, unit: str) -> None:
        """See `Launcher`."""
        self._owned.pop(unit, None)
        self._waiting.pop(unit, None)
        self._given_up.discard(unit)
        self._inventory.give_back(unit)
        if (log := self._logs.pop(unit, None)) is not None:
            log.close()

    def close(self) -> None:
        """Kills what is left, and waits for it. The logs stay."""
        for owned in self._owned.values():
            owned.kill()
        for owned in self._owned.values():
            owned.wait(10)
        for log in self._logs.values():
            log.close()
        self._secret_file.unlink(missing_ok=True)

    def _begin(self, launch: Launch) -> None:
        spec = launch.spec
        resources = {} if launch.role == ROUTER else default_resources(spec.role(launch.role), self._accelerator)
        devices = self._inventory.take(launch.unit, resources)
        if devices is None:
            words = ", ".join(f"{kind}={amount:g}" for kind, amount in resources.items())
            self._waiting[launch.unit] = launch, f"waits for {words} of this machine"
            return
        self._waiting.pop(launch.unit, None)
        port = free_port(self._host, launch.port) if launch.role == ROUTER else 0
        command = arguments(launch, host=self._host, port=port, secret_file=str(self._secret_file))
        accelerator = "cpu" if launch.role == ROUTER else self._accelerator
        self._owned[launch.unit] = Owned(
            tied(command),
            environment={**os.environ, **environment_for(devices, accelerator), **spec.environment},
            log=self._log(launch.unit),
            where=self._host,
            control=joined(self._host, port) if port else None,
        )

    def _log(self, unit: str) -> TextIO:
        if unit not in self._logs:
            self._logs[unit] = open(self._folder / f"{unit}.log", "a", encoding="utf-8")
        return self._logs[unit]

    def _give_up(self, unit: str) -> None:
        """It had no process yet: as good as ended."""
        if self._waiting.pop(unit, None) is not None:
            self._given_up.add(unit)
