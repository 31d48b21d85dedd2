"""A TCP link that can be made slow, cut, or swallow what is sent: between router and workers, and between workers.

    connect ---> [ latency, bytes/s ] ---> target            and the same on the way back
                        |
                        +-- hole: what comes waits here, in order, until `heal`
                        +-- cut: every connection is reset, and so are new ones, until `heal`

A link belongs to the event loop that `start` is awaited on; everything else is called from other threads. What waits in
a hole is bounded by the sockets' buffers: nobody reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import Callable

CHUNK = 64 * 1024
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s: closing sends a reset


@dataclasses.dataclass(eq=False)
class Proxy:
    """Listens on a loopback port and passes everything on to `target` (HOST:PORT).

    `noticed` is called in the loop's thread, once for each connection that had something to say in a hole.
    """

    target: str
    noticed: Callable[[], None] = lambda: None
    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        self.address = ""
        self.passed = 0  # bytes, both ways
        self.connections = 0  # since the start
        self._cut = False
        self._open: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Binds a free port; `address` is where it listens."""
        self._loop = asyncio.get_running_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def slow(self, *, latency_s: float = 0.0, bytes_per_s: float = float("inf")) -> None:
        """From now on, for what is sent each way: so much later, and no more than so much."""
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s

    def hole(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        self._call(self._open.clear)

    def cut(self) -> None:
        """Every connection is reset, new ones too."""
        self._cut = True
        self._call(self._reset)

    def open(self) -> None:
        """What waits in a hole goes on."""
        self._call(self._open.set)

    def heal(self) -> None:
        """As it was."""
        self._cut = False
        self.slow()
        self.open()

    def close(self) -> None:
        """Ends all connections and gives the port back."""
        self._call(self._close)

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(_now(function), self._loop).result(10)

    def _close(self) -> None:
        self._server.close()
        self._reset()
        for task in self._tasks:
            task.cancel()

    def _reset(self) -> None:
        for writer in list(self._writers):
            reset(writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # `close` has ended it; a server's task has nobody who awaits it
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._cut:
            reset(writer)
            return
        host, _, port = self.target.rpartition(":")
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:  # nobody listens: whoever connects is told so, as without a proxy
            reset(writer)
            return
        ends = (writer, there_writer)
        self._writers.update(ends)
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._writers.difference_update(ends)
            for end in ends:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One way of a connection; when its sender is done or gone, so is the connection."""
        told = False
        try:
            while data := await reader.read(CHUNK):
                if not self._open.is_set():
                    if not told:
                        told = True
                        self.noticed()
                    await self._open.wait()
                    told = False
                delay_s = self.latency_s + len(data) / self.bytes_per_s
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                self.passed += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            reset(writer)
        finally:
            writer.close()  # of one way alone: half-closed connections are nothing that gRPC or JAX make


async def _now(function: Callable[[], None]) -> None:
    function()


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection so that the other end sees a reset."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
