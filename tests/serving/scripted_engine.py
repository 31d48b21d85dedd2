"""An engine without a model, for tests of what stands in front of it: it answers with the prompt, again and again.

Its interface and its promises are those of `jaxpd.engine.Engine`; `step_s` is the time a step takes.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import tokenizers

from jaxpd.errors import JaxpdError, ResourceExhausted, Unavailable
from jaxpd.life import Life, Stage
from jaxpd.request import (
    DecodeLeg,
    Event,
    FinishEvent,
    FinishReason,
    Leg,
    PrefillLeg,
    Request,
    Timings,
    TokenLogprobs,
    TokensEvent,
    Usage,
)
from jaxpd.stats import EngineStats, ReplicaStats
from jaxpd.tokenizer import Tokenizer
from serving.model import ServedModel

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 is EOS, a special token."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    shown = {**_bytes_to_unicode()}
    assert set(shown.values()) == set(alphabet)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={char: byte for byte, char in shown.items()}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("</s>", special=True)])
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    return Tokenizer(backend, chat_template=template, special_tokens={"eos_token": "</s>"})


def _bytes_to_unicode() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(moved)}}


def served_model(tokenizer: Tokenizer | None, max_model_len: int = 4096) -> ServedModel:
    """The model that `ScriptedEngine` plays."""
    return ServedModel(
        name="bytes",
        architecture="scripted",
        vocab_size=257,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        dtype="float32",
        page_size=16,
        meshes={"prefill": ("2x1",), "decode": ("1x2",)},
        tokenizer=tokenizer,
    )


@dataclasses.dataclass
class _Running:
    request: Request
    sample: int = 0
    made: int = 0  # tokens, those that were made elsewhere included
    leg: Leg | None = None
    aborted: bool = False
    life: Life = dataclasses.field(default_factory=Life)


class ScriptedEngine:
    """Sample i of a request begins i tokens further on in its prompt. Of a prefill leg it makes one token, of a decode
    leg those behind it. `fail_with` ends a request after two tokens with
    that error, if its prompt starts with the byte `!`. `submit_s` is how long `submit` takes where it compiles a
    grammar, which it does not heed."""

    def __init__(
        self,
        on_events: Callable[[list[Event]], None],
        *,
        step_s: float = 0.0,
        max_queued: int = 64,
        fail_with: JaxpdError | None = None,
        start_s: float = 0.0,
        submit_s: float = 0.0,
    ) -> None:
        self.on_events = on_events
        self.step_s = step_s
        self.max_queued = max_queued
        self.fail_with = fail_with
        self.start_s = start_s
        self.submit_s = submit_s
        self.submitted: list[Request] = []
        self.legs: list[Leg | None] = []
        self.aborts: list[str] = []
        self.closed = False
        self.draining = False
        self._running: dict[tuple[str, int], _Running] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        time.sleep(self.start_s)
        self._thread.start()

    def submit(self, request: Request, leg: Leg | None = None) -> None:
        if request.params.structured is not None:
            time.sleep(self.submit_s)
        with self._changed:
            if self.draining:
                raise Unavailable("draining")
            if len(self._running) >= self.max_queued:
                raise ResourceExhausted(f"{self.max_queued} requests wait already", retry_after_s=2.5)
            self.submitted.append(request)
            self.legs.append(leg)
            before = len(request.outputs) + isinstance(leg, DecodeLeg)
            for sample in range(request.params.n):
                running = self._running[request.request_id, sample] = _Running(request, sample, before, leg)
                running.life.mark(Stage.ARRIVED, at_s=request.arrival_s)
                running.life.mark(Stage.ADMITTED)
            self._changed.notify_all()

    def abort(self, request_id: str, *, sample: int | None = None) -> bool:
        with self._changed:
            self.aborts.append(request_id)
            found = [r for (i, s), r in self._running.items() if i == request_id and sample in (None, s)]
            for running in found:
                running.aborted = True
            return bool(found)

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            self.draining = True
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def stats(self) -> EngineStats:
        replicas = [
            ReplicaStats(role=role, pool=0, replica=r, free_pages=7 + r, num_pages=9, free_slots=1, num_slots=1)
            for role, count in (("prefill", 1), ("decode", 2))
            for r in range(count)
        ]
        states = {"queued": 1, "decoding": len(self._running)}
        return EngineStats(states=states, replicas=tuple(replicas), staging_bytes=0)

    @property
    def running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _loop(self) -> None:
        while not self.closed:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self.closed)
                events = [event for running in list(self._running.values()) for event in self._step(running)]
                self._changed.notify_all()
            self.on_events(events)
            time.sleep(self.step_s)

    def _step(self, running: _Running) -> list[Event]:
        request, params = running.request, running.request.params
        if running.aborted:
            return [self._finish(running, FinishReason.ABORT)]
        failing = self.fail_with is not None and request.prompt_ids[0] == ord("!")
        if failing and running.made == 2:
            return [self._finish(running, FinishReason.ERROR, error=self.fail_with)]
        token = request.prompt_ids[(running.made + running.sample) % len(request.prompt_ids)]
        if not running.made:
            _prefilled(running)
        running.life.token_times.append(time.monotonic())
        score_prompt = running.made == running.sample == 0 and params.prompt_logprobs is not None
        events: list[Event] = [
            TokensEvent(
                request_id=request.request_id,
                first_index=running.made,
                token_ids=(token,),
                logprobs=None if params.logprobs is None else (scores(token, params.logprobs),),
                prompt_logprobs=tuple(scores(i, params.prompt_logprobs or 0) for i in request.prompt_ids[1:])
                if score_prompt
                else None,
                sample=running.sample,
            )
        ]
        running.made += 1
        if token in params.ending_ids((EOS,)):
            events.append(self._finish(running, FinishReason.STOP, stop_token_id=token))
        elif running.made == params.max_tokens:
            events.append(self._finish(running, FinishReason.LENGTH))
        elif isinstance(running.leg, PrefillLeg):
            events.append(self._finish(running, FinishReason.HANDED_OFF))
        return events

    def _finish(self, running: _Running, reason: FinishReason, **more: Any) -> FinishEvent:
        del self._running[running.request.request_id, running.sample]
        running.life.mark(Stage.FAILED if reason is FinishReason.ERROR else Stage.FINISHED)
        running.life.reason = reason.value
        return FinishEvent(
            request_id=running.request.request_id,
            reason=reason,
            usage=Usage(prompt_tokens=len(running.request.prompt_ids), completion_tokens=running.made),
            timings=Timings(queue_s=0.0, prefill_s=0.5, ttft_s=0.25),
            sample=running.sample,
            life=running.life,
            **more,
        )


def _prefilled(running: _Running) -> None:
    """Everything before the first token, as two pools would have it."""
    for stage in (
        Stage.PREFILL_START,
        Stage.CHUNK,
        Stage.OFFERED,
        Stage.PREFILL_END,
        Stage.TRANSFERRED,
        Stage.ACCEPTED,
        Stage.DECODE_START,
    ):
        running.life.mark(stage, tokens=len(running.request.prompt_ids) if stage is Stage.CHUNK else 0)


def scores(token: int, top: int) -> TokenLogprobs:
    """What the scripted model says of a token: it was the likeliest, and those after it half as likely each."""
    return TokenLogprobs(logprob=-0.5, top=tuple(((token + i) % 257, -0.5 - 0.7 * i) for i in range(top)))
