"""One process of a cluster: started, read, killed, stopped, and asked by its hooks.

start -> wait_for (a line of stdout) -> kill | terminate -> start ...        stop <-> cont, in between
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.cluster.proxy import Proxy

ROOT = pathlib.Path(__file__).parent.parent.parent
START_S = 180.0  # until a process is ready, on a machine that does much else
TAIL = 40  # lines of a log that are shown


class Process:
    """One `jaxpd` process. Its stdout is read line by line, its stderr is a file."""

    def __init__(self, name: str, command: Sequence[object], folder: pathlib.Path) -> None:
        self.name = name
        self.command = [str(part) for part in command]
        self.log = folder / f"{name}.log"
        self.lines: list[str] = []
        self.on_line: Callable[[str], None] = lambda line: None
        self.process: subprocess.Popen[str] | None = None
        self._news = threading.Condition()
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Does not wait for anything."""
        assert not self.alive, f"{self.name} runs already"
        self.lines = []
        with self.log.open("a") as log:
            log.write(f"--- {' '.join(self.command)}\n")
            log.flush()
            process = self.process = subprocess.Popen(
                self.command,
                env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is ours alone
            )
        self._reader = threading.Thread(target=self._read, args=(process, self.lines), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with self._news:
                    lines.append(line.rstrip("\n"))
                    self._news.notify_all()
                self.on_line(line)
        with self._news:
            self._news.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first line of stdout that matches. Raises AssertionError when the process ends, or does not say it."""
        end_s = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = len(self.lines)
                assert self.alive, f"{self.name} ended with {self.process and self.process.poll()}:\n{self.tail()}"
                assert time.monotonic() < end_s, f"{self.name} has not said {pattern!r}:\n{self.tail()}"
                self._news.wait(0.2)

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        if self.alive:
            assert self.process is not None
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self._over(30.0)

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM: it drains and ends; its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self._over(timeout_s)

    def _over(self, timeout_s: float) -> int:
        """Waits for its end; nothing of it is left open."""
        if self.process is None:
            return 0
        status = self.process.wait(timeout_s)
        assert self._reader is not None and self.process.stdin is not None
        self._reader.join(timeout_s)
        with contextlib.suppress(BrokenPipeError):  # what it has not read
            self.process.stdin.close()
        return status

    def tail(self, lines: int = TAIL) -> str:
        """The end of its log."""
        said = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"[{self.name}] {line}" for line in said[-lines:])


class Worker(Process):
    """A worker. `address` is where it listens, `reached` where the router is told to reach it."""

    def __init__(
        self, name: str, role: str, mesh: str, address: str, command: Sequence[object], folder: pathlib.Path
    ) -> None:
        super().__init__(name, command, folder)
        self.role = role
        self.mesh = mesh
        self.address = address
        self.reached = address
        self.link: Proxy | None = None  # from the router
        self.peers: dict[str, Proxy] = {}  # of a prefill worker: to each decode worker, by name
        self.events: list[dict[str, Any]] = []  # of its hooks
        self._answers: queue.Queue[Any] = queue.Queue()
        self.on_line = self._hear
        self._said = threading.Condition()

    def ready(self, timeout_s: float = START_S) -> None:
        """Waits for the line that says that it serves."""
        self.wait_for(rf"{self.role} worker serves", timeout_s)

    def _hear(self, line: str) -> None:
        if not line.startswith("FAULT "):
            return
        told = json.loads(line.removeprefix("FAULT "))
        if "answer" in told:
            self._answers.put(told["answer"])
            return
        with self._said:
            self.events.append(told)
            self._said.notify_all()

    def do(self, command: str, **values: Any) -> Any:
        """Gives its hooks a command; returns when it is carried out, with what it answers."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **values}) + "\n")
        self.process.stdin.flush()
        try:
            return self._answers.get(timeout=20)
        except queue.Empty:
            raise AssertionError(f"{self.name} does not answer its hooks ({command}):\n{self.tail()}") from None

    def heard(self, since: int = 0, **values: Any) -> dict[str, Any] | None:
        """The first event from number `since` on that has all these values."""
        with self._said:
            events = self.events[since:]
        return next((event for event in events if values.items() <= event.items()), None)
