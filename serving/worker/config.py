"""What a user may set of a worker process; the engine's part is `jaxpd.config.EngineConfig`."""

from __future__ import annotations

import dataclasses
import ipaddress

from jaxpd.errors import InvalidArgument
from jaxpd.policies.workers import Role
from serving.channel import check_address
from serving.cluster import Cluster, check_exposed, join_address, split_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Addresses are HOST:PORT, port 0 takes a free one. `listen` is where routers and workers reach this one, and what
    it tells the `routers` that it joins.

    Raises InvalidArgument or FailedPrecondition naming the flag.
    """

    role: Role
    listen: str = "127.0.0.1:7100"
    transfer_listen: str | None = None  # ADDRESS:PORT or ADDRESS:LOW-HIGH, a port a peer; None: free ones of `listen`
    routers: tuple[str, ...] = ()
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    insecure_cluster: bool = False  # other machines may command this worker, without a secret
    port: int | None = None  # of HTTP: probes and metrics; None: none
    heartbeat_timeout_s: float = 5.0  # silence of a router or another worker that means that it is gone
    shutdown_timeout_s: float = 30.0
    lease_s: float = 30.0  # for which staged pages wait for the decode worker
    pull_timeout_s: float = 15.0  # for one piece of a hand-off
    transfer_streams: int = 1  # TCP connections between two workers; the same number in all

    def __post_init__(self) -> None:
        host, _ = split_address(self.listen, "--listen")
        check_exposed(self.listen, self.cluster, insecure=self.insecure_cluster)
        if self.routers and _means_all(host):
            raise InvalidArgument(
                f"--listen {self.listen} means every address, and it is what --router {self.routers[0]} would be told "
                "to connect to; listen on the one at which the router reaches this machine",
                field="listen",
            )
        for router in self.routers:
            check_address(router, "--router")
        if self.role is not Role.MIXED and (self.transfer_listen is not None or _means_all(host)):
            transfer_ports(self.transfer_listen or join_address(host, 0))
        for flag, seconds in (
            ("--heartbeat-timeout", self.heartbeat_timeout_s),
            ("--shutdown-timeout", self.shutdown_timeout_s),
        ):
            if not 0 < seconds <= 86400:
                raise InvalidArgument(
                    f"{flag} {seconds} must be above 0 and at most 86400 seconds",
                    field=flag.lstrip("-").replace("-", "_"),
                )
        if self.transfer_streams < 1:
            raise InvalidArgument(
                f"--transfer-streams {self.transfer_streams} must be at least 1, and the same in all workers",
                field="transfer_streams",
            )


def transfer_ports(text: str) -> tuple[str, range]:
    """The numeric address, in brackets for IPv6, and the ports of ADDRESS:PORT or ADDRESS:LOW-HIGH.

    `range(0, 1)` takes any free one. Raises InvalidArgument for what peers could not connect to.
    """
    host, _, ports = text.rpartition(":")
    low, dash, high = ports.partition("-")
    numbers = [int(part) for part in (low, high if dash else low) if part.isascii() and part.isdigit()]
    host = {"localhost": "127.0.0.1"}.get(host, host)
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        address = None
    fits = len(numbers) == 2 and numbers[0] <= numbers[1] <= 65535 and (numbers[0] > 0 or not dash)
    if address is None or address.is_unspecified or not fits:
        raise InvalidArgument(
            f"--transfer-listen {text} must be a numeric address at which the other workers reach this machine, and a "
            "port or a range of them (one for each peer), such as 10.0.0.5:0 or 10.0.0.5:7200-7299",
            field="transfer_listen",
        )
    return (f"[{address}]" if address.version == 6 else str(address)), range(numbers[0], numbers[1] + 1)


def _means_all(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
