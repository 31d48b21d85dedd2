"""The soak: thousands of requests while clients leave and workers are killed, and every token is judged.

Each answer that was not left is whole and right, or an error that says that it may be sent again; at the end nothing is
in use. Progress is shown as it goes (`make soak`), and figures go to build/soak.json.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import secrets
import threading
import time
import types
from collections import Counter
from typing import Any

import pytest

from tests.cluster.asked import Asked
from tests.cluster.conftest import BUILD
from tests.cluster.harness import SMALL, Cluster
from tests.cluster.process import Worker
from tests.cluster.reference import answer_to, prompt_of
from tests.cluster.report import machine
from tests.cluster.stages import VERY_LONG_TOKENS, very_long_answer
from tests.jaxpd import random_requests

REQUESTS, AT_ONCE = 5000, 16
KILL_EVERY, LEAVE = 200, 0.1
PROMPTS = 24  # different greedy ones; each with and without a cache that knows it
BURST, BURST_S = 16, 0.2  # long answers that are sent just before a kill, which comes within so many seconds
RESTART_S = 1.0  # a worker is away for so long, and for its start


@dataclasses.dataclass
class Sent:
    """A request and what its answer must be."""

    asked: Asked
    prompt: list[int]
    options: dict[str, Any] | None  # None: greedy, of `prompt_of`
    began_s: float


class Soak:
    """Sends, judges and kills; everything but the restart of a worker in the test's own thread."""

    def __init__(self, cluster: Cluster, seed: int, kill_every: int = KILL_EVERY) -> None:
        self._kill_every = kill_every
        self._cluster = cluster
        self._random = random.Random(seed)
        self._restart: threading.Thread | None = None
        self._restart_error: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []

    def run(self, count: int) -> None:
        live: list[Sent] = []
        began_s = told_s = time.monotonic()
        for number in range(1, count + 1):
            while len(live) >= AT_ONCE:
                live = self._look(live)
            before_kill = -number % self._kill_every
            burst = before_kill < BURST
            if before_kill == BURST:
                self._restarted()  # now: those of the burst would be done when it is back
            live.append(self._send(number, long=burst))
            if before_kill == 0:
                time.sleep(self._random.random() * BURST_S)
                self.counts["running at a kill"] += sum(not sent.asked.ended for sent in live)
                self._kill_one()
            if time.monotonic() - told_s > 15:
                told_s = time.monotonic()
                rate = number / (told_s - began_s)
                print(f"{number} of {count}, {rate:.1f}/s: {dict(self.counts)}", flush=True)
        while live:
            live = self._look(live)
        self._restarted()

    def _send(self, number: int, *, long: bool) -> Sent:
        draw = self._random
        options: dict[str, Any] | None = None
        prompt: list[int]
        more: dict[str, Any]
        if long:
            prompt, tokens, more = list(very_long_answer()), VERY_LONG_TOKENS, {"seed": number}
        elif draw.random() < 0.5:
            prompt, options = random_requests.random_request(draw.randrange(1_000_000))
            tokens, more = options["max_tokens"], {k: v for k, v in options.items() if k != "max_tokens"}
        else:
            which = draw.randrange(PROMPTS)
            length, tokens = (24, 24) if which % 4 else (150, 12)
            prompt, more = list(prompt_of(which, length, tokens)), {"seed": number}
        more["cache_salt"] = draw.choice(("", "", secrets.token_hex(4)))
        leaves_at = draw.randrange(tokens) if draw.random() < LEAVE and not long else None
        began_s = time.monotonic()
        asked = self._cluster.ask(prompt, tokens, leaves_at=leaves_at, request_id=f"soak-{number}", **more)
        return Sent(asked, prompt, options, began_s)

    def _look(self, live: list[Sent]) -> list[Sent]:
        """Waits a moment, and judges those that have ended."""
        time.sleep(0.005)
        left = []
        for sent in live:
            asked = sent.asked
            if not asked.ended:
                assert time.monotonic() - sent.began_s < 60, f"no answer in 60 s: {asked.options}: {asked.told()}"
                left.append(sent)
            else:
                self._judge(sent)
        return left

    def _judge(self, sent: Sent) -> None:
        asked = sent.asked
        asked.wait()
        assert asked.ended_s is not None
        if asked.left:
            self.counts["left"] += 1
            return
        self.seconds.append(asked.ended_s - sent.began_s)
        if asked.error is not None:
            assert asked.error.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"), asked.told()
            self.counts[f"error {asked.error.code}"] += 1
            print(f"{asked.options.get('request_id')}: {asked.told()}", flush=True)
        elif sent.options is None:
            asked.assert_tokens(answer_to(asked.prompt, asked.max_tokens))
            self.counts["greedy"] += 1
        else:
            answer = types.SimpleNamespace(token_ids=asked.tokens, logprobs=asked.logprobs)
            random_requests.check(sent.prompt, sent.options, answer)
            self.counts["sampled"] += 1

    def _kill_one(self) -> None:
        """Any worker; it comes back by itself."""
        worker = self._random.choice(list(self._cluster.workers.values()))
        worker.kill()
        self.counts[f"killed {worker.role}"] += 1

        def restart(worker: Worker = worker) -> None:
            try:
                time.sleep(RESTART_S)
                self._cluster.restart(worker)
            except BaseException as error:
                self._restart_error = error

        self._restart = threading.Thread(target=restart, daemon=True)
        self._restart.start()

    def _restarted(self) -> None:
        if self._restart is not None:
            self._restart.join()
        assert self._restart_error is None, self._restart_error


def soak(folder: pathlib.Path, count: int, seed: int, kill_every: int = KILL_EVERY) -> dict[str, Any]:
    """Figures of a run. Raises AssertionError for any answer that is wrong, or anything that is left in use."""
    flags = (*SMALL, "--max-queued-requests", 64)
    answer_to(very_long_answer(), VERY_LONG_TOKENS)  # ten seconds of the oracle, before the clock runs
    with Cluster(folder, prefill=["2x1", "1x1"], decode=["1x1", "1x2"], flags=flags, join=True) as cluster:
        began_s = time.monotonic()
        soaked = Soak(cluster, seed, kill_every)
        soaked.run(count)
        took_s = time.monotonic() - began_s
        moved = cluster.router.log.read_text(encoding="utf-8").count("goes on elsewhere")
        baseline_s = cluster.baseline(30.0)
    seconds = sorted(soaked.seconds)
    return {
        "machine": machine(),
        "requests": count,
        "seconds": took_s,
        "baseline_s": baseline_s,
        "moved to another worker": moved,
        "counts": dict(soaked.counts),
        "answer_s": {"p50": seconds[len(seconds) // 2], "p99": seconds[len(seconds) * 99 // 100], "max": seconds[-1]},
    }


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_soak(tmp_path: pathlib.Path) -> None:
    figures = soak(tmp_path, REQUESTS, seed=6)
    print(json.dumps(figures, indent=1))
    BUILD.mkdir(exist_ok=True)
    (BUILD / "soak.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    assert figures["moved to another worker"] >= REQUESTS // KILL_EVERY, "the kills hit nobody"
    errors = sum(count for what, count in figures["counts"].items() if what.startswith("error"))
    assert errors == 0, "with two workers of each role, one that is killed costs nobody an answer"
