"""`jaxpd up` and `jaxpd down`: a router and its workers from one command, on this machine or on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shlex
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpd.cli import options, server_options
from jaxpd.cli.cluster_view import POLL_S, Cluster, banner, failure, follow, show_events, table
from jaxpd.errors import FailedPrecondition, InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from serving.launch.controller import Status
    from serving.launch.spec import ClusterSpec

CLUSTER = "Cluster"
WORKERS = "Workers"

Name = Annotated[str | None, typer.Option(metavar="NAME", help="The cluster's name.", show_default="jaxpd")]
Ray = Annotated[bool, typer.Option("--ray", help="On a Ray cluster. Without it: on this machine.")]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Of the Ray cluster; auto is the one of this machine.", show_default="auto"),
]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long to wait for the cluster to be as wanted. It goes on after.")
]


def _count(role: str) -> Any:
    return typer.Option(metavar="N", min=0, help=f"How many {role} workers.", rich_help_panel=CLUSTER)


def _role_mesh(role: str) -> Any:
    return typer.Option(
        metavar="TPxDP", help=f"Mesh of each {role} worker.", show_default="1x1", rich_help_panel=WORKERS
    )


def _role_resources(role: str) -> Any:
    return typer.Option(
        metavar="NAME=N,...",
        help=f"What a {role} worker takes of its node, such as GPU=2,CPU=4.",
        show_default="the devices of its mesh, or one CPU",
        rich_help_panel=WORKERS,
    )


def _flags(role: str) -> Any:
    return typer.Option(
        metavar="'--FLAG VALUE ...'",
        help=f"More flags of `jaxpd {role}`, in one text.",
        show_default=False,
        rich_help_panel=WORKERS,
    )


def up(
    model: Annotated[str | None, typer.Argument(help="As for `jaxpd serve`; every node must find it.")] = None,
    ray: Ray = False,
    address: Address = None,
    name: Name = None,
    file: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE", help="TOML with the cluster; flags go before it. See docs/launch.md.", show_default=False
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=N,...", help="Of the cluster that runs: so many workers from now on.", show_default=False
        ),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Show the cluster that runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --status or --scale: one JSON object.")] = False,
    prefill: Annotated[int | None, _count("prefill")] = None,
    decode: Annotated[int | None, _count("decode")] = None,
    mixed: Annotated[int | None, _count("mixed")] = None,
    prefill_mesh: Annotated[str | None, _role_mesh("prefill")] = None,
    decode_mesh: Annotated[str | None, _role_mesh("decode")] = None,
    mixed_mesh: Annotated[str | None, _role_mesh("mixed")] = None,
    prefill_resources: Annotated[str | None, _role_resources("prefill")] = None,
    decode_resources: Annotated[str | None, _role_resources("decode")] = None,
    mixed_resources: Annotated[str | None, _role_resources("mixed")] = None,
    worker_flags: Annotated[str | None, _flags("worker")] = None,
    prefill_flags: Annotated[str | None, _flags("worker prefill")] = None,
    decode_flags: Annotated[str | None, _flags("worker decode")] = None,
    mixed_flags: Annotated[str | None, _flags("worker mixed")] = None,
    router_flags: Annotated[str | None, _flags("router")] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|gpu|tpu", help="What workers run on.", show_default="what there is", rich_help_panel=CLUSTER
        ),
    ] = None,
    node_host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where processes listen for each other.",
            show_default="each node's address; 127.0.0.1 without --ray",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    host: server_options.Host = "127.0.0.1",
    port: server_options.Port = 8000,
    grpc_port: server_options.GrpcPort = 50051,
    timeout: Timeout = 1800.0,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Start a router and workers, keep them running, and scale them: on this machine, or with --ray on a cluster."""
    if address is not None and not ray:
        raise InvalidArgument(f"--address {address} is that of a Ray cluster; add --ray", field="address")
    if scale is not None or status:
        _change(name or "jaxpd", scale, as_json, ray=ray, address=address, timeout_s=timeout)
        return
    every = _split("--worker-flags", worker_flags)
    roles = {
        role: {
            "count": count,
            "mesh": mesh,
            "resources": _resources(role, resources),
            "flags": [*every, *_split(f"--{role}-flags", flags)],
        }
        for role, count, mesh, resources, flags in (
            ("prefill", prefill, prefill_mesh, prefill_resources, prefill_flags),
            ("decode", decode, decode_mesh, decode_resources, decode_flags),
            ("mixed", mixed, mixed_mesh, mixed_resources, mixed_flags),
        )
    }
    given = {"host": host, "port": port, "grpc_port": grpc_port}
    router: dict[str, Any] = {key: value for key, value in given.items() if file is None or _typed(context, key)}
    router["flags"] = _split("--router-flags", router_flags)
    spec = _spec(
        file,
        {"model": model, "name": name, "accelerator": accelerator, "node_host": node_host, "router": router, **roles},
    )
    if ray:
        _up_on_ray(spec, address, timeout)
    else:
        _up_here(spec)


def down(ray: Ray = False, address: Address = None, name: Name = None, timeout: Timeout = 120.0) -> None:
    """Stop the cluster that `jaxpd up` has started: the router finishes what it has, then the workers end."""
    with _cluster(name or "jaxpd", ray=ray, address=address) as cluster:
        seen = cluster.status()
        cluster.end()
        try:
            follow(cluster, lambda s: s.ended, timeout, after=seen.events[-1][0] if seen.events else 0)
        except NotFound:  # its command was gone before it could say so
            if ray:
                raise
        if ray:
            from serving.launch.ray_cluster import RayCluster

            assert isinstance(cluster, RayCluster)
            cluster.leave()
    print(f"cluster {seen.name} is down", flush=True)


def _spec(file: pathlib.Path | None, given: Mapping[str, Any]) -> ClusterSpec:
    """The file's tables, and the flags over them."""
    from serving.launch.spec import cluster_spec, read_toml

    tables = dict(read_toml(file)) if file is not None else {}
    for key, value in given.items():
        if isinstance(value, dict):
            inner = {name: item for name, item in value.items() if item is not None and item != []}
            if inner or key in tables:
                tables[key] = {**tables.get(key, {}), **inner}
        elif value is not None:
            tables[key] = value
    tables.setdefault("model", options.DEFAULT_MODEL)
    if not any(isinstance(tables.get(r), dict) and "count" in tables[r] for r in ("prefill", "decode", "mixed")):
        for role in ("prefill", "decode"):
            tables[role] = {"count": 1, **tables.get(role, {})}
    model = pathlib.Path(str(tables["model"]))
    if model.exists():
        tables["model"] = str(model.resolve())  # a process may start in another folder
    return cluster_spec(tables)


def _up_here(spec: ClusterSpec) -> None:
    import signal
    import threading

    import filelock

    from serving.launch import local
    from serving.launch.controller import Controller
    from serving.launch.local_control import ControlSocket
    from serving.launch.router_calls import GrpcRouterCalls

    folder = local.cluster_folder(spec.name)
    lock = filelock.FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise FailedPrecondition(
            f"cluster {spec.name} runs on this machine already; change it with jaxpd up --scale, or give another "
            "--name",
            field="name",
        ) from None
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    secret = local.new_secret()
    launcher = local.LocalLauncher(folder, spec, secret=secret)
    calls = GrpcRouterCalls(spec, secret)
    controller = Controller(spec, launcher, calls, secret=secret)
    control = ControlSocket(folder, controller)
    started_s, served, last = time.monotonic(), False, 0
    try:
        controller.start()
        while not controller.ended(POLL_S):
            if asked.is_set():
                asked.clear()
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)  # a second one ends it at once, and the processes with it
                controller.end()
            status = controller.status(last)
            last = show_events(status, last)
            if status.serves and not served:
                served = True
                print("\n".join(banner(status, time.monotonic() - started_s, folder, more=_named(spec))), flush=True)
            if not served and any(unit.phase == "failed" for unit in status.units):
                controller.end()
                if controller.ended(60):
                    raise FailedPrecondition(failure(status, folder))
        show_events(controller.status(last), last)
    finally:
        launcher.close()
        control.close()
        calls.close()
        lock.release()


def _up_on_ray(spec: ClusterSpec, address: str | None, timeout_s: float) -> None:
    from serving.launch import ray_cluster
    from serving.launch.local import new_secret

    started_s = time.monotonic()

    def settled(status: Status) -> bool:
        return status.serves or any(unit.phase == "failed" for unit in status.units)

    with ray_cluster.connected(address) as ray:
        cluster = ray_cluster.start_on_ray(ray, spec, new_secret())
        status = follow(cluster, settled, timeout_s)
        if not status.serves:
            last = status.events[-1][0] if status.events else 0
            cluster.end()
            follow(cluster, lambda s: s.ended, timeout_s, after=last, silent=True)
            cluster.leave()
            raise FailedPrecondition(failure(status, None))
    more = _named(spec, address or "auto")
    print("\n".join(banner(status, time.monotonic() - started_s, None, more=more)), flush=True)


def _change(name: str, scale: str | None, as_json: bool, *, ray: bool, address: str | None, timeout_s: float) -> None:
    from serving.launch.spec import parse_counts

    counts = parse_counts(scale) if scale is not None else None
    with _cluster(name, ray=ray, address=address) as cluster:
        status = cluster.status()
        if counts is not None:
            after = status.events[-1][0] if status.events else 0
            cluster.scale(counts)
            status = follow(cluster, lambda s: s.serves and _holds(s, counts), timeout_s, after=after)
    print(json.dumps(dataclasses.asdict(status)) if as_json else "\n".join(table(status)), flush=True)


def _holds(status: Status, counts: Mapping[str, int]) -> bool:
    return all(status.wanted[role] == number for role, number in counts.items())


@contextlib.contextmanager
def _cluster(name: str, *, ray: bool, address: str | None) -> Iterator[Cluster]:
    if ray:
        from serving.launch import ray_cluster

        with ray_cluster.connected(address) as joined:
            yield ray_cluster.RayCluster(joined, name)
    else:
        from serving.launch.local import cluster_folder
        from serving.launch.local_control import LocalCluster

        yield LocalCluster(cluster_folder(name), name)


def _named(spec: ClusterSpec, address: str | None = None) -> str:
    """The flags by which another command finds the cluster."""
    found = "" if address is None else " --ray" if address == "auto" else f" --ray --address {address}"
    return found + ("" if spec.name == "jaxpd" else f" --name {spec.name}")


def _typed(context: typer.Context | None, name: str) -> bool:
    """Whether a flag was given by the user: a default must not go before a file."""
    source = context.get_parameter_source(name) if context is not None else None
    return source is not None and source.name == "COMMANDLINE"


def _resources(role: str, text: str | None) -> dict[str, float] | None:
    from serving.launch.spec import parse_resources

    return None if text is None else parse_resources(text, flag=f"--{role}-resources")


def _split(flag: str, text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise InvalidArgument(f"{flag} {text} cannot be split into words: {error}", field=flag.lstrip("-")) from None
