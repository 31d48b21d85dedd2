"""Other workers: a stream and a transport for each pair of one that prefills and one that decodes.

    prefill worker                                                                decode worker
    want(address), from its engine's side
      dial, a transfer server of its own  --- hello ------------------------>  agree; a transfer server of its own
      agree                               <------------------------ hello ---  connected
    connected                             <== messages of the engines, pings ==>

    connected --end of the stream, silence, mismatch, this worker stops--> lost: the side hears of it, once, then the
    transport is closed, and whatever was under way with it

A transport that was with a lost peer is never used again: the next `want` makes a new one, on both ends
(meshes/transfer/link.py says why). What is sent to a peer that is lost is dropped; `lost` has said so, or will.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from jaxpd.errors import FailedPrecondition, InvalidArgument, JaxpdError, Unavailable
from jaxpd.remote.messages import Side
from meshes.transfer.identity import Identity, IdentityMismatch, agree
from meshes.transfer.link import JaxLink, Link
from meshes.transfer.offering import OfferLimits
from meshes.transfer.pulling import PullLimits
from meshes.transfer.remote import RemoteTransport
from serving.cluster import Cluster
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.worker.peer_stream import PeerFilter, PeerStream
from serving.worker.wire_peer import PeerHello, hello_from_proto, hello_to_proto, peer_from_proto

logger = logging.getLogger(__name__)

FETCHED_S = 0.05  # between two looks
LAST_WORDS_S = 1.0  # for the end of a stream to leave
MakeTransport = Callable[[Link, OfferLimits, PullLimits], RemoteTransport]
HELLO_S = 5.0  # within which a stream's other end has to say who it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """What a worker brings to all of its peers."""

    instance: str
    identity: Identity
    host: str  # of transfer servers: numeric, in brackets for IPv6
    ports: range  # they take the first free one; range(0, 1): any
    offers: OfferLimits
    pulls: PullLimits
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    takes: bool = False  # hand-offs of others: it decodes
    silence_s: float = 5.0
    beat_s: float = 1.0
    filter: PeerFilter | None = None  # for tests of faults: what becomes of a message


class Peers:
    """All of them, for one engine's `side`. Made on the event loop; `want` is for any thread."""

    def __init__(
        self,
        settings: PeerSettings,
        side: Side,
        *,
        make_link: Callable[[str, int], Link] | None = None,
        make_transport: MakeTransport = RemoteTransport,
    ) -> None:
        self._settings = settings
        self._side = side
        self._make_link = make_link or (lambda listen, streams: JaxLink(listen, streams=streams))
        self._make_transport = make_transport
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()  # two that look for a free port must not find the same one
        self._streams: dict[str, PeerStream] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._most_silent = max(round(settings.silence_s / settings.beat_s), 1)
        self._closed = False

    @property
    def takes(self) -> bool:
        """Whether others may hand over to this worker."""
        return self._settings.takes

    def check(self, address: str, instance: str) -> None:
        """Raises Unavailable where the worker that is connected at `address` is another one than is meant."""
        stream = self._streams.get(address)
        if stream is not None and instance and stream.instance != instance:
            raise Unavailable(
                f"the decode worker at {address} is {stream.instance}, and {instance} was meant: one of them is gone; "
                "ask again"
            )

    def want(self, address: str) -> None:
        """The engine needs the worker at `address`: `connected` or `lost` of its side will follow. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._want, address)
        except RuntimeError:  # the loop has ended
            self._side.lost(address, "this worker is shutting down")

    async def beat(self) -> None:
        """Once a beat, for ever: a ping to each peer, and an end to those that are silent for too long."""
        while True:
            await asyncio.sleep(self._settings.beat_s)
            for stream in list(self._streams.values()):
                stream.silent += 1
                if stream.silent > self._most_silent:
                    self._lose(stream, f"{stream.name} has said nothing for {self._settings.silence_s:g} s")
                    if stream.task is not None:  # which ends by now, or waits for the other end to read
                        self._loop.call_later(LAST_WORDS_S, stream.task.cancel)
                else:
                    stream.ping()

    async def fetched(self, timeout_s: float) -> bool:
        """Waits until no peer has anything left to fetch; False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(stream.transport.offering.used_bytes for stream in self._streams.values()):
                    await asyncio.sleep(FETCHED_S)
        return not any(stream.transport.offering.used_bytes for stream in self._streams.values())

    async def close(self, reason: str = "this worker is shutting down") -> None:
        """Loses all of them; returns when their transports are closed."""
        self._closed = True
        for stream in list(self._streams.values()):
            self._lose(stream, reason)
        for task in list(self._dials.values()):
            task.cancel()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    # -- the end that prefills

    def _want(self, address: str) -> None:
        if self._closed:
            self._side.lost(address, "this worker is shutting down")
        elif address not in self._streams and address not in self._dials:
            task = self._dials[address] = self._spawn(self._dial(address), f"jaxpd-peer-{address}")
            task.add_done_callback(
                lambda done: self._dials.pop(address, None) if self._dials.get(address) is done else 0
            )

    async def _dial(self, address: str) -> None:
        """One stream, from the first try to its end."""
        reason, connected = "", False
        try:
            async with self._settings.cluster.channel(address) as channel:
                transport = await self._open_transport()
                try:
                    call = worker_pb2_grpc.WorkerStub(channel).Peer(metadata=self._settings.cluster.metadata)
                    hello = await self._greet(call, address, transport)
                except BaseException:
                    self._close_transport(transport)
                    raise
                stream = PeerStream(address, hello.instance, transport, self._settings.filter)
                connected = True
                self._connect(stream)
                try:
                    await self._carry(stream, call)
                finally:
                    self._lose(stream, "this worker is shutting down")
        except asyncio.CancelledError:
            reason = "this worker is shutting down"
        except Exception as error:
            reason = _reason(address, error)
        if not connected:
            self._dials.pop(address, None)  # before the engine hears of it, and wants it again
            logger.warning("no way to the worker at %s: %s", address, reason)
            self._side.lost(address, reason)

    async def _greet(self, call: Any, address: str, transport: RemoteTransport) -> PeerHello:
        """Both hellos. Raises what says why they do not come to it."""
        async with asyncio.timeout(HELLO_S):
            try:
                await call.write(hello_to_proto(self._hello(transport)))
                first = await call.read()
            except asyncio.InvalidStateError:  # the call has ended already
                first = grpc.aio.EOF
            if first is grpc.aio.EOF:
                raise Unavailable(_why(address, await call.code(), await call.details()))
        hello = _read_hello(first)
        agree(self._settings.identity, hello.identity, f"the decode worker at {address}")
        return hello

    async def _carry(self, stream: PeerStream, call: Any) -> None:
        """Both directions, until one of them ends."""

        async def write() -> None:
            async with contextlib.aclosing(stream.leaving()) as messages:
                async for message in messages:
                    await call.write(message)

        async def read() -> None:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._hear(stream, message)
            stream.end(_why(stream.name, await call.code(), await call.details()))

        tasks = [asyncio.ensure_future(write()), asyncio.ensure_future(read())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    stream.end(_reason(stream.name, error))
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # -- the end that decodes

    async def accept(self, messages: AsyncIterator[pb.PeerMessage]) -> AsyncGenerator[pb.PeerMessage, None]:
        """One stream of a worker that prefills. Raises FailedPrecondition where the two cannot agree."""
        if self._closed:
            raise Unavailable("this worker is shutting down")
        hello = _read_hello(await first_of(messages))
        try:
            agree(self._settings.identity, hello.identity, f"the prefill worker at {hello.transfer_address}")
        except IdentityMismatch as error:
            raise FailedPrecondition(str(error)) from None
        for stream in list(self._streams.values()):
            if stream.instance == hello.instance:  # it has lost this one, or it would not open another
                self._lose(stream, "the prefill worker has opened another stream")
        transport = await self._open_transport()
        stream = PeerStream(hello.transfer_address, hello.instance, transport, self._settings.filter)
        reading: asyncio.Task[None] | None = None
        try:
            yield hello_to_proto(self._hello(transport))
            self._connect(stream)
            reading = asyncio.create_task(self._listen(stream, messages), name="jaxpd-peer")
            async with contextlib.aclosing(stream.leaving()) as leaving:
                async for message in leaving:
                    yield message
            raise Unavailable(stream.reason)
        finally:
            if reading is not None:
                self._lose(stream, "the stream has ended")
                reading.cancel()
                await asyncio.wait([reading])  # nobody reads from the stream any more
            else:
                self._close_transport(transport)

    async def _listen(self, stream: PeerStream, messages: AsyncIterator[pb.PeerMessage]) -> None:
        try:
            async for message in messages:
                self._hear(stream, message)
            self._lose(stream, f"{stream.name} has ended the stream")
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._lose(stream, _reason(stream.name, error))

    # -- both

    def _hear(self, stream: PeerStream, message: pb.PeerMessage) -> None:
        """Raises ValueError for what makes no sense: with such a peer there is nothing to be done."""
        stream.silent = 0
        heard = peer_from_proto(message)
        if heard is not None and not stream.ended.is_set():
            for kept in stream.received(heard):
                self._side.received(stream, kept)

    def _connect(self, stream: PeerStream) -> None:
        logger.info("connected with the worker at %s (%s)", stream.name, stream.instance)
        self._streams[stream.name] = stream
        self._side.connected(stream)

    def _lose(self, stream: PeerStream, reason: str) -> None:
        """The one end of a stream that was connected; idempotent."""
        stream.end(reason)
        if self._streams.get(stream.name) is not stream:
            return
        del self._streams[stream.name]
        self._dials.pop(stream.name, None)  # from here on it may be wanted again
        logger.warning("lost the worker at %s: %s", stream.name, stream.reason)
        self._side.lost(stream.name, stream.reason)
        self._close_transport(stream.transport)

    def _hello(self, transport: RemoteTransport) -> PeerHello:
        settings = self._settings
        return PeerHello(instance=settings.instance, identity=settings.identity, transfer_address=transport.address)

    async def _open_transport(self) -> RemoteTransport:
        """One for a peer. Raises FailedPrecondition where there is no port for it."""
        settings = self._settings
        async with self._opening:
            for port in settings.ports:
                try:
                    listen = f"{settings.host}:{port}"
                    link = await asyncio.to_thread(self._make_link, listen, settings.identity.streams)
                except OSError as error:
                    last = error
                    continue
                return self._make_transport(link, settings.offers, settings.pulls)
        raise FailedPrecondition(
            f"no port for another worker ({last}): --transfer-listen {settings.host}:{settings.ports[0]}-"
            f"{settings.ports[-1]} has one for each peer; give it a larger range, or port 0 for any",
            field="transfer_listen",
        )

    def _close_transport(self, transport: RemoteTransport) -> None:
        self._spawn(asyncio.to_thread(transport.close), "jaxpd-peer-close")

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def first_of(messages: AsyncIterator[Any]) -> Any:
    """The first message of a stream; None where there is none. Raises Unavailable where it does not come."""
    try:
        async with asyncio.timeout(HELLO_S):
            return await anext(messages, None)
    except TimeoutError:
        raise Unavailable(f"no hello came within {HELLO_S:g} s") from None


def _read_hello(message: pb.PeerMessage | None) -> PeerHello:
    if message is None or not message.HasField("hello"):
        raise InvalidArgument("the first message of a stream between workers must be a hello")
    return hello_from_proto(message.hello)


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return _why(name, error.code(), error.details())
    if isinstance(error, JaxpdError):
        return error.message
    if isinstance(error, TimeoutError):
        return f"the worker at {name} has not answered within {HELLO_S:g} s"
    if isinstance(error, IdentityMismatch):
        return str(error)
    if not isinstance(error, ValueError | grpc.aio.BaseError):
        logger.error("the stream with %s failed", name, exc_info=error)
    return f"{name}: {error or type(error).__name__}"


def _why(address: str, code: grpc.StatusCode, details: str | None) -> str:
    """What the end of a call means to who reads it in an error."""
    if code is grpc.StatusCode.FAILED_PRECONDITION and details:
        return details
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"the worker at {address} refuses this one: {details}"
    return f"the worker at {address} is gone or cannot be reached ({code.name}: {details or 'no reason given'})"
