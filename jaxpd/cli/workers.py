"""`jaxpd workers`: which workers a router has, what they do, and moving them out of the way."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpd.cli import cluster_options, options
from jaxpd.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.table import Table

    from serving.proto.jaxpd.v1 import worker_pb2 as pb

TIMEOUT_S = 15.0
WIDE = 200  # columns, where nobody looks at it directly

Router = Annotated[str, typer.Option(metavar="HOST:PORT", help="The router's control port (its --listen).")]
Drain = Annotated[
    str | None,
    typer.Option(metavar="WORKER", help="Give this worker nothing new: its name or address.", show_default=False),
]
Resume = Annotated[str | None, typer.Option(metavar="WORKER", help="Take a drained worker back.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def workers(
    router: Router = "127.0.0.1:7000",
    drain: Drain = None,
    resume: Resume = None,
    as_json: Json = False,
    cluster_secret_file: cluster_options.ClusterSecretFile = None,
    ssl_certfile: cluster_options.SslCertfile = None,
    ssl_keyfile: cluster_options.SslKeyfile = None,
    ssl_ca_certs: cluster_options.SslCaCerts = None,
) -> None:
    """List the workers of a router, or drain one."""
    options.parse_address(router, flag="--router")
    if drain is not None and resume is not None:
        raise InvalidArgument("--drain and --resume are opposites; give one of them", field="drain")
    certificates = (ssl_certfile, ssl_keyfile, ssl_ca_certs)
    found = _ask(router, drain, resume, cluster_secret_file, certificates)
    if as_json:
        print(json.dumps({"workers": [as_dict(worker) for worker in found]}, indent=2))
        return
    from rich.console import Console

    if not found:
        print(f"router {router} has no workers; start one with: jaxpd worker prefill MODEL --router {router}")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(table(found))
    for worker in found:
        if worker.trouble:
            print(f"{worker.name}: {worker.trouble}")


def _ask(
    router: str,
    drain: str | None,
    resume: str | None,
    secret_file: pathlib.Path | None,
    certificates: tuple[pathlib.Path | None, ...],
) -> list[pb.WorkerInfo]:
    """The workers, after draining or resuming one. Raises JaxpdError."""
    from serving.channel import Way
    from serving.cluster import Cluster, read_secret
    from serving.proto.jaxpd.v1 import worker_pb2 as pb
    from serving.proto.jaxpd.v1 import worker_pb2_grpc

    certfile, keyfile, ca_certs = certificates
    way = Way(server=router, certfile=certfile, keyfile=keyfile, ca_certs=ca_certs)
    metadata = Cluster(secret=read_secret(secret_file)).metadata
    with way.channel() as channel, way.readable_errors():
        stub = worker_pb2_grpc.RouterStub(channel)
        worker = drain if drain is not None else resume
        if worker is not None:
            request = pb.DrainWorkerRequest(worker=worker, draining=drain is not None)
            stub.DrainWorker(request, metadata=metadata, timeout=TIMEOUT_S)
        return list(stub.ListWorkers(pb.ListWorkersRequest(), metadata=metadata, timeout=TIMEOUT_S).workers)


def as_dict(worker: pb.WorkerInfo) -> dict[str, Any]:
    """One worker as `--json` shows it; `reading` is null before its first one."""
    return {
        "name": worker.name,
        "address": worker.address,
        "role": role_of(worker),
        "state": worker.state,
        "meshes": list(worker.meshes),
        "legs": worker.legs,
        "silent_s": round(worker.silent_s, 3),
        "trouble": worker.trouble or None,
        "reading": _reading(worker.reading) if worker.HasField("reading") else None,
    }


def _reading(reading: pb.Reading) -> dict[str, Any]:
    return {
        "queued": reading.queued,
        "running": reading.running,
        "staging_bytes": reading.staging_bytes,
        "crossed_bytes": reading.crossed_bytes,
        "handoff_failures": dict(reading.handoff_failures),
        "free_pages": sum(replica.free_pages for replica in reading.replicas),
        "pages": sum(replica.num_pages for replica in reading.replicas),
        "free_slots": sum(replica.free_slots for replica in reading.replicas),
        "slots": sum(replica.num_slots for replica in reading.replicas),
    }


def role_of(worker: pb.WorkerInfo) -> str | None:
    """ "prefill", "decode" or "mixed"; None before it has said so."""
    from serving.worker.description import ROLES

    return next((role.value for role, number in ROLES.items() if number == worker.role), None)


def table(found: list[pb.WorkerInfo]) -> Table:
    """For a person: a row a worker."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column("worker", no_wrap=True)
    for name in ("role", "state", "meshes"):
        shown.add_column(name, overflow="fold")
    for name in ("legs", "queued", "running", "pages used"):
        shown.add_column(name, justify="right")
    for worker in found:
        counts = ["", "", ""]
        if worker.HasField("reading"):
            reading = _reading(worker.reading)
            used = reading["pages"] - reading["free_pages"]
            counts = [str(reading["queued"]), str(reading["running"]), f"{used}/{reading['pages']}"]
        meshes = ", ".join(worker.meshes)
        shown.add_row(worker.name, role_of(worker) or "?", worker.state, meshes, str(worker.legs), *counts)
    return shown
