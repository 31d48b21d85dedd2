"""What goes over a session, between `worker.proto` and the engine's nouns, in both directions.

    router -> worker     Start (a `Started`: the request and its leg)
    worker -> router     Events (`jaxpd.request.Event`)

No time of one process means anything in another: a request gets its arrival from who receives it, and the moments of a
life cross as offsets from the start of the leg.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from jaxpd.errors import HandoffFailed, Internal, InvalidArgument, JaxpdError, ResourceExhausted, TooLong
from jaxpd.life import Life, Moment, Stage
from jaxpd.request import (
    DecodeLeg,
    Event,
    FinishEvent,
    FinishReason,
    Leg,
    PrefillLeg,
    Request,
    SamplingParams,
    TokensEvent,
    Usage,
)
from serving.channel import CLASSES
from serving.proto.jaxpd.v1 import inference_pb2
from serving.proto.jaxpd.v1 import worker_pb2 as pb
from serving.wire import SAMPLING, STOPPING, add_structured, get, structured_from_proto
from serving.wire_answers import (
    REASONS,
    REASONS_BACK,
    moments_from_proto,
    moments_to_proto,
    scores_from_proto,
    scores_to_proto,
)

# Of the sessions: what a router and a worker say to each other. One version back is understood.
PROTOCOL = 1
OLDEST_PROTOCOL = 1

TOO_LONG = "OUT_OF_RANGE"  # the code of a TooLong, which is an INVALID_ARGUMENT that clients are told in other words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """One leg of a request; `leg` is None where a mixed worker serves it whole.

    `decode_instance` is the one of the worker at `PrefillLeg.peer` that is meant; "" means whichever answers there.
    """

    request: Request
    leg: Leg | None = None
    decode_instance: str = ""


# -- requests


def request_to_proto(request: Request) -> pb.EngineRequest:
    """All of it but the arrival."""
    params = request.params
    message = pb.EngineRequest(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        sampling=inference_pb2.SamplingOptions(
            logit_bias=params.logit_bias, **{field: getattr(params, field) for field in SAMPLING}
        ),
        stopping=inference_pb2.StoppingOptions(
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            **{field: getattr(params, field) for field in STOPPING},
        ),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        priority=request.priority,
        cache_salt=request.cache_salt,
        outputs=request.outputs,
    )
    if params.structured is not None:
        add_structured(message.sampling, params.structured)
    return message


def request_from_proto(message: pb.EngineRequest, *, arrival_s: float) -> Request:
    """`arrival_s` is when it came here. What cannot be served the engine refuses."""
    given = {field: get(message.sampling, field) for field in SAMPLING}
    given |= {field: get(message.stopping, field) for field in STOPPING}
    given |= {field: get(message, field) for field in ("logprobs", "prompt_logprobs")}
    return Request(
        request_id=message.request_id,
        prompt_ids=tuple(message.prompt_ids),
        params=SamplingParams(
            logit_bias=dict(message.sampling.logit_bias),
            structured=structured_from_proto(message.sampling),
            stop=tuple(message.stopping.stop),
            stop_token_ids=tuple(message.stopping.stop_token_ids),
            **{field: value for field, value in given.items() if value is not None},
        ),
        arrival_s=arrival_s,
        priority=message.priority,
        cache_salt=message.cache_salt,
        outputs=tuple(message.outputs),
    )


def start_to_proto(started: Started) -> pb.Start:
    """One leg of a request."""
    message = pb.Start(request=request_to_proto(started.request))
    match started.leg:
        case PrefillLeg() as leg:
            message.prefill.decode_address = leg.peer
            message.prefill.decode_instance = started.decode_instance
            message.prefill.handoffs.extend(leg.handoffs)
        case DecodeLeg() as leg:
            message.decode.SetInParent()
            message.decode.handoffs.extend(leg.handoffs)
        case None:
            message.whole.SetInParent()
    return message


def start_from_proto(message: pb.Start, *, arrival_s: float) -> Started:
    """Raises InvalidArgument for a kind of leg that is not known here."""
    request = request_from_proto(message.request, arrival_s=arrival_s)
    match message.WhichOneof("leg"):
        case "whole":
            return Started(request=request)
        case "prefill":
            prefill = message.prefill
            leg = PrefillLeg(peer=prefill.decode_address, handoffs=tuple(prefill.handoffs))
            return Started(request=request, leg=leg, decode_instance=prefill.decode_instance)
        case "decode":
            return Started(request=request, leg=DecodeLeg(handoffs=tuple(message.decode.handoffs)))
        case _:
            raise InvalidArgument(
                f"request {request.request_id} starts with a leg that this worker does not know; is the router newer? "
                "upgrade the workers first",
                field="leg",
            )


# -- events


def event_to_proto(event: Event) -> pb.Event:
    """One event; the moments of a life count from its ARRIVED."""
    if isinstance(event, TokensEvent):
        return pb.Event(
            tokens=pb.NewTokens(
                request_id=event.request_id,
                sample=event.sample,
                first_index=event.first_index,
                token_ids=event.token_ids,
                logprobs=scores_to_proto(event.logprobs),
                prompt_logprobs=scores_to_proto(event.prompt_logprobs),
            )
        )
    moments = moments_to_proto([] if event.life is None else _since_arrival(event.life))
    if event.reason is FinishReason.HANDED_OFF:
        return pb.Event(
            handed_off=pb.HandedOff(
                request_id=event.request_id,
                sample=event.sample,
                cached_tokens=event.usage.cached_tokens,
                moments=moments,
            )
        )
    return pb.Event(
        ended=pb.Ended(
            request_id=event.request_id,
            sample=event.sample,
            reason=REASONS[event.reason],
            stop_token_id=event.stop_token_id,
            usage=inference_pb2.Usage(**dataclasses.asdict(event.usage)),
            failure=None if event.error is None else failure_to_proto(event.error),
            moments=moments,
        )
    )


def event_from_proto(message: pb.Event, *, started_s: Mapping[str, float]) -> Event | None:
    """None for a kind of event that is not known here. `started_s`: when each request was sent to the worker.

    A FinishEvent has the worker's life from then on, without the times of single tokens, and what `Life.timings` makes
    of it. The usage of a HANDED_OFF has no prompt_tokens: they did not cross, who sent the request knows them.
    """
    match message.WhichOneof("event"):
        case "tokens":
            tokens = message.tokens
            return TokensEvent(
                request_id=tokens.request_id,
                first_index=tokens.first_index,
                token_ids=tuple(tokens.token_ids),
                logprobs=scores_from_proto(tokens.logprobs) or None,
                prompt_logprobs=scores_from_proto(tokens.prompt_logprobs) or None,
                sample=tokens.sample,
            )
        case "handed_off":
            life = _life(message.handed_off, started_s, FinishReason.HANDED_OFF)
            return FinishEvent(
                request_id=message.handed_off.request_id,
                reason=FinishReason.HANDED_OFF,
                usage=Usage(prompt_tokens=0, completion_tokens=1, cached_tokens=message.handed_off.cached_tokens),
                timings=life.timings(),
                sample=message.handed_off.sample,
                life=life,
            )
        case "ended":
            ended = message.ended
            reason = REASONS_BACK.get(ended.reason, FinishReason.STOP)  # as inference.proto's rules say
            error = failure_from_proto(ended.failure) if ended.HasField("failure") else None
            if reason is FinishReason.ERROR and error is None:
                error = Internal("the worker ended the request with an error and gave no reason")
            life = _life(ended, started_s, reason)
            return FinishEvent(
                request_id=ended.request_id,
                reason=reason,
                usage=Usage(**{f.name: getattr(ended.usage, f.name) for f in dataclasses.fields(Usage)}),
                timings=life.timings(),
                stop_token_id=get(ended, "stop_token_id"),
                error=error,
                sample=ended.sample,
                life=life,
            )
        case _:
            return None


def events_to_proto(events: Iterable[Event]) -> pb.Events:
    """Those of one step, in order."""
    return pb.Events(events=[event_to_proto(event) for event in events])


def events_from_proto(message: pb.Events, *, started_s: Mapping[str, float]) -> list[Event]:
    """Those that are known here, in order; see `event_from_proto`."""
    events = (event_from_proto(entry, started_s=started_s) for entry in message.events)
    return [event for event in events if event is not None]


def _since_arrival(life: Life) -> Iterable[Moment]:
    start_s = life.first(Stage.ARRIVED) or (life.moments[0].at_s if life.moments else 0.0)
    return (dataclasses.replace(moment, at_s=moment.at_s - start_s) for moment in life.moments)


def _life(message: pb.Ended | pb.HandedOff, started_s: Mapping[str, float], reason: FinishReason) -> Life:
    since_s = started_s.get(message.request_id, 0.0)
    moments = moments_from_proto(message.moments)
    return Life(
        moments=[dataclasses.replace(moment, at_s=moment.at_s + since_s) for moment in moments], reason=reason.value
    )


# -- errors


def failure_to_proto(error: JaxpdError) -> pb.Failure:
    """By the name of its gRPC status."""
    return pb.Failure(
        code=TOO_LONG if isinstance(error, TooLong) else error.code,
        message=error.message,
        field=error.field or "",
        retry_after_s=error.retry_after_s if isinstance(error, ResourceExhausted) else 0.0,
        handoff_reason=error.reason if isinstance(error, HandoffFailed) else "",
    )


def failure_from_proto(failure: pb.Failure) -> JaxpdError:
    """The error that it was; Internal for a code that is not known here."""
    field = failure.field or None
    if failure.handoff_reason:
        return HandoffFailed(failure.handoff_reason, failure.message)
    if failure.code == TOO_LONG:
        return TooLong(failure.message, field=field)
    if failure.code == ResourceExhausted.code:
        return ResourceExhausted(failure.message, field=field, retry_after_s=failure.retry_after_s)
    return CLASSES.get(failure.code, Internal)(failure.message, field=field)
