"""A server process from outside: Prometheus asks it, a collector gets its traces, and a machine reads its log."""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.heavy  # a server process

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "tiny" / "smollm2"
SMALL = ("--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "32")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a server that takes traces, and what it got."""
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            del args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def ask(url: str, *, body: dict[str, object] | None = None, **headers: str) -> tuple[str, str]:
    """The body of an answer and its content type."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode(), answer.headers["content-type"]


def test_metrics_traces_and_a_log_of_json(tmp_path: pathlib.Path, collector: tuple[str, list[bytes]]) -> None:
    endpoint, traces = collector
    command = [
        *(sys.executable, "-m", "jaxpd", "serve", str(MODEL), "--port", "0", "--grpc-port", "0"),
        *("--log-format", "json", "--otlp-traces-endpoint", endpoint, "--compile-cache", str(tmp_path / "xla"), *SMALL),
    ]
    log = tmp_path / "log"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = next(
                filter(None, (re.search(r"HTTP on (http://\S+?)[,\s]", line) for line in process.stdout)), None
            )
            assert found is not None, log.read_text()
            url = found[1]
            body: dict[str, object] = {
                "model": "smollm2",
                "prompt": "secret words",
                "max_tokens": 5,
                "ignore_eos": True,
            }
            ids = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{PARENT}-01", "authorization": "Bearer sk-12345"}
            ask(f"{url}/v1/completions", body=body, **ids)
            text, kind = ask(f"{url}/metrics", accept="text/plain;version=0.0.4")
            assert kind.startswith("text/plain; version=0.0.4")
            for line in (
                'jaxpd:xla_compiles_total{model_name="smollm2",phase="serving"} 0.0',
                'vllm:time_to_first_token_seconds_count{model_name="smollm2"} 1.0',
                'vllm:generation_tokens_total{model_name="smollm2"} 5.0',
                'jaxpd:requests_total{front="http",model_name="smollm2",operation="completion"} 1.0',
            ):
                assert line in text.splitlines(), line
            text, kind = ask(f"{url}/metrics", accept="application/openmetrics-text;version=1.0.0")
            assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")
            assert 'vllm:generation_tokens_total{model_name="smollm2"} 5.0' in text.splitlines()
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(f"{url}/v1/completions", body={**body, "max_tokens": 5000})
            text, _ = ask(f"{url}/metrics")
            line = 'jaxpd:admission_rejections_total{model_name="smollm2",reason="invalid_argument"} 1.0'
            assert line in text.splitlines()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
    deadline = time.monotonic() + 5
    while not traces and time.monotonic() < deadline:
        time.sleep(0.01)
    sent = b"".join(traces)
    assert bytes.fromhex(TRACE) in sent and bytes.fromhex(PARENT) in sent and b"mine" in sent and b"transfer" in sent
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert any("compiling" in line["message"] for line in lines), "progress is in the log, too"
    (finished,) = [line for line in lines if line.get("request_id") == "mine"]
    assert finished["event"] == "finished" and finished["completion_tokens"] == 5 and finished["ttft_s"] > 0
    for secret in ("sk-12345", "secret words"):
        assert secret not in log.read_text() and secret.encode() not in sent
