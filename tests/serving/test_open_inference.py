"""The Open Inference Protocol, spoken with bare stubs: what KServe's and Triton's clients send, and what they get."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxpd.errors import Internal, InvalidArgument
from serving.gateway import Gateway
from serving.grpc_server import GrpcFront
from serving.open_inference import PARAMETERS, options_of
from serving.proto.open_inference import open_inference_pb2 as pb
from serving.proto.open_inference import open_inference_pb2_grpc

Served = Callable[..., Any]

# Numbers of the published protocol, written down here a second time: who changes one breaks every client.
PUBLISHED = {
    "ServerLiveResponse": {"live": 1},
    "ServerReadyResponse": {"ready": 1},
    "ModelReadyRequest": {"name": 1, "version": 2},
    "ModelReadyResponse": {"ready": 1},
    "ServerMetadataResponse": {"name": 1, "version": 2, "extensions": 3},
    "ModelMetadataRequest": {"name": 1, "version": 2},
    "ModelMetadataResponse": {"name": 1, "versions": 2, "platform": 3, "inputs": 4, "outputs": 5},
    "ModelInferRequest": {
        "model_name": 1,
        "model_version": 2,
        "id": 3,
        "parameters": 4,
        "inputs": 5,
        "outputs": 6,
        "raw_input_contents": 7,
    },
    "ModelInferResponse": {
        "model_name": 1,
        "model_version": 2,
        "id": 3,
        "parameters": 4,
        "outputs": 5,
        "raw_output_contents": 6,
    },
    "InferParameter": {
        "bool_param": 1,
        "int64_param": 2,
        "string_param": 3,
        "double_param": 4,
        "uint64_param": 5,
    },
    "InferTensorContents": {
        "bool_contents": 1,
        "int_contents": 2,
        "int64_contents": 3,
        "uint_contents": 4,
        "uint64_contents": 5,
        "fp32_contents": 6,
        "fp64_contents": 7,
        "bytes_contents": 8,
    },
}
TENSOR = {"name": 1, "datatype": 2, "shape": 3, "parameters": 4, "contents": 5}


def request(*texts: str, raw: bool = False, **parameters: Any) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="bytes", id="r")
    tensor = made.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    elements = [text.encode() for text in texts]
    if raw:
        made.raw_input_contents.append(b"".join(struct.pack("<I", len(e)) + e for e in elements))
    else:
        tensor.contents.bytes_contents.extend(elements)
    for name, value in parameters.items():
        parameter = made.parameters[name]
        match value:
            case bool():
                parameter.bool_param = value
            case int():
                parameter.int64_param = value
            case float():
                parameter.double_param = value
            case str():
                parameter.string_param = value
    return made


def asking(served: Served, work: Callable[[Any, Any], Any], **options: Any) -> None:
    async def run() -> None:
        async with served(**options) as running, grpc.aio.insecure_channel(running.address) as channel:
            await work(open_inference_pb2_grpc.GRPCInferenceServiceStub(channel), running)

    asyncio.run(run())


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert "x-request-id" in dict(caught.value.trailing_metadata())
    return caught.value.code(), caught.value.details() or ""


def test_the_numbers_are_the_published_ones() -> None:
    messages = pb.DESCRIPTOR.message_types_by_name
    for name, fields in PUBLISHED.items():
        assert {field.name: field.number for field in messages[name].fields} == fields, name
    for outer, inner in (("ModelInferRequest", "InferInputTensor"), ("ModelInferResponse", "InferOutputTensor")):
        tensor = messages[outer].nested_types_by_name[inner]
        assert {field.name: field.number for field in tensor.fields} == TENSOR
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "inference.GRPCInferenceService"
    assert {method.name for method in service.methods} == {
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
    }


def test_other_packages_may_bring_the_same_names() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")


@pytest.mark.parametrize("raw", [False, True])
def test_texts_in_texts_out(served: Served, raw: bool) -> None:
    async def work(stub: Any, running: Any) -> None:
        answer = await stub.ModelInfer(request("abc", "é", "xy", raw=raw, max_tokens=4, stop="y", temperature=1))
        assert (answer.model_name, answer.model_version, answer.id) == ("bytes", "1", "r")
        names = ["text_output", "finish_reason", "prompt_tokens", "completion_tokens"]
        assert [tensor.name for tensor in answer.outputs] == names
        assert [tensor.datatype for tensor in answer.outputs] == ["BYTES", "BYTES", "INT32", "INT32"]
        assert all(list(tensor.shape) == [3] for tensor in answer.outputs)
        texts, reasons = (["abca", "éé", "x"], ["length", "length", "stop"])
        if raw:
            assert not any(tensor.HasField("contents") for tensor in answer.outputs)
            assert [unpacked(data) for data in answer.raw_output_contents[:2]] == [texts, reasons]
            assert [struct.unpack("<3i", data) for data in answer.raw_output_contents[2:]] == [(3, 2, 2), (4, 4, 2)]
        else:
            assert not answer.raw_output_contents
            contents = [tensor.contents for tensor in answer.outputs]
            assert [[e.decode() for e in c.bytes_contents] for c in contents[:2]] == [texts, reasons]
            assert [list(c.int_contents) for c in contents[2:]] == [[3, 2, 2], [4, 4, 2]]
        assert [asked.request_id for asked in running.engine.submitted] == ["r", "r-1", "r-2"]
        assert not running.gateway._live

    def unpacked(data: bytes) -> list[str]:
        found = []
        while data:
            (size,), data = struct.unpack("<I", data[:4]), data[4:]
            found.append(data[:size].decode())
            data = data[size:]
        return found

    asking(served, work)


def test_all_texts_run_at_the_same_time(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        call = stub.ModelInfer(request(*"abcdefgh", max_tokens=4000))
        for _ in range(500):
            if running.engine.running == 8:
                break
            await asyncio.sleep(0.01)
        assert running.engine.running == 8
        call.cancel()
        for _ in range(500):
            if not running.gateway._live:
                break
            await asyncio.sleep(0.01)
        assert not running.gateway._live and running.engine.running == 0

    asking(served, work, step_s=0.002)


def test_one_text_that_fails_ends_the_others(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        code, details = await refused(stub.ModelInfer(request("abc", "!x", "abc", max_tokens=4000)))
        assert code is grpc.StatusCode.INTERNAL and "the KV hand-off failed" in details
        for _ in range(500):
            if not running.gateway._live:
                break
            await asyncio.sleep(0.01)
        assert not running.gateway._live and running.engine.running == 0

    asking(served, work, step_s=0.002, fail_with=Internal("the KV hand-off failed"))


def test_an_id_that_is_in_use_or_no_id_for_us_comes_back_all_the_same(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        asked = request("abc", max_tokens=20)
        answers = await asyncio.gather(*(stub.ModelInfer(asked) for _ in range(4)))
        assert [answer.id for answer in answers] == ["r"] * 4
        assert len({made.request_id for made in running.engine.submitted}) == 4
        asked.id = "not visible, and long " * 20
        assert (await stub.ModelInfer(asked)).id == asked.id
        asked.id = ""
        assert (await stub.ModelInfer(asked)).id == ""

    asking(served, work, step_s=0.002)


def test_only_the_outputs_that_were_asked_for(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        asked = request("abc", max_tokens=2)
        asked.outputs.add(name="completion_tokens")
        asked.outputs.add(name="text_output")
        answer = await stub.ModelInfer(asked)
        assert [tensor.name for tensor in answer.outputs] == ["completion_tokens", "text_output"]
        asked.outputs.add(name="logits")
        code, details = await refused(stub.ModelInfer(asked))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "asks for 'logits'; there are text_output" in details

    asking(served, work)


def test_a_shape_of_two_sides_comes_back(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        asked = request("abc", "xyz", max_tokens=1)
        asked.inputs[0].shape[:] = [2, 1]
        answer = await stub.ModelInfer(asked)
        assert [list(tensor.shape) for tensor in answer.outputs] == [[2, 1]] * 4

    asking(served, work)


def broken(change: Callable[[pb.ModelInferRequest], Any], **more: Any) -> pb.ModelInferRequest:
    made = request("abc", **more)
    change(made)
    return made


BAD: dict[str, pb.ModelInferRequest] = {
    "inputs must be one tensor, text_input; got none": broken(lambda r: r.ClearField("inputs")),
    "got 'prompt'": broken(lambda r: setattr(r.inputs[0], "name", "prompt")),
    "got 'text_input', 'stream'": broken(lambda r: r.inputs.add(name="stream")),
    "text_input is 'FP32'; send it as BYTES": broken(lambda r: setattr(r.inputs[0], "datatype", "FP32")),
    "has the shape [2] and 1 elements; give the shape [1]": broken(lambda r: r.inputs[0].shape.__setitem__(0, 2)),
    "has the shape [-1]": broken(lambda r: r.inputs[0].shape.__setitem__(0, -1)),
    "has the shape [1, 1, 1, 1, 1, 1, 1, 1]": broken(lambda r: r.inputs[0].shape.extend([1] * 100_000)),
    "holds 0 texts, it must be 1 to 128": request(),
    "holds 129 texts": request(*["a"] * 129),
    "not UTF-8, at 1": broken(lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b"a\xff")),
    "element 0 of 5 bytes": broken(lambda r: r.raw_input_contents.__setitem__(0, b"\x02\x00\x00\x00a"), raw=True),
    "element 0 of 2 bytes": broken(lambda r: r.raw_input_contents.__setitem__(0, b"\x02\x00"), raw=True),
    "raw_input_contents holds 2 tensors": broken(lambda r: r.raw_input_contents.append(b""), raw=True),
    "and either there or in contents": broken(lambda r: r.inputs[0].contents.SetInParent(), raw=True),
    "text_input has the parameter 'binary'": broken(lambda r: r.inputs[0].parameters["binary"].SetInParent()),
    "parameters holds 'n', which is not known; known are max_tokens": request("a", n=2),
    "max_tokens must be a whole number, got float": request("a", max_tokens=1.5),
    "max_tokens must be a whole number, got bool": request("a", max_tokens=True),
    "seed must be a whole number": broken(lambda r: r.parameters["seed"].SetInParent()),
    "temperature must be a number, got 'warm'": request("a", temperature="warm"),
    "temperature must be a number, got 'True'": request("a", temperature=True),
    "ignore_eos must be true or false, got int": request("a", ignore_eos=1),
    "stop_token_ids must be a JSON array of token ids": request("a", stop_token_ids="1, 2"),
    "parameters asks for both": request("a", json_object=True, regex="a"),
    "max_tokens=0 must be at least 1": request("a", max_tokens=0),
    "temperature=nan must be between": request("a", temperature=float("nan")),
    "prompt text is empty": request(""),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_requests(served: Served, said: str) -> None:
    async def work(stub: Any, running: Any) -> None:
        code, details = await refused(stub.ModelInfer(BAD[said]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and said in details, details
        assert not running.engine.submitted and not running.gateway._live

    asking(served, work)


def test_a_field_of_a_newer_protocol(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        asked = request("a")
        asked.inputs[0].MergeFromString(bytes([15 << 3, 1]))
        code, details = await refused(stub.ModelInfer(asked))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "inputs[0] holds field number 15" in details

    asking(served, work)


def test_other_models(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        asked = request("abc")
        for name, version in (("other", ""), ("", ""), ("bytes", "2")):
            asked.model_name, asked.model_version = name, version
            code, details = await refused(stub.ModelInfer(asked))
            assert code is grpc.StatusCode.NOT_FOUND and "this server has 'bytes', version '1'" in details
            code, _ = await refused(stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version)))
            assert code is grpc.StatusCode.NOT_FOUND
            assert not (await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))).ready

    asking(served, work)


def test_metadata_and_readiness(served: Served) -> None:
    async def work(stub: Any, running: Any) -> None:
        server = await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert server.name == "jaxpd" and server.version
        model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="bytes", version="1"))
        assert model.name == "bytes" and list(model.versions) == ["1"]
        assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("text_input", "BYTES", [-1])]
        assert [t.name for t in model.outputs][0] == "text_output" and len(model.outputs) == 4
        running.gateway.close_doors()
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="bytes"))).ready
        code, _ = await refused(stub.ModelInfer(request("a")))
        assert code is grpc.StatusCode.UNAVAILABLE

    asking(served, work)


def test_while_the_model_loads() -> None:
    async def run() -> None:
        front = GrpcFront(Gateway())
        address = f"127.0.0.1:{front.bind('127.0.0.1', 0)}"
        await front.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub, health = (
                open_inference_pb2_grpc.GRPCInferenceServiceStub(channel),
                health_pb2_grpc.HealthStub(channel),
            )
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
            assert not (await stub.ModelReady(pb.ModelReadyRequest(name="bytes"))).ready
            code, details = await refused(stub.ModelInfer(request("a")))
            assert code is grpc.StatusCode.UNAVAILABLE and "starting" in details
            asked = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await front.set_ready(True)
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        await front.stop(0)

    asyncio.run(run())


def test_parameters_are_the_options_of_the_same_names() -> None:
    asked = request(
        "a",
        max_tokens=5,
        min_tokens=1,
        top_k=7,
        seed=2**32 - 1,
        priority=-3,
        temperature=1,
        top_p="0.5",
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2,
        ignore_eos=True,
        stop='["a", "]"]',
        stop_token_ids="[1, 2]",
        json_schema="{}",
        cache_salt="s",
    )
    options = options_of(asked.parameters)
    assert options.pop("structured").text == "{}"
    assert options == {
        "max_tokens": 5,
        "min_tokens": 1,
        "top_k": 7,
        "seed": 2**32 - 1,
        "priority": -3,
        "temperature": 1.0,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "ignore_eos": True,
        "stop": ("a", "]"),
        "stop_token_ids": (1, 2),
        "cache_salt": "s",
    }
    assert set(asked.parameters) | {"regex", "json_object"} == set(PARAMETERS)
    assert options_of(request("a", stop="[a").parameters) == {"stop": ("[a",)}
    assert options_of(request("a", json_object=False).parameters) == {}
    unsigned = pb.ModelInferRequest()
    unsigned.parameters["priority"].uint64_param = 3
    assert options_of(unsigned.parameters) == {"priority": 3}
    with pytest.raises(InvalidArgument, match="parameters asks for both json_"):
        options_of(request("a", json_schema="{}", json_object=True).parameters)
