"""What an engine that has started makes a worker say of itself, and bring to its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxpd.checkpoints.fingerprint import fingerprint
from jaxpd.policies.workers import Role
from jaxpd.version import __version__
from meshes.transfer.identity import Identity
from meshes.transfer.offering import OfferLimits
from meshes.transfer.pulling import PullLimits
from pallas_kernels.batch import lanes
from serving.model import served_model
from serving.ports import addresses
from serving.worker.config import WorkerConfig, transfer_ports
from serving.worker.description import Description
from serving.worker.peer_stream import PeerFilter
from serving.worker.peers import PeerSettings

if TYPE_CHECKING:
    from jaxpd.engine import Engine


def describe(engine: Engine, config: WorkerConfig, instance: str) -> Description:
    """Reads a little of every weight; not for an event loop."""
    identity = identity_of(engine, streams=config.transfer_streams)
    replicas = engine.stats().replicas
    decoding = [r for r in replicas if r.role != "prefill" and not r.pool] or [r for r in replicas if not r.pool]
    page_bytes = identity.num_layers * identity.num_kv_heads * identity.page_size * identity.lanes
    return Description(
        version=__version__,
        instance=instance,
        role=config.role,
        identity=identity,
        model=served_model(engine),
        replicas=len(decoding),
        pages=min(r.num_pages for r in decoding),
        slots=min(r.num_slots for r in decoding),
        queue_limit=engine.limits.max_queued_requests,
        page_bytes=page_bytes * jnp.dtype(identity.dtype).itemsize,
    )


def identity_of(engine: Engine, *, streams: int) -> Identity:
    """What has to be the same in two workers that hand over to each other."""
    model, limits = engine.checkpoint.config, engine.limits
    return Identity(
        model=fingerprint(engine.checkpoint),
        dtype=limits.dtype,
        page_size=limits.page_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        lanes=lanes(model.head_dim),
        streams=streams,
    )


def transfer_place(config: WorkerConfig) -> tuple[str, range]:
    """Address and ports of this process's transfer servers, as `transfer_ports`. Raises InvalidArgument."""
    listen_host = config.listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return transfer_ports(config.transfer_listen or f"{addresses(listen_host, '--listen')[0]}:0")


def peer_settings(
    engine: Engine, config: WorkerConfig, description: Description, keep: PeerFilter | None
) -> PeerSettings:
    """Bytes on their way are bounded by what the engine's pool holds, for each peer. Raises InvalidArgument."""
    host, ports = transfer_place(config)
    most = max(pool.kv_bytes * pool.spec.tp for pool in engine.limits.pools)
    return PeerSettings(
        instance=description.instance,
        identity=description.identity,
        host=host,
        ports=ports,
        offers=OfferLimits(max_bytes=most, lease_s=config.lease_s),
        pulls=PullLimits(max_bytes=most, timeout_s=config.pull_timeout_s),
        cluster=config.cluster,
        takes=config.role is Role.DECODE,
        silence_s=config.heartbeat_timeout_s,
        filter=keep,
    )
