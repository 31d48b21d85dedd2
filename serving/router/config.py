"""What a user may set of a router, beside the server's part (`serving.config`)."""

from __future__ import annotations

import dataclasses

from jaxpd.errors import InvalidArgument
from jaxpd.policies.routing import POLICIES
from jaxpd.policies.workers import Role
from serving.cluster import Cluster

LEAST_HEARTBEAT_S = 2.0  # workers say something once a second


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Workers are `HOST:PORT` of their control ports; more may join at `listen`.

    `max_tries` is how often a request is sent before its first token, `max_migrations` how often it goes on elsewhere
    after it. Raises InvalidArgument naming the flag, the value and the limit.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    listen: str = "127.0.0.1:7000"
    prefill_policy: str = "kv_aware"
    decode_policy: str = "kv_aware"
    max_tries: int = 3
    max_migrations: int = 3
    migrate_on_drain: bool = False
    heartbeat_timeout_s: float = 5.0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    insecure_cluster: bool = False  # other machines may command this router, without a secret

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for role, flag, address in self.workers():
            check_address(address, flag)
            if address in seen:
                other = seen[address]
                twice = f"twice in {flag}" if other == flag else f"in {other} and in {flag}"
                raise InvalidArgument(
                    f"{address} stands {twice}; a worker has one role: name it once", field=role.value
                )
            seen[address] = flag
        check_address(self.listen, "--listen", any_port=True)
        for flag, policy in (("--prefill-policy", self.prefill_policy), ("--decode-policy", self.decode_policy)):
            if policy not in POLICIES:
                known = ", ".join(POLICIES)
                raise InvalidArgument(f"{flag} {policy} does not exist; choose one of {known}", field=_field(flag))
        for flag, value, least in (("--max-tries", self.max_tries, 1), ("--max-migrations", self.max_migrations, 0)):
            if value < least:
                raise InvalidArgument(f"{flag} {value} must be at least {least}", field=_field(flag))
        if not self.heartbeat_timeout_s >= LEAST_HEARTBEAT_S:
            raise InvalidArgument(
                f"--heartbeat-timeout {self.heartbeat_timeout_s:g} must be at least {LEAST_HEARTBEAT_S:g} seconds: "
                "workers say something once a second",
                field="heartbeat_timeout",
            )
        self._check_bounds()

    def workers(self) -> list[tuple[Role, str, str]]:
        """(role, its flag, address) of all that are listed."""
        lists = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode), (Role.MIXED, self.mixed))
        return [(role, f"--{role.value}", address) for role, addresses in lists for address in addresses]

    def _check_bounds(self) -> None:
        for flag, bound_s in (("--ttft-slo", self.ttft_slo_s), ("--tpot-slo", self.tpot_slo_s)):
            if bound_s is not None and not bound_s > 0:
                raise InvalidArgument(f"{flag} {bound_s:g} s must be more than 0", field=_field(flag))
        if self.ttft_slo_s is not None and self.prefill_policy != "ttft_estimate":
            raise InvalidArgument(
                f"--ttft-slo refuses what --prefill-policy ttft_estimate expects to be late, and the policy is "
                f"{self.prefill_policy}; set both or neither",
                field="ttft_slo",
            )
        if self.tpot_slo_s is not None and self.decode_policy != "ttft_estimate":
            raise InvalidArgument(
                f"--tpot-slo refuses what --decode-policy ttft_estimate expects to be late, and the policy is "
                f"{self.decode_policy}; set both or neither",
                field="tpot_slo",
            )


def addresses_of(text: str | None, flag: str) -> tuple[str, ...]:
    """The addresses in "A:1,B:2". Raises InvalidArgument for an empty one."""
    parts = tuple(part.strip() for part in text.split(",")) if text else ()
    if "" in parts:
        raise InvalidArgument(f"{flag} {text} holds an empty address; write HOST:PORT,HOST:PORT", field=_field(flag))
    return parts


def check_address(address: str, flag: str, *, any_port: bool = False) -> None:
    """Raises InvalidArgument naming `flag` for what is not HOST:PORT; `any_port`: 0 may stand for any free one."""
    host, colon, port = address.rpartition(":")
    least = 0 if any_port else 1
    if not (host and colon and port.isascii() and port.isdigit() and least <= int(port) <= 65535):
        raise InvalidArgument(
            f"{flag} {address} must be HOST:PORT with a port from {least} to 65535, such as 127.0.0.1:7100",
            field=_field(flag),
        )


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
