"""`jaxpd serve`: flags to a configuration, the memory plan, and the server until it is told to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxpd.cli import options, server_options
from jaxpd.cli.progress import console_progress
from jaxpd.cli.render import command_name, seconds
from jaxpd.config import EngineConfig
from jaxpd.version import __version__

if TYPE_CHECKING:
    from serving.config import Ports, ServerConfig


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    mode: options.Mode = None,
    mesh: options.Mesh = None,
    prefill_mesh: options.PrefillMesh = None,
    decode_mesh: options.DecodeMesh = None,
    local_prefill: options.LocalPrefill = None,
    host: server_options.Host = "127.0.0.1",
    port: server_options.Port = 8000,
    grpc_port: server_options.GrpcPort = 50051,
    http: server_options.Http = True,
    grpc: server_options.Grpc = True,
    page: server_options.Page = True,
    served_model_name: server_options.ServedModelName = None,
    shutdown_timeout: server_options.ShutdownTimeout = 30.0,
    api_key: server_options.ApiKey = None,
    api_key_file: server_options.ApiKeyFile = None,
    salt_by_key: server_options.SaltByKey = False,
    ssl_certfile: server_options.SslCertfile = None,
    ssl_keyfile: server_options.SslKeyfile = None,
    ssl_ca_certs: server_options.SslCaCerts = None,
    log_format: server_options.LogFormat = "text",
    otlp_traces_endpoint: server_options.OtlpTracesEndpoint = None,
    profile_dir: server_options.ProfileDir = None,
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
    """Serve a model over HTTP (OpenAI's API) and gRPC, prefilling on one mesh and decoding on another."""
    config = server_options.server_config(
        host=host,
        port=port if http else None,
        grpc_port=grpc_port if grpc else None,
        page=page,
        served_names=tuple(served_model_name or ()),
        shutdown_timeout_s=shutdown_timeout,
        api_key=api_key,
        api_key_file=api_key_file,
        salt_by_key=salt_by_key,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_ca_certs=ssl_ca_certs,
        log_format=log_format,
        otlp_endpoint=otlp_traces_endpoint,
        profile_dir=profile_dir,
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
    _run(model, EngineConfig(**engine), config, log_format=log_format)


def _run(model: str, config: EngineConfig, server_config: ServerConfig, *, log_format: str) -> None:
    from jaxpd.checkpoints.resolving import resolve
    from jaxpd.engine import Engine
    from jaxpd.startup import prepare_devices
    from serving import server
    from serving.logs import JSON, log_stream, set_up

    set_up(log_format)
    started_s = time.monotonic()
    # where every line has to be JSON, progress is lines of the log
    progress = console_progress(log_stream("jaxpd.start") if log_format == JSON else None)
    engines: list[Engine] = []

    def make_engine(on_events: server.OnEvents) -> Engine:
        prepare_devices(config)
        checkpoint = resolve(model, progress=progress)
        engine = Engine(checkpoint, config, on_events=on_events, progress=progress)
        progress.note("\n".join(["memory plan:", *(f"  {line}" for line in engine.limits.plan_lines())]))
        engines.append(engine)
        return engine

    def on_ready(ports: Ports) -> None:
        limits = engines[0].limits
        what = f"serves {limits.model} in {limits.dtype}: {shown_meshes(limits.meshes)}"
        print("\n".join(banner(what, server_config, ports, time.monotonic() - started_s)), flush=True)

    asyncio.run(server.serve(make_engine, server_config, on_ready=on_ready))


def shown_meshes(meshes: Mapping[str, Sequence[str]]) -> str:
    """ "prefill on 8x1; decode on 1x8"."""
    words = {"mixed": "prefill and decode"}
    return "; ".join(f"{words.get(role, role)} on {','.join(specs)}" for role, specs in meshes.items())


def banner(what: str, config: ServerConfig, ports: Ports, ready_s: float, *, also: Sequence[str] = ()) -> list[str]:
    """What a person sees when the server is ready; the last lines are to be typed in another terminal.

    `what` it does, and what else it listens on.
    """
    scheme = "http" if config.tls is None else "https"
    where, commands = [], []
    if ports.http is not None:
        url = f"{scheme}://{_reached(config.host, ports.http)}"
        where.append(f"HTTP on {scheme}://{_address(config.host, ports.http)}")
        key = " -H 'authorization: Bearer KEY'" if config.keys.required else ""
        body = '{"prompt": "The capital of France is", "max_tokens": 16}'
        commands.append(f"curl {url}/v1/completions{key} -H 'content-type: application/json' -d '{body}'")
        if config.page:
            commands.append(f"or open {url} in a browser")
    if ports.grpc is not None:
        where.append(f"gRPC on {_address(config.host, ports.grpc)}")
        more = " --api-key-file FILE" if config.keys.required else ""
        more += " --tls" if config.tls is not None else ""
        reached = _reached(config.host, ports.grpc)
        commands.append(f'{command_name()} generate --server {reached}{more} --prompt "The capital of France is"')
    return [
        "",
        f"jaxpd {__version__} {what}",
        f"{', '.join((*where, *also))}, ready in {seconds(ready_s)}. Ctrl-C stops it. In another terminal:",
        "",
        *(f"    {command}" for command in commands),
        "",
    ]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reached(host: str, port: int) -> str:
    """An address that means "all of them" is none to connect to."""
    return _address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
