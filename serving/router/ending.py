"""How a sample ends: as it would have where it was made in one place, with its times on the router's clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpd.errors import JaxpdError
from jaxpd.life import Life, Moment, Stage
from jaxpd.request import FinishEvent, FinishReason, Request, Usage
from serving.router.attempt import Sample

# Of a sample's life: what the prefill worker tells, and what the decode worker does.
BY_PREFILL = frozenset((Stage.ADMITTED, Stage.PREFILL_START, Stage.CHUNK, Stage.PREFILL_END, Stage.OFFERED))
BY_DECODE = frozenset((Stage.TRANSFERRED, Stage.ACCEPTED, Stage.DECODE_START, Stage.PREEMPTED))


def natural_end(request: Request, sample: Sample, ending_ids: frozenset[int]) -> FinishReason | None:
    """How a sample has ended that has all its tokens, so that only the word of its end is missing; None: it goes on."""
    tokens = sample.tokens
    if len(tokens) == len(request.outputs):
        return None
    if tokens[-1] in ending_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= request.params.max_tokens else None


def finish(
    request: Request,
    sample: Sample,
    reason: FinishReason,
    now_s: float,
    *,
    stop_token_id: int | None = None,
    error: JaxpdError | None = None,
) -> FinishEvent:
    """The last event of a sample, for the client."""
    sample.finished = True
    life = _life(request, sample, reason, now_s)
    usage = Usage(
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(sample.tokens),
        cached_tokens=sample.cached_tokens or 0,
    )
    return FinishEvent(
        request_id=request.request_id,
        reason=reason,
        usage=usage,
        timings=life.timings(),
        stop_token_id=stop_token_id,
        error=error,
        sample=sample.index,
        life=life,
    )


def _life(request: Request, sample: Sample, reason: FinishReason, now_s: float) -> Life:
    """What the workers told, and when tokens came here. Nothing decodes before its first token is out."""
    arrived = Moment(Stage.ARRIVED, request.arrival_s)
    first_s = sample.times[0] if sample.times else now_s
    moments = [
        dataclasses.replace(m, at_s=max(m.at_s, first_s)) if m.stage is Stage.DECODE_START else m
        for m in sample.moments
    ]
    moments.sort(key=lambda moment: moment.at_s)
    stage = Stage.FAILED if reason is FinishReason.ERROR else Stage.FINISHED
    return Life(moments=[arrived, *moments, Moment(stage, now_s)], token_times=list(sample.times), reason=reason.value)


def between(moments: Sequence[Moment], starts: Sequence[Stage], end: Stage) -> float | None:
    """Seconds from the first of `starts` that there is to `end`."""
    at = {moment.stage: moment.at_s for moment in moments}  # the last time, after a replay
    start_s = next((at[stage] for stage in starts if stage in at), None)
    return None if start_s is None or end not in at else max(at[end] - start_s, 0.0)
