"""One run: every call goes out when it is due, on one event loop and one task a call.

    jobs -> (due? room?) -> task: Backend.send -> Record -> on_record

What the client itself adds is measured too: how late its loop is (a task that sleeps and looks at the clock), and how
late calls left. A stop ends the calls that are under way; they are counted as cut off, neither as answers nor as
failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

from serving.bench.records import Backend, Call, Record, record

LAG_EVERY_S = 0.01


@dataclasses.dataclass(frozen=True)
class Job:
    """A call, and what the backend made of it."""

    call: Call
    prepared: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What a run brought. `records` stand in the order in which they ended; times in seconds."""

    records: tuple[Record, ...]
    cut_off: int  # calls that a stop ended
    stopped: bool
    lag_s: tuple[float, ...]  # how late the client's loop was, each 10 ms
    wall_start: float  # time.time() at the start of the run


async def run(
    jobs: Iterable[Job],
    backend: Backend,
    *,
    concurrency: int | None = None,
    duration_s: float | None = None,
    stop: asyncio.Event | None = None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Trial:
    """Sends `jobs`, at most `concurrency` at a time, for at most `duration_s`, until all have ended or `stop` is set.

    `on_record` is called on the loop with each answer or failure.
    """
    stop = stop or asyncio.Event()
    records: list[Record] = []
    running: set[asyncio.Task[None]] = set()
    slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
    lag: list[float] = []
    cut_off = 0
    bugs: list[BaseException] = []

    async def one(job: Job) -> None:
        try:
            reply = await backend.send(job.prepared)
        finally:
            if slots is not None:
                slots.release()
        records.append(record(job.call, reply, start_s))
        on_record(records[-1])

    def ended(task: asyncio.Task[None]) -> None:
        nonlocal cut_off
        running.discard(task)
        if task.cancelled():
            cut_off += 1
        elif (bug := task.exception()) is not None:
            bugs.append(bug)
            sending.cancel()

    async def send_all() -> None:
        for job in jobs:
            if job.call.due_s is not None:
                await asyncio.sleep(max(0.0, start_s + job.call.due_s - time.perf_counter()))
            if slots is not None:
                await slots.acquire()
            if duration_s is not None and job.call.due_s is None and time.perf_counter() - start_s >= duration_s:
                break
            task = asyncio.create_task(one(job))
            running.add(task)
            task.add_done_callback(ended)
            if job.call.due_s is None:
                await asyncio.sleep(0)  # it shall leave before the next one is made
        if running:
            await asyncio.wait(running)

    # A full collection with many prompts in memory takes tenths of a second.
    gc.collect()
    gc.freeze()
    watch = asyncio.create_task(_watch_lag(lag))
    wall_start, start_s = time.time(), time.perf_counter()
    sending, stopping = asyncio.create_task(send_all()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending = [sending, stopping, watch, *running]
        for task in ending:
            task.cancel()
        outcomes = await asyncio.gather(*ending, return_exceptions=True)
        gc.unfreeze()
    for outcome in (*bugs, *outcomes):
        if isinstance(outcome, Exception):
            raise outcome
    return Trial(
        records=tuple(records), cut_off=cut_off, stopped=stop.is_set(), lag_s=tuple(lag), wall_start=wall_start
    )


async def _watch_lag(lag: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_EVERY_S)
        lag.append(max(0.0, time.perf_counter() - before - LAG_EVERY_S))


def raise_file_limit() -> None:
    """As many open files, and so connections, as the system allows this process."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not everywhere, and not always allowed
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
