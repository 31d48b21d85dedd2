"""The commands of the platform `cpu`, run on this machine, answer the probes that stand beside them in the manifests.

Each pod is a process with a loopback address of its own, so every port is the manifest's.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.manifests import ROOT, Pod, documents_of, pods_of

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8"),
]

TINY = ROOT / "tests" / "data" / "tiny" / "llama3"
START_S, LEAVE_S = 180.0, 60.0
SMALL = ("--no-precompile", "--max-model-len=256")  # of workers: nothing is compiled that is not needed here


class Process:
    """A pod's command with what a cluster would give it: addresses, a secret, a model, a cache."""

    def __init__(self, pod: Pod, addresses: dict[str, str], folder: pathlib.Path) -> None:
        self.pod, self.address = pod, addresses[pod.component]
        here = {
            "10.0.0.5": self.address,
            "0.0.0.0": self.address,
            "jaxpd-router-0.jaxpd-router.jaxpd.svc": addresses["router"],
            "/etc/jaxpd/cluster/secret": str(folder / "secret"),
            "/cache/xla": str(folder / "xla"),
            "smollm2-135m": str(TINY),
        }
        words = [word for word in pod.command if "jaxpd-router-1" not in word]
        for name, value in here.items():
            words = [word.replace(name, value) for word in words]
        words += SMALL if pod.component != "router" else ()
        self.log = folder / f"{pod.component}.log"
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "jaxpd", *words],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def probe(self, name: str) -> bool:
        """What the kubelet would hear."""
        probe = self.pod.container[name]
        if "grpc" in probe:
            return self._grpc(**probe["grpc"])
        ports = {entry["name"]: entry["containerPort"] for entry in self.pod.container["ports"]}
        port = probe["httpGet"]["port"]
        return self.get(ports.get(port, port), probe["httpGet"]["path"]) is not None

    def get(self, port: int, path: str) -> bytes | None:
        """The body of an answer 200; None for another one, or none."""
        try:
            with urllib.request.urlopen(f"http://{self.address}:{port}{path}", timeout=5) as answer:
                return answer.read()
        except OSError:
            return None

    def _grpc(self, port: int, service: str = "") -> bool:
        with grpc.insecure_channel(f"{self.address}:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            except grpc.RpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def until(self, wanted: Callable[[], bool], limit_s: float = START_S) -> None:
        """Waits; fails with the log when the process ends or the time is over."""
        end_s = time.monotonic() + limit_s
        while not wanted():
            assert self.popen.poll() is None, self.log.read_text(encoding="utf-8")
            assert time.monotonic() < end_s, self.log.read_text(encoding="utf-8")
            time.sleep(0.2)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    folder = tmp_path_factory.mktemp("pods")
    (folder / "secret").write_text("0123456789abcdef0123456789abcdef\n", encoding="utf-8")
    net = f"127.{random.randint(2, 254)}.{random.randint(0, 254)}"
    addresses = {role: f"{net}.{last}" for last, role in enumerate(("router", "prefill", "decode"), 1)}
    started: dict[str, Process] = {}
    try:
        for pod in pods_of(documents_of("cpu")):
            if pod.component:
                started[pod.component] = Process(pod, addresses, folder)
        yield started
    finally:
        for process in started.values():
            process.popen.kill()
            process.popen.wait()


def complete(process: Process) -> Any:
    body = json.dumps({"prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "temperature": 0}).encode()
    port = process.pod.flag("--port")
    request = urllib.request.Request(
        f"http://{process.address}:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.mark.timeout(600)
def test_from_the_start_to_an_answer_to_the_end(processes: dict[str, Process]) -> None:
    router, decode = processes["router"], processes["decode"]
    router.until(lambda: router.probe("startupProbe"))
    for name in ("prefill", "decode"):
        process = processes[name]
        process.until(lambda process=process: process.probe("startupProbe"))  # type: ignore[misc]
    for process in processes.values():
        process.until(lambda process=process: process.probe("readinessProbe"))  # type: ignore[misc]
        assert process.probe("livenessProbe")
        annotations = process.pod.template["metadata"]["annotations"]
        metrics = process.get(int(annotations["prometheus.io/port"]), annotations["prometheus.io/path"])
        assert metrics is not None and b"jaxpd:build_info" in metrics

    assert complete(router)["usage"]["completion_tokens"] == 4

    # SIGTERM, as Kubernetes sends it: the worker leaves by itself, and a router without it lives and is not ready.
    decode.popen.send_signal(signal.SIGTERM)
    assert decode.popen.wait(LEAVE_S) == 0
    router.until(lambda: not router.probe("readinessProbe"), LEAVE_S)
    assert router.probe("livenessProbe")
    router.popen.send_signal(signal.SIGTERM)
    assert router.popen.wait(LEAVE_S) == 0
