"""Every gRPC call on its way in: API keys, request ids, where it came from, deadlines; and that texts fit the wire."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxpd.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unauthenticated
from serving.callers import Caller, Keys
from serving.client import AsyncClient
from serving.messages import GenerateRequest
from serving.observer import Observer, Origin
from serving.proto.jaxpd.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from serving.proto.jaxpd.v1 import inference_pb2 as pb
from serving.proto.open_inference import open_inference_pb2 as oip
from serving.proto.open_inference import open_inference_pb2_grpc

Served = Callable[..., Any]
KEYS = Keys({"sesame": Caller(name="ali", max_requests=2), "abracadabra": Caller(name="merlin")})
TEXT = pb.GenerateRequest(text="abc", stopping=pb.StoppingOptions(max_tokens=4))
LONG = pb.GenerateRequest(text="abc", stopping=pb.StoppingOptions(max_tokens=4000))


class Seen(Observer):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.origins: dict[str, Origin] = {}
        self.refusals: list[Exception] = []

    def arrived(self, request_id: str, origin: Origin) -> None:
        self.origins[request_id] = origin

    def refused(self, request_id: str, origin: Origin, error: Exception) -> None:
        self.refusals.append(error)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")


def with_key(key: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {key}"),)}


def test_without_a_valid_key_nothing_is_answered(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with served(keys=KEYS) as running, grpc.aio.insecure_channel(running.address) as channel:
            inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
            open_inference = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            calls: list[Callable[..., Any]] = [
                lambda **more: inference.Generate(TEXT, **more),
                lambda **more: inference.GenerateStream(TEXT, **more).read(),
                lambda **more: control.GetServerInfo(control_pb2.GetServerInfoRequest(), **more),
                lambda **more: control.GetModelInfo(control_pb2.GetModelInfoRequest(), **more),
                lambda **more: control.Abort(control_pb2.AbortRequest(request_id="x"), **more),
                lambda **more: open_inference.ModelInfer(oip.ModelInferRequest(), **more),
                lambda **more: open_inference.ModelMetadata(oip.ModelMetadataRequest(), **more),
                lambda **more: open_inference.ServerMetadata(oip.ServerMetadataRequest(), **more),
                lambda **more: channel.unary_unary("/jaxpd.v1.Control/Abort")(b"\xff\xff", **more),
            ]
            wrong: list[dict[str, Any]] = [
                {},
                with_key("open-barley"),
                with_key("sesam"),
                with_key("sesamee"),
                with_key(""),
                {"metadata": (("authorization", "sesame"),)},
                {"metadata": (("authorization", "Basic sesame"),)},
                {"metadata": (("authorization", "Bearer sesame"), ("authorization", "Bearer open-barley"))},
            ]
            for call in calls:
                for more in wrong:
                    error = await refused(call(**more))
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED, error
                    assert "API key" in (error.details() or "") and "x-request-id" in dict(error.trailing_metadata())
                    assert not any(key in str(error) for key in ("open-barley", "sesam"))
            assert (await inference.Generate(TEXT, **with_key("sesame"))).sequences[0].text == "abca"
            assert (await control.GetModelInfo(control_pb2.GetModelInfoRequest(), **with_key("sesame"))).name
            assert (await open_inference.ServerMetadata(oip.ServerMetadataRequest(), **with_key("sesame"))).name
            assert len(running.engine.submitted) == 1
            # not for everybody, but for probes
            assert (await open_inference.ServerLive(oip.ServerLiveRequest())).live
            assert (await open_inference.ServerReady(oip.ServerReadyRequest())).ready
            assert (await open_inference.ModelReady(oip.ModelReadyRequest(name="bytes"))).ready
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "jaxpd.v1.Inference", "inference.GRPCInferenceService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            assert [answer async for answer in reflect.ServerReflectionInfo(asked)]

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    assert "sesam" not in caplog.text and "open-barley" not in caplog.text


def test_clients_with_and_without_a_key(served: Served) -> None:
    async def run() -> None:
        async with served(keys=KEYS) as running:
            async with AsyncClient(running.address, api_key="abracadabra") as client:
                assert (await client.generate(GenerateRequest(text="abc", max_tokens=1))).text == "a"
                assert (await client.model_info()).name == "bytes" and (await client.server_info()).version
            async with AsyncClient(running.address) as client:
                with pytest.raises(Unauthenticated, match="an API key is needed"):
                    await client.generate(GenerateRequest(text="abc"))
            async with AsyncClient(running.address, api_key="open-barley") as client:
                with pytest.raises(Unauthenticated, match="not one of this server's") as caught:
                    await client.model_info()
                assert "open-barley" not in caught.value.message

    asyncio.run(run())


def test_a_key_ends_its_own_requests_only(served: Served) -> None:
    async def run() -> None:
        async with served(keys=KEYS, step_s=0.002) as running:
            async with (
                AsyncClient(running.address, api_key="sesame") as ali,
                AsyncClient(running.address, api_key="abracadabra") as merlin,
            ):
                asked = GenerateRequest(text="abc", max_tokens=4000, request_id="mine")
                answer = asyncio.ensure_future(ali.generate(asked))
                await until(lambda: running.engine.running == 1)
                assert not await merlin.abort("mine") and running.engine.running == 1
                with pytest.raises(InvalidArgument, match="in use"):
                    await merlin.generate(asked)
                assert await ali.abort("mine")
                assert (await answer).finish_reason == "abort"

    asyncio.run(run())


def test_limits_of_a_key(served: Served) -> None:
    async def run() -> None:
        async with served(keys=KEYS, step_s=0.002) as running, AsyncClient(running.address, api_key="sesame") as client:
            asked = GenerateRequest(text="abc", max_tokens=4000)
            answers = [asyncio.ensure_future(client.generate(asked)) for _ in range(2)]
            await until(lambda: running.engine.running == 2)
            with pytest.raises(ResourceExhausted, match="2 requests of key 'ali' are in flight") as caught:
                await client.generate(asked)
            assert caught.value.retry_after_s == 1.0
            for answer in answers:
                answer.cancel()
            await until(lambda: running.engine.running == 0)
            await until(lambda: not running.gateway._live)
            assert (await client.generate(GenerateRequest(text="abc", max_tokens=1))).text == "a"

    asyncio.run(run())


def test_where_a_request_comes_from(served: Served) -> None:
    seen = Seen()

    async def run() -> None:
        async with served(keys=KEYS, observers=(seen,)) as running:
            async with grpc.aio.insecure_channel(running.address) as channel:
                metadata = (
                    ("authorization", "bearer sesame"),
                    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
                    ("tracestate", "a=b"),
                    ("cookie", "private"),
                )
                inference = inference_pb2_grpc.InferenceStub(channel)
                request = pb.GenerateRequest(text="abc", request_id="r1", stopping=TEXT.stopping)
                await inference.Generate(request, metadata=metadata)
                request.request_id = "r2"
                began_s = time.monotonic()
                [m async for m in inference.GenerateStream(request, metadata=metadata[:1], timeout=30)]
                deadline_s = seen.origins["r2"].deadline_s
                assert deadline_s is not None and 29 < deadline_s - began_s < 30.5
                open_inference = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                infer = oip.ModelInferRequest(model_name="bytes", id="r3")
                infer.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
                await open_inference.ModelInfer(infer, metadata=metadata)

    asyncio.run(run())
    ali = Caller(name="ali", max_requests=2)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    assert seen.origins["r1"] == Origin(front="grpc", operation="generate", caller=ali, headers=headers)
    assert seen.origins["r2"].headers == {} and seen.origins["r2"].caller == ali
    assert seen.origins["r3"].operation == "infer" and seen.origins["r3"].headers == headers


def test_which_request_id_counts(served: Served) -> None:
    async def run() -> None:
        async with served(step_s=0.002) as running, grpc.aio.insecure_channel(running.address) as channel:
            inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)

            async def ids(request: pb.GenerateRequest, offered: str | None) -> tuple[str, str]:
                """In the answer and in the trailers."""
                call = inference.Generate(request, metadata=(("x-request-id", offered),) if offered else None)
                answer = await call
                return answer.info.request_id, str(dict(await call.trailing_metadata())["x-request-id"])

            assert await ids(pb.GenerateRequest(text="a", request_id="own"), "theirs") == ("own", "own")
            assert await ids(pb.GenerateRequest(text="a"), "theirs") == ("theirs", "theirs")
            for unusable in (None, "not visible", "x" * 129):
                made, trailer = await ids(pb.GenerateRequest(text="a"), unusable)
                assert made == trailer and len(made) == 16
            running_call = inference.GenerateStream(LONG, metadata=(("x-request-id", "busy"),))
            assert (await running_call.read()).info.request_id == "busy"
            made, trailer = await ids(pb.GenerateRequest(text="a"), "busy")
            assert made == trailer != "busy", "the metadata asks, and does not insist"
            assert (await control.Abort(control_pb2.AbortRequest(request_id="busy"))).aborted
            while await running_call.read() is not grpc.aio.EOF:
                pass
            assert dict(await running_call.trailing_metadata())["x-request-id"] == "busy"
            info = control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=(("x-request-id", "c"),))
            await info
            assert dict(await info.trailing_metadata())["x-request-id"] == "c"
            error = await refused(inference.Generate(pb.GenerateRequest(), metadata=(("x-request-id", "bad"),)))
            assert dict(error.trailing_metadata())["x-request-id"] == "bad"

    asyncio.run(run())


def test_a_deadline_that_the_queue_does_not_allow(served: Served) -> None:
    """Ten wait, and the latest got their first tokens 100 ms apart."""
    seen = Seen()

    async def run() -> None:
        async with served(observers=(seen,)) as running, AsyncClient(running.address, timeout_s=0.3) as client:
            pace, now_s = running.gateway._pace, time.monotonic()
            pace._waiting.update(f"w{i}" for i in range(10))
            pace._firsts.extend(now_s - 1 + i / 10 for i in range(11))
            with pytest.raises(DeadlineExceeded, match=r"in 0.3 s and 10 requests wait, about 1.0 s of work"):
                await client.generate(GenerateRequest(text="abc", max_tokens=1))
            assert [type(error) for error in seen.refusals] == [DeadlineExceeded] and not running.engine.submitted
            assert (await client.generate(GenerateRequest(text="abc", max_tokens=1, priority=-1))).text == "a"
            async with AsyncClient(running.address, timeout_s=10) as patient:
                assert (await patient.generate(GenerateRequest(text="abc", max_tokens=1))).text == "a"

    asyncio.run(run())


def test_a_text_of_any_length_and_alphabet_arrives(served: Served) -> None:
    async def run() -> None:
        async with served() as running, grpc.aio.insecure_channel(running.address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            for character in ("x", "%", "\n", "é", "語", "😀"):
                sampling = pb.SamplingOptions(regex="(" + character * 3000)
                request = pb.GenerateRequest(text="a", sampling=sampling, stopping=pb.StoppingOptions(stop=[""]))
                error = await refused(inference.Generate(request))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
                open_inference = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                infer = oip.ModelInferRequest(model_name="bytes")
                infer.parameters[character * 3000].int64_param = 1
                error = await refused(open_inference.ModelInfer(infer))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error

    asyncio.run(run())
