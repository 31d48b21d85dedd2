"""One process that somebody owns: started, read until it is ready, ended.

    Owned(command) --ready line on stdout--> ready --stop(): SIGTERM ... SIGKILL--> exited

What it writes goes on to the owner's log, line by line; the last lines are kept for the message about its end.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from serving.launch.reconcile import Seen, ending

LAST_LINES = 12
_CONTROL = re.compile(r"\bcontrol on (\S+?)[,;.]?(?:\s|$)")
_HTTP = re.compile(r"\bHTTP on (https?://\S+?)[,;.]?(?:\s|$)")
_GRPC = re.compile(r"\bgRPC on (\S+?)[,;.]?(?:\s|$)")


class Owned:
    """A process of this one, in a session of its own: Ctrl-C in a terminal reaches the owner alone, which then stops
    it in order. Thread-safe."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: TextIO,
        where: str,
        control: str | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._seen = Seen(running=True, where=where, control=control)
        self._last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._log = log
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.PIPE,  # the tether: never written to, closed when this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._seen = dataclasses.replace(self._seen, pid=self._process.pid)
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, True), name="stdout", daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, False), name="stderr", daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._waiter = threading.Thread(target=self._wait, name="waiter", daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def look(self) -> Seen:
        """What there is to see now."""
        with self._lock:
            return self._seen

    def stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after `grace_s` seconds. Does not wait."""
        self._signal(signal.SIGTERM)
        killer = threading.Timer(grace_s, self.kill)
        killer.daemon = True
        killer.start()

    def kill(self) -> None:
        """SIGKILL, for its children as well."""
        self._signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s` seconds."""
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def _signal(self, number: signal.Signals) -> None:
        # Popen knows under its own lock whether it was waited for: a pid that is somebody else's by now is not hit.
        if self._process.poll() is None:
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _read(self, pipe: IO[str], stdout: bool) -> None:
        with pipe:
            for line in pipe:
                with self._lock:
                    self._last.append(line.rstrip())
                    if stdout:
                        self._seen = _after(self._seen, line)
                self._log.write(line)
                self._log.flush()

    def _wait(self) -> None:
        code = self._process.wait()
        for reader in self._readers:
            reader.join(5)  # a grandchild may hold the pipe open
        assert self._process.stdin is not None
        self._process.stdin.close()
        with self._lock:
            seen = dataclasses.replace(self._seen, running=False, ready=False, exited=True, exit_code=code)
            words = [ending(seen), *(line for line in self._last if line.strip())]
            self._seen = dataclasses.replace(seen, trouble="\n".join(words))


def _after(seen: Seen, line: str) -> Seen:
    """What a line of its standard output tells; the line with `control on` is the one that says it is ready."""
    control, http, grpc = (pattern.search(line) for pattern in (_CONTROL, _HTTP, _GRPC))
    return dataclasses.replace(
        seen,
        ready=seen.ready or control is not None,
        control=control[1] if control else seen.control,
        http=http[1] if http else seen.http,
        grpc=grpc[1] if grpc else seen.grpc,
    )
