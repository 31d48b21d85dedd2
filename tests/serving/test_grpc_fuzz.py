"""Random and mutated messages to every gRPC method: each is answered with a result or with a status that says what is
wrong; nothing is logged as a bug, and afterwards the server is as it was.

    a seed -> one of: a valid message; random bytes; a valid message with bytes changed; one with fields changed; random
              values in random fields -> the call, with now and then odd metadata, a short deadline or a cancel
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from serving.proto.jaxpd.v1 import control_pb2
from serving.proto.jaxpd.v1 import inference_pb2 as pb
from serving.proto.open_inference import open_inference_pb2 as oip

pytestmark = pytest.mark.heavy  # a thousand calls

Served = Callable[..., Any]
Random = random.Random
AT_ONCE = 16
SEED = 20261130
FINE = {
    grpc.StatusCode[name]
    for name in (
        "OK",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "UNIMPLEMENTED",
    )
}
STRINGS = (
    "",
    "a",
    "abc def",
    "\x00",
    "\n",
    "%",
    "é語😀",
    "\u202eabc\ufeff",
    "</s>",
    "bytes",
    "text_input",
    "BYTES",
    "[1, 2]",
    '["a"]',
    "{}",
    "{",
    '{"type": "object"}',
    '{"a": 1e999, "b": "\\ud800"}',
    "[" * 2000,
    "(a|b)*",
    "(",
    'start: "a"',
    "start: start",
    "user",
    "{{ x }}",
    "x" * 300,
    "😀" * 2000,
)
INTEGERS = (0, 1, 2, 3, -1, 7, 20, 64, 65, 128, 255, 256, 257, 1000, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.0, -1.0, 100.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)
OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "json_schema", "ignore_eos", "guess")


def infer() -> oip.ModelInferRequest:
    message = oip.ModelInferRequest(model_name="bytes")
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[2])
    tensor.contents.bytes_contents.extend([b"abc", b"xy"])
    message.parameters["max_tokens"].int64_param = 3
    return message


def infer_raw() -> oip.ModelInferRequest:
    message = oip.ModelInferRequest(model_name="bytes", raw_input_contents=[struct.pack("<I", 3) + b"abc"])
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    return message


def full() -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        text="abcdef",
        priority=1,
        cache_salt="s",
        sampling=pb.SamplingOptions(
            temperature=1, seed=3, n=2, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.1, json_schema="{}"
        ),
        stopping=pb.StoppingOptions(max_tokens=9, stop=["x", "yz"], stop_token_ids=[7], ignore_eos=True, min_tokens=2),
        response=pb.ResponseOptions(
            text=True, token_ids=True, prompt_token_ids=True, logprobs=3, prompt_logprobs=2, timeline=True
        ),
    )
    message.sampling.logit_bias[3] = 1.5
    return message


def chat() -> pb.GenerateRequest:
    messages = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(role="assistant", content="ho", more_json='{"tool_calls": null, "name": "x"}'),
    ]
    options = pb.Chat(messages=messages, template_options_json='{"enable_thinking": false}')
    return pb.GenerateRequest(chat=options, stopping=pb.StoppingOptions(max_tokens=5))


def ids() -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.SamplingOptions(regex="[a-z]+"))


GENERATE = (full, chat, ids)
METHODS: dict[str, tuple[int, tuple[Callable[[], Message], ...]]] = {  # how often, valid messages
    "/jaxpd.v1.Inference/Generate": (6, GENERATE),
    "/jaxpd.v1.Inference/GenerateStream": (6, GENERATE),
    "/jaxpd.v1.Control/GetServerInfo": (1, (control_pb2.GetServerInfoRequest,)),
    "/jaxpd.v1.Control/GetModelInfo": (1, (control_pb2.GetModelInfoRequest,)),
    "/jaxpd.v1.Control/Abort": (1, (lambda: control_pb2.AbortRequest(request_id="a"),)),
    "/inference.GRPCInferenceService/ServerLive": (1, (oip.ServerLiveRequest,)),
    "/inference.GRPCInferenceService/ServerReady": (1, (oip.ServerReadyRequest,)),
    "/inference.GRPCInferenceService/ModelReady": (1, (lambda: oip.ModelReadyRequest(name="bytes"),)),
    "/inference.GRPCInferenceService/ServerMetadata": (1, (oip.ServerMetadataRequest,)),
    "/inference.GRPCInferenceService/ModelMetadata": (1, (lambda: oip.ModelMetadataRequest(name="bytes"),)),
    "/inference.GRPCInferenceService/ModelInfer": (6, (infer, infer_raw)),
    "/grpc.health.v1.Health/Check": (1, (lambda: health_pb2.HealthCheckRequest(service="jaxpd.v1.Inference"),)),
    "/grpc.health.v1.Health/Watch": (1, (health_pb2.HealthCheckRequest,)),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (
        1,
        (lambda: reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.ModelInferRequest"),),
    ),
}
STREAMING = ("GenerateStream", "Watch", "ServerReflectionInfo")


def random_bytes(rng: Random, example: Message) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 8, 64, 1000)))


def broken_bytes(rng: Random, example: Message) -> bytes:
    data = bytearray(example.SerializeToString())
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(4):
            case 0:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case _:
                data[at:at] = data[at : at + rng.randint(1, 20)]
    return bytes(data)


def changed_fields(rng: Random, example: Message) -> bytes:
    """Some of the message's fields, at any depth, are another value, twice there or gone."""
    for _ in range(rng.randint(1, 3)):
        change(rng, example)
    return example.SerializeToString()


def random_fields(rng: Random, example: Message) -> bytes:
    example.Clear()
    fill(rng, example, depth=0)
    return example.SerializeToString()


def as_it_is(rng: Random, example: Message) -> bytes:
    return example.SerializeToString()


KINDS = (as_it_is, as_it_is, random_bytes, broken_bytes, changed_fields, changed_fields, random_fields, random_fields)


def change(rng: Random, message: Message) -> None:
    present = [(field, value) for field, value in message.ListFields() if field.message_type is not None]
    inner = [value for field, value in present if not field.is_repeated]
    inner += [value for field, many in present if field.is_repeated and not is_map(field) for value in many]
    if inner and rng.random() < 0.6:
        change(rng, rng.choice(inner))
    elif fields := [field for field, _ in message.ListFields() if rng.random() < 0.7] or message.DESCRIPTOR.fields:
        field = rng.choice(fields)
        old = getattr(message, field.name)
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.is_repeated and field.message_type is None and old and rng.random() < 0.7:
            old[rng.randrange(len(old))] = scalar(rng, field)
        else:
            set_field(rng, message, field, depth=0)


def fill(rng: Random, message: Message, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < (0.4 if depth < 3 else 0.1):
            set_field(rng, message, field, depth)


def set_field(rng: Random, message: Message, field: Any, depth: int) -> None:
    """A value of the field's type; of a oneof the last one that is set stays."""
    if is_map(field):
        entries = getattr(message, field.name)
        for _ in range(rng.choice((0, 1, 2, 5))):
            if field.message_type.fields_by_name["value"].message_type is None:
                key, value = (scalar(rng, field.message_type.fields_by_name[part]) for part in ("key", "value"))
                entries[key] = value
            else:
                fill(rng, entries[rng.choice(OPTIONS) if rng.random() < 0.9 else rng.choice(STRINGS)], depth + 1)
    elif field.is_repeated:
        many = getattr(message, field.name)
        for _ in range(rng.choice((0, 1, 1, 2, 3, 70, 400) if depth < 2 else (0, 1))):
            if field.message_type is None:
                many.append(scalar(rng, field))
            elif len(many) < 5:
                fill(rng, many.add(), depth + 1)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        fill(rng, getattr(message, field.name), depth + 1)
    else:
        setattr(message, field.name, scalar(rng, field))


def is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def scalar(rng: Random, field: Any) -> Any:
    match field.cpp_type:
        case field.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case field.CPPTYPE_STRING if field.type == field.TYPE_BYTES:
            return rng.choice((b"", b"abc", b"\xff\xfe", struct.pack("<I", 2) + b"ab", b"\xff" * 8))
        case field.CPPTYPE_STRING:
            return rng.choice(STRINGS)
        case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
            return rng.choice(FLOATS)
        case field.CPPTYPE_ENUM:
            return rng.choice((0, 1, 99))
        case field.CPPTYPE_INT32:
            return rng.choice([i for i in INTEGERS if -(2**31) <= i < 2**31])
        case field.CPPTYPE_UINT32:
            return rng.choice([i for i in INTEGERS if 0 <= i < 2**32])
        case field.CPPTYPE_UINT64:
            return rng.choice([*(i for i in INTEGERS if i >= 0), 2**64 - 1])
        case _:
            return rng.choice(INTEGERS)


def metadata(rng: Random) -> tuple[tuple[str, str | bytes], ...]:
    choices: tuple[tuple[str, str | bytes], ...] = (
        ("x-request-id", rng.choice(("a", "b", " ", "x" * 500))),
        ("traceparent", rng.choice(("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "00", "%", ""))),
        ("tracestate", "a=b,c"),
        ("authorization", rng.choice(("Bearer x", "Bearer", "Basic x", ""))),
        ("odd-bin", b"\x00\xff"),
    )
    return tuple(entry for entry in choices if rng.random() < 0.2)


async def ask(channel: grpc.aio.Channel, rng: Random, method: str) -> tuple[grpc.StatusCode, str]:
    """One call's status and text. Streams are read to their end, but for the watch, which has none."""
    examples = METHODS[method][1]
    data = rng.choice(KINDS)(rng, rng.choice(examples)())
    options: dict[str, Any] = {"metadata": metadata(rng), "timeout": 60.0}
    if method.endswith("/Watch") or rng.random() < 0.03:
        options["timeout"] = rng.choice((0.0001, 0.005, 0.02))
    if method.endswith("/ServerReflectionInfo"):
        call = channel.stream_stream(method)(iter([data]), **options)
    elif method.endswith(STREAMING):
        call = channel.unary_stream(method)(data, **options)
    else:
        call = channel.unary_unary(method)(data, **options)
    if rng.random() < 0.03:
        asyncio.get_running_loop().call_later(rng.choice((0, 0.002)), call.cancel)
    try:
        if method.endswith(STREAMING):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        if options["timeout"] < 1 and error.details() == "Internal error from Core":
            return grpc.StatusCode.DEADLINE_EXCEEDED, ""  # what this client says when its time ends while it sends
        return error.code(), error.details() or ""
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED, ""
    return await call.code(), ""


async def storm(address: str, count: int, seed: int) -> collections.Counter[tuple[str, str]]:
    """So many calls, and how they ended."""
    ends: collections.Counter[tuple[str, str]] = collections.Counter()
    numbers = iter(range(count))
    often = [often for often, _ in METHODS.values()]

    async def caller() -> None:
        for number in numbers:
            rng = Random(seed + number)  # of its own, so that one call can be made again alone
            method = rng.choices(list(METHODS), often)[0]
            code, details = await ask(channel, rng, method)
            assert code in FINE, f"call {seed + number} to {method}: {code.name} {details}"
            assert "Traceback" not in details and "Error(" not in details, details
            ends[method, code.name] += 1

    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(caller())
    return ends


def attack(served: Served, caplog: pytest.LogCaptureFixture, count: int, seed: int) -> collections.Counter[Any]:
    async def run() -> collections.Counter[tuple[str, str]]:
        async with served(max_model_len=64, max_queued=200) as running:
            ends = await storm(running.address, count, seed)
            for _ in range(500):
                if not running.gateway._live and not running.engine.running:
                    break
                await asyncio.sleep(0.01)
            assert not running.gateway._live and not running.engine.running and await running.gateway.idle(1)
            quotas = running.gateway._quotas
            assert quotas._requests == quotas._tokens == {} and not running.gateway._pace._waiting
            async with grpc.aio.insecure_channel(running.address) as channel:
                answer = await channel.unary_unary(
                    "/jaxpd.v1.Inference/Generate", response_deserializer=pb.GenerateResponse.FromString
                )(pb.GenerateRequest(text="abc", stopping=pb.StoppingOptions(max_tokens=4)).SerializeToString())
                assert answer.sequences[0].text == "abca", "it goes on as if nothing had been"
            return ends

    with caplog.at_level(logging.WARNING):
        ends = asyncio.run(run())
    bad = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not bad, bad[:3]
    assert ends.total() == count
    return ends


def test_a_thousand_calls(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    ends = attack(served, caplog, 1000, SEED)
    for method in METHODS:  # it reaches what it is for
        answered = {code for called, code in ends if called == method}
        assert answered & {"OK", "DEADLINE_EXCEEDED"}, f"{method}: {answered}"
    assert ends["/jaxpd.v1.Inference/Generate", "INVALID_ARGUMENT"] > 50


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_calls(served: Served, caplog: pytest.LogCaptureFixture, part: int) -> None:
    attack(served, caplog, 1000, 1_000_000 + 1000 * part)
