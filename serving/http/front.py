"""The HTTP front as a part of the server process: its sockets, its life, and uvicorn between the two.

    bind -> start -> (answers 503) -> set_ready(True) -> set_ready(False) -> stop

uvicorn runs as one task of the loop that everything else runs on. Signals, logging and the end of the process are not
its business here.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from serving import ports
from serving.callers import Keys
from serving.http.app import make_app
from serving.http.connection import Connection, close_late_ones
from serving.http.options import HttpOptions
from serving.http.ready import Ready

if TYPE_CHECKING:
    from serving.tls import Tls

LAST_WORDS_S = 1.0  # for tasks that were cancelled to end


class HttpFront:
    """One HTTP server over one gateway; made, bound, started and stopped on one event loop.

    `make` makes its routes: all of them, or `make_system_app` for a process without clients.
    """

    def __init__(
        self,
        gateway: Any,
        *,
        keys: Keys | None = None,
        tls: Tls | None = None,
        metrics_render: Callable[[str], tuple[bytes, str]] | None = None,
        options: HttpOptions | None = None,
        make: Callable[..., FastAPI] = make_app,
    ) -> None:
        options = options or HttpOptions()
        self._ready = Ready(gateway)
        app = make(gateway, keys=keys or Keys({}), metrics_render=metrics_render, options=options, ready=self._ready)
        limits = type("Connection", (Connection,), {"options": options, "most_connections": _most(options)})
        config = uvicorn.Config(
            app,
            http=limits,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            forwarded_allow_ips=[],
            server_header=False,
            workers=1,
            timeout_keep_alive=int(options.idle_s) + 1,  # ours comes first
            **({} if tls is None else tls.uvicorn_options()),
        )
        self._server = _Server(config)
        self._sockets = list[socket.socket]()
        self._serving: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """Takes the port (0: any free one) on every address of `host`, and returns it.

        Raises InvalidArgument for a host or port that cannot be, FailedPrecondition for one that cannot be had.
        """
        self._sockets = ports.listening_sockets(host, port, ports.HTTP)
        return int(self._sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Starts to answer: live, not ready."""
        self._serving = asyncio.create_task(self._server.serve(self._sockets), name="jaxpd-http")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended before it began")
            await asyncio.sleep(0)
        self._sweeping = asyncio.create_task(
            close_late_ones(self._server.server_state.connections), name="jaxpd-http-sweep"
        )

    async def set_ready(self, ready: bool) -> None:
        """What `/health` says."""
        self._ready.ready = ready

    async def stop(self, grace_s: float) -> None:
        """Refuses new connections and gives running answers `grace_s` seconds before it cancels them."""
        self._ready.ready = False
        serving, self._serving = self._serving, None
        if serving is None:
            for sock in self._sockets:
                sock.close()
            return
        # Rounded up by uvicorn's type only; it waits for this many seconds, fractions too.
        self._server.config.timeout_graceful_shutdown = max(grace_s, 0.001)  # type: ignore[assignment]
        self._server.should_exit = True
        await asyncio.wait([serving])
        if self._sweeping is not None:
            self._sweeping.cancel()
        state = self._server.server_state
        if state.tasks:
            await asyncio.wait(list(state.tasks), timeout=LAST_WORDS_S)
        for connection in list(state.connections):
            connection.transport.abort()  # a client that takes nothing would keep it open
        serving.result()


class _Server(uvicorn.Server):
    """Leaves signals to who runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _most(options: HttpOptions) -> int:
    """As many connections as files may be open, with half of those left for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return options.max_connections if soft == resource.RLIM_INFINITY else min(options.max_connections, soft // 2)
