"""The device side of a pool: its arrays and the calls that run its programs. Dispatch only; nothing here waits.

Owned by the pool's thread. `pages` and `last_tokens` are donated to every program that changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpd.batch import BatchShape, Row, pack
from jaxpd.programs import Programs, ProgramSpec, page_pieces
from meshes.sharding import DATA, replica_mesh, replica_view, shards_of, with_replica
from meshes.transfer.in_process import Staging


class PoolDevice:
    """Weights, page pool and programs of one pool on its mesh."""

    def __init__(self, spec: ProgramSpec, params: dict[str, jax.Array], programs: Programs) -> None:
        self.spec = spec
        self.params = params
        self.programs = programs
        self._packed = spec.on(P(DATA))
        self._ids = [spec.on(P(), replica_mesh(spec.mesh, r)) for r in range(spec.replicas)]
        self.pages, self.last_tokens = spec.new_state()

    def reset(self) -> None:
        """A fresh page pool, after an error may have taken the old one."""
        self.pages, self.last_tokens = self.spec.new_state()

    def step(self, shape: BatchShape, replicas: Sequence[Sequence[Row]]) -> jax.Array:
        """Dispatches forward and sample of one batch; the sampled tokens [R, B] int32, still on their way."""
        packed = jax.device_put(pack(shape, replicas), self._packed)
        logits, self.pages = self.programs.forward[shape](self.params, self.pages, self.last_tokens, packed)
        tokens, self.last_tokens = self.programs.sample[shape](logits, self.last_tokens, packed)
        return tokens

    def gather(self, replica: int, page_ids: np.ndarray) -> list[Staging]:
        """Dispatches copies of pages of one replica into staging, in the pieces of `page_pieces`."""
        view = replica_view(self.pages, shards_of(self.pages), self.spec.mesh, replica)
        out = []
        for ids in self._pieces(page_ids, filler=0):
            out.append(self.programs.gather[replica, len(ids)](view, jax.device_put(ids, self._ids[replica])))
        return out

    def scatter(self, replica: int, page_ids: np.ndarray, pieces: Sequence[Staging]) -> None:
        """Dispatches writes of settled pieces into pages of one replica, in place, without touching the others."""
        shards = shards_of(self.pages)
        view = replica_view(self.pages, shards, self.spec.mesh, replica)
        for ids, piece in zip(self._pieces(page_ids, filler=self.spec.num_pages), pieces, strict=True):
            view = self.programs.scatter[replica, len(ids)](view, jax.device_put(ids, self._ids[replica]), piece)
        self.pages = with_replica(self.pages, shards, view)

    @staticmethod
    def _pieces(page_ids: np.ndarray, *, filler: int) -> list[np.ndarray]:
        """`page_ids` cut as `page_pieces` says; the last piece filled up with `filler`."""
        out, start = [], 0
        for size in page_pieces(len(page_ids)):
            ids = np.full(size, filler, np.int32)
            part = page_ids[start : start + size]
            ids[: len(part)] = part
            out.append(ids)
            start += size
        return out
