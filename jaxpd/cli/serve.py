"""`jaxpd serve`: flags to a configuration, the memory plan, and the server until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Annotated

import typer

from jaxpd.cli import options
from jaxpd.cli.progress import console_progress
from jaxpd.cli.render import command_name, seconds
from jaxpd.config import EngineConfig
from jaxpd.errors import InvalidArgument
from jaxpd.version import __version__

if TYPE_CHECKING:
    from jaxpd.limits import Limits


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    mode: options.Mode = None,
    mesh: options.Mesh = None,
    prefill_mesh: options.PrefillMesh = None,
    decode_mesh: options.DecodeMesh = None,
    local_prefill: options.LocalPrefill = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.", rich_help_panel=options.SERVER)
    ] = "127.0.0.1",
    grpc_port: Annotated[
        int,
        typer.Option(
            metavar="PORT", help="Port of the gRPC service; 0 takes a free one.", rich_help_panel=options.SERVER
        ),
    ] = 50051,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="After SIGTERM or Ctrl-C, how long running requests may take to finish.",
            rich_help_panel=options.SERVER,
        ),
    ] = 30.0,
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
    seed: Annotated[
        int,
        typer.Option(metavar="S", help="Seed of what the engine draws by itself.", rich_help_panel=options.NUMERICS),
    ] = EngineConfig.seed,
    precompile: options.Precompile = None,
    compile_cache: options.CompileCache = None,
) -> None:
    """Serve a model over gRPC, prefilling on one mesh and decoding on another."""
    if not 0 <= grpc_port <= 65535:
        raise InvalidArgument(f"--grpc-port {grpc_port} must be between 0 (any free port) and 65535", field="grpc_port")
    if not shutdown_timeout >= 0:
        raise InvalidArgument(
            f"--shutdown-timeout {shutdown_timeout} must be 0 (stop at once) or more seconds", field="shutdown_timeout"
        )
    engine = options.engine_fields(
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
    _log_to_stderr()
    _run(model, EngineConfig(**engine), host=host, grpc_port=grpc_port, shutdown_timeout=shutdown_timeout)


def _run(model: str, config: EngineConfig, *, host: str, grpc_port: int, shutdown_timeout: float) -> None:
    from jaxpd.checkpoints.resolving import resolve
    from jaxpd.engine import Engine
    from jaxpd.startup import prepare_devices
    from serving import server

    started_s = time.monotonic()
    progress = console_progress()
    engines: list[Engine] = []

    def make_engine(on_events: server.OnEvents) -> Engine:
        prepare_devices(config)
        checkpoint = resolve(model, progress=progress)
        engine = Engine(checkpoint, config, on_events=on_events, progress=progress)
        progress.note("\n".join(["memory plan:", *(f"  {line}" for line in engine.limits.plan_lines())]))
        engines.append(engine)
        return engine

    def on_ready(port: int) -> None:
        print("\n".join(banner(engines[0].limits, host, port, time.monotonic() - started_s)), flush=True)

    asyncio.run(
        server.serve(make_engine, host=host, grpc_port=grpc_port, shutdown_timeout=shutdown_timeout, on_ready=on_ready)
    )


def banner(limits: Limits, host: str, port: int, ready_s: float) -> list[str]:
    """What a person sees when the server is ready; the last line is the one to type in another terminal."""
    words = {"mixed": "prefill and decode"}
    meshes = [f"{words.get(role, role)} on {','.join(specs)}" for role, specs in limits.meshes.items()]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # An address that means "all of them" is none to connect to.
    reached = f"127.0.0.1:{port}" if host == "0.0.0.0" else f"[::1]:{port}" if host == "::" else address
    return [
        "",
        f"jaxpd {__version__} serves {limits.model} in {limits.dtype}: {'; '.join(meshes)}",
        f"gRPC on {address}, ready in {seconds(ready_s)}. Ctrl-C stops it. In another terminal:",
        "",
        f'    {command_name()} generate --server {reached} --prompt "The capital of France is"',
        "",
    ]


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for package in ("jaxpd", "meshes", "pallas_kernels", "serving"):
        logging.getLogger(package).setLevel(logging.INFO)
