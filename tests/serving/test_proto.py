"""The committed modules are what the sources say, and the wire keeps every value."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.request import FinishReason, SamplingParams, Timings, Usage
from serving.messages import Answer, Finished, GenerateRequest, Tokens, Understood
from serving.proto import generate
from serving.proto.jaxpd.v1 import inference_pb2 as pb
from serving.wire import (
    answer_from_proto,
    answer_to_proto,
    message_from_proto,
    message_to_proto,
    request_from_proto,
    request_to_proto,
)


def test_generated_modules_are_fresh(tmp_path: pathlib.Path) -> None:
    generate.generate(tmp_path)
    for name in generate.generated_files():
        made, committed = (root / name for root in (tmp_path, generate.ROOT))
        assert made.read_bytes() == committed.read_bytes(), f"{name}: run python -m serving.proto.generate"


def test_modules_live_beside_the_engine_and_not_in_it() -> None:
    assert pb.DESCRIPTOR.name == "serving/proto/jaxpd/v1/inference.proto"
    assert pb.DESCRIPTOR.package == "jaxpd.v1"


def test_every_scalar_of_a_request_has_presence() -> None:
    todo, seen = [pb.GenerateRequest.DESCRIPTOR], set()
    while todo:
        message = todo.pop()
        seen.add(message.name)
        for field in message.fields:
            if field.message_type is not None:
                todo.append(field.message_type)
            else:
                assert field.is_repeated or field.has_presence, field.full_name
    assert {"SamplingOptions", "StoppingOptions", "ResponseOptions", "ChatMessage"} <= seen


FULL = GenerateRequest(
    chat=({"role": "user", "content": ""},),
    request_id="a",
    max_tokens=0,
    temperature=0.0,
    seed=0,
    stop=("x",),
    stop_token_ids=(0,),
    ignore_eos=False,
    want_text=False,
    want_token_ids=False,
    want_prompt_ids=False,
)


@pytest.mark.parametrize(
    "request_",
    [FULL, GenerateRequest(), GenerateRequest(text=""), GenerateRequest(token_ids=()), GenerateRequest(chat=())],
)
def test_request_round_trip_keeps_zero_apart_from_unset(request_: GenerateRequest) -> None:
    sent = request_to_proto(request_).SerializeToString()
    assert request_from_proto(pb.GenerateRequest.FromString(sent)) == request_


UNDERSTOOD = Understood(
    request_id="r",
    prompt_tokens=2,
    prompt_ids=(0, 7),
    params=SamplingParams(max_tokens=3, temperature=0.7, seed=2**32 - 1, stop=("a",), stop_token_ids=(5,)),
    want_text=True,
    want_token_ids=True,
)
FINISHED = Finished(
    reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1),
    timings=Timings(**{f.name: float(i) if i % 2 else None for i, f in enumerate(dataclasses.fields(Timings))}),
    stop_token_id=0,
)


@pytest.mark.parametrize(
    "message",
    [
        UNDERSTOOD,
        dataclasses.replace(UNDERSTOOD, prompt_ids=None, want_text=False),
        Tokens(first_index=3, count=2, token_ids=(0, 2), text=""),
        Tokens(first_index=0, count=2, token_ids=(), text=None),
        FINISHED,
        dataclasses.replace(FINISHED, stop_token_id=None, stop_string="\n"),
        *(dataclasses.replace(FINISHED, stop_token_id=None, reason=reason) for reason in FinishReason),
    ],
)
def test_answer_round_trip(message: Understood | Tokens | Finished) -> None:
    sent = message_to_proto(message).SerializeToString()
    assert message_from_proto(pb.GenerateStreamResponse.FromString(sent)) == message


def test_unary_round_trip() -> None:
    answer = Answer(understood=UNDERSTOOD, token_ids=(1, 0), text="", finished=FINISHED)
    sent = answer_to_proto(answer).SerializeToString()
    assert answer_from_proto(pb.GenerateResponse.FromString(sent)) == answer


def test_a_newer_finish_reason_reads_as_a_regular_end() -> None:
    finish = pb.Finish.FromString(bytes([2 << 3, 99]))
    assert finish.reason == 99
    message = message_from_proto(pb.GenerateStreamResponse(finish=finish))
    assert isinstance(message, Finished) and message.reason is FinishReason.STOP


def test_a_newer_kind_of_message_is_passed_over() -> None:
    newer = bytes([15 << 3 | 2, 0])  # field 15, an empty message
    assert message_from_proto(pb.GenerateStreamResponse.FromString(newer)) is None


def test_unknown_fields_are_named_at_any_depth() -> None:
    newer = bytes([19 << 3 & 0x7F | 0x80, 19 << 3 >> 7, 1])  # field 19, a number
    request = pb.GenerateRequest(text="x")
    request.MergeFromString(newer)
    with pytest.raises(InvalidArgument, match="GenerateRequest holds field number 19"):
        request_from_proto(request)
    nested = pb.GenerateRequest(text="x")
    nested.sampling.MergeFromString(newer)
    with pytest.raises(InvalidArgument, match=r"sampling holds field number 19.*1 \(temperature\), 2 \(seed\)"):
        request_from_proto(nested)
    chat = pb.GenerateRequest()
    chat.chat.messages.add(role="user", content="x")
    chat.chat.messages.add(role="user", content="x").MergeFromString(newer)
    with pytest.raises(InvalidArgument, match=r"chat.messages\[1\] holds field number 19"):
        request_from_proto(chat)


def test_chat_message_without_role_or_content() -> None:
    message = pb.GenerateRequest()
    message.chat.messages.add(role="user", content="x")
    message.chat.messages.add(content="x")
    with pytest.raises(InvalidArgument, match=r"chat.messages\[1\].role is missing"):
        request_from_proto(message)


@pytest.mark.parametrize("request_", [GenerateRequest(token_ids=(2**40,)), GenerateRequest(text="x", max_tokens=2**40)])
def test_values_that_no_field_holds_fail_at_the_client(request_: GenerateRequest) -> None:
    with pytest.raises(InvalidArgument, match=r"token_ids|max_tokens"):
        request_to_proto(request_)
