"""Workers that join, differ, drain, leave and come back; and what a router says of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from jaxpd.errors import InvalidArgument, NotFound, Unavailable
from jaxpd.policies.workers import Role, State
from jaxpd.request import FinishReason
from serving.router import fleet as fleet_module

Cluster = Callable[..., Any]


@pytest.mark.parametrize(
    "differs, words",
    [
        ({"model": "xyz"}, "model (hash) xyz, the workers of this router have abc"),
        ({"dtype": "float32"}, "KV dtype float32, the workers of this router have bfloat16"),
        ({"page_size": 32}, "page size 32, the workers of this router have 4"),
        ({"protocol": 9, "oldest_protocol": 8}, "speaks hand-off protocol 8 to 9, the workers of this router have 1"),
        ({"max_model_len": 100}, "--max-model-len 100, this router serves 4096"),
    ],
)
def test_a_worker_that_differs_is_refused_with_both_values(
    differs: dict[str, Any], words: str, cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, _):
            other = await worker_script.ScriptedWorker(Role.DECODE, **differs).start()
            try:
                router.engine.fleet.add(other.address, role=None, flag="Router.Join")
                await soon(lambda: router.engine.fleet.infos()[-1].trouble)
                info = router.engine.fleet.infos()[-1]
                assert words in info.trouble and other.address in info.trouble and info.state == "connecting"
                assert len(router.engine.roster.states()) == 2
            finally:
                await other.die()

    asyncio.run(run())


def test_a_mixed_worker_need_not_have_the_transfer_streams_of_the_others(
    cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, _):
            other = await worker_script.ScriptedWorker(Role.MIXED, streams=0).start()
            try:
                router.engine.fleet.add(other.address, role=None, flag="Router.Join")
                await soon(lambda: len(router.engine.roster.states()) == 3)
            finally:
                await other.die()

    asyncio.run(run())


def test_a_listed_worker_must_have_the_role_of_its_list(worker_script: ModuleType, cluster: Cluster, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            other = await worker_script.ScriptedWorker(Role.DECODE).start()
            try:
                router.engine.fleet.add(other.address, role=Role.PREFILL, flag="--prefill", listed=True)
                await soon(lambda: router.engine.fleet.infos()[-1].trouble)
                trouble = router.engine.fleet.infos()[-1].trouble
                assert f"--prefill {other.address} is a decode worker; name it as --decode" in trouble
            finally:
                await other.die()

    asyncio.run(run())


def test_a_worker_that_comes_back_is_another_one(cluster: Cluster, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            changes: list[bool] = []
            router.engine.on_ready_changed = changes.append
            d.crossed_bytes = 7
            await soon(lambda: router.engine.stats().crossed_bytes == 7)
            before = d.name
            await d.die()
            await soon(lambda: changes == [False])
            assert router.engine.stats().crossed_bytes == 7, "what is gone has happened all the same"
            await d.start()
            await soon(lambda: changes == [False, True])
            assert before not in router.engine.roster.states() and d.name in router.engine.roster.states()
            request = router.submit()
            await router.finish(request)
            assert router.tokens(request) == worker_script.answer_of(request)
            assert router.engine.stats().crossed_bytes == 14
            assert {(r.role, r.pool) for r in router.engine.stats().replicas} == {("prefill", 0), ("decode", 0)}

    asyncio.run(run())


def test_a_worker_that_drains_ends_what_it_has(cluster: Cluster, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2) as (router, (p, d1, d2)):
            d1.stop_at = d2.stop_at = 3
            request = router.submit()
            await soon(lambda: len(router.tokens(request)) == 3)
            busy, other = (d1, d2) if d1.running else (d2, d1)
            await router.engine.fleet.hold(busy.address, True)
            assert busy.draining and router.engine.roster.states()[busy.name] is State.DRAINING
            busy.stop_at = other.stop_at = None
            await router.finish(request)
            assert router.tokens(request) == worker_script.answer_of(request) and len(busy.started) == 1
            for _ in range(3):
                await router.finish(router.submit())
            assert len(busy.started) == 1 and len(other.started) == 3
            await router.engine.fleet.hold(busy.name, False)
            await soon(lambda: router.engine.roster.states()[busy.name] is State.READY)
            with pytest.raises(NotFound, match="there is no worker nobody:1; there are: "):
                await router.engine.fleet.hold("nobody:1", True)

    asyncio.run(run())


def test_a_worker_that_says_itself_that_it_drains(cluster: Cluster, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, (p, d)):
            d.draining = True
            await soon(lambda: not router.engine.ready)
            with pytest.raises(Unavailable, match="is draining"):
                router.submit()
            d.draining = False
            await soon(lambda: router.engine.ready)

    asyncio.run(run())


@pytest.mark.parametrize("samples", [1, 2])
def test_with_migrate_on_drain_answers_go_on_elsewhere(
    samples: int, cluster: Cluster, worker_script: ModuleType, soon: Any
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=2, migrate_on_drain=True) as (router, (p, d1, d2)):
            d1.stop_at = d2.stop_at = 3
            request = router.submit(n=samples)
            await soon(lambda: all(len(router.tokens(request, i)) == 3 for i in range(samples)))
            busy, other = (d1, d2) if d1.running else (d2, d1)
            other.stop_at = None
            await router.engine.fleet.hold(busy.address, True)
            for sample in range(samples):
                await router.finish(request, sample)
                assert router.tokens(request, sample) == worker_script.answer_of(request, sample)
            assert len(other.started) == samples
            router.settled()
            # Where nobody else takes it, it stays.
            other.stop_at = 3
            await router.engine.fleet.hold(busy.address, False)
            last = router.submit()
            await soon(lambda: len(router.tokens(last)) == 3)
            busy = d1 if d1.running else d2
            for worker in (d1, d2):
                if worker is not busy:
                    await worker.die()
            await soon(lambda: len(router.engine.roster.states()) == 2)
            await router.engine.fleet.hold(busy.address, True)
            assert router.end(last) is None
            busy.stop_at = None
            assert (await router.finish(last)).reason is FinishReason.LENGTH
            assert router.tokens(last) == worker_script.answer_of(last)
            router.settled()

    asyncio.run(run())


def test_who_has_joined_and_is_gone_for_good_is_forgotten(
    cluster: Cluster, worker_script: ModuleType, soon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with cluster(prefill=1, decode=1) as (router, _):
            fleet = router.engine.fleet
            other = await worker_script.ScriptedWorker(Role.DECODE).start()
            fleet.add(other.address, role=None, flag="Router.Join")
            fleet.add(other.address, role=None, flag="Router.Join")
            await soon(lambda: len(router.engine.roster.states()) == 3)
            assert [r.pool for r in router.engine.stats().replicas if r.role == "decode"] == [0, 0, 1, 1]
            await other.die()
            await soon(lambda: len(router.engine.roster.states()) == 2)
            await fleet.sweep()
            assert len(fleet.infos()) == 3
            monkeypatch.setattr(fleet_module, "FORGOTTEN_S", 0.0)
            await fleet.sweep()
            assert len(fleet.infos()) == 2
            await other.start()
            fleet.add(other.address, role=None, flag="Router.Join")
            await soon(lambda: len(router.engine.roster.states()) == 3)
            await other.die()

    asyncio.run(run())


def test_many_threads_may_submit_and_abort(cluster: Cluster, worker_script: ModuleType, soon: Any) -> None:
    async def run() -> None:
        async with cluster(prefill=2, decode=2) as (router, _):
            requests: list[Any] = []

            def work() -> None:
                for i in range(10):
                    request = router.submit(max_tokens=20)
                    requests.append(request)
                    if i % 3 == 0:
                        router.engine.abort(request.request_id)
                    router.engine.stats()

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            await soon(lambda: not any(thread.is_alive() for thread in threads), 20)
            for request in requests:
                end = await router.finish(request, within_s=10)
                assert router.tokens(request) == worker_script.answer_of(request)[: end.usage.completion_tokens]
                assert end.reason in (FinishReason.LENGTH, FinishReason.ABORT)
            assert len(requests) == 40
            router.settled()

    asyncio.run(run())


def test_wrong_requests_are_refused_before_any_worker_has_them(cluster: Cluster) -> None:
    async def run() -> None:
        async with cluster(mixed=1) as (router, (m,)):
            with pytest.raises(InvalidArgument, match="outside the vocabulary"):
                router.submit(prompt=(999,))
            with pytest.raises(InvalidArgument, match="limit of 4096"):
                router.submit(max_tokens=5000)
            assert not m.started

    asyncio.run(run())
