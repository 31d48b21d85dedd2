"""The OpenAI client against jaxpd's own HTTP front over a scripted engine: lengths, token counts, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.progress import SilentProgress
from serving.bench.arrivals import Arrivals
from serving.bench.lengths import Lengths
from serving.bench.session import Outcome, Plan, measure
from serving.bench.target import Target
from serving.bench.workload import Workload
from serving.http.front import HttpFront


def bench(opened: Callable[..., Any], engine_options: dict[str, Any], backend: str, **plan: Any) -> tuple[Outcome, Any]:
    pytest.importorskip("aiohttp")

    async def run() -> tuple[Outcome, Any]:
        gateway, engine = opened(**engine_options)
        front = HttpFront(gateway)
        port = front.bind("127.0.0.1", 0)
        await front.start()
        await front.set_ready(True)
        try:
            target = Target(backend=backend, address=f"http://127.0.0.1:{port}/v1", ignore_eos=True)
            return await measure(Plan(target=target, **plan), SilentProgress(), asyncio.Event()), engine
        finally:
            await front.stop(0)
            engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("backend", ["openai-chat", "openai-completions"])
def test_lengths_and_token_counts_are_the_servers(opened: Callable[..., Any], backend: str) -> None:
    outcome, engine = bench(
        opened,
        {"step_s": 0.002},
        backend,
        workload=Workload(input_len=Lengths("fixed", 120), output_len=Lengths("fixed", 12), shared_prefix_len=40),
        arrivals=Arrivals(num_requests=8, concurrency=2),
    )
    summary = outcome.probes[0].summary
    assert summary.answered == 8 and not summary.failures
    assert summary.prompt_tokens == pytest.approx(160, abs=2), outcome.about.notes
    assert summary.completion_tokens == 12 and summary.without_itl == 0 and summary.itl_s.count == 8 * 11
    asked = [bytes(request.prompt_ids) for request in engine.submitted[-8:]]
    assert len({ids[:38] for ids in asked}) == 1 and len(set(asked)) == 8
    assert outcome.about.model == "bytes" and outcome.about.max_model_len == 4096


def test_a_full_queue_is_a_429(opened: Callable[..., Any]) -> None:
    outcome, _ = bench(
        opened,
        {"step_s": 0.005, "max_queued": 4},
        "openai-completions",
        workload=Workload(input_len=Lengths("fixed", 8), output_len=Lengths("fixed", 200)),
        arrivals=Arrivals(num_requests=10),
        warm_up=0,
    )
    assert outcome.probes[0].summary.failures == {"http 429": 6}
