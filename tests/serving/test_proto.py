"""The committed modules are what the sources say, and the wire keeps every value."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.life import Moment, Stage
from jaxpd.request import FinishReason, SamplingParams, Timings, TokenLogprobs, Usage
from jaxpd.structured import StructuredOutput
from serving.messages import Answer, Finished, GenerateRequest, Sample, Tokens, Understood
from serving.proto import generate
from serving.proto.jaxpd.v1 import inference_pb2 as pb
from serving.wire import request_from_proto, request_to_proto
from serving.wire_answers import answer_from_proto, answer_to_proto, message_from_proto, message_to_proto


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
                todo += [] if field.message_type.GetOptions().map_entry else [field.message_type]
            else:
                assert field.is_repeated or field.has_presence, field.full_name
    assert {"SamplingOptions", "StoppingOptions", "ResponseOptions", "ChatMessage"} <= seen


FULL = GenerateRequest(
    chat=({"role": "user", "content": ""}, {"role": "tool", "content": "4", "tool_call_id": "c"}),
    tools=({"type": "function", "function": {"name": "add"}},),
    template_options={"enable_thinking": False},
    request_id="a",
    priority=0,
    cache_salt="",
    min_tokens=0,
    n=0,
    top_k=0,
    top_p=0.0,
    min_p=0.0,
    repetition_penalty=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={0: 0.0, 5: -1.5},
    logprobs=0,
    prompt_logprobs=0,
    structured=StructuredOutput(kind="choice", choices=("a", "b")),
    want_timeline=False,
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
    [
        FULL,
        *(
            GenerateRequest(text="x", structured=StructuredOutput(kind=kind, text=text))
            for kind, text in (("json_object", ""), ("json_schema", "{}"), ("regex", "a+"), ("grammar", 'start: "a"'))
        ),
        GenerateRequest(),
        GenerateRequest(text=""),
        GenerateRequest(token_ids=()),
        GenerateRequest(chat=()),
    ],
)
def test_request_round_trip_keeps_zero_apart_from_unset(request_: GenerateRequest) -> None:
    sent = request_to_proto(request_).SerializeToString()
    assert request_from_proto(pb.GenerateRequest.FromString(sent)) == request_


def test_every_field_of_a_request_is_on_the_wire() -> None:
    unset = {field.name for field in dataclasses.fields(FULL) if getattr(FULL, field.name) is None}
    assert unset == {"text", "token_ids", "add_special_tokens"}  # the other prompts; and what gRPC refuses
    with pytest.raises(InvalidArgument, match="add_special_tokens"):
        request_to_proto(GenerateRequest(text="x", add_special_tokens=False))


SCORES = (TokenLogprobs(logprob=-0.25, top=((3, -0.25), (4, -1.5))), TokenLogprobs(logprob=-7.0, top=()))
UNDERSTOOD = Understood(
    request_id="r",
    prompt_tokens=2,
    prompt_ids=(0, 7),
    params=SamplingParams(max_tokens=3, temperature=0.7, seed=2**32 - 1, stop=("a",), stop_token_ids=(5,)),
    want_text=True,
    want_token_ids=True,
    priority=-3,
)
FINISHED = Finished(
    reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1),
    timings=Timings(**{f.name: float(i) if i % 2 else None for i, f in enumerate(dataclasses.fields(Timings))}),
    stop_token_id=0,
    timeline=(Moment(Stage.ARRIVED, 0.0), Moment(Stage.CHUNK, 0.25, 16)),
)


@pytest.mark.parametrize(
    "message",
    [
        UNDERSTOOD,
        dataclasses.replace(UNDERSTOOD, prompt_ids=None, want_text=False),
        Tokens(first_index=3, count=2, token_ids=(0, 2), text=""),
        Tokens(first_index=0, count=2, token_ids=(), text=None),
        Tokens(first_index=0, count=2, token_ids=(1, 2), text="ab", sample=3, logprobs=SCORES, prompt_logprobs=SCORES),
        FINISHED,
        dataclasses.replace(FINISHED, stop_token_id=None, stop_string="\n"),
        *(
            dataclasses.replace(FINISHED, stop_token_id=None, reason=reason)
            for reason in FinishReason
            if reason is not FinishReason.HANDED_OFF
        ),
    ],
)
def test_answer_round_trip(message: Understood | Tokens | Finished) -> None:
    sent = message_to_proto(message).SerializeToString()
    assert message_from_proto(pb.GenerateStreamResponse.FromString(sent)) == message


@pytest.mark.parametrize("scored", [False, True])
def test_unary_round_trip(scored: bool) -> None:
    asked = 2 if scored else None
    params = dataclasses.replace(UNDERSTOOD.params, n=2, logprobs=asked, prompt_logprobs=asked)
    samples = tuple(
        Sample(
            index=i,
            token_ids=(1, i),
            text="",
            logprobs=SCORES if scored else None,
            finished=dataclasses.replace(FINISHED, sample=i),
        )
        for i in range(2)
    )
    answer = Answer(
        understood=dataclasses.replace(UNDERSTOOD, params=params),
        samples=samples,
        prompt_logprobs=SCORES if scored else None,
    )
    sent = answer_to_proto(answer).SerializeToString()
    assert answer_from_proto(pb.GenerateResponse.FromString(sent)) == answer
    assert answer.usage.completion_tokens == 6 and answer.usage.prompt_tokens == 2


def test_json_fields_that_are_none() -> None:
    for field, text in (("tools_json", "{}"), ("tools_json", "["), ("template_options_json", "[1]")):
        message = pb.GenerateRequest()
        message.chat.messages.add(role="user", content="x")
        setattr(message.chat, field, text)
        with pytest.raises(InvalidArgument, match=f"chat.{field} must be a JSON"):
            request_from_proto(message)
    message = pb.GenerateRequest()
    message.chat.messages.add(role="user", content="x", more_json='{"role": "system"}')
    with pytest.raises(InvalidArgument, match=r"chat.messages\[0\].more_json holds role"):
        request_from_proto(message)


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
