"""`jaxpd worker`: an engine of one role behind a control port, until it is told to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpd.cli import cluster_options, options, server_options
from jaxpd.cli.cluster_options import CLUSTER
from jaxpd.cli.progress import console_progress
from jaxpd.config import ROLES, EngineConfig
from jaxpd.errors import InvalidArgument
from jaxpd.version import __version__

if TYPE_CHECKING:
    from jaxpd.engine import Engine
    from jaxpd.multihost.joining import Processes
    from jaxpd.multihost.leader import Followers
    from jaxpd.progress import Progress
    from serving.worker.config import WorkerConfig
    from serving.worker.process import Ready

MIXED = "mixed"
SEVERAL = "A worker of several processes"

RoleArgument = Annotated[
    str,
    typer.Argument(
        metavar="prefill|decode|mixed",
        help="What it does: prompts, answers behind them, or requests from one end to the other.",
        show_default=False,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="TPxDP",
        help="The mesh of the worker: 8x1 is 8-way tensor parallel by 1 data replica. Of a mixed one, it goes with "
        "--mode; one with two meshes has --prefill-mesh and --decode-mesh.",
        show_default="1x1 on CPU, else derived from the devices",
        rich_help_panel=options.MESHES,
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Where routers and other workers reach this one; port 0: any.",
        rich_help_panel=CLUSTER,
    ),
]
TransferListen = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS:PORT",
        help="Where KV is fetched from, in the clear: a numeric address and a port, or a range of ports such as "
        "10.0.0.5:7200-7299, one for each other worker; port 0: any.",
        show_default="the address of --listen, any port",
        rich_help_panel=CLUSTER,
    ),
]
Router = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST:PORT",
        help="A router to join; again for more. Without one it waits for a router that was told of it.",
        show_default=False,
        rich_help_panel=CLUSTER,
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="For a worker that is several processes: where process 0 waits for the others (jax.distributed). All get "
        "the same command, but for --process-id and the addresses of their own machine.",
        show_default=False,
        rich_help_panel=SEVERAL,
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="How many they are; each has an equal part of the devices of --mesh.",
        show_default=False,
        rich_help_panel=SEVERAL,
    ),
]
ProcessId = Annotated[
    int | None,
    typer.Option(
        metavar="I",
        help="Which one this is, from 0 on: 0 serves, the others follow it.",
        show_default=False,
        rich_help_panel=SEVERAL,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="Port of HTTP with /health, /ready, /metrics and /version; 0: any.",
        show_default="none",
        rich_help_panel=CLUSTER,
    ),
]


def worker(
    role: RoleArgument,
    model: options.Model = options.DEFAULT_MODEL,
    mesh: Mesh = None,
    mode: options.Mode = None,
    prefill_mesh: options.PrefillMesh = None,
    decode_mesh: options.DecodeMesh = None,
    local_prefill: options.LocalPrefill = None,
    listen: Listen = "127.0.0.1:7100",
    transfer_listen: TransferListen = None,
    router: Router = None,
    port: Port = None,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    heartbeat_timeout: cluster_options.HeartbeatTimeout = 5.0,
    shutdown_timeout: server_options.ShutdownTimeout = 30.0,
    cluster_secret_file: cluster_options.ClusterSecretFile = None,
    insecure_cluster: cluster_options.InsecureCluster = False,
    ssl_certfile: cluster_options.SslCertfile = None,
    ssl_keyfile: cluster_options.SslKeyfile = None,
    ssl_ca_certs: cluster_options.SslCaCerts = None,
    log_format: server_options.LogFormat = "text",
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_memory: options.KvMemory = None,
    reserve_tokens: options.ReserveTokens = None,
    step_timeout: options.StepTimeout = None,
    max_queued_requests: options.MaxQueuedRequests = EngineConfig.max_queued_requests,
    dtype: options.Dtype = None,
    prefix_cache: options.PrefixCache = None,
    kernels: options.Kernels = None,
    seed: options.Seed = EngineConfig.seed,
    precompile: options.Precompile = None,
    compile_cache: options.CompileCache = None,
) -> None:
    """Do a part of what a router serves: prefill, decode, or requests as a whole (mixed)."""
    if role not in (*ROLES, MIXED):
        raise InvalidArgument(f"worker {role}: the role must be {', '.join(ROLES)} or {MIXED}", field="role")
    config = worker_config(
        role,
        listen=listen,
        transfer_listen=transfer_listen,
        routers=tuple(router or ()),
        port=port,
        heartbeat_timeout_s=heartbeat_timeout,
        shutdown_timeout_s=shutdown_timeout,
        insecure_cluster=insecure_cluster,
        log_format=log_format,
        cluster=cluster_options.cluster_of(
            cluster_secret_file=cluster_secret_file,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            ssl_ca_certs=ssl_ca_certs,
        ),
    )
    engine = options.engine_fields(
        role=role if role in ROLES else None,
        mode=mode,
        mesh=mesh,
        prefill_mesh=prefill_mesh,
        decode_mesh=decode_mesh,
        local_prefill=local_prefill,
        max_model_len=max_model_len,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_memory=kv_memory,
        reserve_tokens=reserve_tokens,
        step_timeout_s=step_timeout,
        max_queued_requests=max_queued_requests,
        dtype=dtype,
        prefix_cache=prefix_cache,
        kernels=kernels,
        seed=seed,
        precompile=precompile,
        compile_cache=compile_cache,
    )
    engine_config = EngineConfig(**engine)
    processes = processes_of_flags(coordinator, num_processes, process_id, engine_config)
    _run(model, engine_config, config, processes, log_format=log_format)


def worker_config(role: str, *, port: int | None, log_format: str, **fields: Any) -> WorkerConfig:
    """Checked before a model is fetched. Raises InvalidArgument naming the flag."""
    from jaxpd.policies.workers import Role
    from serving.ports import HTTP, check_port
    from serving.worker.config import WorkerConfig

    server_options.check_log_format(log_format)
    if port is not None:
        check_port(port, HTTP)
    return WorkerConfig(role=Role(role), port=port, **fields)


def processes_of_flags(
    coordinator: str | None, num_processes: int | None, process_id: int | None, config: EngineConfig
) -> Processes | None:
    """What the worker is, if it is several processes. Raises InvalidArgument naming the flag."""
    if coordinator is num_processes is process_id is None:
        return None
    from jaxpd.multihost.process import check_flags

    return check_flags(coordinator, num_processes, process_id, config)


def _run(
    model: str, config: EngineConfig, worker_config: WorkerConfig, processes: Processes | None, *, log_format: str
) -> None:
    from jaxpd.checkpoints.resolving import resolve
    from jaxpd.engine import Engine
    from jaxpd.startup import prepare_devices
    from serving.logs import JSON, log_stream, set_up
    from serving.server import OnEvents
    from serving.worker import process

    set_up(log_format)
    progress = console_progress(log_stream("jaxpd.start") if log_format == JSON else None)

    if processes is not None and not processes.leads:
        _follow(model, config, worker_config, processes, progress)
        return

    def make_engine(on_events: OnEvents) -> Engine:
        if processes is None:
            return make(on_events, None)
        from jaxpd.multihost.process import lead

        return lead(processes, config, lambda followers: make(on_events, followers))

    def make(on_events: OnEvents, followers: Followers | None) -> Engine:
        prepare_devices(config)
        checkpoint = resolve(model, progress=progress)
        engine = Engine(checkpoint, config, on_events=on_events, progress=progress, followers=followers)
        progress.note("\n".join(["memory plan:", *(f"  {line}" for line in engine.limits.plan_lines())]))
        return engine

    def on_ready(ready: Ready) -> None:
        print(banner(ready), flush=True)

    asyncio.run(process.run(make_engine, worker_config, on_ready=on_ready))


def _follow(
    model: str, config: EngineConfig, worker_config: WorkerConfig, processes: Processes, progress: Progress
) -> None:
    from jaxpd.checkpoints.resolving import resolve
    from jaxpd.multihost.process import run_follower
    from serving.worker.describing import transfer_place

    host, ports = transfer_place(worker_config)
    run_follower(
        processes,
        config,
        lambda: resolve(model, progress=progress),
        progress=progress,
        transfer_host=host,
        transfer_ports=ports,
    )


def banner(ready: Ready) -> str:
    """The one line that says that the worker is ready, and where it is reached."""
    description = ready.description
    meshes = ", ".join(spec for specs in description.model.meshes.values() for spec in specs)
    http = "" if ready.http is None else f", HTTP on port {ready.http}"
    return (
        f"jaxpd {__version__} {description.role.value} worker serves {description.model.name} on {meshes}; "
        f"control on {ready.control}{http}"
    )
