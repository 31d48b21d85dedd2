"""A worker of several processes that a test started, and what it has said."""

from __future__ import annotations

import json
import pathlib
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from typing import Any

from jaxpd.remote.messages import Message, Side
from jaxpd.request import FinishReason, Leg, Request, SamplingParams

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = pathlib.Path(__file__).with_name("worker_process.py")


class Several:
    """The processes. `tokens`, `ends` and `broken` are what the leader has said so far."""

    def __init__(self, folder: pathlib.Path, *, logs: pathlib.Path, silence_s: float = 30.0, **config: Any) -> None:
        key = secrets.token_bytes(16)
        self._news = threading.Condition()
        self.tokens: dict[str, dict[int, int]] = {}
        self.ends: dict[str, tuple[FinishReason, str]] = {}
        self.broken: str | None = None
        self._said: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.receive: Callable[[Message], None] = lambda message: None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        listener = Listener(("127.0.0.1", 0), authkey=key)
        settings = {"port": listener.address[1], "key": key.hex(), "folder": str(folder), "config": config}
        self.logs = [logs / f"process{i}.log" for i in range(2)]
        self.processes = []
        for i, log in enumerate(self.logs):
            settings["processes"] = {
                "coordinator": coordinator,
                "num_processes": 2,
                "process_id": i,
                "silence_s": silence_s,
            }
            with log.open("w") as out:
                command = [sys.executable, str(SCRIPT), json.dumps(settings)]
                env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(pathlib.Path.home())}
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=env))
        self._connection: Connection = listener.accept()
        listener.close()
        threading.Thread(target=self._hear, daemon=True).start()
        assert self.hears("ready", timeout_s=120.0)

    @property
    def leader(self) -> subprocess.Popen:
        return self.processes[0]

    @property
    def follower(self) -> subprocess.Popen:
        return self.processes[1]

    def say(self, *words: Any) -> None:
        self._connection.send(words)

    def hears(self, what: str, timeout_s: float = 30.0) -> tuple[Any, ...]:
        """The next thing that is not an event; it must be `what`."""
        said = self._said.get(timeout=timeout_s)
        assert said[0] == what, said
        return said

    def submit(self, name: str, prompt: Any, leg: Leg | None = None, **params: Any) -> None:
        options = {"ignore_eos": True, "seed": 0, **params}
        request = Request(
            request_id=name, prompt_ids=tuple(prompt), params=SamplingParams(**options), arrival_s=time.monotonic()
        )
        self.say("submit", request, *([] if leg is None else [leg]))

    def end(self, name: str, timeout_s: float = 150.0) -> tuple[FinishReason, str]:
        with self._news:
            assert self._news.wait_for(lambda: name in self.ends, timeout_s), self.what_they_logged()
            return self.ends[name]

    def answer(self, name: str) -> list[int]:
        with self._news:
            return [token for _, token in sorted(self.tokens[name].items())]

    def wait_token(self, name: str, timeout_s: float = 60.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: name in self.tokens, timeout_s), self.what_they_logged()

    def connect(self, side: Side, peer: Any, *, lease_s: float = 30.0) -> None:
        """Messages go between the leader's side and `side`, which knows it as `peer`."""
        self.receive = lambda message: side.received(peer, message)
        side.connected(peer)
        self.say("connect", lease_s)

    def close(self) -> None:
        """Ends it as it should end, or, where it has not, by force."""
        try:
            if self.leader.poll() is None:
                self.say("close")
                self.hears("closed")
            for process in self.processes:
                process.wait(timeout=20.0)
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()

    def what_they_logged(self) -> str:
        return "\n".join(f"-- {log.name}\n{log.read_text()[-4000:]}" for log in self.logs)

    def _hear(self) -> None:
        while True:
            try:
                what, *values = self._connection.recv()
            except (EOFError, OSError):
                return
            with self._news:
                if what == "tokens":
                    (event,) = values
                    for i, token in enumerate(event.token_ids, event.first_index):
                        assert i not in self.tokens.setdefault(event.request_id, {})
                        self.tokens[event.request_id][i] = token
                elif what == "end":
                    self.ends[values[0]] = values[1], values[2]
                elif what == "broken":
                    (self.broken,) = values
                elif what == "message":
                    self.receive(values[0])
                else:
                    self._said.put((what, *values))
                self._news.notify_all()
