"""One server process: from the bound port to the last answer.

    bind -> live -> (engine starts in a thread) -> ready -> signal -> not ready -> drain -> stop -> close -> return

Ports are bound before the model is loaded, so that a port in use costs no minute of loading and a probe gets an
answer all the while. The first SIGTERM or SIGINT drains. From then on both signals have their default effect: the
second one ends the process at once, whatever it is busy with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, runtime_checkable

from jaxpd.errors import Unavailable
from jaxpd.request import Event
from serving.config import Ports, ServerConfig
from serving.gateway import Engine, Gateway
from serving.grpc_server import GrpcFront
from serving.model import ServedModel, served_model
from serving.observer import Observer
from serving.seeing import Seeing

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

OnEvents = Callable[[list[Event]], None]

LAST_MESSAGES_S = 5.0  # for what is on its way when the drain is over


class Served(Engine, Protocol):
    """What a server needs of `jaxpd.engine.Engine`, beside what the gateway does. Called from threads."""

    def start(self) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


@runtime_checkable
class Following(Protocol):
    """An engine that depends on others, as a router does: `start` waits for them, and `close` ends that wait. They may
    leave and come back: it calls `on_ready_changed`, on the server's loop.
    """

    on_ready_changed: Callable[[bool], None] | None

    @property
    def ready(self) -> bool: ...


E = TypeVar("E", bound=Served)
MakeEngine = Callable[[OnEvents], E]


class Front(Protocol):
    """One way in; its port is bound already."""

    async def start(self) -> None: ...
    async def set_ready(self, ready: bool) -> None: ...
    async def stop(self, grace_s: float) -> None: ...


async def serve(
    make_engine: MakeEngine[E],
    config: ServerConfig | None = None,
    *,
    describe: Callable[[E], ServedModel] | None = None,
    observers: Sequence[Observer] = (),
    collectors: Sequence[Collector] = (),
    on_ready: Callable[[Ports], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until a signal or until `stop` is set, then drains for at most `shutdown_timeout_s` seconds.

    `make_engine` is called in a thread with the function that takes the engine's events, and the engine is started
    there; `describe` says which model it serves (None: that of its checkpoint). `collectors` are metrics beside those
    of every server. `on_ready` is called with the ports that were bound. With `stop` given no signal is touched
    (notebooks, tests, threads). Raises JaxpdError when a port cannot be had or the engine cannot start.
    """
    config = config or ServerConfig()
    seeing = Seeing(config, observers)
    gateway = Gateway(observers=seeing.observers, salt_by_caller=config.salt_by_key)
    seeing.watch(gateway)
    for collector in collectors:
        seeing.metrics.registry.register(collector)
    fronts, ports = _bound(gateway, config, seeing)
    for front in fronts:
        await front.start()
    stopping = stop if stop is not None else stop_on_signals()
    made: list[E] = []
    starting = start_in_thread(make_engine, gateway.on_events, made)
    interrupted = asyncio.ensure_future(stopping.wait())
    following: _Readiness | None = None
    try:
        await asyncio.wait((starting, interrupted), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await _stop_all(fronts, 0)
            if made and _following(made[0]) is not None:
                logger.warning("stopped before it was ready")
                await asyncio.to_thread(made[0].close)
                with contextlib.suppress(Unavailable):
                    await starting
                return
            if stop is None:
                leave_at_once()
            engine = await starting
            await asyncio.to_thread(engine.close)
            return
        engine = await starting
        try:
            model = await asyncio.to_thread(describe or cast("Callable[[E], ServedModel]", served_model), engine)
            gateway.open(engine, model.called(config.served_names))
            for front in fronts:
                await front.set_ready(True)
            follower = _following(engine)
            if follower is not None:
                follower.on_ready_changed = following = _Readiness(fronts)
                following(follower.ready)  # it may have changed meanwhile
            if on_ready is not None:
                on_ready(ports)
            await interrupted
            if following is not None:
                await following.stop()
            await _drain(gateway, fronts, engine, config.shutdown_timeout_s)
        finally:
            await asyncio.to_thread(engine.close)
    finally:
        interrupted.cancel()
        await _stop_all(fronts, 0)
        await asyncio.to_thread(seeing.close)


def _bound(gateway: Gateway, config: ServerConfig, seeing: Seeing) -> tuple[list[Front], Ports]:
    """The fronts that are asked for, with their ports taken. Raises JaxpdError."""
    fronts: list[Front] = []
    ports: dict[str, int | None] = {"http": None, "grpc": None}
    if config.port is not None:
        from serving.http.front import HttpFront
        from serving.http.options import HttpOptions

        options = HttpOptions(profile_dir=config.profile_dir, page=config.page)
        http = HttpFront(
            gateway, keys=config.keys, tls=config.tls, metrics_render=seeing.metrics.render, options=options
        )
        ports["http"] = http.bind(config.host, config.port)
        fronts.append(http)
    if config.grpc_port is not None:
        grpc = GrpcFront(gateway, keys=config.keys, tls=config.tls)
        ports["grpc"] = grpc.bind(config.host, config.grpc_port)
        fronts.append(grpc)
    return fronts, Ports(**ports)


async def _drain(gateway: Gateway, fronts: Sequence[Front], engine: Served, timeout_s: float) -> None:
    """Lets running answers finish, aborts what is left after `timeout_s`, and closes the ports."""
    end_s = time.monotonic() + timeout_s
    for front in fronts:
        await front.set_ready(False)
    gateway.close_doors()
    drained = await asyncio.to_thread(engine.drain, timeout_s)
    if not drained:
        logger.warning("still running after %.0f s (--shutdown-timeout); aborting the rest", timeout_s)
        gateway.abort_all()
    await gateway.idle(max(end_s - time.monotonic(), LAST_MESSAGES_S))
    await _stop_all(fronts, LAST_MESSAGES_S)


async def _stop_all(fronts: Sequence[Front], grace_s: float) -> None:
    await asyncio.gather(*(front.stop(grace_s) for front in fronts))


def _following(engine: object) -> Following | None:
    return engine if isinstance(engine, Following) else None


class _Readiness:
    """Tells the fronts when the engine's workers leave and come back, one word after the other."""

    def __init__(self, fronts: Sequence[Front]) -> None:
        self._fronts = fronts
        self._telling: asyncio.Task[None] | None = None
        self._stopped = False

    def __call__(self, ready: bool) -> None:
        if not self._stopped:
            self._telling = asyncio.ensure_future(self._tell(ready, self._telling))

    async def _tell(self, ready: bool, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        for front in self._fronts:
            await front.set_ready(ready)

    async def stop(self) -> None:
        """Nothing is told any more."""
        self._stopped = True
        if self._telling is not None:
            await self._telling


def start_in_thread(make_engine: MakeEngine[E], on_events: OnEvents, made: list[E] | None = None) -> asyncio.Future[E]:
    """Makes and starts the engine in a daemon thread: a process that wants to end would wait for one of a pool.

    It is added to `made` before it is started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[E] = loop.create_future()

    def settle(engine: E | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            assert engine is not None
            future.set_result(engine)

    def start() -> None:
        try:
            engine = make_engine(on_events)
            if made is not None:
                made.append(engine)
            engine.start()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, engine, None)

    threading.Thread(target=start, name="jaxpd-start", daemon=True).start()
    return future


def stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; from then on both end the process at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)

    def first(number: int) -> None:
        logger.warning("got %s: draining; once more ends at once", signal.Signals(number).name)
        for each in signals:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        stop.set()

    for each in signals:
        loop.add_signal_handler(each, first, each)
    return stop


def leave_at_once() -> None:
    """Ends the process while the engine starts. A compile cannot be interrupted, nothing is running yet that could be
    lost, and tearing the interpreter down under a compiling thread crashes."""
    logger.warning("stopped before it was ready")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
