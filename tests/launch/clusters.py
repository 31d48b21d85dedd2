"""Real clusters for tests: the commands, what they say, and traffic that knows every right token."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from serving.launch.local import cluster_folder

ROOT = pathlib.Path(__file__).parent.parent.parent
MODEL = ROOT / "tests" / "data" / "tiny" / "smollm2"
PATIENCE_S = 240.0
MESHES = ("--prefill-mesh", "2x1", "--decode-mesh", "1x2")
SMALL = "--max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 32 --page-size 8 --kv-memory 8MiB"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "jaxpd", *map(str, args)]


def run(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*args), env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, f"{args}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def small(cache: pathlib.Path) -> tuple[str, ...]:
    """Flags of a small cluster on free ports; its programs are compiled once for all tests of a module."""
    return ("--port", "0", "--grpc-port", "0", "--worker-flags", f"{SMALL} --compile-cache {cache}", str(MODEL))


@dataclasses.dataclass(frozen=True)
class Running:
    """A cluster, by the flags that find it."""

    flags: tuple[str, ...]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("up", *self.flags, "--status", "--json").stdout)
        return found

    def scale(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("up", *self.flags, "--scale", text, "--json").stdout)
        return found

    def unit(self, name: str) -> dict[str, Any]:
        unit: dict[str, Any] = next(unit for unit in self.status()["units"] if unit["name"] == name)
        return unit

    def ready(self) -> set[str]:
        return {unit["name"] for unit in self.status()["units"] if unit["phase"] == "ready"}

    def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end_s = time.monotonic() + PATIENCE_S
        while not true(status := self.status()):
            assert time.monotonic() < end_s, status
            time.sleep(0.2)
        return status


@contextlib.contextmanager
def up_here(name: str, *args: object) -> Iterator[tuple[Running, subprocess.Popen[str]]]:
    """`jaxpd up` of this machine, until it serves; killed in the end, and its processes with it."""
    process = subprocess.Popen(
        command("up", "--name", name, *args),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,))
    reader.start()
    try:
        for line in process.stdout:
            if "jaxpd down" in line or " down --name" in line:
                break
        else:
            raise AssertionError(f"jaxpd up ended with {process.wait(PATIENCE_S)}:\n{''.join(errors)}")
        yield Running(("--name", name)), process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()
        shutil.rmtree(cluster_folder(name))


class Traffic:
    """Clients that ask one after the other, from entering to leaving. An answer must have the reference's tokens."""

    def __init__(self, url: str, clients: int = 2) -> None:
        expected = json.loads((MODEL / "expected.json").read_text())["prompts"]
        self._cases = [(p["prompt_ids"], p["greedy_ids"]) for p in expected if len(p["prompt_ids"]) <= 40]
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(clients)]
        self.right = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def more(self, number: int) -> None:
        """Until so many right answers have come from now on."""
        goal, end_s = self.right + number, time.monotonic() + PATIENCE_S
        while self.right < goal:
            assert time.monotonic() < end_s and not self.wrong, self.wrong[:3]
            time.sleep(0.02)

    def _client(self, index: int) -> None:
        while not self._stop.is_set():
            prompt, greedy = self._cases[index % len(self._cases)]
            index += 1
            try:
                tokens = ask(self._url, prompt, len(greedy))
            except urllib.error.HTTPError as error:
                self.wrong.append(f"{error.code} {error.read().decode()}")
            except OSError as error:
                self.wrong.append(repr(error))
            else:
                if tokens == greedy:
                    self.right += 1
                else:
                    self.wrong.append(f"{tokens} for {prompt}, not {greedy}")


def ask(url: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens over HTTP. Raises OSError."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        tokens: list[int] = json.load(reply)["choices"][0]["token_ids"]
    return tokens


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent_of(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
