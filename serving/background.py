"""A server in a thread of this process, for notebooks and tests: what `jaxpd serve` does, without the command.

    with BackgroundServer("smollm2-135m", prefill_mesh="2x1", decode_mesh="1x2") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")

Leaving it drains and stops, as SIGTERM does.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxpd.config import EngineConfig
from jaxpd.errors import FailedPrecondition
from jaxpd.progress import Progress, SilentProgress
from serving import server
from serving.config import Ports, ServerConfig

if TYPE_CHECKING:
    from jaxpd.engine import Engine
    from jaxpd.stats import EngineStats


class BackgroundServer:
    """Starting loads and compiles, and returns when the server is ready; it raises what `jaxpd serve` would.

    Keyword arguments are the fields of `EngineConfig`. By default both ports are free ones of 127.0.0.1.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        server_config: ServerConfig | None = None,
        progress: Progress | None = None,
        **engine: Any,
    ) -> None:
        self._model = model
        self._engine_config = EngineConfig(**engine)
        self._config = server_config or ServerConfig(port=0, grpc_port=0)
        self._progress = progress or SilentProgress()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ports: Ports | None = None
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="jaxpd-server", daemon=True)

    @property
    def ports(self) -> Ports:
        """What was bound. Raises FailedPrecondition before the server is ready."""
        if self._ports is None:
            raise FailedPrecondition("the server is not ready; enter it with `with` or call start()")
        return self._ports

    def stats(self) -> EngineStats:
        """The engine's load. Raises FailedPrecondition before the server is ready."""
        assert self.ports is not None and self._engine is not None
        return self._engine.stats()

    @property
    def url(self) -> str:
        """Where HTTP is, such as "http://127.0.0.1:8000"."""
        scheme = "http" if self._config.tls is None else "https"
        return f"{scheme}://{self._config.host}:{self.ports.http}"

    @property
    def grpc_address(self) -> str:
        """Where gRPC is, such as "127.0.0.1:50051"."""
        return f"{self._config.host}:{self.ports.grpc}"

    def start(self) -> BackgroundServer:
        """Blocks until the server is ready. Raises JaxpdError when it cannot start."""
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def stop(self) -> None:
        """Drains, for at most `shutdown_timeout_s`, and stops. Idempotent."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> BackgroundServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await server.serve(self._make_engine, self._config, on_ready=self._on_ready, stop=self._stop)

    def _make_engine(self, on_events: server.OnEvents) -> Engine:
        from jaxpd.checkpoints.resolving import resolve
        from jaxpd.engine import Engine
        from jaxpd.startup import prepare_devices

        prepare_devices(self._engine_config)
        checkpoint = resolve(self._model, progress=self._progress)
        self._engine = Engine(checkpoint, self._engine_config, on_events=on_events, progress=self._progress)
        return self._engine

    def _on_ready(self, ports: Ports) -> None:
        self._ports = ports
        self._ready.set()
