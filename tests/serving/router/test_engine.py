"""Requests over scripted workers: each gets its own answer, whatever happens to the workers on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from jaxpd.errors import HandoffFailed, Internal, InvalidArgument, ResourceExhausted, Unavailable
from jaxpd.life import Stage
from jaxpd.policies.workers import State
from jaxpd.request import FinishReason, TokensEvent

Cluster = Callable[..., Any]


def test_prefill_makes_the_first_token_and_decode_the_rest(cluster: Cluster, worker_script: ModuleType) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            requests = [router.submit(prompt=(1, 2, 3, 4, 5, 6)) for _ in range(5)]
            for request in requests:
                end = await router.finish(request)
                assert router.tokens(request) == worker_script.answer_of(request)
                assert end.reason is FinishReason.LENGTH and end.error is None
                assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (6, 6, 4)
                times = end.timings
                assert times.ttft_s is not None and times.ttst_s is not None and 0 < times.ttft_s <= times.ttst_s
                assert None not in (times.queue_s, times.prefill_s, times.transfer_s, times.decode_s)
                assert times.transfer_exposed_s is not None and times.transfer_exposed_s >= 0
                stages = [moment.stage for moment in end.life.moments]
                assert stages[0] is Stage.ARRIVED and stages[-1] is Stage.FINISHED and Stage.DECODE_START in stages
            assert {started.leg.peer for started in p.started} == {d.address}
            assert {started.decode_instance for started in p.started} == {d.instance}
            handoffs = [handoff for started in p.started for handoff in started.leg.handoffs]
            assert handoffs == [handoff for started in d.started for handoff in started.leg.handoffs]
            assert len(set(handoffs)) == 5
            assert p.described + d.described <= 2
            router.settled()

    asyncio.run(run())


def test_a_mixed_worker_serves_it_whole(cluster: Cluster, worker_script: ModuleType) -> None:
    async def run() -> None:
        async with cluster(mixed=1) as (router, (m,)):
            request = router.submit(prompt=tuple(range(9)), n=2)
            ends = [await router.finish(request, sample) for sample in range(2)]
            for sample, end in enumerate(ends):
                assert router.tokens(request, sample) == worker_script.answer_of(request, sample)
                assert end.usage.cached_tokens == 4
            assert [started.leg for started in m.started] == [None]
            router.settled()

    asyncio.run(run())


def test_samples_share_both_workers_and_each_has_its_handoff(cluster: Cluster, worker_script: ModuleType) -> None:
    async def run() -> None:
        async with cluster(prefill=2, decode=2) as (router, workers):
            request = router.submit(n=3)
            for sample in range(3):
                await router.finish(request, sample)
                assert router.tokens(request, sample) == worker_script.answer_of(request, sample)
            starts = [started for worker in workers for started in worker.started]
            assert len(starts) == 2 and len({*starts[0].leg.handoffs, *starts[1].leg.handoffs}) == 3
            router.settled()

    asyncio.run(run())


def test_an_answer_of_one_token_ends_the_decode_leg(cluster: Cluster, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            request = router.submit(max_tokens=1)
            end = await router.finish(request)
            assert end.reason is FinishReason.LENGTH and len(router.tokens(request)) == 1
            await soon(lambda: d.aborts)
            assert d.aborts == [("r1.1", 0)]
            router.settled()

    asyncio.run(run())


def test_early_tokens_of_the_decode_worker_wait_for_the_first(cluster: Cluster, worker_script: ModuleType) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            d.early, p.stop_at = True, 0
            request = router.submit()
            await asyncio.sleep(0.1)
            assert not d.running, "the decode worker has said all it had to say"
            assert router.tokens(request) == [] and router.end(request) is None
            p.stop_at = None
            end = await router.finish(request)
            assert router.tokens(request) == worker_script.answer_of(request) and end.reason is FinishReason.LENGTH
            router.settled()

    asyncio.run(run())


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_worker_that_dies_before_the_first_token(
    who: str, cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=2, decode=2) as (router, workers):
            for worker in workers[:2]:
                worker.stop_at = 0
            request = router.submit()
            await soon(lambda: any(w.running for w in workers[:2]) and any(w.running for w in workers[2:]))
            pair = [worker for worker in workers if worker.running]
            victim, other = pair if who == "prefill" else pair[::-1]
            await victim.die()
            await soon(lambda: (f"{request.request_id}.1", None) in other.aborts)
            for worker in workers[:2]:
                worker.stop_at = None
            await router.finish(request)
            assert router.tokens(request) == worker_script.answer_of(request)
            assert router.engine.counts.again == {"retries": 1, "replays": 0}
            router.settled()

    asyncio.run(run())


@pytest.mark.parametrize("samples", [1, 2])
def test_a_decode_worker_that_dies_is_replaced_and_the_client_sees_a_pause(
    samples: int, cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2) as (router, workers):
            for worker in workers[1:]:
                worker.stop_at = 3
            request = router.submit(n=samples, max_tokens=8)
            await soon(lambda: all(len(router.tokens(request, i)) == 3 for i in range(samples)))
            victim = next(worker for worker in workers[1:] if worker.running)
            await victim.die()
            for worker in workers[1:]:
                worker.stop_at = None
            for sample in range(samples):
                end = await router.finish(request, sample)
                assert router.tokens(request, sample) == worker_script.answer_of(request, sample)
                assert end.reason is FinishReason.LENGTH and end.usage.completion_tokens == 8
            replays = [started for started in workers[0].started if started.request.outputs]
            assert [len(started.request.outputs) for started in replays] == [3] * samples
            assert {started.request.params.n for started in replays} == {1}
            assert router.engine.counts.again["replays"] == samples
            router.settled()

    asyncio.run(run())


def test_a_mixed_worker_that_dies_is_replaced(cluster: Cluster, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with cluster(mixed=2) as (router, workers):
            for worker in workers:
                worker.stop_at = 2
            request = router.submit()
            await soon(lambda: len(router.tokens(request)) == 2)
            await next(worker for worker in workers if worker.running).die()
            for worker in workers:
                worker.stop_at = None
            await router.finish(request)
            assert router.tokens(request) == worker_script.answer_of(request)
            router.settled()

    asyncio.run(run())


def test_what_was_handed_over_does_not_need_its_prefill_worker(
    cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            d.stop_at = 3
            request = router.submit()
            await soon(lambda: len(router.tokens(request)) == 3)
            await p.die()
            await soon(lambda: not router.engine.ready)
            assert router.end(request) is None
            d.stop_at = None
            await router.finish(request)
            assert router.tokens(request) == worker_script.answer_of(request)
            router.settled()

    asyncio.run(run())


def test_a_full_worker_is_left_out_and_one_that_is_alone_says_so(cluster: Cluster, worker_script: ModuleType) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2) as (router, (p, d1, d2)):
            d1.fail = ResourceExhausted("it is full", retry_after_s=3.0)
            for request in [router.submit() for _ in range(4)]:
                await router.finish(request)
                assert router.tokens(request) == worker_script.answer_of(request)
            d2.fail = ResourceExhausted("it is full", retry_after_s=3.0)
            request = router.submit()
            end = await router.finish(request)
            assert isinstance(end.error, ResourceExhausted) and end.error.retry_after_s == 3.0
            assert router.engine.roster.openings == 0, "who is full is healthy"
            router.settled()

    asyncio.run(run())


def test_what_is_wrong_with_a_request_is_not_tried_again(cluster: Cluster) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            p.fail = InvalidArgument("the grammar does not parse", field="grammar")
            end = await router.finish(router.submit())
            assert isinstance(end.error, InvalidArgument) and end.error.field == "grammar"
            assert len(p.started) == 1
            router.settled()

    asyncio.run(run())


def test_tries_and_migrations_are_bounded(cluster: Cluster, worker_script: ModuleType) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1, max_tries=2, max_migrations=1) as (router, (p, d)):
            p.fail = Internal("a step failed")
            end = await router.finish(router.submit())
            assert isinstance(end.error, Internal) and len(p.started) == 2
            p.fail = None
            d.fail_at = (3, HandoffFailed("step", "a step failed"))
            request = router.submit()
            end = await router.finish(request)
            assert isinstance(end.error, HandoffFailed) and len(p.started) == 4
            assert router.tokens(request) == worker_script.answer_of(request)[: len(router.tokens(request))]
            router.settled()

    asyncio.run(run())


def test_a_broken_link_is_one_pair_s_and_others_are_tried(cluster: Cluster, worker_script: ModuleType) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2) as (router, (p, d1, d2)):
            d1.fail = HandoffFailed("peer", "the prefill worker is not reached")
            for request in [router.submit() for _ in range(4)]:
                await router.finish(request)
                assert router.tokens(request) == worker_script.answer_of(request)
            router.settled()

    asyncio.run(run())


def test_abort_answers_at_once_and_ends_both_legs(cluster: Cluster, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            for stop_p, stop_d, had in ((0, None, 0), (None, 1, 1), (None, 4, 4)):
                p.stop_at, d.stop_at = stop_p, stop_d
                request = router.submit()
                await soon(lambda h=had, r=request: len(router.tokens(r)) == h and len(d.running) == 1)
                assert router.engine.abort(request.request_id)
                end = router.end(request)
                assert end is not None and end.reason is FinishReason.ABORT and end.usage.completion_tokens == had
                assert not router.engine.abort(request.request_id)
                await soon(lambda: not p.running and not d.running)
                router.settled()
            assert not router.engine.abort("nobody")
            await asyncio.sleep(0.05)
            assert router.end(request) is not None

    asyncio.run(run())


def test_abort_of_one_sample_leaves_the_others(cluster: Cluster, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            d.stop_at = 3
            request = router.submit(n=2)
            await soon(lambda: all(len(router.tokens(request, i)) == 3 for i in range(2)))
            assert await asyncio.to_thread(router.engine.abort, request.request_id, sample=1)
            d.stop_at = None
            await router.finish(request, 0)
            assert router.tokens(request, 0) == worker_script.answer_of(request)
            assert router.tokens(request, 1) == worker_script.answer_of(request, 1)[:3]
            router.settled()

    asyncio.run(run())


def test_a_silent_worker_is_gone_and_what_it_says_later_is_not_heard(
    cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2) as (router, workers):
            for worker in workers[1:]:
                worker.stop_at = 2
            request = router.submit()
            await soon(lambda: len(router.tokens(request)) == 2)
            victim = next(worker for worker in workers[1:] if worker.running)
            name = victim.name
            victim.mute = True
            other = next(worker for worker in workers[1:] if worker is not victim)
            other.stop_at = None
            await router.finish(request, within_s=6)
            assert router.tokens(request) == worker_script.answer_of(request)
            victim.mute = False
            victim.say(TokensEvent(f"{request.request_id}.1", 2, (9, 9, 9)))
            await soon(lambda: f"{name}.2" in router.engine.roster.states(), 8)
            await soon(lambda: router.engine.roster.states()[f"{name}.2"] is State.READY)
            assert name not in router.engine.roster.states()
            router.settled()

    asyncio.run(run())


def test_stale_and_strange_events_change_nothing(cluster: Cluster, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2) as (router, (p, d1, d2)):
            d1.stop_at = d2.stop_at = 4
            request = router.submit()
            await soon(lambda: len(router.tokens(request)) == 4)
            d, stranger = (d1, d2) if d1.running else (d2, d1)
            expected = worker_script.answer_of(request)
            d.say(TokensEvent("r1.1", 1, tuple(expected[1:3])))  # twice
            d.say(TokensEvent("r1.1", 2, tuple(expected[2:5])))  # overlaps: one is new
            stranger.say(TokensEvent("r1.1", 5, (7,)))  # has nothing to do with it
            p.say(TokensEvent("r1.1", 0, (7,)))
            d.say(TokensEvent("r1.1", 4, (7,), sample=3), TokensEvent("r1.99", 4, (7,)))
            await soon(lambda: len(router.tokens(request)) == 5)
            d1.stop_at = d2.stop_at = None
            await router.finish(request)
            assert router.tokens(request) == expected
            router.settled()

    asyncio.run(run())


def test_a_hole_in_the_tokens_is_a_failure_and_not_an_answer(
    cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2) as (router, (p, d1, d2)):
            d1.stop_at = d2.stop_at = 2
            request = router.submit()
            await soon(lambda: len(router.tokens(request)) == 2)
            d = d1 if d1.running else d2
            d.say(TokensEvent("r1.1", 4, (7,)))
            d1.stop_at = d2.stop_at = None
            await router.finish(request)
            assert router.tokens(request) == worker_script.answer_of(request)
            assert router.engine.counts.again["replays"] == 1
            router.settled()

    asyncio.run(run())


def test_nobody_to_serve_is_said_at_once(cluster: Cluster, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            d.stop_at = 2
            running = router.submit()
            await soon(lambda: len(router.tokens(running)) == 2)
            await d.die()
            end = await router.finish(running)
            assert isinstance(end.error, Unavailable) and end.usage.completion_tokens == 2
            with pytest.raises(Unavailable, match="no decode worker is ready"):
                router.submit()
            assert router.engine.counts.refusals["decode", "no_worker"] == 2
            router.settled()

    asyncio.run(run())


def test_events_of_one_message_are_one_batch(cluster: Cluster) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            d.stop_at = 1
            a, b = router.submit(), router.submit()
            while not (router.tokens(a) and router.tokens(b)):
                await asyncio.sleep(0.005)
            router.batches.clear()
            d.say(TokensEvent("r1.1", 1, (1, 2)), TokensEvent("r2.2", 1, (3,)), TokensEvent("r1.1", 3, (4,)))
            await asyncio.sleep(0.1)
            assert [len(batch) for batch in router.batches] == [3]

    asyncio.run(run())


def test_who_gives_up_what_the_prefill_worker_has_ended_is_not_blamed(cluster: Cluster, soon: Any) -> None:
    """The decode worker hears from the prefill worker that it is over, and may say so here before the other does."""

    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            p.stop_at = 0
            d.fail = Unavailable("the worker has ended what it had")
            request = router.submit(max_tokens=1)
            await soon(lambda: d.started and not d.running)
            await asyncio.sleep(0.05)
            p.stop_at = None
            end = await router.finish(request)
            assert end.reason is FinishReason.LENGTH and len(p.started) == 1
            end = await router.finish(router.submit())
            assert isinstance(end.error, Unavailable) and "ended what it had" in end.error.message
            router.settled()

    asyncio.run(run())


def test_what_would_be_late_is_refused_at_once(cluster: Cluster) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1, prefill_policy="ttft_estimate", ttft_slo_s=0.02) as (router, (p, d)):
            p.prefill_s = 0.05
            for _ in range(8):  # while nothing is known of it, all are let in
                await router.finish(router.submit())
            with pytest.raises(ResourceExhausted, match=r"a TTFT of 0.02 s was asked for") as caught:
                router.submit()
            assert caught.value.retry_after_s > 0
            assert router.engine.counts.refusals["prefill", "too_late"] == 1
            router.settled()

    asyncio.run(run())


def test_workers_that_keep_dying_under_load(cluster: Cluster, worker_script: ModuleType, soon: Any) -> None:
    """Every answer is whole, or ends with an error that says why; what it has of tokens is right in any case."""

    async def run() -> None:
        async with cluster(prefill=2, decode=3, mixed=1, max_migrations=20, max_tries=20) as (router, workers):
            stop = asyncio.Event()
            for worker in workers:
                worker.step_s = 0.005

            async def kill() -> None:
                for i in range(12):
                    victim = workers[i % len(workers)]
                    await asyncio.sleep(0.15)
                    await victim.die()
                    await asyncio.sleep(0.1)
                    await victim.start()
                stop.set()

            killing = asyncio.create_task(kill())
            requests: list[Any] = []
            refused = 0
            while not stop.is_set():
                try:
                    requests.append(router.submit(max_tokens=40, n=1 + len(requests) % 2))
                except Unavailable:
                    refused += 1
                await asyncio.sleep(0.02)
            await killing
            whole = 0
            for request in requests:
                for sample in range(request.params.n):
                    end = await router.finish(request, sample, within_s=20)
                    got, right = router.tokens(request, sample), worker_script.answer_of(request, sample)
                    assert got == right[: len(got)] and end.usage.completion_tokens == len(got)
                    if end.error is None:
                        assert got == right
                        whole += 1
                    else:
                        assert isinstance(end.error, Unavailable), end.error
            assert whole > 50 and router.engine.counts.again["replays"] > 3
            assert refused < len(requests)
            await soon(lambda: all(not worker.running for worker in workers))
            router.settled()

    asyncio.run(run())
