"""`python -m serving.launch.tether MODULE ARGUMENTS...`: `python -m MODULE ARGUMENTS...`, which ends with its owner.

Standard input is a pipe that only the owner holds. However the owner ends, SIGKILL included, the pipe closes, and this
process ends at once: a worker without an owner would keep its devices from the one that is started in its place.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Does not return before MODULE does."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with, args=(pipe,), name="tether", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with(pipe: int) -> None:
    while os.read(pipe, 64):
        pass  # nobody writes; a byte means nothing
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
