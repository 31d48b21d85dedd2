"""A process that is owned: when it is ready, how it ends, and that it never outlives its owner."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from serving.launch.process import Owned
from serving.launch.reconcile import Seen

ROOT = pathlib.Path(__file__).parent.parent.parent
PATIENCE_S = 30.0


@contextlib.contextmanager
def owned(code: str, *, log: io.StringIO | None = None, control: str | None = None) -> Iterator[Owned]:
    process = Owned(
        [sys.executable, "-u", "-c", code],
        environment=dict(os.environ),
        log=log or io.StringIO(),
        where="here",
        control=control,
    )
    try:
        yield process
    finally:
        process.kill()
        assert process.wait(PATIENCE_S)


def until(process: Owned, true: Callable[[Seen], bool]) -> Seen:
    end_s = time.monotonic() + PATIENCE_S
    while not true(seen := process.look()):
        assert time.monotonic() < end_s, seen
        time.sleep(0.01)
    return seen


def test_a_worker_is_ready_with_its_line_and_its_port() -> None:
    code = (
        "import time; print('loading'); time.sleep(0.2)\n"
        "print('jaxpd 0.1.0 DECODE worker serves m on 1x2; control on 10.0.0.6:7100')\ntime.sleep(60)"
    )
    with owned(code) as process:
        assert not process.look().ready and process.look().running and process.look().pid == process.pid
        assert until(process, lambda s: s.ready).control == "10.0.0.6:7100"


def test_a_router_tells_its_doors_and_is_known_before_it_is_ready() -> None:
    code = (
        "import time; time.sleep(0.2)\n"
        "print('HTTP on http://127.0.0.1:8001, gRPC on 127.0.0.1:50052, ready in 1 s. Ctrl-C stops it.')\n"
        "print('control on 127.0.0.1:7000')\ntime.sleep(60)"
    )
    with owned(code, control="127.0.0.1:7000") as process:
        assert process.look().control == "127.0.0.1:7000" and not process.look().ready
        seen = until(process, lambda s: s.ready)
        assert (seen.http, seen.grpc) == ("http://127.0.0.1:8001", "127.0.0.1:50052")


def test_its_end_comes_with_its_code_and_its_last_words() -> None:
    log = io.StringIO()
    with owned("import sys; print('out'); print('jaxpd: no such model', file=sys.stderr); sys.exit(2)", log=log) as p:
        seen = until(p, lambda s: s.exited)
    assert seen.exit_code == 2 and not seen.running
    assert seen.trouble.startswith("exit code 2") and "no such model" in seen.trouble
    assert sorted(log.getvalue().splitlines()) == ["jaxpd: no such model", "out"]


def test_stop_asks_first_and_does_not_wait_for_ever() -> None:
    asked = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('control on h:1')\ntime.sleep(60)"
    )
    with owned(asked) as process:
        until(process, lambda s: s.ready)
        process.stop(60)
        assert until(process, lambda s: s.exited).exit_code == 0
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('control on h:1')\ntime.sleep(60)"
    with owned(deaf) as process:
        until(process, lambda s: s.ready)
        process.stop(0.3)
        assert until(process, lambda s: s.exited).exit_code == -signal.SIGKILL


@pytest.mark.parametrize("stuck", [False, True], ids=["waits", "computes"])
def test_it_ends_when_its_owner_is_killed(tmp_path: pathlib.Path, stuck: bool) -> None:
    work = "while True: pass" if stuck else "import time; time.sleep(600)"
    (tmp_path / "standing.py").write_text(f"print('control on h:1', flush=True)\n{work}\n")
    owner_code = (
        "import os, sys, time\nfrom serving.launch.process import Owned\n"
        "p = Owned([sys.executable, '-m', 'serving.launch.tether', 'standing'], environment=dict(os.environ), "
        "log=sys.stderr, where='')\n"
        "while not p.look().ready: time.sleep(0.01)\nprint(p.pid, flush=True)\ntime.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    owner = subprocess.Popen(
        [sys.executable, "-c", owner_code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.kill()
        end_s = time.monotonic() + PATIENCE_S
        while alive(pid):
            assert time.monotonic() < end_s, f"process {pid} outlived its owner"
            time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
