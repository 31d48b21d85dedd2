"""One server process: from the bound port to the last answer.

    bind -> live -> (engine starts in a thread) -> ready -> signal -> not ready -> drain -> stop -> close -> return

The port is bound before the model is loaded, so that a port in use costs no minute of loading and a probe gets an
answer all the while. The first SIGTERM or SIGINT drains. From then on both signals have their default effect: the
second one ends the process at once, whatever it is busy with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxpd.request import Event
from serving.gateway import Gateway
from serving.grpc_server import GrpcFront
from serving.model import served_model

if TYPE_CHECKING:
    from jaxpd.engine import Engine

logger = logging.getLogger(__name__)

OnEvents = Callable[[list[Event]], None]
MakeEngine = Callable[[OnEvents], "Engine"]

LAST_MESSAGES_S = 1.0  # for what is on its way when the drain is over


async def serve(
    make_engine: MakeEngine,
    *,
    host: str = "127.0.0.1",
    grpc_port: int = 50051,
    shutdown_timeout: float = 30.0,
    on_ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until a signal or until `stop` is set, then drains for at most `shutdown_timeout` seconds.

    `make_engine` is called in a thread with the function that takes the engine's events, and the engine is started
    there. `on_ready` is called with the port that was bound. With `stop` given no signal is touched (notebooks, tests,
    threads). Raises JaxpdError when the port cannot be had or the engine cannot start.
    """
    gateway = Gateway()
    front = GrpcFront(gateway)
    port = front.bind(host, grpc_port)
    await front.start()
    stopping = stop if stop is not None else _stop_on_signals()
    starting = _start_in_thread(make_engine, gateway.on_events)
    interrupted = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((starting, interrupted), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await front.stop(0)
            if stop is None:
                _leave_at_once()
            engine = await starting
            await asyncio.to_thread(engine.close)
            return
        engine = await starting
        try:
            gateway.open(engine, await asyncio.to_thread(served_model, engine))
            await front.set_ready(True)
            if on_ready is not None:
                on_ready(port)
            await interrupted
            await _drain(gateway, front, engine, shutdown_timeout)
        finally:
            await asyncio.to_thread(engine.close)
    finally:
        interrupted.cancel()
        await front.stop(0)


async def _drain(gateway: Gateway, front: GrpcFront, engine: Engine, timeout_s: float) -> None:
    """Lets running answers finish, aborts what is left after `timeout_s`, and closes the port."""
    end_s = time.monotonic() + timeout_s
    await front.set_ready(False)
    gateway.close_doors()
    drained = await asyncio.to_thread(engine.drain, timeout_s)
    if not drained:
        logger.warning("still running after %.0f s (--shutdown-timeout); aborting the rest", timeout_s)
        gateway.abort_all()
    await gateway.idle(max(end_s - time.monotonic(), LAST_MESSAGES_S))
    await front.stop(LAST_MESSAGES_S)


def _start_in_thread(make_engine: MakeEngine, on_events: OnEvents) -> asyncio.Future[Engine]:
    """Makes and starts the engine in a daemon thread: a process that wants to end would wait for one of a pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: BaseException | None) -> None:
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
            engine.start()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, engine, None)

    threading.Thread(target=start, name="jaxpd-start", daemon=True).start()
    return future


def _stop_on_signals() -> asyncio.Event:
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


def _leave_at_once() -> None:
    """Ends the process while the engine starts. A compile cannot be interrupted, nothing is running yet that could be
    lost, and tearing the interpreter down under a compiling thread crashes."""
    logger.warning("stopped before it was ready")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
