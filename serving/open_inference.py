"""The Open Inference Protocol: texts in a tensor in, texts in a tensor out, for KServe's and Triton's clients.

    ModelInferRequest -> texts, options -> Gateway.generate, once a text, all at the same time -> ModelInferResponse

The first text that fails ends the others and the call. What a request holds and is not understood is refused by name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from jaxpd.errors import InvalidArgument, NotFound
from jaxpd.structured import JSON_OBJECT, JSON_SCHEMA, REGEX, StructuredOutput
from jaxpd.version import __version__
from serving.gateway import Gateway, State
from serving.interceptors import this_call
from serving.messages import MAX_REQUEST_ID, Answer, GenerateRequest, new_request_id, shown
from serving.model import ServedModel
from serving.proto.open_inference import open_inference_pb2 as pb
from serving.proto.open_inference import open_inference_pb2_grpc
from serving.wire import refuse_unknown_fields

VERSION = "1"  # of the model: there is one
INPUT = "text_input"
MAX_TEXTS = 128  # in one request
MAX_SIDES = 8  # of a tensor
LENGTH_BYTES = 4  # before each element of a raw BYTES tensor

INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "priority")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
STRUCTURED = {"json_schema": JSON_SCHEMA, "regex": REGEX}
PARAMETERS = (*INTEGERS, *NUMBERS, "ignore_eos", "stop", "stop_token_ids", "json_object", *STRUCTURED, "cache_salt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One tensor of the answer, with one element a text."""

    datatype: str
    field: str  # of InferTensorContents
    of: Callable[[Answer], Any]
    raw: Callable[[Any], bytes]


def _raw_bytes(element: bytes) -> bytes:
    return len(element).to_bytes(LENGTH_BYTES, "little") + element


def _raw_int(element: int) -> bytes:
    return element.to_bytes(4, "little", signed=True)


OUTPUTS = {
    "text_output": Output(
        datatype="BYTES", field="bytes_contents", of=lambda answer: answer.text.encode("utf-8"), raw=_raw_bytes
    ),
    "finish_reason": Output(
        datatype="BYTES", field="bytes_contents", of=lambda answer: answer.finish_reason.value.encode(), raw=_raw_bytes
    ),
    "prompt_tokens": Output(
        datatype="INT32", field="int_contents", of=lambda answer: answer.usage.prompt_tokens, raw=_raw_int
    ),
    "completion_tokens": Output(
        datatype="INT32", field="int_contents", of=lambda answer: answer.usage.completion_tokens, raw=_raw_int
    ),
}


class OpenInferenceServicer(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """inference.GRPCInferenceService."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def ServerLive(self, request: pb.ServerLiveRequest, context: grpc.aio.ServicerContext) -> Any:
        """Always."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: grpc.aio.ServicerContext) -> Any:
        """While requests are taken."""
        return pb.ServerReadyResponse(ready=self._gateway.state is State.READY)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: grpc.aio.ServicerContext) -> Any:
        """The same for one model; False for one of another name, of which callers without a key learn no more."""
        ready = self._gateway.state is State.READY and _is_served(self._gateway.model, request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: grpc.aio.ServicerContext) -> Any:
        """Name and version."""
        return pb.ServerMetadataResponse(name="jaxpd", version=__version__)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: grpc.aio.ServicerContext) -> Any:
        """The tensors that go in and come out."""
        refuse_unknown_fields(request)
        model = self._gateway.model
        _check_model(model, request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[VERSION],
            platform="jaxpd",
            inputs=[tensor(name=INPUT, datatype="BYTES", shape=[-1])],
            outputs=[tensor(name=name, datatype=output.datatype, shape=[-1]) for name, output in OUTPUTS.items()],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> Any:
        """The answers to all texts."""
        refuse_unknown_fields(request)
        model = self._gateway.model
        _check_model(model, request.model_name, request.model_version)
        wanted = _wanted(request)
        options = options_of(request.parameters)
        texts, raw = texts_of(request)
        call = this_call()
        asked = [
            GenerateRequest(text=text, request_id=self._id(call.request_id, index), want_text=True, **options)
            for index, text in enumerate(texts)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._gateway.generate(one, call.origin)) for one in asked]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        answer = pb.ModelInferResponse(model_name=model.name, model_version=VERSION, id=request.id)
        shape = request.inputs[0].shape
        for name in wanted:
            _add_output(answer, name, shape, [OUTPUTS[name].of(task.result()) for task in tasks], raw)
        return answer

    def _id(self, request_id: str, index: int) -> str:
        """The id of the text at `index`: the call's own for the first, one that shows whose it is for the others."""
        longer = f"{request_id}-{index}"
        if index == 0:
            return request_id
        return longer if len(longer) <= MAX_REQUEST_ID and not self._gateway.in_use(longer) else new_request_id()


def texts_of(request: pb.ModelInferRequest) -> tuple[list[str], bool]:
    """The texts of a request, and whether they came as raw bytes. Raises InvalidArgument naming the tensor."""
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT]:
        given = ", ".join(shown(name) for name in names[:4]) or "none"
        raise InvalidArgument(f"inputs must be one tensor, {INPUT}; got {given}", field="inputs")
    (tensor,), raw = request.inputs, bool(request.raw_input_contents)
    if tensor.datatype != "BYTES":
        raise InvalidArgument(f"{INPUT} is {shown(tensor.datatype)}; send it as BYTES", field="inputs")
    for name in tensor.parameters:
        if name != "content_type":  # says of what kind the elements are, which is known here
            raise InvalidArgument(f"{INPUT} has the parameter {shown(name)}, none is known", field="inputs")
    if raw:
        if tensor.HasField("contents") or len(request.raw_input_contents) != 1:
            raise InvalidArgument(
                f"raw_input_contents holds {len(request.raw_input_contents)} tensors; send {INPUT} alone, and either "
                "there or in contents",
                field="raw_input_contents",
            )
        elements = _split(request.raw_input_contents[0])
    else:
        elements = list(tensor.contents.bytes_contents)
    sides = tensor.shape[:MAX_SIDES]
    size = math.prod(sides) if len(tensor.shape) <= MAX_SIDES and all(side >= 0 for side in sides) else -1
    if size != len(elements):
        raise InvalidArgument(
            f"{INPUT} has the shape {list(sides)} and {len(elements)} elements; give the shape [{len(elements)}]",
            field="inputs",
        )
    if not 1 <= size <= MAX_TEXTS:
        raise InvalidArgument(f"{INPUT} holds {size} texts, it must be 1 to {MAX_TEXTS}", field="inputs")
    return [_text(element) for element in elements], raw


def options_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Fields of GenerateRequest from parameters of their names. Raises InvalidArgument for what is none.

    `stop` is one string, or several as a JSON array; `stop_token_ids` is a JSON array. Fractions may be strings.
    """
    options: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = None if kind is None else getattr(parameter, kind)
        whole = kind in ("int64_param", "uint64_param")
        if name in INTEGERS:
            options[name] = _of_kind(name, value, whole, "a whole number")
        elif name in NUMBERS:
            number = _number(str(value)) if whole or kind in ("double_param", "string_param") else None
            options[name] = _of_kind(name, number, number is not None, f"a number, got {shown(str(value))}")
        elif name == "ignore_eos":
            options[name] = _of_kind(name, value, kind == "bool_param", "true or false")
        elif name == "json_object":
            if _of_kind(name, value, kind == "bool_param", "true or false"):
                _set_structured(options, StructuredOutput(kind=JSON_OBJECT))
        elif name in STRUCTURED:
            text = _of_kind(name, value, kind == "string_param", "a string")
            _set_structured(options, StructuredOutput(kind=STRUCTURED[name], text=text))
        elif name == "cache_salt":
            options[name] = _of_kind(name, value, kind == "string_param", "a string")
        elif name == "stop":
            text = _of_kind(name, value, kind == "string_param", "a string, or several as a JSON array")
            options[name] = tuple(_json_list(text, str) or (text,))
        elif name == "stop_token_ids":
            ids = _json_list(str(value), int) if kind == "string_param" else None
            options[name] = tuple(_of_kind(name, ids, ids is not None, "a JSON array of token ids, such as [1, 2]"))
        else:
            raise InvalidArgument(
                f"parameters holds {shown(name)}, which is not known; known are {', '.join(PARAMETERS)}",
                field="parameters",
            )
    return options


def _number(text: str) -> float | None:
    """KServe's own client has no parameters with a fraction: they come as strings."""
    try:
        return float(text)
    except ValueError:
        return None


def _of_kind(name: str, value: Any, fits: bool, what: str) -> Any:
    if not fits:
        given = "" if value is None else f", got {type(value).__name__}"
        raise InvalidArgument(f"the parameter {name} must be {what}{given}", field=name)
    return value


def _set_structured(options: dict[str, Any], structured: StructuredOutput) -> None:
    if "structured" in options:
        raise InvalidArgument(
            f"parameters asks for both {options['structured'].kind} and {structured.kind}; ask for one of them",
            field="parameters",
        )
    options["structured"] = structured


def _json_list(text: str, kind: type) -> list[Any] | None:
    """The entries of a JSON array of one type; None where it is none."""
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and all(type(entry) is kind for entry in value) else None


def _split(data: bytes) -> list[bytes]:
    """The elements of a raw BYTES tensor. Raises InvalidArgument where lengths and bytes do not go together."""
    elements, at = list[bytes](), 0
    while at < len(data):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data) or len(elements) == MAX_TEXTS:
            raise InvalidArgument(
                f"raw_input_contents must be up to {MAX_TEXTS} times four bytes of length and so many bytes; "
                f"element {len(elements)} of {len(data)} bytes does not fit that",
                field="raw_input_contents",
            )
        elements.append(data[start:at])
    return elements


def _text(element: bytes) -> str:
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{INPUT} holds bytes that are not UTF-8, at {error.start}", field="inputs") from None


def _wanted(request: pb.ModelInferRequest) -> list[str]:
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidArgument(
                f"outputs asks for {shown(output.name)}; there are {', '.join(OUTPUTS)}", field="outputs"
            )
        for name in output.parameters:
            raise InvalidArgument(f"{output.name} has the parameter {shown(name)}, none is known", field="outputs")
    return list(dict.fromkeys(output.name for output in request.outputs)) or list(OUTPUTS)


def _add_output(
    answer: pb.ModelInferResponse, name: str, shape: Sequence[int], elements: Sequence[Any], raw: bool
) -> None:
    output = OUTPUTS[name]
    tensor = answer.outputs.add(name=name, datatype=output.datatype, shape=shape)
    if raw:
        answer.raw_output_contents.append(b"".join(map(output.raw, elements)))
    else:
        getattr(tensor.contents, output.field).extend(elements)


def _is_served(model: ServedModel, name: str, version: str) -> bool:
    return name in model.names and version in ("", VERSION)


def _check_model(model: ServedModel, name: str, version: str) -> None:
    if not _is_served(model, name, version):
        asked = f"{shown(name)}, version {shown(version)}" if version else shown(name)
        raise NotFound(f"there is no model {asked}; this server has {model.name!r}, version '{VERSION}'", field="model")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What happened first. What came of ending the others is not in the group."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
