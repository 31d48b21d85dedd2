"""A worker's service on a scripted engine: sessions, legs, and every way in which they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxpd.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from jaxpd.policies.workers import Role
from jaxpd.request import DecodeLeg, FinishReason, PrefillLeg, TokensEvent
from jaxpd.structured import JSON_OBJECT, StructuredOutput
from serving.cluster import Cluster
from serving.gateway import State
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.proto.jaxpd.v1 import worker_pb2_grpc
from serving.tls import Tls
from serving.worker.description import description_from_proto
from tests.serving.test_tls import Files
from tests.serving.worker.small_router import WorkerSession, hand_over

Working = Callable[..., Any]
ABC = (97, 98, 99)
SECRET = "a secret of the cluster"


def go(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(bounded())


async def eventually(true: Callable[[], Any], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.01)


async def status_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def test_requests_are_served_whole_with_a_message_a_step(working: Working) -> None:
    async def run() -> None:
        async with working(step_s=0.02) as w, WorkerSession(w.address) as session:
            assert session.description.instance == "me" and session.description.model.tokenizer is None
            await session.start("r", ABC, max_tokens=5, logprobs=2)
            end = await session.end("r")
            assert end.reason is FinishReason.LENGTH and end.usage.completion_tokens == 5 and end.life is not None
            assert session.tokens("r") == {0: 97, 1: 98, 2: 99, 3: 97, 4: 98}
            assert len(session.messages) == 5  # the end comes with the last token
            first = session.events("r")[0]
            assert isinstance(first, TokensEvent) and first.logprobs is not None and len(first.logprobs[0].top) == 2
            assert not w.worker.in_use("r")

    go(run())


def test_the_description_has_the_tokenizer(working: Working) -> None:
    async def run() -> None:
        async with working() as w, grpc.aio.insecure_channel(w.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = description_from_proto(await stub.Describe(pb.DescribeRequest()))
            assert description.model.tokenizer is not None and description.model.tokenizer.encode("a") == [97]

    go(run())


def test_nothing_is_to_be_had_before_the_model_is_loaded(working: Working) -> None:
    async def run() -> None:
        async with working(opened=False) as w, grpc.aio.insecure_channel(w.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            code, details = await status_of(stub.Describe(pb.DescribeRequest()))
            assert code is grpc.StatusCode.UNAVAILABLE and "starting" in details
            assert (await status_of(stub.SetDraining(pb.SetDrainingRequest())))[0] is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError, match="starting"):
                async with WorkerSession(w.address):
                    pass
            health = health_pb2_grpc.HealthStub(channel)
            ready = await health.Check(health_pb2.HealthCheckRequest(service="jaxpd.v1.Worker"))
            assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1

    go(run())


def test_a_router_of_another_age_is_refused_with_both_protocols(working: Working) -> None:
    precondition = grpc.StatusCode.FAILED_PRECONDITION

    async def run() -> None:
        async with working() as w, grpc.aio.insecure_channel(w.address) as channel:
            for hello, said, status in (
                (
                    pb.RouterMessage(hello=pb.RouterHello(protocol=9, oldest_protocol=8, router="new")),
                    "8 to 9",
                    precondition,
                ),
                (pb.RouterMessage(ping=pb.Ping()), "must be a hello", grpc.StatusCode.INVALID_ARGUMENT),
            ):
                call = worker_pb2_grpc.WorkerStub(channel).Session()
                await call.write(hello)
                code, details = await status_of(call.read())
                assert code is status and said in details

    go(run())


def test_both_legs_make_one_answer(working: Working) -> None:
    async def run() -> None:
        async with (
            working(role=Role.PREFILL) as p,
            working(role=Role.DECODE) as d,
            WorkerSession(p.address) as prefill,
            WorkerSession(d.address) as decode,
        ):
            assert await hand_over(prefill, decode, "r", ABC, max_tokens=4) == [97, 98, 99, 97]
            assert (await prefill.end("r")).reason is FinishReason.HANDED_OFF
            assert isinstance(p.engine.legs[0], PrefillLeg) and p.engine.legs[0].peer == d.address
            assert p.engine.legs[0].handoffs == d.engine.legs[0].handoffs
            await decode.start("more", ABC, DecodeLeg(handoffs=(1,)), max_tokens=5, outputs=(97, 98))
            assert (await decode.end("more")).reason is FinishReason.LENGTH
            assert sorted(decode.tokens("more")) == [3, 4]

    go(run())


def test_a_leg_of_another_role_is_refused(working: Working) -> None:
    async def run() -> None:
        async with working(role=Role.PREFILL) as w, WorkerSession(w.address) as session:
            await session.start("r", ABC)
            error = (await session.end("r")).error
            assert isinstance(error, FailedPrecondition) and "this is a prefill worker" in error.message

    go(run())


def test_what_cannot_be_started_ends_for_every_sample(working: Working) -> None:
    async def run() -> None:
        async with working(max_queued=1, step_s=0.05) as w, WorkerSession(w.address) as session:
            await session.start("long", ABC, max_tokens=500)
            await session.start("r", ABC, n=3)
            for sample in range(3):
                end = await session.end("r", sample)
                assert end.reason is FinishReason.ERROR and isinstance(end.error, ResourceExhausted)
                assert end.error.retry_after_s == 2.5 and end.usage.prompt_tokens == 3
            assert not w.worker.in_use("r") and w.worker.in_use("long")

    go(run())


def test_a_start_that_comes_twice_counts_once(working: Working) -> None:
    async def run() -> None:
        async with working(step_s=0.01) as w, WorkerSession(w.address) as session:
            for _ in range(2):
                await session.start("r", ABC, max_tokens=20)
            assert (await session.end("r")).reason is FinishReason.LENGTH and len(session.tokens("r")) == 20
            await session.start("r", ABC, max_tokens=20)  # too late
            await session.start("next", ABC, max_tokens=1)
            await session.end("next")
            assert [r.request_id for r in w.engine.submitted] == ["r", "next"]

    go(run())


def test_an_id_that_another_router_uses_is_refused_and_the_first_goes_on(working: Working) -> None:
    async def run() -> None:
        async with (
            working(step_s=0.01) as w,
            WorkerSession(w.address) as first,
            WorkerSession(w.address) as second,
        ):
            await first.start("r", ABC, max_tokens=50)
            await first.until(lambda: first.tokens("r"))
            await second.start("r", ABC, n=2)
            for sample in range(2):
                error = (await second.end("r", sample)).error
                assert isinstance(error, InvalidArgument) and error.field == "request_id"
            await second.abort("r")  # not its own
            assert (await first.end("r")).reason is FinishReason.LENGTH and len(first.tokens("r")) == 50

    go(run())


def test_a_router_aborts_a_sample_or_all(working: Working) -> None:
    async def run() -> None:
        async with working(step_s=0.01) as w, WorkerSession(w.address) as session:
            await session.start("r", ABC, max_tokens=2000, n=3)
            await session.until(lambda: session.tokens("r", 2))
            await session.abort("r", 1)
            assert (await session.end("r", 1)).reason is FinishReason.ABORT
            assert w.worker.in_use("r")
            await session.abort("r")
            await session.abort("r")
            for sample in (0, 2):
                end = await session.end("r", sample)
                assert end.reason is FinishReason.ABORT and end.error is None
            assert not w.worker.in_use("r")
            await session.abort("nobody")

    go(run())


def test_grammars_are_compiled_beside_everything_else(working: Working) -> None:
    async def run() -> None:
        async with working(submit_s=0.5, step_s=0.005) as w, WorkerSession(w.address) as session:
            structured = StructuredOutput(kind=JSON_OBJECT)
            await session.start("slow", ABC, max_tokens=3, structured=structured)
            await session.start("gone", ABC, max_tokens=2000, structured=structured)
            await session.abort("gone")
            await session.start("quick", ABC, max_tokens=3)
            assert (await session.end("quick")).reason is FinishReason.LENGTH
            assert not session.events("slow")
            assert (await session.end("slow")).reason is FinishReason.LENGTH
            assert (await session.end("gone")).reason is FinishReason.ABORT
            assert not w.worker.in_use("slow") and not w.worker.in_use("gone")

    go(run())


def test_the_end_of_a_session_ends_what_it_has_started(working: Working) -> None:
    async def run() -> None:
        async with working(step_s=0.01) as w, WorkerSession(w.address) as other:
            await other.start("stays", ABC, max_tokens=100)
            async with WorkerSession(w.address) as session:
                await session.start("goes", ABC, max_tokens=100_000)
                await session.start("too", ABC, max_tokens=100_000, n=2)
                await session.until(lambda: session.tokens("too", 1))
            await eventually(lambda: w.engine.running == 1)
            assert not w.worker.in_use("goes") and w.worker.in_use("stays")
            assert (await other.end("stays")).reason is FinishReason.LENGTH

    go(run())


def test_a_router_that_is_silent_is_gone(working: Working) -> None:
    async def run() -> None:
        async with (
            working(step_s=0.01, silence_s=0.3) as w,
            WorkerSession(w.address, pings=False) as silent,
        ):
            await silent.start("r", ABC, max_tokens=100_000)
            begun = time.monotonic()
            await silent.until(lambda: silent.status)
            assert 0.2 < time.monotonic() - begun < 5
            assert silent.status is not None and silent.status[0] is grpc.StatusCode.UNAVAILABLE
            await eventually(lambda: w.engine.running == 0)

    go(run())


def test_a_reading_each_beat_and_at_once_when_the_state_changes(working: Working) -> None:
    async def run() -> None:
        async with (
            working(beat_s=0.05, step_s=0.005) as w,
            WorkerSession(w.address) as session,
            grpc.aio.insecure_channel(w.address) as channel,
        ):
            await session.start("r", ABC, max_tokens=200)
            await session.until(lambda: len(session.readings) > 3 and session.readings[-1].steps)
            reading = session.readings[-1]
            assert reading.state is State.READY and len(reading.stats.replicas) == 3
            assert reading.steps[0][0] == 1 and 0.001 < reading.steps[0][1] < 1
            stub = worker_pb2_grpc.WorkerStub(channel)
            answer = await stub.SetDraining(pb.SetDrainingRequest(draining=True))
            assert answer.state == pb.WORKER_STATE_DRAINING
            await session.start("new", ABC)
            error = (await session.end("new")).error
            assert isinstance(error, Unavailable) and "draining" in error.message
            assert any(reading.state is State.DRAINING for reading in session.readings)
            assert (await session.end("r")).reason is FinishReason.LENGTH  # what runs goes on
            await stub.SetDraining(pb.SetDrainingRequest(draining=False))
            await session.start("again", ABC, max_tokens=1)
            assert (await session.end("again")).reason is FinishReason.LENGTH

    go(run())


def test_what_a_worker_ends_by_itself_is_no_abort(working: Working) -> None:
    async def run() -> None:
        async with working(step_s=0.01) as w, WorkerSession(w.address) as session:
            await session.start("r", ABC, max_tokens=100_000)
            await session.until(lambda: session.tokens("r"))
            w.worker.close_doors()
            assert w.worker.set_draining(False) is State.DRAINING  # for good
            w.worker.abort_all()
            end = await session.end("r")
            assert end.reason is FinishReason.ERROR and isinstance(end.error, Unavailable)
            await w.worker.flush(5)
            w.worker.end_sessions("bye")
            await session.until(lambda: session.status)
            assert session.status == (grpc.StatusCode.UNAVAILABLE, "bye")

    go(run())


@pytest.mark.parametrize("shown", [None, "another secret, as long", SECRET])
def test_the_secret_of_the_cluster(working: Working, shown: str | None) -> None:
    async def run() -> None:
        async with (
            working(cluster=Cluster(secret=SECRET)) as w,
            grpc.aio.insecure_channel(w.address) as channel,
        ):
            cluster, stub = Cluster(secret=shown), worker_pb2_grpc.WorkerStub(channel)
            code, details = await status_of(stub.Describe(pb.DescribeRequest(), metadata=cluster.metadata))
            assert (code is grpc.StatusCode.OK) == (shown == SECRET)
            if shown == SECRET:
                async with WorkerSession(w.address, cluster) as session:
                    await session.start("r", ABC, max_tokens=1)
                    await session.end("r")
            else:
                assert code is grpc.StatusCode.UNAUTHENTICATED and "--cluster-secret-file" in details
                assert SECRET not in details
                with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                    async with WorkerSession(w.address, cluster):
                        pass
                peer = stub.Peer(metadata=cluster.metadata)
                assert (await status_of(peer.read()))[0] is grpc.StatusCode.UNAUTHENTICATED
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1  # probes have none

    go(run())


def test_mutual_tls(working: Working, tmp_path: Any) -> None:
    files = Files(tmp_path)
    ours = Cluster(tls=Tls(**files.server, ca_certs=files.ca["certfile"]))
    strangers = Cluster(tls=Tls(**files.stranger, ca_certs=files.ca["certfile"]))

    async def run() -> None:
        async with working(cluster=ours) as w:
            async with WorkerSession(w.address, ours) as session:
                await session.start("r", ABC, max_tokens=2)
                assert (await session.end("r")).reason is FinishReason.LENGTH
            for cluster in (strangers, Cluster()):
                with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                    async with WorkerSession(w.address, cluster):
                        pass

    go(run())


def test_workers_that_take_no_hand_offs_say_so(working: Working) -> None:
    async def run() -> None:
        async with working() as w, grpc.aio.insecure_channel(w.address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Peer()
            await call.write(pb.PeerMessage(hello=pb.PeerHello()))
            code, details = await status_of(call.read())
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "mixed worker, which takes no hand-offs" in details

    go(run())


def test_rubbish_ends_a_session_with_a_reason(working: Working) -> None:
    async def run() -> None:
        async with working() as w, grpc.aio.insecure_channel(w.address) as channel:
            call = channel.stream_stream("/jaxpd.v1.Worker/Session")()
            await call.write(pb.RouterMessage(hello=pb.RouterHello(protocol=1, oldest_protocol=1)).SerializeToString())
            assert await call.read()
            await call.write(b"\xff\xff\xff")
            code = grpc.StatusCode.OK
            while code is grpc.StatusCode.OK:  # readings that were on their way
                code, _ = await status_of(call.read())
            assert code is grpc.StatusCode.INVALID_ARGUMENT

    go(run())
