"""The gRPC client against a scripted engine."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.errors import FailedPrecondition, Internal, InvalidArgument, Unauthenticated, Unavailable
from jaxpd.progress import SilentProgress
from serving.bench.arrivals import Arrivals
from serving.bench.lengths import Lengths
from serving.bench.session import Outcome, Plan, measure
from serving.bench.target import Target
from serving.bench.traces import read_trace
from serving.bench.workload import Workload
from serving.callers import Caller, Keys
from serving.tls import Tls


def bench(served: Callable[..., Any], options: dict[str, Any], **plan: Any) -> tuple[Outcome, Any]:
    async def run() -> tuple[Outcome, Any]:
        async with served(**options) as running:
            target = {"backend": "grpc", "address": running.address, "ignore_eos": True, **plan.pop("target", {})}
            made = Plan(target=Target(**target), **plan)
            return await measure(made, SilentProgress(), asyncio.Event()), running.engine

    return asyncio.run(run())


def test_lengths_shared_prefixes_and_usage(served: Callable[..., Any]) -> None:
    outcome, engine = bench(
        served,
        {"step_s": 0.002},
        workload=Workload(input_len=Lengths("fixed", 30), output_len=Lengths("fixed", 10), shared_prefix_len=20),
        arrivals=Arrivals(num_requests=12, concurrency=3),
    )
    summary = outcome.probes[0].summary
    assert summary.answered == 12 and not summary.failures
    assert (summary.prompt_tokens, summary.completion_tokens) == (50, 10)
    assert summary.itl_s.count == 12 * 9 and summary.without_itl == 0
    assert 0.002 < summary.tpot_s.p50 < 0.02
    assert outcome.about.model == "bytes" and outcome.about.max_model_len == 4096
    asked = [request.prompt_ids for request in engine.submitted[1:]]  # after the warm-up
    assert len({tuple(ids[:20]) for ids in asked}) == 1 and len({tuple(ids) for ids in asked}) == 12


def test_messages_of_several_tokens_say_so(served: Callable[..., Any]) -> None:
    outcome, _ = bench(
        served,
        {"step_s": 0.0},  # faster than anybody reads
        workload=Workload(input_len=Lengths("fixed", 9), output_len=Lengths("fixed", 200)),
        arrivals=Arrivals(num_requests=3, concurrency=1),
    )
    summary = outcome.probes[0].summary
    assert summary.tokens_per_message > 1.2 and summary.without_itl == 0 and summary.itl_s.count == 3 * 199


def test_refusals_and_errors_are_failures_of_their_kind(served: Callable[..., Any]) -> None:
    small = Workload(input_len=Lengths("fixed", 5), output_len=Lengths("fixed", 20))
    long = Workload(input_len=Lengths("fixed", 5), output_len=Lengths("fixed", 200))  # none ends before all have come
    queue = {"step_s": 0.005, "max_queued": 4}
    outcome, _ = bench(served, queue, workload=long, arrivals=Arrivals(num_requests=10), warm_up=0)
    assert outcome.probes[0].summary.failures == {"RESOURCE_EXHAUSTED": 6}
    # The scripted engine fails a prompt that begins with the byte `!`, 33: one in 34 of these.
    outcome, _ = bench(
        served,
        {"fail_with": Internal("broken device")},
        target={"vocab_size": 34},
        workload=small,
        arrivals=Arrivals(num_requests=200),
        warm_up=0,
    )
    failures = outcome.probes[0].summary.failures
    assert 0 < failures.get("INTERNAL", 0) < 30


def test_a_stop_cuts_off_what_runs_and_frees_it(served: Callable[..., Any]) -> None:
    async def run() -> None:
        async with served(step_s=0.01) as running:
            plan = Plan(
                target=Target(backend="grpc", address=running.address, ignore_eos=True),
                workload=Workload(input_len=Lengths("fixed", 5), output_len=Lengths("fixed", 1000)),
                arrivals=Arrivals(num_requests=30, concurrency=7),
                warm_up=0,
            )
            stop = asyncio.Event()
            measuring = asyncio.create_task(measure(plan, SilentProgress(), stop))
            while running.engine.running < 7:
                await asyncio.sleep(0.01)
            stop.set()
            outcome = await measuring
            assert outcome.stopped and outcome.probes[0].summary.cut_off == 7
            assert outcome.probes[0].summary.requests == 0
            for _ in range(100):
                if not running.engine.running:
                    break
                await asyncio.sleep(0.02)
            assert not running.engine.running

    asyncio.run(run())


def test_what_does_not_fit_the_model_is_said_before_it_is_sent(
    served: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(InvalidArgument, match="4000 \\+ 97 tokens, and its limit is 4096.*--input-len"):
        bench(served, {}, workload=Workload(input_len=Lengths("fixed", 4000), output_len=Lengths("fixed", 97)))
    path = tmp_path / "trace"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,10,5\n2023-11-16 18:17:03.1,9000,5\n",
        encoding="utf-8",
    )
    with pytest.raises(InvalidArgument, match="1 of 2 .*--length-scale"):
        bench(served, {}, workload=Workload(trace=read_trace(path)))
    outcome, _ = bench(served, {}, workload=Workload(trace=read_trace(path), length_scale=0.1))
    assert outcome.probes[0].summary.prompt_tokens == pytest.approx((1 + 900) / 2)


def test_texts_go_as_they_are(served: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "share.json"
    talk = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "x" * 21}]
    path.write_text(json.dumps([{"conversations": talk}] * 2), encoding="utf-8")
    outcome, engine = bench(served, {}, workload=Workload(trace=read_trace(path)))
    summary = outcome.probes[0].summary
    assert summary.answered == 2 and summary.prompt_tokens == 5 and summary.completion_tokens == 6
    assert bytes(engine.submitted[-1].prompt_ids) == b"hello"


def test_no_server_and_options_of_the_other_protocol(served: Callable[..., Any]) -> None:
    plan = Plan(target=Target(backend="grpc", address="127.0.0.1:1"))
    with pytest.raises(Unavailable, match="127.0.0.1:1"):
        asyncio.run(measure(plan, SilentProgress(), asyncio.Event()))
    with pytest.raises(InvalidArgument, match="--model other: .* serves bytes"):
        bench(served, {}, target={"model": "other"})
    with pytest.raises(FailedPrecondition, match="--extra-body"):
        bench(served, {}, target={"extra_body": {"top_p": 1}})


def test_a_key_and_tls_go_along(served: Callable[..., Any], certificate: dict[str, pathlib.Path]) -> None:
    keys = Keys({"sesame": Caller(name="me")})
    small = {"workload": Workload(output_len=Lengths("fixed", 2)), "arrivals": Arrivals(num_requests=2)}
    secure = {"keys": keys, "tls": Tls(**certificate)}
    outcome, _ = bench(served, secure, target={"api_key": "sesame", "ssl_ca_certs": certificate["certfile"]}, **small)
    assert outcome.probes[0].summary.answered == 2
    with pytest.raises(Unavailable):  # no CA that this machine trusts has signed it
        bench(served, secure, target={"api_key": "sesame", "tls": True}, **small)
    with pytest.raises((Unauthenticated, FailedPrecondition)):
        bench(served, {"keys": keys}, target={"api_key": "wrong"}, **small)
