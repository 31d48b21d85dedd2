"""Between the messages of `jaxpd/v1/inference.proto` and the nouns of `serving.messages`, in both directions.

The server reads strictly and refuses what it does not know; the client reads leniently and passes over it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from google.protobuf import unknown_fields
from google.protobuf.message import Message as ProtoMessage

from jaxpd.errors import Internal, InvalidArgument
from jaxpd.request import FinishReason, SamplingParams, Timings, Usage
from serving.messages import Answer, Finished, GenerateRequest, Message, Tokens, Understood
from serving.proto.jaxpd.v1 import inference_pb2 as pb

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_REASONS_BACK = {value: reason for reason, value in _REASONS.items()}


# -- requests ------------------------------------------------------------------------------------------------------


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises InvalidArgument naming a field that is not known or a part of the prompt that is missing."""
    refuse_unknown_fields(message)
    prompt = message.WhichOneof("prompt")
    sampling, stopping, response = message.sampling, message.stopping, message.response
    return GenerateRequest(
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.token_ids.ids) if prompt == "token_ids" else None,
        chat=_chat_from_proto(message.chat) if prompt == "chat" else None,
        request_id=_get(message, "request_id"),
        max_tokens=_get(stopping, "max_tokens"),
        temperature=_get(sampling, "temperature"),
        seed=_get(sampling, "seed"),
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=_get(stopping, "ignore_eos"),
        want_text=_get(response, "text"),
        want_token_ids=_get(response, "token_ids"),
        want_prompt_ids=_get(response, "prompt_token_ids"),
    )


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Raises InvalidArgument for a value that the field's type cannot hold."""
    message = pb.GenerateRequest()
    if request.text is not None:
        message.text = request.text
    if request.token_ids is not None:
        message.token_ids.SetInParent()
        _extend(message.token_ids.ids, request.token_ids, "token_ids")
    if request.chat is not None:
        message.chat.SetInParent()
        for entry in request.chat:
            message.chat.messages.add(role=entry.get("role"), content=entry.get("content"))
    _set(message, "request_id", request.request_id)
    _set(message.sampling, "temperature", request.temperature)
    _set(message.sampling, "seed", request.seed)
    _set(message.stopping, "max_tokens", request.max_tokens)
    message.stopping.stop.extend(request.stop)
    _extend(message.stopping.stop_token_ids, request.stop_token_ids, "stop_token_ids")
    _set(message.stopping, "ignore_eos", request.ignore_eos)
    _set(message.response, "text", request.want_text)
    _set(message.response, "token_ids", request.want_token_ids)
    _set(message.response, "prompt_token_ids", request.want_prompt_ids)
    return message


def refuse_unknown_fields(message: ProtoMessage, path: str = "") -> None:
    """Raises InvalidArgument if a field of a newer protocol was set anywhere in `message`."""
    unknown = sorted({field.field_number for field in unknown_fields.UnknownFieldSet(message)})
    where = path or message.DESCRIPTOR.name
    if unknown:
        numbers = ", ".join(str(number) for number in unknown)
        known = ", ".join(f"{field.number} ({field.name})" for field in message.DESCRIPTOR.fields) or "none"
        raise InvalidArgument(
            f"{where} holds field number {numbers}, which this server does not know; it knows {known}", field=where
        )
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        name = f"{path}.{descriptor.name}" if path else descriptor.name
        if isinstance(value, ProtoMessage):
            refuse_unknown_fields(value, name)
        else:
            for index, entry in enumerate(value):
                refuse_unknown_fields(entry, f"{name}[{index}]")


def _chat_from_proto(chat: pb.Chat) -> tuple[dict[str, Any], ...]:
    for index, entry in enumerate(chat.messages):
        for field in ("role", "content"):
            if not entry.HasField(field):
                raise InvalidArgument(f"chat.messages[{index}].{field} is missing; set it", field="chat")
    return tuple({"role": entry.role, "content": entry.content} for entry in chat.messages)


# -- answers -------------------------------------------------------------------------------------------------------


def message_to_proto(message: Message) -> pb.GenerateStreamResponse:
    """One message of a stream."""
    match message:
        case Understood():
            return pb.GenerateStreamResponse(info=_info_to_proto(message))
        case Tokens():
            return pb.GenerateStreamResponse(
                tokens=pb.Tokens(
                    first_index=message.first_index,
                    count=message.count,
                    token_ids=message.token_ids,
                    text=message.text,
                )
            )
        case Finished():
            return pb.GenerateStreamResponse(finish=_finish_to_proto(message))


def message_from_proto(message: pb.GenerateStreamResponse) -> Message | None:
    """None for a kind of message that this client does not know."""
    match message.WhichOneof("event"):
        case "info":
            return _info_from_proto(message.info)
        case "tokens":
            tokens = message.tokens
            return Tokens(
                first_index=tokens.first_index,
                count=tokens.count,
                token_ids=tuple(tokens.token_ids),
                text=_get(tokens, "text"),
            )
        case "finish":
            return _finish_from_proto(message.finish)
        case _:
            return None


def answer_to_proto(answer: Answer) -> pb.GenerateResponse:
    """The unary response."""
    sequence = pb.Sequence(token_ids=answer.token_ids, finish=_finish_to_proto(answer.finished))
    if answer.understood.want_text:
        sequence.text = answer.text
    return pb.GenerateResponse(info=_info_to_proto(answer.understood), sequences=[sequence])


def answer_from_proto(response: pb.GenerateResponse) -> Answer:
    """The first sequence of a unary response."""
    if not response.sequences:
        raise Internal("the answer holds no sequence; is the server newer than this client?")
    sequence = response.sequences[0]
    return Answer(
        understood=_info_from_proto(response.info),
        token_ids=tuple(sequence.token_ids),
        text=sequence.text,
        finished=_finish_from_proto(sequence.finish),
    )


def _info_to_proto(message: Understood) -> pb.RequestInfo:
    params = message.params
    return pb.RequestInfo(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        prompt_token_ids=message.prompt_ids or (),
        sampling=pb.SamplingOptions(temperature=params.temperature, seed=params.seed),
        stopping=pb.StoppingOptions(
            max_tokens=params.max_tokens,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        ),
        response=pb.ResponseOptions(
            text=message.want_text,
            token_ids=message.want_token_ids,
            prompt_token_ids=message.prompt_ids is not None,
        ),
    )


def _info_from_proto(info: pb.RequestInfo) -> Understood:
    return Understood(
        request_id=info.request_id,
        prompt_tokens=info.prompt_tokens,
        prompt_ids=tuple(info.prompt_token_ids) if info.response.prompt_token_ids else None,
        params=SamplingParams(
            max_tokens=info.stopping.max_tokens,
            temperature=info.sampling.temperature,
            seed=_get(info.sampling, "seed"),
            stop=tuple(info.stopping.stop),
            stop_token_ids=tuple(info.stopping.stop_token_ids),
            ignore_eos=info.stopping.ignore_eos,
        ),
        want_text=info.response.text,
        want_token_ids=info.response.token_ids,
    )


def _finish_to_proto(message: Finished) -> pb.Finish:
    finish = pb.Finish(
        reason=_REASONS[message.reason],
        usage=pb.Usage(**dataclasses.asdict(message.usage)),
        timings=pb.Timings(**dataclasses.asdict(message.timings)),
    )
    _set(finish, "stop_token_id", message.stop_token_id)
    _set(finish, "stop_string", message.stop_string)
    return finish


def _finish_from_proto(finish: pb.Finish) -> Finished:
    return Finished(
        reason=_REASONS_BACK.get(finish.reason, FinishReason.STOP),  # as the proto's rules say
        usage=Usage(**{f.name: getattr(finish.usage, f.name) for f in dataclasses.fields(Usage)}),
        timings=Timings(**{f.name: _get(finish.timings, f.name) for f in dataclasses.fields(Timings)}),
        stop_token_id=_get(finish, "stop_token_id"),
        stop_string=_get(finish, "stop_string"),
    )


# -- presence ------------------------------------------------------------------------------------------------------


def _get(message: ProtoMessage, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _set(message: ProtoMessage, field: str, value: Any) -> None:
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{field}={value!r} does not fit the field: {error}", field=field) from error


def _extend(repeated: Any, values: tuple[int, ...], field: str) -> None:
    try:
        repeated.extend(values)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{field} holds a value that is no token id: {error}", field=field) from error
