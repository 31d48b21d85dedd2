"""The device side of a pool: its arrays and the calls that run its programs. Dispatch only; nothing here waits.

Owned by the pool's thread. `pages`, `last_tokens`, `options` and `counts` are donated to every program that changes
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpd.batch import BatchShape, Row, pack
from jaxpd.errors import JaxpdError
from jaxpd.programs import LOGPROBS, TOKENS, Programs, ProgramSpec, page_pieces
from jaxpd.sampling import Logprobs, Sampled
from jaxpd.slot_options import NO_TOKEN, Flag
from meshes.sharding import DATA, MODEL, is_here, replica_mesh, replica_view, shards_of, to_devices, with_replica
from meshes.transfer.in_process import Staging


class Forwarded(NamedTuple):
    """A batch whose forward is dispatched, before anything is sampled of it."""

    shape: BatchShape
    packed: np.ndarray  # [R, M]
    head: jax.Array  # the beginning of it, on the device
    logits: jax.Array  # [R, B, V]


class PoolDevice:
    """Weights, page pool and programs of one pool on its mesh."""

    def __init__(self, spec: ProgramSpec, params: dict[str, jax.Array], programs: Programs) -> None:
        self.spec = spec
        self.params = params
        self.programs = programs
        self._packed = spec.on(P(DATA))
        self._alone = spec.mesh.size == 1
        self._counts = spec.on(P(DATA, MODEL))
        meshes = [replica_mesh(spec.mesh, r) for r in range(spec.replicas)]
        self._ids = [spec.on(P(), mesh) for mesh in meshes]
        self._here = [is_here(mesh) for mesh in meshes]
        self.reset()
        self.weight_bytes = _bytes_on_one_device(params)
        self.kv_bytes = _bytes_on_one_device(self.pages)

    def reset(self) -> None:
        """A fresh page pool and fresh slots: at the start, and after an error may have taken the old ones."""
        self.pages, self.last_tokens = self.spec.new_state()
        self.options, self.counts = self.spec.new_slots()

    def explained(self, error: Exception) -> JaxpdError | None:
        """What a failed step means to the requests in it; None: a fault of this process."""
        return None

    @property
    def free_bytes(self) -> int | None:
        """Bytes left on the fullest device; None where the backend does not say (CPU). From any thread."""
        here = jax.process_index()
        devices = [d for d in self.spec.mesh.devices.flat if d.platform != "cpu" and d.process_index == here]
        readings = [device.memory_stats() for device in devices]
        free = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in readings if stats and "bytes_limit" in stats]
        return min(free, default=None)

    def put(self, packed: np.ndarray) -> jax.Array | np.ndarray:
        """Metadata as the programs take it. One device takes it from NumPy, in the call of the program itself.

        That is a copy of a few microseconds in C++; `device_put` takes 50 to 150, most of it Python. For several
        devices the call would do the same in Python, once for each program.
        """
        return packed if self._alone else to_devices(packed, self._packed)

    def step(self, shape: BatchShape, batch: Sequence[Sequence[Row]] | np.ndarray) -> Sampled:
        """Dispatches forward, sample and what options need of one batch; the result, [R, B], is still on its way.

        The batch is each replica's rows, or what `pack` made of them, which must not change any more.
        """
        return self.sample(self.forward(shape, batch))

    def forward(self, shape: BatchShape, batch: Sequence[Sequence[Row]] | np.ndarray) -> Forwarded:
        """Dispatches forward of one batch alone, for a `sample` that has to wait for something."""
        packed = batch if isinstance(batch, np.ndarray) else pack(shape, batch)
        run = self.programs.forward[shape]
        logits, self.pages, head = run(self.params, self.pages, self.last_tokens, self.put(packed))
        return Forwarded(shape, packed, head, logits)

    def sample(self, batch: Forwarded, mask_RBW: np.ndarray | None = None) -> Sampled:
        """Dispatches what follows a forward; `mask_RBW`: what each row may sample, in words of `jaxpd.structured`."""
        shape, packed, head, logits = batch
        start, length = shape.fields()["flags"]
        asked = packed[:, start : start + length]
        changed = logits if mask_RBW is None else self.programs.mask[shape.rows](logits, self.put(mask_RBW))
        if not asked.any():
            tokens, self.last_tokens = self.programs.sample[shape.rows](changed, self.last_tokens, head)
            return self._readable(Sampled(tokens, None))
        flags = Flag(int(np.bitwise_or.reduce(asked, axis=None)))
        if flags.needs_slot:
            changed = self.programs.apply[shape.rows](changed, self.options, self.counts, head)
        tokens, self.last_tokens = self.programs.sample[shape.rows](changed, self.last_tokens, head)
        if not flags & (Flag.COUNT | Flag.LOGPROBS):
            return self._readable(Sampled(tokens, None))
        self.counts, logprobs = self.programs.account[shape.rows](logits, tokens, self.counts, head)
        return self._readable(Sampled(tokens, logprobs if flags & Flag.LOGPROBS else None))

    def score(self, replica: int, row: Row, targets: Sequence[int]) -> Logprobs:
        """Dispatches a chunk of a prompt and the log probabilities of `targets`, each given the tokens before it.

        `row` holds at most SCORE_TOKENS tokens; `targets[i]` is what follows its i-th. The result is [R, SCORE_TOKENS],
        still on its way.
        """
        shape, replicas = self.spec.score_shape, self.spec.replicas
        packed = pack(shape, [[row] if r == replica else [] for r in range(replicas)])
        logits, self.pages, _ = self.programs.score[shape](
            self.params, self.pages, self.last_tokens, to_devices(packed, self._packed)
        )
        head = np.zeros((replicas, BatchShape(0, shape.tokens, 0).packed_len), np.int32)
        fields = BatchShape(0, shape.tokens, 0).fields()
        start, length = fields["slots"]
        head[:, start : start + length] = NO_TOKEN  # out of range: nothing is counted
        start, _ = fields["flags"]
        head[replica, start : start + len(targets)] = int(Flag.LOGPROBS)
        asked = np.zeros((replicas, shape.tokens), np.int32)
        asked[replica, : len(targets)] = targets
        tokens, on_device = to_devices(asked, self._packed), to_devices(head, self._packed)
        self.counts, logprobs = self.programs.account[shape.tokens](logits, tokens, self.counts, on_device)
        return self.programs.read[LOGPROBS, shape.tokens](logprobs) if self.spec.read_apart else logprobs

    def set_slot(self, replica: int, slot: int, options_K: np.ndarray, counts_V: np.ndarray | None) -> None:
        """Dispatches writes of what a sequence asks of sampling (rows of `jaxpd.slot_options`) into its slot.

        `counts_V` is None for a sequence without penalties.
        """
        rows_RK = np.full((self.spec.replicas, 1 + len(options_K)), NO_TOKEN, np.int32)  # a slot out of range: nowhere
        rows_RK[replica] = (slot, *options_K)
        self.options = self.programs.set_row["options"](self.options, to_devices(rows_RK, self._packed))
        if counts_V is None:
            return
        counts_RV = np.zeros((self.spec.replicas, len(counts_V)), np.uint16)
        counts_RV[replica] = counts_V
        slots_R = to_devices(np.ascontiguousarray(rows_RK[:, 0]), self._packed)
        self.counts = self.programs.set_row["counts"](self.counts, slots_R, to_devices(counts_RV, self._counts))

    def gather(self, replica: int, page_ids: np.ndarray) -> list[Staging]:
        """Dispatches copies of pages of one replica into staging, in the pieces of `page_pieces`.

        Of a replica that lies in other processes the pieces have no shards here.
        """
        if not self._here[replica]:
            return [self.spec.staging_elsewhere(replica, size) for size in page_pieces(len(page_ids))]
        view = replica_view(self.pages, shards_of(self.pages), self.spec.mesh, replica)
        out = []
        for ids in self._pieces(page_ids, filler=0):
            out.append(self.programs.gather[replica, len(ids)](view, to_devices(ids, self._ids[replica])))
        return out

    def scatter(self, replica: int, page_ids: np.ndarray, pieces: Sequence[Staging]) -> None:
        """Dispatches writes of settled pieces into pages of one replica, in place, without touching the others."""
        shards = shards_of(self.pages)
        view = replica_view(self.pages, shards, self.spec.mesh, replica)
        for ids, piece in zip(self._pieces(page_ids, filler=self.spec.num_pages), pieces, strict=True):
            view = self.programs.scatter[replica, len(ids)](view, to_devices(ids, self._ids[replica]), piece)
        self.pages = with_replica(self.pages, shards, view)

    def _readable(self, sampled: Sampled) -> Sampled:
        """The same where this process can read all of it, also what the replicas in other processes have sampled."""
        if not self.spec.read_apart:
            return sampled
        read, rows = self.programs.read, sampled.tokens_B.shape[1]
        tokens = read[TOKENS, rows](sampled.tokens_B)
        return Sampled(tokens, None if sampled.logprobs is None else read[LOGPROBS, rows](sampled.logprobs))

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


def _bytes_on_one_device(arrays: Any) -> int:
    """What each device of a mesh holds of `arrays` (any pytree): their shards are equal."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(arrays))
