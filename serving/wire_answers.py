"""Answers between `serving.messages` and the messages of `jaxpd/v1/inference.proto`, in both directions.

The client reads leniently and passes over what it does not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxpd.errors import Internal
from jaxpd.life import Moment, Stage
from jaxpd.request import FinishReason, SamplingParams, Timings, TokenLogprobs, Usage
from serving.messages import Answer, Finished, Message, Sample, Tokens, Understood
from serving.proto.jaxpd.v1 import inference_pb2 as pb
from serving.wire import SAMPLING, STOPPING, get, set_

REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
REASONS_BACK = {value: reason for reason, value in REASONS.items()}
_STAGES = {stage.value for stage in Stage}


def message_to_proto(message: Message) -> pb.GenerateStreamResponse:
    """One message of a stream."""
    match message:
        case Tokens():
            return pb.GenerateStreamResponse(
                tokens=pb.Tokens(
                    sequence=message.sample,
                    first_index=message.first_index,
                    count=message.count,
                    token_ids=message.token_ids,
                    text=message.text,
                    logprobs=scores_to_proto(message.logprobs),
                    prompt_logprobs=scores_to_proto(message.prompt_logprobs),
                )
            )
        case Understood():
            return pb.GenerateStreamResponse(info=_info_to_proto(message))
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
                text=get(tokens, "text"),
                sample=tokens.sequence,
                logprobs=scores_from_proto(tokens.logprobs) or None,
                prompt_logprobs=scores_from_proto(tokens.prompt_logprobs) or None,
            )
        case "finish":
            return _finish_from_proto(message.finish)
        case _:
            return None


def answer_to_proto(answer: Answer) -> pb.GenerateResponse:
    """The unary response."""
    return pb.GenerateResponse(
        info=_info_to_proto(answer.understood),
        sequences=[
            pb.Sequence(
                sequence=sample.index,
                token_ids=sample.token_ids,
                text=sample.text,
                logprobs=scores_to_proto(sample.logprobs),
                finish=_finish_to_proto(sample.finished),
            )
            for sample in answer.samples
        ],
        prompt_logprobs=scores_to_proto(answer.prompt_logprobs),
    )


def answer_from_proto(response: pb.GenerateResponse) -> Answer:
    """The whole answer of a unary response. Raises Internal for one without a sequence."""
    if not response.sequences:
        raise Internal("the answer holds no sequence; is the server newer than this client?")
    understood = _info_from_proto(response.info)
    scored = understood.params.logprobs is not None
    return Answer(
        understood=understood,
        samples=tuple(
            Sample(
                index=sequence.sequence,
                token_ids=tuple(sequence.token_ids),
                text=get(sequence, "text"),
                logprobs=scores_from_proto(sequence.logprobs) if scored else None,
                finished=_finish_from_proto(sequence.finish),
            )
            for sequence in response.sequences
        ),
        prompt_logprobs=scores_from_proto(response.prompt_logprobs)
        if understood.params.prompt_logprobs is not None
        else None,
    )


def scores_to_proto(scores: Iterable[TokenLogprobs] | None) -> list[pb.TokenLogprobs]:
    """One entry a token; none for None."""
    return [
        pb.TokenLogprobs(
            logprob=entry.logprob,
            top_token_ids=[token for token, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in scores or ()
    ]


def scores_from_proto(scores: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """One entry a token."""
    return tuple(
        TokenLogprobs(logprob=entry.logprob, top=tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
        for entry in scores
    )


def _info_to_proto(message: Understood) -> pb.RequestInfo:
    params = message.params
    info = pb.RequestInfo(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        prompt_token_ids=message.prompt_ids or (),
        sampling=pb.SamplingOptions(
            logit_bias=params.logit_bias, **{field: getattr(params, field) for field in SAMPLING}
        ),
        stopping=pb.StoppingOptions(
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            **{field: getattr(params, field) for field in STOPPING},
        ),
        response=pb.ResponseOptions(
            text=message.want_text,
            token_ids=message.want_token_ids,
            prompt_token_ids=message.prompt_ids is not None,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        ),
        priority=message.priority,
    )
    return info


def _info_from_proto(info: pb.RequestInfo) -> Understood:
    given = {field: get(info.sampling, field) for field in SAMPLING}
    given |= {field: get(info.stopping, field) for field in STOPPING}
    given |= {field: get(info.response, field) for field in ("logprobs", "prompt_logprobs")}
    return Understood(
        request_id=info.request_id,
        prompt_tokens=info.prompt_tokens,
        prompt_ids=tuple(info.prompt_token_ids) if info.response.prompt_token_ids else None,
        params=SamplingParams(
            stop=tuple(info.stopping.stop),
            stop_token_ids=tuple(info.stopping.stop_token_ids),
            logit_bias=dict(info.sampling.logit_bias),
            **{field: value for field, value in given.items() if value is not None},
        ),
        want_text=info.response.text,
        want_token_ids=info.response.token_ids,
        priority=info.priority,
    )


def _finish_to_proto(message: Finished) -> pb.Finish:
    finish = pb.Finish(
        sequence=message.sample,
        reason=REASONS[message.reason],
        usage=pb.Usage(**dataclasses.asdict(message.usage)),
        timings=pb.Timings(**dataclasses.asdict(message.timings)),
        timeline=moments_to_proto(message.timeline or ()),
    )
    set_(finish, "stop_token_id", message.stop_token_id)
    set_(finish, "stop_string", message.stop_string)
    return finish


def _finish_from_proto(finish: pb.Finish) -> Finished:
    timeline = moments_from_proto(finish.timeline)
    return Finished(
        reason=REASONS_BACK.get(finish.reason, FinishReason.STOP),  # as the proto's rules say
        usage=Usage(**{f.name: getattr(finish.usage, f.name) for f in dataclasses.fields(Usage)}),
        timings=Timings(**{f.name: get(finish.timings, f.name) for f in dataclasses.fields(Timings)}),
        stop_token_id=get(finish, "stop_token_id"),
        stop_string=get(finish, "stop_string"),
        sample=finish.sequence,
        timeline=timeline or None,
    )


def moments_to_proto(moments: Iterable[Moment]) -> list[pb.Moment]:
    """As they are: whoever reads them has to know since when `at_s` counts."""
    return [pb.Moment(stage=m.stage.value, at_s=m.at_s, tokens=m.tokens) for m in moments]


def moments_from_proto(moments: Iterable[pb.Moment]) -> tuple[Moment, ...]:
    """Without those of stages that are not known here."""
    return tuple(Moment(Stage(m.stage), m.at_s, m.tokens) for m in moments if m.stage in _STAGES)
