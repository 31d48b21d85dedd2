"""The gRPC front over a scripted engine: statuses, cancellation, health, reflection, ports, keepalive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxpd.errors import FailedPrecondition, Internal, InvalidArgument, JaxpdError
from serving import wire
from serving.gateway import Gateway
from serving.grpc_server import MAX_MESSAGE_BYTES, SERVICE, GrpcFront
from serving.proto.jaxpd.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from serving.proto.jaxpd.v1 import inference_pb2 as pb

Served = Callable[..., Any]
STOPPING = pb.StoppingOptions


def stub(address: str, *options: tuple[str, Any]) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(address, options=options)
    return channel, inference_pb2_grpc.InferenceStub(channel)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def test_unary_and_stream(served: Served) -> None:
    async def run() -> None:
        async with served() as running:
            channel, inference = stub(running.address)
            async with channel:
                request = pb.GenerateRequest(text="abc", request_id="r1", stopping=STOPPING(max_tokens=4))
                answer = await inference.Generate(request)
                assert answer.info.request_id == "r1" and answer.info.prompt_tokens == 3
                assert answer.info.sampling.HasField("seed") and answer.info.stopping.max_tokens == 4
                (sequence,) = answer.sequences
                assert list(sequence.token_ids) == [97, 98, 99, 97] and sequence.text == "abca"
                assert sequence.finish.reason == pb.FINISH_REASON_LENGTH
                assert sequence.finish.usage == pb.Usage(prompt_tokens=3, completion_tokens=4)
                timings = sequence.finish.timings
                assert timings.HasField("queue_s") and timings.queue_s == 0 and not timings.HasField("transfer_s")
                request.response.prompt_token_ids = True
                kinds, ids = [], []
                async for message in inference.GenerateStream(request):
                    kinds.append(message.WhichOneof("event"))
                    ids += message.tokens.token_ids
                    if message.HasField("info"):
                        assert list(message.info.prompt_token_ids) == [97, 98, 99]
                assert ids == [97, 98, 99, 97]
                assert kinds[0] == "info" and kinds[-1] == "finish" and set(kinds[1:-1]) == {"tokens"}

    asyncio.run(run())


def test_bad_requests_beside_a_good_one(served: Served) -> None:
    bad = {
        "max_tokens=0": pb.GenerateRequest(text="a", stopping=STOPPING(max_tokens=0)),
        "temperature=-1.0": pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(temperature=-1)),
        "prompt text is empty": pb.GenerateRequest(text=""),
        "got none": pb.GenerateRequest(),
        "holds 999": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 999])),
        "request_id='": pb.GenerateRequest(text="a", request_id=""),
        "above the limit of 4096": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 5000)),
        "role is missing": pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])),
    }

    async def run() -> None:
        async with served(step_s=0.005) as running:
            channel, inference = stub(running.address)
            async with channel:
                good = asyncio.ensure_future(
                    inference.Generate(pb.GenerateRequest(text="good", stopping=STOPPING(max_tokens=40)))
                )
                for text, request in bad.items():
                    for error in (
                        await refused(inference.Generate(request)),
                        await refused(inference.GenerateStream(request).read()),
                    ):
                        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, text
                        assert text in (error.details() or ""), error.details()
                        assert "x-request-id" in dict(error.trailing_metadata() or ())
                assert (await good).sequences[0].text == "good" * 10
                assert len(running.engine.submitted) == 1

    asyncio.run(run())


def test_bytes_that_do_not_parse(served: Served) -> None:
    async def run() -> None:
        async with served() as running, grpc.aio.insecure_channel(running.address) as channel:
            for method in ("Inference/Generate", "Control/Abort"):
                call = channel.unary_unary(f"/jaxpd.v1.{method}", request_serializer=lambda data: data)
                error = await refused(call(b"\xff\xff\xff"))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "does not parse" in (error.details() or "")
            unknown = await refused(channel.unary_unary("/jaxpd.v1.Inference/Guess")(b""))
            assert unknown.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(run())


def test_full_queue_says_when_to_come_back(served: Served) -> None:
    async def run() -> None:
        async with served(max_queued=0) as running:
            channel, inference = stub(running.address)
            async with channel:
                error = await refused(inference.Generate(pb.GenerateRequest(text="a")))
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert dict(error.trailing_metadata() or ())["retry-after-ms"] == "2500"

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("secret /root/path"), Internal("the KV hand-off failed")])
def test_bugs_are_logged_and_not_shown(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def run() -> None:
        async with served() as running:
            monkeypatch.setattr(running.engine, "submit", lambda request: (_ for _ in ()).throw(error))
            channel, inference = stub(running.address)
            async with channel:
                for call in (
                    inference.Generate(pb.GenerateRequest(text="a", request_id="r7")),
                    inference.GenerateStream(pb.GenerateRequest(text="a", request_id="r7")).read(),
                ):
                    shown = await refused(call)
                    assert shown.code() is grpc.StatusCode.INTERNAL
                    details = shown.details() or ""
                    assert "r7" in details and "secret" not in details and "Traceback" not in details
                    assert ("hand-off" in details) == isinstance(error, JaxpdError)
                    assert dict(shown.trailing_metadata() or ())["x-request-id"] == "r7"

    with caplog.at_level(logging.ERROR, logger="serving"):
        asyncio.run(run())
    logged = [record for record in caplog.records if record.name == "serving.interceptors"]
    assert len(logged) == 2 and all("r7" in r.getMessage() and r.exc_info for r in logged)


def test_an_answer_that_fails_half_way_ends_with_its_status(served: Served) -> None:
    async def run() -> None:
        async with served(fail_with=Internal("the KV hand-off failed")) as running:
            channel, inference = stub(running.address)
            async with channel:
                got = []
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for message in inference.GenerateStream(pb.GenerateRequest(text="!x")):
                        got.append(message)
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert got[-1].finish.reason == pb.FINISH_REASON_ERROR
                assert [i for m in got for i in m.tokens.token_ids] == list(b"!x")
                unary = await refused(inference.Generate(pb.GenerateRequest(text="!x")))
                assert unary.code() is grpc.StatusCode.INTERNAL and "hand-off failed" in (unary.details() or "")

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "leave"])
def test_a_client_that_goes_ends_its_request_at_once(served: Served, kind: str, how: str) -> None:
    async def run() -> None:
        async with served(step_s=0.002) as running:
            channel, inference = stub(running.address)
            request = pb.GenerateRequest(text="abc", stopping=STOPPING(max_tokens=4000))
            method = inference.Generate if kind == "unary" else inference.GenerateStream
            call = method(request, timeout=0.2 if how == "deadline" else None)
            if kind == "stream":
                await call.read()
            await until(lambda: running.engine.running == 1)
            if how == "deadline":
                error = await refused(call if kind == "unary" else drain(call))
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            elif how == "cancel":
                call.cancel()
            else:
                await channel.close()
            await until(lambda: running.engine.running == 0)
            assert len(running.engine.aborts) == 1
            assert await running.gateway.idle(1)
            await channel.close()

    async def drain(call: Any) -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    asyncio.run(run())


def test_cancel_while_the_reader_is_stuck(served: Served) -> None:
    """The server waits for room in the connection, with a message half sent, when the client goes."""

    async def run() -> None:
        async with served(max_model_len=4_000_000) as running:
            channel, inference = stub(running.address)
            ids = pb.TokenIds(ids=[250] * 300_000)  # sent back in the first message, more than a window holds
            options = pb.ResponseOptions(prompt_token_ids=True)
            call = inference.GenerateStream(
                pb.GenerateRequest(token_ids=ids, response=options, stopping=STOPPING(max_tokens=3_000_000))
            )
            await until(lambda: running.engine.running == 1)
            await asyncio.sleep(0.1)
            assert running.gateway._live and not await running.gateway.idle(0)
            call.cancel()
            await until(lambda: running.engine.running == 0)
            assert await running.gateway.idle(1)
            await channel.close()

    asyncio.run(run())


def test_control(served: Served) -> None:
    async def run() -> None:
        async with served(step_s=0.002) as running, grpc.aio.insecure_channel(running.address) as channel:
            control, inference = control_pb2_grpc.ControlStub(channel), inference_pb2_grpc.InferenceStub(channel)
            call = inference.Generate(
                pb.GenerateRequest(text="abc", request_id="a", stopping=STOPPING(max_tokens=4000))
            )
            await until(lambda: running.engine.running == 1)
            info = await control.GetServerInfo(control_pb2.GetServerInfoRequest())
            assert info.state == control_pb2.SERVER_STATE_READY and info.version
            assert (info.queued_requests, info.running_requests) == (1, 1)
            assert [(p.role, p.mesh, list(p.free_pages), list(p.total_pages)) for p in info.pools] == [
                ("prefill", "2x1", [7], [9]),
                ("decode", "1x2", [7, 8], [9, 9]),
            ]
            model = await control.GetModelInfo(control_pb2.GetModelInfoRequest())
            assert (model.name, model.vocab_size, model.max_model_len) == ("bytes", 257, 4096)
            assert list(model.eos_token_ids) == [256] and model.default_max_tokens == 128
            assert model.has_tokenizer and model.has_chat_template
            assert (await control.Abort(control_pb2.AbortRequest(request_id="a"))).aborted
            answer = await call
            assert answer.sequences[0].finish.reason == pb.FINISH_REASON_ABORT
            assert not (await control.Abort(control_pb2.AbortRequest(request_id="a"))).aborted
            missing = await refused(control.Abort(control_pb2.AbortRequest()))
            assert missing.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_while_starting(served: Served) -> None:
    async def run() -> None:
        front = GrpcFront(Gateway())
        address = f"127.0.0.1:{front.bind('127.0.0.1', 0)}"
        await front.start()
        async with grpc.aio.insecure_channel(address) as channel:
            control = control_pb2_grpc.ControlStub(channel)
            info = await control.GetServerInfo(control_pb2.GetServerInfoRequest())
            assert info.state == control_pb2.SERVER_STATE_STARTING and not info.pools
            inference = inference_pb2_grpc.InferenceStub(channel)
            for call in (
                inference.Generate(pb.GenerateRequest(text="a")),
                control.GetModelInfo(control_pb2.GetModelInfoRequest()),
            ):
                error = await refused(call)
                assert error.code() is grpc.StatusCode.UNAVAILABLE and "starting" in (error.details() or "")
        await front.stop(0)

    asyncio.run(run())


def test_health(served: Served) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

    async def run() -> None:
        front = GrpcFront(Gateway())
        address = f"127.0.0.1:{front.bind('127.0.0.1', 0)}"
        await front.start()
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def status(service: str) -> int:
                return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

            watches = [health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(2)]
            assert [(await watch.read()).status for watch in watches] == [not_serving, not_serving]
            assert await status("") == serving and await status(SERVICE) == not_serving
            await front.set_ready(True)
            assert await status("") == serving and await status(SERVICE) == serving
            watches[0].cancel()
            assert (await asyncio.wait_for(watches[1].read(), 5)).status == serving
            await front.set_ready(False)
            last = (await asyncio.wait_for(watches[1].read(), 5)).status
            assert last == not_serving, "a watcher that left takes no other with it"
            assert await status("") == serving, "draining is no reason to be killed"
            unknown = await refused(health.Check(health_pb2.HealthCheckRequest(service="nonsense")))
            assert unknown.code() is grpc.StatusCode.NOT_FOUND
            watch = health.Watch(health_pb2.HealthCheckRequest(service="nonsense"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            began = time.monotonic()
            await front.stop(5)
            assert time.monotonic() - began < 1, "watchers do not hold up the end"

    asyncio.run(run())


def test_reflection(served: Served) -> None:
    async def run() -> None:
        async with served() as running, grpc.aio.insecure_channel(running.address) as channel:
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="jaxpd.v1.Inference"),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Service"),
            ]
            listed, described, open_inference, none = [
                answer async for answer in reflect.ServerReflectionInfo(iter(asked))
            ]
            assert open_inference.file_descriptor_response.file_descriptor_proto
            assert none.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
            assert {s.name for s in listed.list_services_response.service} == {
                "jaxpd.v1.Inference",
                "jaxpd.v1.Control",
                "inference.GRPCInferenceService",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            assert described.file_descriptor_response.file_descriptor_proto

    asyncio.run(run())


def test_a_quiet_call_survives_pings(served: Served) -> None:
    """Python clients ping as often as they are told to; an untouched server cuts this one off after about 4 s."""

    async def run() -> None:
        async with served(step_s=5.5) as running:
            channel, inference = stub(
                running.address,
                ("grpc.keepalive_time_ms", 1000),
                ("grpc.keepalive_timeout_ms", 1000),
                ("grpc.http2.max_pings_without_data", 0),
            )
            async with channel:
                answer = await inference.Generate(pb.GenerateRequest(text="ab", stopping=STOPPING(max_tokens=2)))
                assert answer.sequences[0].text == "ab"

    asyncio.run(run())


def test_message_size(served: Served) -> None:
    async def run() -> None:
        async with served(max_model_len=10_000_000) as running:
            channel, inference = stub(
                running.address, ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)
            )
            async with channel:
                above_default = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=[250] * 2_500_000),
                    stopping=STOPPING(max_tokens=1),
                    response=pb.ResponseOptions(prompt_token_ids=True),
                )
                assert 4 * 2**20 < above_default.ByteSize() < MAX_MESSAGE_BYTES
                assert len((await inference.Generate(above_default)).info.prompt_token_ids) == 2_500_000
                too_large = pb.GenerateRequest(text="a" * MAX_MESSAGE_BYTES)
                assert (await refused(inference.Generate(too_large))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())


def test_a_port_in_use_is_refused_and_not_shared(served: Served) -> None:
    async def run() -> None:
        async with served() as running:
            port = int(running.address.rpartition(":")[2])
            for host in ("127.0.0.1", "localhost"):
                with pytest.raises(FailedPrecondition, match=rf"--grpc-port {port} on --host {host} is in use"):
                    GrpcFront(Gateway()).bind(host, port)

    asyncio.run(run())


def test_a_foreign_socket_in_the_way() -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(FailedPrecondition, match=rf"--grpc-port {port} .* is in use"):
                GrpcFront(Gateway()).bind("127.0.0.1", port)

    asyncio.run(run())


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_another_machine(host: str) -> None:
    async def run() -> None:
        with pytest.raises(FailedPrecondition, match=rf"--host {host} is no address of this machine"):
            GrpcFront(Gateway()).bind(host, 0)

    asyncio.run(run())


def test_a_host_without_address() -> None:
    async def run() -> None:
        with pytest.raises(FailedPrecondition, match="--host no.such.host.invalid has no address"):
            GrpcFront(Gateway()).bind("no.such.host.invalid", 0)

    asyncio.run(run())


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be(port: int) -> None:
    async def run() -> None:
        with pytest.raises(InvalidArgument, match=f"--grpc-port {port} must be between 0"):
            GrpcFront(Gateway()).bind("127.0.0.1", port)

    asyncio.run(run())


def test_a_name_takes_its_own_addresses_only() -> None:
    async def run() -> None:
        front = GrpcFront(Gateway())
        port = front.bind("localhost", 0)
        await front.start()
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.connect(("203.0.113.7", 9))  # sends nothing: finds this machine's outer address
            outer = other.getsockname()[0]
            with pytest.raises(OSError):
                socket.create_connection((outer, port), timeout=1).close()
        await front.stop(0)

    asyncio.run(run())


def test_unset_is_not_zero_on_the_wire() -> None:
    unset = wire.request_from_proto(pb.GenerateRequest(text="a"))
    zero = wire.request_from_proto(
        pb.GenerateRequest(
            text="a",
            sampling=pb.SamplingOptions(temperature=0, seed=0),
            stopping=STOPPING(max_tokens=0, ignore_eos=False),
            response=pb.ResponseOptions(text=False, token_ids=False),
        )
    )
    assert (unset.temperature, unset.seed, unset.max_tokens, unset.ignore_eos, unset.want_text) == (None,) * 5
    assert (zero.temperature, zero.seed, zero.max_tokens, zero.ignore_eos, zero.want_text) == (0, 0, 0, False, False)
