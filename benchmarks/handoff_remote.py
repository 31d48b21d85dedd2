"""How fast does KV go from one process to another, beside what the machinery below it can do?

    python -m benchmarks.handoff_remote [--sizes 2 16 64] [--meshes 8x1:1x1 2x1:4x1 1x1:1x1] [--repeats 7]
                                        [--prompts 512 2048 8176] [--model smollm2-135m]

Two processes of this machine, each with its own JAX. This one is the decode side, its child the prefill side. A repeat
moves some staged pieces of one size in three ways, one right after the other, in an order that rotates:

    remote     `meshes.transfer.remote`: offers, leases, bounds, pulls, the copies to other head slots, acks. The
               control messages go over a pipe between the two, and their time counts
    transfer   `jax.experimental.transfer` alone, as bare as it can be used: the same shards, all offered before the
               clock starts, pulled onto the same devices with as many pulls in flight, waited for in their order
    tcp        the same bytes from a buffer of one process through one loopback socket into a buffer of the other

GB/s (10^9 bytes of true KV heads, each once) are medians over the repeats; `share` is the median of the repeats' own
ratios, since other load on the machine hits neighbours alike. The first repeat of a case warms up and is not counted.

The second part sends prompts of `--prompts` tokens through real workers (benchmarks/handoff_exposed.py): what share of
the time to the second token is a transfer that is not hidden? Either part is left out by giving it nothing (`--sizes`,
`--prompts` without a value).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import queue
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.cluster import cpu_seconds
from benchmarks.handoff_exposed import measure_exposed
from benchmarks.handoff_remote_report import exposed_table, table
from benchmarks.machine import busy_seconds, describe, slug
from meshes.devices import assign_devices, ensure_cpu_devices
from meshes.heads import HeadLayout, head_layout
from meshes.spec import MeshSpec, parse_mesh_specs
from meshes.transfer.link import JaxLink
from meshes.transfer.messages import Ack, Offer
from meshes.transfer.move import receivers, true_heads
from meshes.transfer.offering import OfferLimits
from meshes.transfer.pulling import PullLimits, TransferFailed
from meshes.transfer.remote import RemoteTransport

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib")
WAYS = ("remote", "transfer", "tcp")
KV_HEADS, LAYERS, SLOTS, LANES = 8, 16, 16, 128  # bfloat16: 0.52 MB a page
PAGE_BYTES = KV_HEADS * LAYERS * SLOTS * LANES * 2
IN_FLIGHT = 4
DEVICES = 8
PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Case:
    """What is moved: `pieces` of `pages` pages each, from a replica of one mesh to a replica of another."""

    src: MeshSpec
    dst: MeshSpec
    pages: int
    pieces: int

    @property
    def piece_bytes(self) -> int:
        """True KV heads, each once."""
        return self.pages * PAGE_BYTES

    @property
    def nbytes(self) -> int:
        """All pieces."""
        return self.pieces * self.piece_bytes


def layout_of(spec: MeshSpec) -> HeadLayout:
    """The head layout of one side."""
    return head_layout(KV_HEADS, KV_HEADS, spec.tp)


def mesh_of(spec: MeshSpec) -> Mesh:
    """One replica of a side, on this process's devices."""
    (mesh,), _ = assign_devices((MeshSpec(spec.tp, 1),), (), jax.devices())
    return mesh


# -- the prefill side, a process of its own


class Prefill:
    """Stages pieces and lets them be taken, in each of the ways."""

    def __init__(self, pipe: Connection) -> None:
        from jax.experimental import transfer

        self._pipe = pipe
        self._sending = threading.Lock()
        self._server = transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
        self._transport = RemoteTransport(JaxLink(), OfferLimits(1 << 40, lease_s=PATIENCE_S), PullLimits(1 << 40))
        self._pieces: list[tuple[jax.Array, ...]] = []
        self._layout = head_layout(1, 1, 1)

    def send(self, message: Any) -> None:
        """To the decode side; from any thread."""
        with self._sending:
            self._pipe.send(message)

    def stage(self, case: Case) -> None:
        """Makes fresh pieces, on the devices."""
        self._layout = layout_of(case.src)
        shape = (case.src.tp, LAYERS, case.pages, SLOTS, LANES)
        sharding = NamedSharding(mesh_of(case.src), PartitionSpec("model"))
        make = jax.jit(lambda value: jax.numpy.full(shape, value, jax.numpy.bfloat16), out_shardings=sharding)
        self._pieces = [
            tuple(make(float(piece)) for _ in range(self._layout.kv_per_device)) for piece in range(case.pieces)
        ]
        jax.block_until_ready(self._pieces)
        self.send("staged")

    def remote(self) -> None:
        """Offers them; the offers go over the pipe as they are announced."""
        for piece in self._pieces:
            self._transport.offer(piece, self._layout, announce=self.send, done=lambda _: None)
        self._pieces = []

    def ack(self, ack: Ack) -> None:
        """The decode side has one."""
        self._transport.offering.ack(ack)

    def settled(self) -> None:
        """Answers when all staging is free again."""
        while self._transport.offering.used_bytes:
            time.sleep(0.001)
        self.send("free")

    def transfer(self) -> None:
        """Offers their shards to the bare transfer server."""
        keys = [secrets.randbits(64) for _ in self._pieces]
        for key, piece in zip(keys, self._pieces, strict=True):
            self._server.await_pull(key, true_heads(piece, self._layout))
        self._pieces = []
        self.send((self._server.address(), keys))

    def tcp(self, port: int) -> None:
        """Sends their bytes through a socket, from one buffer."""
        heads = [np.asarray(head).view(np.uint8) for piece in self._pieces for head in true_heads(piece, self._layout)]
        buffer = np.concatenate([head.reshape(-1) for head in heads])
        self._pieces = []
        with socket.create_connection(("127.0.0.1", port)) as sender:
            self.send("connected")
            assert self._pipe.recv() == "go"
            sender.sendall(buffer.data)

    def close(self) -> None:
        """Ends it."""
        self._transport.close()


def prefill_process(pipe: Connection) -> None:
    """Does what comes through the pipe, until there is nothing more."""
    jax.config.update("jax_platforms", "cpu")
    ensure_cpu_devices(DEVICES)
    side = Prefill(pipe)
    side.send("ready")
    while (command := pipe.recv()) is not None:
        verb, *arguments = command
        getattr(side, verb)(*arguments)
    side.close()


# -- the decode side, this process


class Decode:
    """Takes the pieces, and the time."""

    def __init__(self, pipe: Connection) -> None:
        from jax.experimental import transfer

        self._pipe = pipe
        self._server = transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
        self._transport = RemoteTransport(
            JaxLink(), OfferLimits(1 << 40), PullLimits(1 << 40, max_count=IN_FLIGHT, timeout_s=PATIENCE_S)
        )
        self._connection: Any = None

    def run(self, way: str, case: Case) -> float:
        """Seconds that one way takes for fresh pieces of a case."""
        self._pipe.send(("stage", case))
        assert self._pipe.recv() == "staged"
        time.sleep(0.02)  # let the threads that staged go to sleep
        return float(getattr(self, f"_{way}")(case))

    def _remote(self, case: Case) -> float:
        dst, mesh = layout_of(case.dst), mesh_of(case.dst)
        arrived: queue.Queue[TransferFailed | None] = queue.Queue()

        def take(offer: Offer, _: object, error: TransferFailed | None) -> None:
            if (ack := self._transport.pulling.taken(offer.id)) is not None:
                self._pipe.send(("ack", ack))
            arrived.put(error)

        began = time.perf_counter()
        self._pipe.send(("remote",))
        for _ in range(case.pieces):
            offer = self._pipe.recv()
            self._transport.pull(offer, dst, mesh, functools.partial(take, offer))
        for _ in range(case.pieces):
            if (error := arrived.get(timeout=PATIENCE_S)) is not None:
                raise error
        seconds = time.perf_counter() - began
        self._pipe.send(("settled",))
        assert self._pipe.recv() == "free"
        return seconds

    def _transfer(self, case: Case) -> float:
        dst, mesh = layout_of(case.dst), mesh_of(case.dst)
        shape = (1, LAYERS, case.pages, SLOTS, LANES)
        wanted = [
            jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16, sharding=SingleDeviceSharding(device))
            for device in receivers(layout_of(case.src), dst, mesh)
        ]
        self._pipe.send(("transfer",))
        address, keys = self._pipe.recv()
        if self._connection is None:
            self._connection = self._server.connect(address)
        waiting: list[Any] = []
        began = time.perf_counter()
        for key in keys:
            waiting.append(self._connection.pull(key, wanted))
            if len(waiting) == IN_FLIGHT:
                jax.block_until_ready(waiting.pop(0))
        jax.block_until_ready(waiting)
        return time.perf_counter() - began

    def _tcp(self, case: Case) -> float:
        buffer = memoryview(bytearray(case.nbytes))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._pipe.send(("tcp", listener.getsockname()[1]))
            receiver, _ = listener.accept()
        with receiver:
            assert self._pipe.recv() == "connected"
            began = time.perf_counter()
            self._pipe.send("go")
            got = 0
            while got < case.nbytes:
                count = receiver.recv_into(buffer[got:])
                assert count, "the sender ended"
                got += count
            return time.perf_counter() - began

    def close(self) -> None:
        """Ends both processes' work."""
        self._pipe.send(None)
        self._transport.close()


def measure(decode: Decode, case: Case, repeats: int) -> dict[str, Any]:
    """One row: GB/s of each way, and the shares."""
    gb_s: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for turn in range(len(WAYS)):
            way = WAYS[(repeat + turn) % len(WAYS)]
            seconds = decode.run(way, case)
            if repeat:
                gb_s[way].append(case.nbytes / seconds / 1e9)

    def share(of: str) -> list[float]:
        return [round(mine / other, 3) for mine, other in zip(gb_s["remote"], gb_s[of], strict=True)]

    return {
        "meshes": f"{case.src}->{case.dst}",
        "piece_mb": case.piece_bytes / 1e6,
        "pieces": case.pieces,
        "gb_s": {way: round(statistics.median(found), 3) for way, found in gb_s.items()},
        "share_of_transfer": statistics.median(share("transfer")),
        "share_of_tcp": statistics.median(share("tcp")),
        "repeats": {way: [round(value, 3) for value in found] for way, found in gb_s.items()},
        "shares_of_transfer": share("transfer"),
        "shares_of_tcp": share("tcp"),
    }


def main() -> None:
    """Measures all cases and writes JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 16, 64], help="MiB of a piece")
    parser.add_argument("--meshes", nargs="+", default=["8x1:1x1", "2x1:4x1", "1x1:1x1"], metavar="SRC:DST")
    parser.add_argument("--total", type=int, default=256, help="MiB that a repeat moves, at most")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048, 8176], help="tokens, through workers")
    parser.add_argument("--prompt-repeats", type=int, default=5, help="requests of each length")
    parser.add_argument("--model", default="smollm2-135m", help="of the workers")
    parser.add_argument("--output", type=pathlib.Path, help="JSON; the table goes beside it, as .md")
    args = parser.parse_args()
    cases = []
    for pair in args.meshes:
        src, dst = (parse_mesh_specs(part, name="--meshes")[0] for part in pair.split(":"))
        for size in args.sizes:
            pages = size * (1 << 20) // PAGE_BYTES
            if pages < 1:
                parser.error(f"--sizes {size} is less than a page, {PAGE_BYTES} bytes")
            cases.append(Case(src, dst, pages, pieces=max(1, min(32, args.total // size))))
    rows: list[dict[str, Any]] = []
    busy_with, load_average = 0.0, round(os.getloadavg()[0], 2)
    if cases:
        rows, busy_with = measure_all(cases, args.repeats)
    exposed = measure_exposed(args.model, args.prompts, args.prompt_repeats) if args.prompts else []
    about = describe(PACKAGES) | {"cores_used_by_other_processes": busy_with, "load_average_at_start": load_average}
    command = " ".join(["python -m benchmarks.handoff_remote", *sys.argv[1:]])
    path = args.output or RESULTS / f"handoff_remote-{slug(about)}-jax-{about['packages']['jax']}.json"
    result = {"command": command, "machine": about, "rows": rows, "model": args.model, "exposed": exposed}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = table(about, rows, command, in_flight=IN_FLIGHT)
    if exposed:
        text += "\n".join(["", *exposed_table(args.model, exposed), ""])
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def measure_all(cases: Sequence[Case], repeats: int) -> tuple[list[dict[str, Any]], float]:
    """A row for each case, and the cores that other processes used meanwhile."""
    ensure_cpu_devices(DEVICES)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=prefill_process, args=(theirs,))
    child.start()
    theirs.close()
    assert ours.recv() == "ready"
    decode = Decode(ours)
    began, busy = time.perf_counter(), busy_seconds()
    own = _own_seconds(child.pid)
    rows = []
    for case in cases:
        rows.append(measure(decode, case, repeats))
        print(json.dumps(rows[-1]), flush=True)
    others = (busy_seconds() - busy) - (_own_seconds(child.pid) - own)
    seconds = time.perf_counter() - began
    decode.close()
    child.join()
    return rows, round(max(0.0, others) / seconds, 2)


def _own_seconds(child: int | None) -> float:
    return cpu_seconds(os.getpid()) + (cpu_seconds(child) if child is not None else 0.0)


if __name__ == "__main__":
    main()
