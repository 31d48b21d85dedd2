"""Workers and a router as processes of this machine, each on the cores that it is given; and `jaxpd bench serve` on it.

    with Process("decode worker", ["worker", "decode", MODEL, ...], logs, cores=(1,), nice=5) as worker:
        worker.control -> "127.0.0.1:41213"

Cores are given by `taskset`, which what a process starts inherits, its threads included: XLA on CPU makes as many as
the cores it is allowed (`spread` looks). Niceness by `nice`. What a process writes goes into a file of its own, and its
end is shown when it does not become ready.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONTROL, GRPC, HTTP = r"control on ([0-9.]+:\d+)", r"gRPC on ([0-9.]+:\d+)", r"HTTP on (?:http://)?([0-9.]+:\d+)"
READY_S = 1800.0  # a cold compile cache on one busy core
STOP_S = 60.0


def prefix(cores: Sequence[int] = (), nice: int = 0) -> list[str]:
    """What stands before a command that is to run on these cores (none: on all), so nice."""
    words = ["nice", "-n", str(nice)] if nice else []
    return [*words, "taskset", "-c", ",".join(map(str, cores))] if cores else words


class Process:
    """`python -m jaxpd ARGUMENTS`, ready when its banner has said where it is reached. Raises SystemExit when not."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        logs: pathlib.Path,
        *,
        cores: Sequence[int] = (),
        nice: int = 0,
        says: Sequence[str] = (CONTROL,),
    ) -> None:
        self.name = name
        self.command = [*prefix(cores, nice), sys.executable, "-m", "jaxpd", *arguments]
        self.log = logs / f"{name.replace(' ', '-')}.log"
        self.said: dict[str, str] = {}
        self._says = says
        self._ready = threading.Event()
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={"JAX_PLATFORMS": "cpu", **os.environ},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process; `nice` and `taskset` become what they start."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            for pattern in self._says:
                if found := re.search(pattern, line):
                    self.said[pattern] = found[1]
            if len(self.said) == len(self._says):
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        """Returns when it has said everything."""
        if not self._ready.wait(READY_S) or len(self.said) < len(self._says):
            self.stop()
            tail = self.log.read_text(encoding="utf-8").splitlines()[-20:]
            raise SystemExit("\n".join([*tail, f"{self.name} did not become ready: {' '.join(self.command)}"]))

    @property
    def control(self) -> str:
        """Where routers and workers reach it."""
        return self.said[CONTROL]

    def spread(self) -> dict[str, Any]:
        """Its threads, and the cores on which they may run: the same for all, or pinning did not work."""
        allowed: set[int] = set()
        threads = 0
        for task in pathlib.Path(f"/proc/{self.pid}/task").iterdir():
            allowed |= os.sched_getaffinity(int(task.name))
            threads += 1
        return {"threads": threads, "cores": sorted(allowed)}

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        return cpu_seconds(self.pid)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when it does not end by it."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()


class Bench:
    """One `jaxpd bench serve` over gRPC, which runs until `finish`, or to its end."""

    def __init__(
        self, name: str, server: str, flags: Sequence[str], logs: pathlib.Path, *, cores: Sequence[int] = ()
    ) -> None:
        self.output = logs / f"{name}.json"
        self.output.unlink(missing_ok=True)
        self._log = logs / f"{name}.log"
        jaxpd = [sys.executable, "-m", "jaxpd", "bench", "serve", "--backend", "grpc", "--server", server]
        self.command = [*prefix(cores), *jaxpd, "--ignore-eos", *flags, "--output", str(self.output)]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def wait_begun(self, patience_s: float) -> None:
        """Returns when it sends what counts: it has warmed up by then. Raises SystemExit when it never does."""
        end_s = time.monotonic() + patience_s
        while "sending" not in self._log.read_text(encoding="utf-8"):
            if self.ended or time.monotonic() > end_s:
                raise SystemExit(self._log.read_text(encoding="utf-8") + f"it sent nothing: {' '.join(self.command)}")
            time.sleep(0.1)

    @property
    def ended(self) -> bool:
        """Whether it has ended, whichever way."""
        return self._process.poll() is not None

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        return cpu_seconds(self._process.pid)

    def interrupt(self) -> None:
        """It ends with a report of what there was."""
        self._process.send_signal(signal.SIGINT)

    def result(self, patience_s: float) -> dict[str, Any]:
        """The JSON, when it has ended. Raises SystemExit where there is none."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise SystemExit(f"it did not end in {patience_s} s: {' '.join(self.command)}") from None
        if not self.output.exists():
            raise SystemExit(self._log.read_text(encoding="utf-8") + f"it left nothing: {' '.join(self.command)}")
        return dict(json.loads(self.output.read_text(encoding="utf-8")))


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used so far; 0 where there is no /proc."""
    stat = pathlib.Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
