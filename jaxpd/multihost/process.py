"""The two kinds of process of a worker of several, from the flags to the end: what a command line calls.

    check_flags ---> leads: lead(...) makes the engine, and everything else is as in a worker of one process
                \\-> else:  run_follower(...), and nothing else

Where something is lost the leader's process ends itself, whatever its threads do: first all requests are answered.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from jaxpd.checkpoints.source import Checkpoint
from jaxpd.config import EngineConfig
from jaxpd.errors import JaxpdError
from jaxpd.multihost import EXIT_BROKEN
from jaxpd.multihost.follower import follow
from jaxpd.multihost.joining import Processes, check, join, meet_followers, meet_leader, processes_of
from jaxpd.multihost.leader import Followers
from jaxpd.progress import Progress

if TYPE_CHECKING:
    from jaxpd.engine import Engine

LAST_ANSWERS_S = 1.0  # for the answers to leave the process


def check_flags(
    coordinator: str | None, num_processes: int | None, process_id: int | None, config: EngineConfig
) -> Processes | None:
    """From the flags of that name; None: the worker is one process. Raises InvalidArgument naming the flag."""
    processes = processes_of(coordinator, num_processes, process_id)
    if processes is not None:
        check(processes, config.role or "mixed", config.mesh)
    return processes


def lead(processes: Processes, config: EngineConfig, make: Callable[[Followers], Engine]) -> Engine:
    """Waits for the followers, and makes the engine that leads them. Call it before anything else uses JAX.

    From then on the process ends with EXIT_BROKEN where a follower is lost. Raises Unavailable where not all come, and
    what `make` raises; then the followers have been told to end.
    """
    join(processes, check(processes, config.role or "mixed", config.mesh))
    engines: list[Engine] = []
    channels = meet_followers(processes)
    followers = Followers(
        channels, on_broken=lambda reason: _end_broken(engines, reason), silence_s=processes.silence_s
    )
    try:
        engines.append(make(followers))
    except BaseException:
        followers.close()
        raise
    return engines[0]


def run_follower(
    processes: Processes,
    config: EngineConfig,
    resolve: Callable[[], Checkpoint],
    *,
    progress: Progress,
    transfer_host: str,
    transfer_ports: range,
) -> None:
    """A follower, from joining to the leader's goodbye. Call it from the main thread, before anything else uses JAX.

    `transfer_host` and `transfer_ports`: see `offers.FollowerOffers`. Where it cannot join, the process ends at once.
    """
    try:
        join(processes, check(processes, config.role or "mixed", config.mesh))
        channel = meet_leader(processes)
    except JaxpdError as error:  # leaving as one does would wait for the processes that do not come
        _leave(error.message, error.exit_code)
    follow(
        channel,
        resolve,
        config,
        progress=progress,
        transfer_host=transfer_host,
        transfer_ports=transfer_ports,
    )


def _end_broken(engines: list[Engine], reason: str) -> None:
    """Answers everybody, and ends the process."""
    for engine in engines:
        answering = threading.Thread(target=engine.give_up, args=(reason,), daemon=True)
        answering.start()  # in a thread: whatever holds it up, the process ends
        answering.join(LAST_ANSWERS_S)
    time.sleep(LAST_ANSWERS_S)
    _leave(f"{reason}; this process ends, the whole worker has to be started again", EXIT_BROKEN)


def _leave(message: str, code: int) -> NoReturn:
    print(f"jaxpd: error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
