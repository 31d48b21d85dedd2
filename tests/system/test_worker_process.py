"""Workers as processes of their own: they hand over, outlive each other, and leave when they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpd.errors import HandoffFailed
from jaxpd.request import DecodeLeg, FinishReason, PrefillLeg
from serving.cluster import Cluster
from tests.serving.worker.small_router import WorkerSession, hand_over

pytestmark = pytest.mark.clusters

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((MODEL / "expected.json").read_text())["prompts"]}
SMALL = ("--max-model-len", "160", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--no-precompile")
SECRET = "the secret of this test"
CLUSTER = Cluster(secret=SECRET)
LONG: dict[str, Any] = {"max_tokens": 110}


class Process:
    """`jaxpd worker`, ready."""

    def __init__(self, folder: pathlib.Path, role: str, mesh: str) -> None:
        secret = folder / "secret"
        secret.write_text(SECRET)
        command = [
            *(sys.executable, "-m", "jaxpd", "worker", role, str(MODEL), "--mesh", mesh, "--listen", "127.0.0.1:0"),
            *("--cluster-secret-file", str(secret), "--compile-cache", str(folder / "xla"), *SMALL),
        ]
        self.log = folder / f"{role}-{time.monotonic_ns()}.log"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.fullmatch(rf"jaxpd \S+ {role} worker serves smollm2 on {mesh}; control on (\S+)\n", self.line)
        assert found, (self.line, self.log.read_text())
        self.address = found[1]

    def session(self) -> WorkerSession:
        return WorkerSession(self.address, CLUSTER)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def leave(self) -> int:
        """Told to go, it goes; its exit code."""
        self.process.terminate()
        return self.process.wait(timeout=30)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def started(tmp_path: pathlib.Path) -> Iterator[Any]:
    processes: list[Process] = []

    def start(role: str, mesh: str) -> Process:
        processes.append(Process(tmp_path, role, mesh))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_processes_hand_over_and_outlive_each_other(started: Any) -> None:
    p, d = started("prefill", "2x1"), started("decode", "1x2")

    async def run() -> None:
        async with p.session() as prefill, d.session() as decode:
            for name in ("len5", "len40", "len100"):
                prompt = PROMPTS[name]
                count = len(prompt["greedy_ids"])
                tokens = await hand_over(prefill, decode, name, prompt["prompt_ids"], max_tokens=count)
                assert tokens == prompt["greedy_ids"]
            ids = PROMPTS["len5"]["prompt_ids"]
            # what D decodes has left P: it goes on without it
            await decode.start("alone", ids, DecodeLeg(handoffs=(7,)), **LONG)
            await prefill.start("alone", ids, PrefillLeg(peer=d.address, handoffs=(7,)), **LONG)
            await decode.until(lambda: decode.tokens("alone"))
            p.signal(signal.SIGKILL)
            end = await decode.end("alone")
            assert end.reason is FinishReason.LENGTH and len(decode.tokens("alone")) == 109
        again = started("prefill", "1x1")
        async with again.session() as prefill, d.session() as decode:
            assert len(await hand_over(prefill, decode, "next", ids, max_tokens=5)) == 5
            d.signal(signal.SIGKILL)
            await decode.until(lambda: decode.status)
            begun = time.monotonic()
            await prefill.start("late", ids, PrefillLeg(peer=d.address, handoffs=(8,)), max_tokens=5)
            error = (await prefill.end("late")).error
            assert isinstance(error, HandoffFailed) and d.address in error.message
            assert time.monotonic() - begun < 5
        assert again.leave() == 0

    asyncio.run(run())


def test_a_stopped_process_is_given_up_by_the_other_one(started: Any) -> None:
    p, d = started("prefill", "1x1"), started("decode", "1x1")

    async def run() -> None:
        async with p.session() as prefill, d.session() as decode:
            ids = PROMPTS["len40"]["prompt_ids"]
            await hand_over(prefill, decode, "first", ids, max_tokens=5)
            d.signal(signal.SIGSTOP)
            try:
                begun = time.monotonic()
                await prefill.start("r", ids, PrefillLeg(peer=d.address, handoffs=(9,)), max_tokens=5)
                end = await prefill.end("r")
                assert isinstance(end.error, HandoffFailed) and time.monotonic() - begun < 15
                stats = prefill.readings[-1].stats
                assert stats.staging_bytes == 0
            finally:
                d.signal(signal.SIGCONT)
        async with p.session() as prefill, d.session() as decode:
            assert len(await hand_over(prefill, decode, "next", ids, max_tokens=5)) == 5
        assert p.leave() == 0 and d.leave() == 0

    asyncio.run(run())
