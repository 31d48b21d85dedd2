"""How much of the time to the second token is a hand-off that is not hidden? Part of benchmarks/handoff_remote.py.

A prefill worker on the first core, a decode worker on the second one, a router, and one request at a time, so that
nobody waits in a queue. For each length of prompt, over the requests:

    TTST              arrival to second token, at the router
    transfer          from the first pages on their way to the last ones in the decode worker's pages; most of it
                      happens while the rest of the prompt is computed
    exposed           the first token's arrival at the router to the moment from which the decode worker could decode;
                      below zero where that came first, and then it counts as zero
    exposed share     exposed / TTST of the same request

Router and workers count on their own clocks; a worker's moments come as durations since its leg began. So `exposed` is
wrong by what a message takes between them, which is well below a millisecond where the machine is not busy.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cluster import CONTROL, GRPC, Process
from jaxpd.request import Timings
from serving.client import Client
from serving.messages import GenerateRequest

ANSWER = 8  # tokens
WARM_UP = 1  # requests of each length before those that count


def measure_exposed(model: str, prompts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each length of prompt, in tokens. Raises SystemExit where a worker does not start."""
    cores = sorted(os.sched_getaffinity(0))
    longest = -(-(max(prompts) + ANSWER) // 16) * 16
    flags = ["--mesh", "1x1", "--listen", "127.0.0.1:0", "--no-prefix-cache", "--max-model-len", str(longest)]
    flags += ["--max-num-seqs", "2"]
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handoff-")))
        workers = {
            role: stack.enter_context(Process(f"{role} worker", ["worker", role, model, *flags], logs, cores=[core]))
            for role, core in (("prefill", cores[0]), ("decode", cores[-1]))
        }
        for worker in workers.values():
            worker.wait_ready()
        router = ["router", "--listen", "127.0.0.1:0", "--grpc-port", "0", "--no-http"]
        router += [word for role, worker in workers.items() for word in (f"--{role}", worker.control)]
        front = stack.enter_context(Process("router", router, logs, says=(CONTROL, GRPC)))
        front.wait_ready()
        client = stack.enter_context(Client(front.said[GRPC], timeout_s=1800.0))
        vocabulary = client.model_info().vocab_size
        rng = np.random.default_rng(20261130)
        rows = []
        for length in prompts:
            timings = []
            for number in range(WARM_UP + repeats):
                ids = tuple(rng.integers(3, vocabulary, length).tolist())
                asked = GenerateRequest(token_ids=ids, max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
                timings.append(client.generate(asked).finished.timings)
                print(f"prompt of {length} tokens, {number + 1}/{WARM_UP + repeats}", file=sys.stderr, flush=True)
            rows.append(exposed_row(length, timings[WARM_UP:]))
            print(rows[-1], flush=True)
        return rows


def exposed_row(length: int, timings: Sequence[Timings]) -> dict[str, Any]:
    """Medians over requests, times in milliseconds. Raises AssertionError for a request that was not handed over."""
    found = []
    for one in timings:
        known = (one.ttft_s, one.ttst_s, one.transfer_s, one.transfer_exposed_s)
        assert all(value is not None for value in known), f"it was not handed over, or had one token: {one}"
        found.append([value or 0.0 for value in known])
    ttft, ttst, transfer, exposed = zip(*found, strict=True)
    shares = [max(0.0, hidden_not) / whole for hidden_not, whole in zip(exposed, ttst, strict=True)]

    def ms(values: Sequence[float]) -> float:
        return round(1e3 * statistics.median(values), 2)

    return {
        "prompt": length,
        "requests": len(found),
        "ttft_ms": ms(ttft),
        "ttst_ms": ms(ttst),
        "transfer_ms": ms(transfer),
        "exposed_ms": ms(exposed),
        "exposed_share": round(statistics.median(shares), 4),
        "exposed_shares": [round(share, 4) for share in shares],
    }
