"""`jaxpd router`: flags to a configuration, and a server in front of workers until it is told to stop."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from jaxpd.cli import bench_flags, cluster_options, router_options, server_options
from jaxpd.cli.serve import banner, shown_meshes

if TYPE_CHECKING:
    from serving.config import Ports, ServerConfig
    from serving.router.config import RouterConfig
    from serving.router.engine import RouterEngine


def router(
    prefill: router_options.Prefill = None,
    decode: router_options.Decode = None,
    mixed: router_options.Mixed = None,
    listen: router_options.Listen = "127.0.0.1:7000",
    heartbeat_timeout: cluster_options.HeartbeatTimeout = 5.0,
    prefill_policy: router_options.PrefillPolicy = "kv_aware",
    decode_policy: router_options.DecodePolicy = "kv_aware",
    ttft_slo: router_options.TtftSlo = None,
    tpot_slo: router_options.TpotSlo = None,
    max_tries: router_options.MaxTries = 3,
    max_migrations: router_options.MaxMigrations = 3,
    migrate_on_drain: router_options.MigrateOnDrain = False,
    host: server_options.Host = "127.0.0.1",
    port: server_options.Port = 8000,
    grpc_port: server_options.GrpcPort = 50051,
    http: server_options.Http = True,
    grpc: server_options.Grpc = True,
    page: server_options.Page = True,
    served_model_name: server_options.ServedModelName = None,
    shutdown_timeout: server_options.ShutdownTimeout = 30.0,
    cluster_secret_file: cluster_options.ClusterSecretFile = None,
    insecure_cluster: cluster_options.InsecureCluster = False,
    api_key: server_options.ApiKey = None,
    api_key_file: server_options.ApiKeyFile = None,
    salt_by_key: server_options.SaltByKey = False,
    ssl_certfile: server_options.SslCertfile = None,
    ssl_keyfile: server_options.SslKeyfile = None,
    ssl_ca_certs: server_options.SslCaCerts = None,
    log_format: server_options.LogFormat = "text",
    otlp_traces_endpoint: server_options.OtlpTracesEndpoint = None,
) -> None:
    """Serve what workers serve: HTTP (OpenAI's API) and gRPC in front of prefill and decode workers."""
    from serving.cluster import Cluster, read_secret
    from serving.router.config import RouterConfig, addresses_of

    server_config = server_options.server_config(
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
    )
    config = RouterConfig(
        prefill=addresses_of(prefill, "--prefill"),
        decode=addresses_of(decode, "--decode"),
        mixed=addresses_of(mixed, "--mixed"),
        listen=listen,
        heartbeat_timeout_s=heartbeat_timeout,
        prefill_policy=prefill_policy,
        decode_policy=decode_policy,
        ttft_slo_s=None if ttft_slo is None else bench_flags.parse_time(ttft_slo, flag="--ttft-slo"),
        tpot_slo_s=None if tpot_slo is None else bench_flags.parse_time(tpot_slo, flag="--tpot-slo"),
        max_tries=max_tries,
        max_migrations=max_migrations,
        migrate_on_drain=migrate_on_drain,
        cluster=Cluster(secret=read_secret(cluster_secret_file), tls=server_config.tls),
        insecure_cluster=insecure_cluster,
    )
    _run(config, server_config, log_format=log_format)


def _run(config: RouterConfig, server_config: ServerConfig, *, log_format: str) -> None:
    from serving.logs import set_up
    from serving.router import process

    set_up(log_format)
    started_s = time.monotonic()
    known: list[tuple[str, RouterEngine]] = []

    def on_ready(ports: Ports) -> None:
        address, engine = known[0]
        model = engine.served_model()
        what = f"routes {model.name} in {model.dtype}: {shown_meshes(model.meshes)}"
        lines = banner(what, server_config, ports, time.monotonic() - started_s, also=(f"control on {address}",))
        print("\n".join(lines), flush=True)

    def on_listening(address: str, engine: RouterEngine) -> None:
        known.append((address, engine))

    asyncio.run(process.run(config, server_config, on_listening=on_listening, on_ready=on_ready))
