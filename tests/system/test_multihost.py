"""A prefill worker that is two processes under jax.distributed, in a cluster: its tokens, and a lost follower."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from jaxpd.multihost import EXIT_BROKEN

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((MODEL / "expected.json").read_text())["prompts"]}
SMALL = "--no-precompile --max-model-len 160 --max-num-batched-tokens 32 --max-num-seqs 4".split()
pytestmark = pytest.mark.heavy


class Cluster:
    """Processes by name, and the router's URL."""

    def __init__(self, logs: pathlib.Path) -> None:
        self.logs = logs
        self.processes: dict[str, subprocess.Popen] = {}
        self.control, self.decode, self.coordinator, self.router, http = free_ports(5)
        self.url = f"http://127.0.0.1:{http}"
        model = [str(MODEL), *SMALL]
        for i in (0, 1):
            self.start(f"prefill{i}", "worker", "prefill", *model, *self._several(i))
        self.start("decode", "worker", "decode", *model, "--mesh", "1x2", "--listen", address(self.decode))
        self.start("router", "router", "--listen", address(self.router), "--port", str(http), "--grpc-port", "0",
                   "--prefill", address(self.control), "--decode", address(self.decode))  # fmt: skip

    def _several(self, i: int) -> list[str]:
        flags = ["--mesh", "2x1", "--listen", address(self.control), "--coordinator", address(self.coordinator)]
        return [*flags, "--num-processes", "2", "--process-id", str(i)]

    def start(self, name: str, *command: str) -> None:
        if (before := self.processes.get(name)) is not None:
            before.wait(timeout=10.0)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        with (self.logs / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "jaxpd", *command], stdout=log, stderr=log, env=environment, cwd=ROOT
            )

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def complete(self, prompt: list[int], **body: Any) -> httpx.Response:
        asked = {"prompt": prompt, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **body}
        return httpx.post(f"{self.url}/v1/completions", json=asked, timeout=60.0)

    def close(self) -> None:
        """Ends the workers as their launchers do, all at once."""
        try:
            for process in self.processes.values():
                process.send_signal(signal.SIGTERM)
            for process in self.processes.values():
                process.wait(timeout=30.0)
        finally:
            for process in self.processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def said(self) -> str:
        return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.logs.iterdir()))


def address(port: int) -> str:
    return f"127.0.0.1:{port}"


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def until(condition: Callable[[], bool], timeout_s: float, said: Callable[[], str]) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.timeout(400)
def test_two_processes_prefill_and_the_loss_of_one_takes_them_out_of_rotation(cluster: Cluster) -> None:
    until(cluster.ready, 200.0, cluster.said)
    for name in ("len5", "len40", "len100"):
        answer = cluster.complete(PROMPTS[name]["prompt_ids"], max_tokens=24)
        assert answer.status_code == 200, answer.text + cluster.said()
        assert answer.json()["choices"][0]["token_ids"] == PROMPTS[name]["greedy_ids"], name
    began = time.monotonic()
    cluster.processes["prefill1"].kill()
    until(lambda: not cluster.ready(), 10.0, cluster.said)
    assert cluster.processes["prefill0"].wait(timeout=10.0) == EXIT_BROKEN, cluster.said()
    assert time.monotonic() - began < 10.0
    assert "process 1 is lost" in (cluster.logs / "prefill0.log").read_text()
    refused = cluster.complete([1, 2, 3], max_tokens=4)
    assert refused.status_code == 503, refused.text
    for i in (0, 1):  # as a launcher does
        cluster.start(f"prefill{i}", "worker", "prefill", str(MODEL), *SMALL, *cluster._several(i))
    until(cluster.ready, 100.0, cluster.said)
    answer = cluster.complete(PROMPTS["len40"]["prompt_ids"], max_tokens=24)
    assert answer.json()["choices"][0]["token_ids"] == PROMPTS["len40"]["greedy_ids"]
    cluster.close()
    assert [cluster.processes[f"prefill{i}"].returncode for i in (0, 1)] == [0, 0], cluster.said()
