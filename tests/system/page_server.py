"""A server for the tests of the page: the real HTTP front round an engine that is slow enough to watch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import pathlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jaxpd.errors import Internal
from serving.callers import Keys
from serving.gateway import Gateway
from serving.http.front import HttpFront

SERVING_TESTS = pathlib.Path(__file__).parent.parent / "serving"
STEP_S = 0.03


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SERVING_TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass
class Site:
    """A server in a thread."""

    url: str
    gateway: Gateway
    engine: Any
    call: Any  # runs a function on the server's loop
    open: Any


@contextlib.contextmanager
def serving(*, keys: Keys | None = None, chat_template: bool = True, opened: bool = True) -> Iterator[Site]:
    scripted, staged = load("scripted_engine"), load("staged_engine")
    ready, loop = threading.Event(), asyncio.new_event_loop()
    site: dict[str, Any] = {}

    async def main() -> None:
        gateway = Gateway()
        engine = staged.staged_engine(scripted)(
            gateway.on_events, step_s=STEP_S, fail_with=Internal("the device fell over")
        )
        engine.start()
        tokenizer = scripted.byte_tokenizer()
        if not chat_template:
            tokenizer = type(tokenizer)(tokenizer.backend, special_tokens={"eos_token": "</s>"})
        model = dataclasses.replace(scripted.served_model(tokenizer, 1024), mode="disaggregated")
        if opened:
            gateway.open(engine, model)
        front = HttpFront(gateway, keys=keys)
        port, stop = front.bind("127.0.0.1", 0), asyncio.Event()
        await front.start()
        await front.set_ready(opened)
        site["it"] = Site(
            f"http://127.0.0.1:{port}/", gateway, engine, loop.call_soon_threadsafe, lambda: gateway.open(engine, model)
        )
        site["stop"] = stop.set
        ready.set()
        await stop.wait()
        gateway.close_doors()
        gateway.abort_all()
        await gateway.idle(5)
        await front.stop(1)
        engine.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield site["it"]
    finally:
        loop.call_soon_threadsafe(site["stop"])
        thread.join(20)
        loop.close()
