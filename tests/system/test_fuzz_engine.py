"""The fuzzers of both fronts against a real engine: what it answers, and that no page, slot or staged byte is kept.

The requests are those of tests/serving/test_grpc_fuzz.py and tests/serving/http/test_http_fuzz.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import pathlib
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest

from serving.background import BackgroundServer
from serving.config import ServerConfig

TESTS = pathlib.Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    """A test module by its path, for what it makes up."""
    name = f"fuzz_{pathlib.Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, TESTS / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(tiny_folders: dict[str, pathlib.Path]) -> Iterator[BackgroundServer]:
    config = ServerConfig(port=0, grpc_port=0, served_names=("bytes",))
    limits: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_queued_requests": 200,
    }
    folder = str(tiny_folders["smollm2"])
    with BackgroundServer(folder, server_config=config, precompile=False, **limits) as running:
        with httpx.Client(base_url=running.url, timeout=120) as client:  # compiles what most requests need
            client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 8, "n": 4})
        yield running


@pytest.mark.fuzz
@pytest.mark.parametrize("front", ["grpc", "http"])
def test_a_real_engine_keeps_nothing(front: str, server: BackgroundServer, caplog: pytest.LogCaptureFixture) -> None:
    baseline = server.stats()

    async def by_grpc() -> int:
        ends = await load("serving/test_grpc_fuzz.py").storm(server.grpc_address, 500, 5_000_000)
        return ends.total()

    async def by_http() -> int:
        module = load("serving/http/test_http_fuzz.py")
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            description = (await client.get("/openapi.json")).json()
            ends = await module.storm(client, module.names_of(description), 500, 5_000_000)
        return int(ends.total())

    with caplog.at_level(logging.WARNING):
        total = asyncio.run(by_grpc() if front == "grpc" else by_http())
    assert total > 450
    bad = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not bad, bad[:3]
    deadline = time.monotonic() + 20
    while server.stats() != baseline and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.stats() == baseline
