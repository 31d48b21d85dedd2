"""An engine's process, as the benchmark sees it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import time
from typing import IO, Any

WORKER = pathlib.Path(__file__).with_name("worker.py")


class Missing(Exception):
    """An engine that does not start; the text says why."""


class Worker:
    """One engine's process; see worker.py for what it is told. `path`, where given, is searched for modules first."""

    def __init__(
        self, name: str, python: str, module: str, options: dict[str, Any], logs: pathlib.Path, path: str | None = None
    ) -> None:
        self.name = name
        self.log = logs / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        command = [python, str(WORKER), module, json.dumps(options)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        if path is not None:
            environment["PYTHONPATH"] = os.pathsep.join([path, *filter(None, [environment.get("PYTHONPATH")])])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.about = self._read()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Has the worker do one thing."""
        print(json.dumps(command), file=self._pipe(self.process.stdin), flush=True)
        return self._read()

    def close(self) -> None:
        """Lets the process end."""
        self._pipe(self.process.stdin).close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self.process.stdout).readline()
        if not line:
            self.process.wait()
            said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise Missing(f"{self.name} ended with status {self.process.returncode}: {' | '.join(said[-3:])}")
        found: dict[str, Any] = json.loads(line)
        return found

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
