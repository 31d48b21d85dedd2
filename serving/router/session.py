"""The stream between the router and one worker, from the first dial to the last: requests out, events and readings in.

    dial -> [Describe] -> hello, welcome -> up: Start, Abort, Ping -->      <-- Events, Reading
     ^                                       |
     +------- 0.2 s, doubled up to 5 s ------+-- end of the stream, or silence for the heartbeat's bound: gone

Everything happens on the router's event loop. Silence is counted in ticks of a task of this process, and not by the
clock alone: when it is this process that stood still, what the workers have sent meanwhile is read first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from jaxpd.errors import FailedPrecondition, InvalidArgument, JaxpdError
from jaxpd.policies.workers import Role
from jaxpd.request import Event
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.worker.description import Description, description_from_proto
from serving.worker.reading import Reading, reading_from_proto
from serving.worker.wire import OLDEST_PROTOCOL, PROTOCOL, Started, events_from_proto, start_to_proto

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
PING_S = 1.0
TICKS = 20  # in the bound of silence
DESCRIBE_S = 30.0  # a large tokenizer is made text in a second or two, on a busy machine in more
STEADY_S = 10.0  # a session that lasted so long was a good one: the next pause is short again

Channel = Callable[[str], grpc.aio.Channel]


class Owner(Protocol):
    """Whom a session tells what it hears."""

    @property
    def has_model(self) -> bool:
        """Whether it knows the model; otherwise it wants to be told with the tokenizer."""

    def joined(self, session: Session, description: Description) -> str:
        """The worker is there; returns the name of this incarnation. Raises JaxpdError to have none of it."""

    def heard(self, session: Session, events: list[Event]) -> None: ...
    def read(self, session: Session, reading: Reading) -> None: ...

    def gone(self, session: Session, name: str, reason: str) -> None:
        """The incarnation `name` is."""

    def started_s(self) -> Mapping[str, float]:
        """When each request that runs was sent, by the id that workers know it by."""


class Session:
    """One worker's address, dialled until `close`. `role` is what it has to be; None: any."""

    def __init__(
        self,
        address: str,
        owner: Owner,
        *,
        role: Role | None,
        flag: str,
        channel: Channel,
        metadata: tuple[tuple[str, str], ...] = (),
        heartbeat_timeout_s: float,
    ) -> None:
        self.address = address
        self.role = role
        self.flag = flag  # where the address was given, for errors
        self.name: str | None = None  # of the incarnation that is up
        self.trouble = ""
        self.silent_s = 0.0
        self._owner = owner
        self._channel = channel
        self._metadata = metadata
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._described: Description | None = None  # with its tokenizer
        self._outgoing: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begins to dial."""
        self._task = asyncio.create_task(self._run(), name=f"jaxpd-session-{self.address}")

    async def close(self) -> None:
        """Ends the stream; nobody is told."""
        task, self._task, self.name = self._task, None, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # -- out

    def start(self, started: Started) -> None:
        """Sends one leg of a request."""
        self._send(pb.RouterMessage(start=start_to_proto(started)))

    def abort(self, wire_id: str, sample: int | None) -> None:
        """Aborts a request there, or one sample of it."""
        self._send(pb.RouterMessage(abort=pb.Abort(request_id=wire_id, sample=sample)))

    def _send(self, message: pb.RouterMessage) -> None:
        """Lost where the worker is gone, which its requests have been told."""
        if self.name is not None:
            self._outgoing.put_nowait(message)

    async def set_draining(self, draining: bool) -> None:
        """Asks the worker itself. Raises FailedPrecondition where it cannot be asked."""
        channel = self._channel(self.address)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            request = pb.SetDrainingRequest(draining=draining)
            await stub.SetDraining(request, metadata=self._metadata, timeout=self._heartbeat_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise FailedPrecondition(f"{self.address} cannot be asked: {_said(error)}", field="worker") from None
        finally:
            await channel.close()

    # -- life

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = loop.time()
            reason = await self._once()
            name, self.name = self.name, None
            if name is not None:
                logger.warning("worker %s is gone: %s", name, reason)
                self._owner.gone(self, name, reason)
            elif reason != self.trouble:
                logger.warning("worker %s: %s", self.address, reason)
            self.trouble = reason
            if loop.time() - began_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _once(self) -> str:
        """One connection, from the dial to its end; returns why it ended."""
        channel = self._channel(self.address)
        self._outgoing = asyncio.Queue()
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            self._described = None
            if not self._owner.has_model:
                message = await stub.Describe(pb.DescribeRequest(), metadata=self._metadata, timeout=DESCRIBE_S)
                self._described = await asyncio.to_thread(description_from_proto, message)
            call = stub.Session(metadata=self._metadata)
            try:
                return await self._talk(call)
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            return _said(error)
        except JaxpdError as error:
            return error.message
        except Exception as error:
            logger.exception("the session with worker %s failed", self.address)
            return f"internal error in the router: {type(error).__name__}"
        finally:
            await channel.close()

    async def _talk(self, call: grpc.aio.StreamStreamCall) -> str:
        self.silent_s = 0.0
        tasks = [
            asyncio.create_task(work, name=f"jaxpd-session-{name}-{self.address}")
            for name, work in (("read", self._read(call)), ("write", self._write(call)), ("tick", self._tick()))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The reader knows best why a stream has ended.
            return next(task for task in tasks if task in done).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> str:
        hello = pb.RouterHello(
            protocol=PROTOCOL, oldest_protocol=OLDEST_PROTOCOL, router=f"{socket.gethostname()}:{os.getpid()}"
        )
        try:
            await call.write(pb.RouterMessage(hello=hello))
            while True:
                await call.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.sleep(self._heartbeat_timeout_s)  # the reader says why
            return "the stream has ended"

    async def _tick(self) -> str:
        """Pings, and notices silence."""
        tick_s, unsaid_s = self._heartbeat_timeout_s / TICKS, 0.0
        while self.silent_s < self._heartbeat_timeout_s:
            await asyncio.sleep(tick_s)
            self.silent_s += tick_s
            unsaid_s += tick_s
            if unsaid_s >= PING_S:
                unsaid_s = 0.0
                self._send(pb.RouterMessage(ping=pb.Ping()))
        return f"it has said nothing for {self._heartbeat_timeout_s:g} s (--heartbeat-timeout)"

    async def _read(self, call: grpc.aio.StreamStreamCall) -> str:
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                code, details = await call.code(), await call.details()
                return _words(code, details or "")
            self.silent_s = 0.0
            match message.WhichOneof("message"):
                case "welcome":
                    self._welcome(message.welcome)
                case "events" if self.name is not None:
                    self._owner.heard(self, events_from_proto(message.events, started_s=self._owner.started_s()))
                case "reading" if self.name is not None:
                    self._owner.read(self, reading_from_proto(message.reading))

    def _welcome(self, welcome: pb.DescribeResponse) -> None:
        description = self._described or description_from_proto(welcome)
        if welcome.instance != description.instance:
            raise FailedPrecondition("it has restarted meanwhile")
        if self.role is not None and description.role is not self.role:
            raise InvalidArgument(
                f"{self.flag} {self.address} is a {description.role.value} worker; name it as "
                f"--{description.role.value}, or start it as: jaxpd worker {self.role.value}",
                field=self.role.value,
            )
        self.name = self._owner.joined(self, description)
        self.trouble = ""


def _said(error: grpc.aio.AioRpcError) -> str:
    return _words(error.code(), error.details() or "")


def _words(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.OK:
        return "it has ended the session"
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        return f"nobody answers there ({details.rpartition(': ')[2]})"
    return f"{code.name}: {details}" if details else code.name
