"""Fixtures of the network side: a scripted engine, and a server round it on a free port."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import pathlib
from collections.abc import AsyncIterator, Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from serving.callers import Keys
from serving.gateway import Gateway
from serving.grpc_server import GrpcFront
from serving.observer import Observer
from serving.tls import Tls

HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass
class Running:
    """A server that takes requests."""

    address: str
    gateway: Gateway
    front: GrpcFront
    engine: Any


@pytest.fixture(scope="session")
def scripted() -> ModuleType:
    """tests/serving/scripted_engine.py"""
    spec = importlib.util.spec_from_file_location("scripted_engine", HERE / "scripted_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["scripted_engine"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def opened(scripted: ModuleType) -> Callable[..., Any]:
    """`opened(**options)` -> (gateway, engine), on the running loop."""

    def open_(
        *,
        tokenizer: bool = True,
        max_model_len: int = 4096,
        observers: Iterable[Observer] = (),
        salt_by_caller: bool = False,
        **options: Any,
    ) -> tuple[Gateway, Any]:
        gateway = Gateway(observers=observers, salt_by_caller=salt_by_caller)
        engine = scripted.ScriptedEngine(gateway.on_events, **options)
        engine.start()
        model = scripted.served_model(scripted.byte_tokenizer() if tokenizer else None, max_model_len)
        gateway.open(engine, model)
        return gateway, engine

    return open_


@pytest.fixture
def served(opened: Callable[..., Any]) -> Callable[..., Any]:
    """`async with served(**options) as running:` a ready server on a free port."""

    @contextlib.asynccontextmanager
    async def serve(*, keys: Keys | None = None, tls: Tls | None = None, **options: Any) -> AsyncIterator[Running]:
        gateway, engine = opened(**options)
        front = GrpcFront(gateway, keys=keys, tls=tls)
        port = front.bind("127.0.0.1", 0)
        await front.start()
        await front.set_ready(True)
        try:
            yield Running(f"127.0.0.1:{port}", gateway, front, engine)
        finally:
            await front.stop(0)
            engine.close()

    return serve


@pytest.fixture(scope="session")
def scraped() -> Callable[[Any], dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """`scraped(metrics)` -> {(sample name, labels without model_name): value}, read as Prometheus would."""
    from prometheus_client.parser import text_string_to_metric_families

    def scrape(metrics: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = metrics.render()[0].decode()
        return {
            (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    return scrape
