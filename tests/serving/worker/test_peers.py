"""Streams between two workers, over real ports; their transports move nothing, and their engines are a test's ears."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from jaxpd.errors import Unavailable
from jaxpd.policies.workers import Role
from jaxpd.remote.messages import FirstToken, Message, NotReserved, Peer, Reserve, Reserved
from meshes.transfer.identity import Identity
from meshes.transfer.link import Link
from meshes.transfer.offering import OfferLimits
from meshes.transfer.pulling import PullLimits
from serving.cluster import Cluster
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.worker.peers import Peers, PeerSettings
from serving.worker.wire_peer import PeerHello, hello_to_proto

IDENTITY = Identity("hash", "float32", 16, 2, 4, 2, 128, 1)
Working = Callable[..., Any]


class Ears:
    """A side that keeps what it hears."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.heard: list[tuple[str, Message]] = []
        self.losses: list[tuple[str, str]] = []

    def connected(self, peer: Peer) -> None:
        self.peers[peer.name] = peer

    def received(self, peer: Peer, message: Message) -> None:
        assert self.peers[peer.name] is peer
        self.heard.append((peer.name, message))

    def has(self, name: str) -> bool:
        return name in self.peers

    def has_lost(self, name: str) -> bool:
        return any(lost == name for lost, _ in self.losses)

    def lost(self, name: str, reason: str) -> None:
        self.peers.pop(name, None)
        self.losses.append((name, reason))


class Ports:
    """Links of which each has a port that nobody else has."""

    def __init__(self) -> None:
        self.taken: dict[int, StillLink] = {}
        self.made = 0

    def make(self, listen: str, streams: int) -> Link:
        host, _, port = listen.rpartition(":")
        number = int(port) or 40000 + self.made
        if number in self.taken:
            raise OSError(98, f"{listen} is taken")
        self.made += 1
        self.taken[number] = link = StillLink(f"{host}:{number}", self, number)
        return link


@dataclasses.dataclass
class StillLink:
    """Nothing is moved over it."""

    address: str
    ports: Ports
    number: int

    def put(self, key: int, arrays: Any) -> None:
        raise AssertionError("nobody offers anything")

    def withdraw(self, key: int) -> None:
        raise AssertionError("nobody offers anything")

    def pull(self, address: str, key: int, wanted: Any) -> Any:
        raise AssertionError("nobody offers anything")

    def cut(self, address: str) -> None:
        raise AssertionError("nobody offers anything")

    def close(self) -> None:
        self.ports.taken.pop(self.number, None)


@dataclasses.dataclass
class End:
    """One worker."""

    address: str
    peers: Peers
    ears: Ears
    ports: Ports
    port: Any


@pytest.fixture
def ends(working: Working) -> Callable[..., Any]:
    """`async with ends(role, **settings) as end`: a worker with peers."""

    @contextlib.asynccontextmanager
    async def make(role: Role, *, cluster: Cluster | None = None, at: str = "", **more: Any) -> AsyncIterator[End]:
        cluster = cluster or Cluster()
        async with working(role=role, cluster=cluster) as w:
            settings: dict[str, Any] = dict(
                instance=f"{role.value}-{time.monotonic_ns()}",
                identity=IDENTITY,
                host="127.0.0.1",
                ports=range(0, 1),
                offers=OfferLimits(1 << 20),
                pulls=PullLimits(1 << 20),
                cluster=cluster,
                takes=role is Role.DECODE,
                beat_s=0.05,
            )
            ears, ports = Ears(), Ports()
            w.servicer.peers = peers = Peers(PeerSettings(**(settings | more)), ears, make_link=ports.make)
            beating = asyncio.create_task(peers.beat())
            try:
                yield End(w.address, peers, ears, ports, w.port)
            finally:
                beating.cancel()
                await peers.close()
                assert not ports.taken, "a transport was left open"

    return make


def go(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 30)

    asyncio.run(bounded())


async def eventually(true: Callable[[], Any], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.01)


async def connected(p: End, d: End) -> tuple[Peer, Peer]:
    """What each has of the other."""
    p.peers.want(d.address)
    await eventually(lambda: p.ears.peers and d.ears.peers)
    return p.ears.peers[d.address], next(iter(d.ears.peers.values()))


def test_messages_of_any_thread_arrive_in_order(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        async with ends(Role.PREFILL) as p, ends(Role.DECODE) as d:
            to_d, to_p = await connected(p, d)
            assert to_p.name == to_d.transport.address

            def talk() -> None:
                for i in range(500):
                    to_d.send(FirstToken(i, 7))

            thread = threading.Thread(target=talk)
            thread.start()
            for i in range(500):
                to_p.send(Reserved(i, 1))
            await eventually(lambda: len(d.ears.heard) == len(p.ears.heard) == 500)
            thread.join()
            assert [message for _, message in d.ears.heard] == [FirstToken(i, 7) for i in range(500)]
            assert [message for _, message in p.ears.heard] == [Reserved(i, 1) for i in range(500)]
            for _ in range(3):
                p.peers.want(d.address)  # it is there
            await asyncio.sleep(0.3)
            assert p.ports.made == d.ports.made == 1 and not p.ears.losses and not d.ears.losses

    go(run())


@pytest.mark.parametrize("leaves", ["prefill", "decode"])
def test_the_end_of_one_is_told_to_the_other_and_the_next_stream_is_a_new_one(
    ends: Callable[..., Any], leaves: str
) -> None:
    async def run() -> None:
        async with ends(Role.PREFILL) as p, ends(Role.DECODE) as d:
            to_d, to_p = await connected(p, d)
            name = to_p.name
            await (p if leaves == "prefill" else d).peers.close("bye")
            await eventually(lambda: p.ears.losses and d.ears.losses)
            assert [lost for lost, _ in p.ears.losses] == [d.address]
            assert [lost for lost, _ in d.ears.losses] == [name]
            assert "bye" in ((p if leaves == "prefill" else d).ears.losses[0][1])
            await eventually(lambda: not p.ports.taken and not d.ports.taken)
            to_d.send(Reserve(1))  # to nobody
            to_p.send(Reserved(1, 0))
            if leaves == "decode":
                p.peers.want(d.address)
                await eventually(lambda: len(p.ears.losses) == 2)
                assert "shutting down" in p.ears.losses[1][1]
            else:
                p.peers.want(d.address)
                await eventually(lambda: len(p.ears.losses) == 2)
                assert p.ears.losses[1] == (d.address, "this worker is shutting down")

    go(run())


def test_a_worker_that_was_lost_can_be_reached_again(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        async with ends(Role.PREFILL) as p, ends(Role.DECODE) as d:
            before, _ = await connected(p, d)
            await d.port.stop(0)  # its streams are cut
            await eventually(lambda: p.ears.losses and d.ears.losses)
            p.peers.want(d.address)
            await eventually(lambda: len(p.ears.losses) == 2)
            assert "cannot be reached" in p.ears.losses[1][1] and d.address in p.ears.losses[1][1]

        async with ends(Role.PREFILL) as p, ends(Role.DECODE) as d:
            before, _ = await connected(p, d)
            p.peers._lose(p.peers._streams[d.address], "the cable was pulled")
            assert p.ears.losses == [(d.address, "the cable was pulled")]
            p.peers.want(d.address)
            await eventually(lambda: p.ears.peers and len(d.ears.losses) == 1 and d.ears.peers)
            after = p.ears.peers[d.address]
            assert after is not before and after.transport is not before.transport
            after.send(Reserve(3))
            await eventually(lambda: d.ears.heard)
            assert len(d.ears.peers) == 1

    go(run())


def test_a_silent_worker_is_lost(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        async with ends(Role.DECODE, silence_s=0.3) as d, grpc.aio.insecure_channel(d.address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Peer()
            hello = PeerHello(instance="x", identity=IDENTITY, transfer_address="127.0.0.1:9")
            await call.write(hello_to_proto(hello))
            answer = await call.read()
            assert answer.hello.transfer_address == "127.0.0.1:40000"
            for _ in range(10):
                await call.write(pb.PeerMessage(ping=pb.Ping()))
                await asyncio.sleep(0.06)
            assert not d.ears.losses
            await eventually(lambda: d.ears.losses)
            assert d.ears.losses == [("127.0.0.1:9", "127.0.0.1:9 has said nothing for 0.3 s")]
            with pytest.raises(grpc.aio.AioRpcError, match="has said nothing for 0.3 s"):
                while (await call.read()) is not grpc.aio.EOF:
                    pass

    go(run())


def test_workers_that_differ_are_told_both_values(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        other = dataclasses.replace(IDENTITY, page_size=32)
        async with ends(Role.PREFILL) as p, ends(Role.DECODE, identity=other) as d:
            p.peers.want(d.address)
            await eventually(lambda: p.ears.losses)
            ((name, reason),) = p.ears.losses
            assert name == d.address and "page size 16" in reason and "32" in reason and "--page-size" in reason
            assert not d.ears.peers and not d.ears.losses and not p.ears.peers
            p.peers.want(d.address)  # it may be another one by then
            await eventually(lambda: len(p.ears.losses) == 2)

    go(run())


def test_who_cannot_be_reached_is_lost_with_a_reason(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        secret = Cluster(secret="a secret of the cluster")
        async with (
            ends(Role.PREFILL) as p,
            ends(Role.DECODE, cluster=secret) as guarded,
            ends(Role.PREFILL) as other,
        ):
            for address, said in (
                ("127.0.0.1:1", "cannot be reached"),
                ("nonsense", "must be HOST:PORT"),
                (guarded.address, "refuses this one"),
                (other.address, "a prefill worker, which takes no hand-offs"),
            ):
                p.peers.want(address)
                await eventually(functools.partial(p.ears.has_lost, address))
                assert said in dict(p.ears.losses)[address]

    go(run())


def test_each_peer_has_a_port_of_the_range(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        async with (
            ends(Role.PREFILL, ports=range(7200, 7202)) as p,
            ends(Role.DECODE) as one,
            ends(Role.DECODE) as two,
            ends(Role.DECODE) as three,
        ):
            for d in (one, two):
                p.peers.want(d.address)
            await eventually(lambda: len(p.ears.peers) == 2)
            assert {peer.transport.address for peer in p.ears.peers.values()} == {"127.0.0.1:7200", "127.0.0.1:7201"}
            p.peers.want(three.address)
            await eventually(lambda: p.ears.losses)
            assert "--transfer-listen 127.0.0.1:7200-7201" in p.ears.losses[0][1]

    go(run())


def test_messages_can_be_dropped_and_repeated(ends: Callable[..., Any]) -> None:
    def keep(message: Message, direction: str) -> list[Message]:
        if direction == "sent":
            return [] if isinstance(message, Reserve) else [message, message]
        return [] if isinstance(message, NotReserved) else [message]

    async def run() -> None:
        async with ends(Role.PREFILL, filter=keep) as p, ends(Role.DECODE) as d:
            to_d, to_p = await connected(p, d)
            for message in (Reserve(1), FirstToken(1, 2)):
                to_d.send(message)
            for answer in (NotReserved(1, "full"), Reserved(1, 2)):
                to_p.send(answer)
            await eventually(lambda: len(d.ears.heard) == 2 and p.ears.heard)
            assert [message for _, message in d.ears.heard] == [FirstToken(1, 2), FirstToken(1, 2)]
            assert [message for _, message in p.ears.heard] == [Reserved(1, 2)]

    go(run())


def test_another_worker_than_is_meant_is_found_out(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        async with ends(Role.PREFILL) as p, ends(Role.DECODE, instance="new") as d:
            p.peers.check(d.address, "old")  # nobody is there yet, so it is not known
            await connected(p, d)
            p.peers.check(d.address, "new")
            p.peers.check(d.address, "")
            with pytest.raises(Unavailable, match="new, and old was meant"):
                p.peers.check(d.address, "old")

    go(run())


def test_a_worker_that_comes_again_has_lost_its_stream_from_before(ends: Callable[..., Any]) -> None:
    async def run() -> None:
        async with ends(Role.DECODE) as d, grpc.aio.insecure_channel(d.address) as channel:
            for port in (8, 9):
                call = worker_pb2_grpc.WorkerStub(channel).Peer()
                hello = PeerHello(instance="same", identity=IDENTITY, transfer_address=f"127.0.0.1:{port}")
                await call.write(hello_to_proto(hello))
                await call.read()
                await eventually(functools.partial(d.ears.has, f"127.0.0.1:{port}"))
            assert d.ears.losses == [("127.0.0.1:8", "the prefill worker has opened another stream")]
            assert list(d.ears.peers) == ["127.0.0.1:9"]

    go(run())
