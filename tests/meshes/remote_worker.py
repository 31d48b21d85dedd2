"""The other process of the tests of the remote transport: `python tests/meshes/remote_worker.py DEVICES`.

Reads one JSON command a line and prints one JSON event a line. It stages pieces that only the seed decides, so that the
test can stage the same ones.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshes.devices import assign_devices
from meshes.heads import HeadLayout, head_layout
from meshes.sharding import replica_mesh
from meshes.spec import MeshSpec
from meshes.transfer.link import JaxLink
from meshes.transfer.messages import Ack, Offer, Refuse
from meshes.transfer.offering import OfferLimits, Released
from meshes.transfer.pulling import PullLimits
from meshes.transfer.remote import RemoteTransport


def stage(layout: HeadLayout, mesh: Mesh, shape: tuple[int, ...], dtype: str, seed: int) -> tuple[jax.Array, ...]:
    """A staged piece of random bytes: true heads of `shape` [L, N, S, W], cut as the layout says on a 1 x tp mesh."""
    size = np.dtype(jax.numpy.dtype(dtype)).itemsize * int(np.prod(shape))
    raw = np.random.default_rng(seed).bytes(layout.num_kv_heads * size)
    true = np.frombuffer(raw, np.uint8).view(jax.numpy.dtype(dtype)).reshape(layout.num_kv_heads, *shape)
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    return tuple(
        jax.device_put(np.stack([true[layout.device_kv(d)[j]] for d in range(layout.tp)]), sharding)
        for j in range(layout.kv_per_device)
    )


def mesh_of(tp: int, dp: int, replica: int) -> Mesh:
    """One replica's sub-mesh of a pool `tp x dp` on this process's first devices."""
    (mesh,), _ = assign_devices((MeshSpec(tp, dp),), (), jax.devices())
    return replica_mesh(mesh, replica)


def to_json(offer: Offer) -> dict[str, Any]:
    """As a control plane might carry it."""
    return dataclasses.asdict(offer)


def from_json(message: dict[str, Any]) -> Offer:
    """The inverse of `to_json` after a trip as text."""
    layout: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in message["layout"].items()}
    rest: dict[str, Any] = message | {"layout": HeadLayout(**layout), "shape": tuple(message["shape"])}
    return Offer(**rest)


class Worker:
    """Does what the lines say."""

    def __init__(self) -> None:
        self._printing = threading.Lock()
        self._transports: dict[float, RemoteTransport] = {}  # by the seconds of their leases

    def emit(self, event: str, **values: Any) -> None:
        with self._printing:
            print(json.dumps({"event": event, **values}), flush=True)

    def transport(self, lease_s: float) -> RemoteTransport:
        if lease_s not in self._transports:
            self._transports[lease_s] = RemoteTransport(
                JaxLink(), OfferLimits(1 << 30, lease_s=lease_s), PullLimits(1 << 30)
            )
        return self._transports[lease_s]

    def offer(
        self, *, heads: list[int], mesh: list[int], shape: list[int], dtype: str, seed: int, lease_s: float
    ) -> None:
        layout = head_layout(heads[0], heads[1], mesh[0])
        staging = stage(layout, mesh_of(*mesh), tuple(shape), dtype, seed)

        def released(end: Released) -> None:
            self.emit("released", **dataclasses.asdict(end))

        self.transport(lease_s).offer(
            staging, layout, announce=lambda offer: self.emit("offer", offer=to_json(offer)), done=released
        )

    def ack(self, *, id: int, generation: int, lease_s: float) -> None:
        self.emit("acked", done=self.transport(lease_s).offering.ack(Ack(id, generation)))

    def refuse(self, *, id: int, generation: int, lease_s: float) -> None:
        self.emit("refused", done=self.transport(lease_s).offering.refuse(Refuse(id, generation, "asked to")))

    def again(self, *, id: int, lease_s: float) -> None:
        self.emit("again", done=self.transport(lease_s).offering.again(id))

    def abort(self, *, id: int, lease_s: float) -> None:
        revoke = self.transport(lease_s).offering.abort(id)
        self.emit("aborted", revoke=None if revoke is None else dataclasses.asdict(revoke))

    def pull(self, *, offer: dict[str, Any], lease_s: float) -> None:
        taken = from_json(offer)
        dst = head_layout(taken.layout.num_heads, taken.layout.num_kv_heads, 1)
        here = self.transport(lease_s)
        here.pull(taken, dst, mesh_of(1, 1, 0), lambda _, error: self.emit("pulled", error=str(error)))

    def memory(self, *, lease_s: float) -> None:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        self.emit("memory", rss=pages * 4096, used=self.transport(lease_s).offering.used_bytes)

    def close(self, *, lease_s: float) -> None:
        self._transports.pop(lease_s).close()
        self.emit("closed")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    worker = Worker()
    worker.emit("ready", devices=len(jax.devices()))
    for line in sys.stdin:
        command = json.loads(line)
        getattr(worker, command.pop("do"))(**command)


if __name__ == "__main__":
    main()
