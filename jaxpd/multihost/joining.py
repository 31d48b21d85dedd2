"""How the processes of a worker find each other: `jax.distributed`, then the leader's address and a key.

    check   the flags, and the mesh, whose devices the processes must divide evenly        before JAX starts
    join    jax.distributed.initialize: all wait for all
    meet    the leader draws a key and listens; both go to all by one collective of JAX

The key proves to the leader, and to followers, that the other end of a connection came this way. The coordination
service of JAX and its collectives ask nobody for a name: they belong inside a private network.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import struct

import jax
import numpy as np

from jaxpd.errors import FailedPrecondition, InvalidArgument, Unavailable
from jaxpd.multihost.channel import KEY_BYTES, Channel, ChannelEnded, accept, connect, listen, new_key
from jaxpd.multihost.watch import SILENCE_S, START_SILENCE_S
from meshes.spec import parse_mesh_specs

log = logging.getLogger(__name__)

JOIN_S = 300  # all processes are to be there by then
MEET_S = 60.0
JAX_SILENCE_S = 60  # jax.distributed ends processes after so long without a sign of life; ours must come first
SHUTDOWN_S = 10  # at the end, all wait for all once more
_PORT = struct.Struct("<H")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """The flags of a worker of several processes; each gets the same ones, but for its `process_id`."""

    coordinator: str  # HOST:PORT of process 0, where all can reach it
    num_processes: int
    process_id: int
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        host, colon, port = self.coordinator.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidArgument(
                f'--coordinator "{self.coordinator}" must be HOST:PORT of process 0, for example 10.0.0.5:1234',
                field="coordinator",
            )
        if self.num_processes < 2:
            raise InvalidArgument(
                f"--num-processes {self.num_processes} must be at least 2; leave out --coordinator for a worker that "
                "is one process",
                field="num_processes",
            )
        if not 0 <= self.process_id < self.num_processes:
            raise InvalidArgument(
                f"--process-id {self.process_id} must be from 0 to {self.num_processes - 1} (--num-processes "
                f"{self.num_processes})",
                field="process_id",
            )

    @property
    def host(self) -> str:
        """Of process 0, without brackets."""
        return self.coordinator.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.process_id == 0


def processes_of(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Processes | None:
    """From the three flags, which go together; None: the worker is one process. Raises InvalidArgument."""
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if coordinator is None or num_processes is None or process_id is None:
        there = ", ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
        raise InvalidArgument(
            f"{there} is for a worker that is several processes, which needs {' and '.join(missing)} too",
            field=missing[0].strip("-").replace("-", "_"),
        )
    return Processes(coordinator=coordinator, num_processes=num_processes, process_id=process_id)


def check(processes: Processes, role: str, mesh: str | None) -> int:
    """Devices of the mesh that each process has. Raises InvalidArgument where mesh, role and processes do not fit."""
    count = processes.num_processes
    if role == "decode":
        raise InvalidArgument(
            f"--num-processes {count} is for prefill and mixed workers; a decode worker is one process: start {count} "
            "of them",
            field="num_processes",
        )
    if mesh is None:
        raise InvalidArgument(
            f"--num-processes {count} needs --mesh: the devices of all processes, for example --mesh {count}x1",
            field="mesh",
        )
    try:
        specs = parse_mesh_specs(mesh, name="--mesh")
    except ValueError as error:
        raise InvalidArgument(str(error), field="mesh") from error
    if len(specs) > 1 or specs[0].num_devices % count:
        raise InvalidArgument(
            f"--mesh {mesh} must be one mesh whose number of devices {count} processes (--num-processes) divide evenly",
            field="mesh",
        )
    return specs[0].num_devices // count


def join(processes: Processes, devices: int) -> None:
    """Joins the processes; `devices` is how many each has in the mesh. Call it before anything else uses JAX.

    On CPU virtual devices are made, and programs run one after the other: two that are under way at once would meet the
    other process's collectives in any order. Raises Unavailable where not all come, FailedPrecondition where the
    devices are not those of the mesh.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if not platforms or platforms.split(",")[0] == "cpu":
        try:
            jax.config.update("jax_num_cpu_devices", devices)
        except RuntimeError as error:
            raise FailedPrecondition("JAX runs already: join the processes before its first use") from error
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away from whoever has asked for it
    log.info("process %d of %d joins %s", processes.process_id, processes.num_processes, processes.coordinator)
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.num_processes,
            processes.process_id,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=JAX_SILENCE_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=processes.coordinator,
        )
    except RuntimeError as error:
        raise Unavailable(
            f"the {processes.num_processes} processes of this worker did not meet at --coordinator "
            f"{processes.coordinator} within {JOIN_S} s: {error}"
        ) from error
    wanted = devices * processes.num_processes
    if jax.local_device_count() != devices or jax.device_count() != wanted:
        raise FailedPrecondition(
            f"--mesh has {wanted} devices, {devices} in each process, and here are {jax.local_device_count()} of "
            f"{jax.device_count()}: the mesh of a worker of several processes takes all devices of all",
            field="mesh",
        )


def meet_followers(processes: Processes) -> dict[int, Channel]:
    """The leader's channels, by process. Raises Unavailable where one does not come."""
    key = new_key()
    with listen(processes.host) as server:
        _tell(_PORT.pack(server.getsockname()[1]) + key)
        server.settimeout(MEET_S)
        channels: dict[int, Channel] = {}
        while len(channels) < processes.num_processes - 1:
            try:
                came = accept(server, key, silence_s=START_SILENCE_S)
            except TimeoutError:
                missing = sorted(set(range(1, processes.num_processes)) - set(channels))
                raise Unavailable(f"processes {missing} of this worker did not connect within {MEET_S:g} s") from None
            if came is not None:
                channels[came[0]] = came[1]
    return channels


def meet_leader(processes: Processes) -> Channel:
    """A follower's channel to the leader. Raises Unavailable where that cannot be reached."""
    told = _tell(bytes(_PORT.size + KEY_BYTES))
    (port,) = _PORT.unpack(told[: _PORT.size])
    try:
        return connect(processes.host, port, told[_PORT.size :], processes.process_id, silence_s=START_SILENCE_S)
    except (ChannelEnded, OSError, socket.gaierror) as error:
        raise Unavailable(f"the leader of this worker at {processes.host}:{port} cannot be reached: {error}") from error


def _tell(ours: bytes) -> bytes:
    """What process 0 says, in all processes."""
    from jax.experimental import multihost_utils  # here: what has no use for it does not load it

    told = multihost_utils.broadcast_one_to_all(np.frombuffer(ours, np.uint8))
    return np.asarray(told).astype(np.uint8).tobytes()
