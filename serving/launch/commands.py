"""The command line of each process, made on the node where it will run."""

from __future__ import annotations

import dataclasses
import socket
import sys

from serving.launch.spec import MIXED, ROUTER, ClusterSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One process to start. `router` is the router's control address, None for the router itself, which listens on
    `port` where that is free (it was there before). `secret` is the cluster's."""

    spec: ClusterSpec
    unit: str
    role: str
    generation: int
    router: str | None = None
    port: int = 0
    secret: str = dataclasses.field(repr=False)


def arguments(launch: Launch, *, host: str, port: int, secret_file: str) -> list[str]:
    """What follows `jaxpd`. Each worker listens on ports of `host` that it finds free."""
    spec = launch.spec
    files = {"certfile": spec.ssl_certfile, "keyfile": spec.ssl_keyfile, "ca-certs": spec.ssl_ca_certs}
    tls = [word for name, path in files.items() if path is not None for word in (f"--ssl-{name}", path)]
    if launch.role == ROUTER:
        router = spec.router
        ports = ["--host", router.host, "--port", str(router.port), "--grpc-port", str(router.grpc_port)]
        listen = ["--listen", joined(host, port)]
        return ["router", *listen, *ports, "--cluster-secret-file", secret_file, *tls, *router.flags]
    role = spec.role(launch.role)
    assert launch.router is not None
    mode = ("--mode", "chunked") if launch.role == MIXED else ()  # a flag of the spec goes before it
    return [
        "worker",
        launch.role,
        spec.model,
        "--mesh",
        role.mesh,
        "--listen",
        joined(host, 0),
        "--router",
        launch.router,
        "--cluster-secret-file",
        secret_file,
        *tls,
        *mode,
        *role.flags,
    ]


def tied(arguments: list[str]) -> list[str]:
    """The command that runs `jaxpd ARGUMENTS` and ends with its owner."""
    return [sys.executable, "-m", "serving.launch.tether", "jaxpd", *arguments]


def joined(host: str, port: int) -> str:
    """HOST:PORT, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str, wanted: int = 0) -> int:
    """`wanted` if it can be had on `host`, else any free port. Somebody else may take it before it is used: the
    process then ends, and the next start gets another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (wanted, 0) if wanted else (0,):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no free port on {host}")
