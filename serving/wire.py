"""Requests between the messages of `jaxpd/v1/inference.proto` and `serving.messages`, in both directions.

The server reads strictly and refuses what it does not know; `wire_answers` is the way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import unknown_fields
from google.protobuf.message import Message as ProtoMessage

from jaxpd.errors import InvalidArgument
from jaxpd.structured import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, StructuredOutput
from serving.messages import GenerateRequest
from serving.proto.jaxpd.v1 import inference_pb2 as pb

# Fields of the groups that are scalars of the same name in GenerateRequest.
SAMPLING = (
    "temperature",
    "seed",
    "n",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
STOPPING = ("max_tokens", "ignore_eos", "min_tokens")
RESPONSE = {
    "text": "want_text",
    "token_ids": "want_token_ids",
    "prompt_token_ids": "want_prompt_ids",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "timeline": "want_timeline",
}
_KINDS = {"json_schema": JSON_SCHEMA, "regex": REGEX, "grammar": GRAMMAR}  # fields that hold text
MAX_JSON = 1 << 20  # characters of a field that holds JSON


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises InvalidArgument naming a field that is not known or a part of the prompt that is missing."""
    refuse_unknown_fields(message)
    prompt = message.WhichOneof("prompt")
    sampling, stopping, response = message.sampling, message.stopping, message.response
    chat = message.chat
    return GenerateRequest(
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.token_ids.ids) if prompt == "token_ids" else None,
        chat=_chat_from_proto(chat) if prompt == "chat" else None,
        tools=_json(chat, "tools_json", "chat.tools_json", list),
        template_options=_json(chat, "template_options_json", "chat.template_options_json", dict),
        request_id=get(message, "request_id"),
        priority=get(message, "priority"),
        cache_salt=get(message, "cache_salt"),
        logit_bias=dict(sampling.logit_bias) if sampling.logit_bias else None,
        structured=structured_from_proto(sampling),
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        **{field: get(sampling, field) for field in SAMPLING},
        **{field: get(stopping, field) for field in STOPPING},
        **{ours: get(response, theirs) for theirs, ours in RESPONSE.items()},
    )


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Raises InvalidArgument for a value that the field's type cannot hold."""
    message = pb.GenerateRequest()
    if request.text is not None:
        message.text = request.text
    if request.token_ids is not None:
        message.token_ids.SetInParent()
        extend(message.token_ids.ids, request.token_ids, "token_ids")
    if request.chat is not None:
        message.chat.SetInParent()
        for entry in request.chat:
            _add_chat_message(message.chat, entry)
        if request.tools is not None:
            message.chat.tools_json = json.dumps(request.tools)
        if request.template_options is not None:
            message.chat.template_options_json = json.dumps(request.template_options)
    if request.add_special_tokens is not None:
        raise InvalidArgument(
            "add_special_tokens is not to be had over gRPC; send token_ids instead of text", field="add_special_tokens"
        )
    for field in ("request_id", "priority", "cache_salt"):
        set_(message, field, getattr(request, field))
    for field in SAMPLING:
        set_(message.sampling, field, getattr(request, field))
    for field in STOPPING:
        set_(message.stopping, field, getattr(request, field))
    for theirs, ours in RESPONSE.items():
        set_(message.response, theirs, getattr(request, ours))
    for token, bias in (request.logit_bias or {}).items():
        try:
            message.sampling.logit_bias[token] = bias
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"logit_bias holds {token!r}: {bias!r}: {error}", field="logit_bias") from error
    if request.structured is not None:
        add_structured(message.sampling, request.structured)
    message.stopping.stop.extend(request.stop)
    extend(message.stopping.stop_token_ids, request.stop_token_ids, "stop_token_ids")
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
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        name = f"{path}.{descriptor.name}" if path else descriptor.name
        if isinstance(value, ProtoMessage):
            refuse_unknown_fields(value, name)
        else:
            for index, entry in enumerate(value):
                refuse_unknown_fields(entry, f"{name}[{index}]")


def _chat_from_proto(chat: pb.Chat) -> tuple[dict[str, Any], ...]:
    return tuple(_chat_message(entry, f"chat.messages[{index}]") for index, entry in enumerate(chat.messages))


def _chat_message(entry: pb.ChatMessage, where: str) -> dict[str, Any]:
    for field in ("role", "content"):
        if not entry.HasField(field):
            raise InvalidArgument(f"{where}.{field} is missing; set it", field="chat")
    more = _json(entry, "more_json", f"{where}.more_json", dict) or {}
    if taken := sorted({"role", "content"} & set(more)):
        raise InvalidArgument(f"{where}.more_json holds {taken[0]}, which has a field of its own", field="chat")
    return {"role": entry.role, "content": entry.content, **more}


def _add_chat_message(chat: pb.Chat, entry: Mapping[str, Any]) -> None:
    content = entry.get("content")
    if content is not None and not isinstance(content, str):
        raise InvalidArgument("the content of a chat message must be text over gRPC; join its parts", field="chat")
    message = chat.messages.add(role=entry.get("role"), content=content)
    if more := {key: value for key, value in entry.items() if key not in ("role", "content")}:
        message.more_json = json.dumps(more)


def _json(message: ProtoMessage, field: str, where: str, kind: type) -> Any:
    """What a field holds as JSON, of the given kind; None where it is not set. A list comes as a tuple."""
    text = get(message, field)
    if text is None:
        return None
    words = "a JSON array" if kind is list else "a JSON object"
    if len(text) > MAX_JSON:
        raise InvalidArgument(f"{where} has {len(text)} characters, the limit is {MAX_JSON}", field=where)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} must be {words}, but it does not parse: {error}", field=where) from None
    if not isinstance(value, kind):
        raise InvalidArgument(f"{where} must be {words}, not {type(value).__name__}", field=where)
    return tuple(value) if isinstance(value, list) else value


def structured_from_proto(sampling: pb.SamplingOptions) -> StructuredOutput | None:
    """What the answer has to match; None: nothing."""
    match sampling.WhichOneof("structured"):
        case None:
            return None
        case "json_object":
            return StructuredOutput(kind=JSON_OBJECT) if sampling.json_object else None
        case "choices":
            return StructuredOutput(kind=CHOICE, choices=tuple(sampling.choices.strings))
        case field:
            return StructuredOutput(kind=_KINDS[field], text=getattr(sampling, field))


def add_structured(sampling: pb.SamplingOptions, structured: StructuredOutput) -> None:
    """Sets what the answer has to match."""
    if structured.kind == JSON_OBJECT:
        sampling.json_object = True
    elif structured.kind == CHOICE:
        sampling.choices.strings.extend(structured.choices)
        sampling.choices.SetInParent()
    else:
        setattr(sampling, structured.kind, structured.text)


def get(message: ProtoMessage, field: str) -> Any:
    """The field's value; None where it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def set_(message: ProtoMessage, field: str, value: Any) -> None:
    """Sets a field unless `value` is None. Raises InvalidArgument for a value that its type cannot hold."""
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{field}={value!r} does not fit the field: {error}", field=field) from error


def extend(repeated: Any, values: Iterable[int], field: str) -> None:
    """Adds token ids. Raises InvalidArgument for a value that is none."""
    try:
        repeated.extend(values)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{field} holds a value that is no token id: {error}", field=field) from error
