"""The Python door: `LLM(...).generate(prompts, SamplingParams(...))` and `.stream(...)`, on the server's engine.

with LLM("smollm2-135m", prefill_mesh="8x1", decode_mesh="1x8") as llm:
    for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(answer.text)
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.errors import InvalidArgument, JaxpdError
from jaxpd.progress import Progress, SilentProgress
from jaxpd.request import (
    MAX_SEED,
    Event,
    FinishReason,
    Request,
    SamplingParams,
    Timings,
    TokenLogprobs,
    TokensEvent,
    Usage,
)
from jaxpd.startup import prepare_devices
from jaxpd.text import TextStream, to_prompt_ids
from jaxpd.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids or chat messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished answer. `token_ids` are complete (EOS and stop tokens included); `text` hides special tokens.

    `logprobs` has one entry a token where the request asked for them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    error: JaxpdError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens, their log probabilities where asked for, and the text that became safe to show."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None


class LLM:
    """A model on a prefill and a decode mesh, in this process.

    `model` is a path, a built-in name or a hub id; keyword arguments are the fields of `EngineConfig`. Starting loads
    and compiles, which takes a while the first time: pass `jaxpd.cli.progress.console_progress()` to watch.
    Raises JaxpdError (InvalidArgument, NotFound, FailedPrecondition) with what to change.
    """

    def __init__(self, model: str = "smollm2-135m", *, progress: Progress | None = None, **config: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(config) - known):
            raise InvalidArgument(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
        shown = progress or SilentProgress()
        asked = EngineConfig(**config)
        prepare_devices(asked)
        checkpoint = resolve(model, progress=shown)
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self._queues: dict[str, queue.SimpleQueue[Event]] = {}
        self._lock = threading.Lock()
        self.engine = Engine(checkpoint, asked, on_events=self._on_events, progress=shown)
        for line in self.engine.limits.plan_lines():
            shown.note(line)
        self.engine.start()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answers to all prompts, run concurrently, in order. A request that fails carries its `error`.

        A single prompt may be given alone. Raises InvalidArgument for a prompt or parameter that cannot be served,
        before anything runs.
        """
        many = _as_list(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise InvalidArgument(f"{len(each)} sampling params for {len(many)} prompts; give one, or one for each")
        requests = [self._request(prompt, p) for prompt, p in zip(many, each, strict=True)]
        answers: dict[str, Completion] = {}
        waiting, running = list(reversed(requests)), list[Request]()
        bound = self.engine.limits.max_queued_requests
        try:
            while waiting or running:
                while waiting and len(running) < bound:
                    request = waiting.pop()
                    self._submit(request)
                    running.append(request)
                request = running.pop(0)
                *_, last = self._events(request)
                assert isinstance(last, Completion)
                answers[request.request_id] = last
        finally:
            self._forget(running)
        return [answers[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta | Completion]:
        """Deltas as they come, then the `Completion`. Closing the iterator early aborts the request."""
        request = self._request(prompt, params or SamplingParams())
        self._submit(request)
        try:
            yield from self._events(request)
        finally:
            self._forget([request])

    def close(self) -> None:
        """Ends running requests and frees the devices. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            ids = to_prompt_ids(self.tokenizer, text=prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = to_prompt_ids(self.tokenizer, chat=prompt)  # type: ignore[arg-type]
        else:
            ids = to_prompt_ids(self.tokenizer, token_ids=prompt)  # type: ignore[arg-type]
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        request = Request(
            request_id=f"req-{secrets.token_hex(8)}", prompt_ids=ids, params=params, arrival_s=time.monotonic()
        )
        limits = self.engine.limits
        request.validate(vocab_size=self.engine.checkpoint.config.vocab_size, max_model_len=limits.max_model_len)
        return request

    def _submit(self, request: Request) -> None:
        with self._lock:
            self._queues[request.request_id] = queue.SimpleQueue()
        try:
            self.engine.submit(dataclasses.replace(request, arrival_s=time.monotonic()))
        except JaxpdError:
            self._forget([request])
            raise

    def _events(self, request: Request) -> Iterator[Delta | Completion]:
        """The request's events as text, up to and with its Completion."""
        events = self._queues[request.request_id]
        text = TextStream(self.tokenizer, stop=request.params.stop)
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        stopped = False
        while True:
            event = events.get()
            if isinstance(event, TokensEvent):
                if stopped:
                    continue  # tokens that were on their way when a stop string ended it
                token_ids.extend(event.token_ids)
                logprobs.extend(event.logprobs or ())
                yield Delta(token_ids=event.token_ids, text=text.push(event.token_ids), logprobs=event.logprobs)
                if text.stopped:
                    stopped = True
                    self.engine.abort(request.request_id)
            else:
                rest = text.finish()
                if rest:
                    yield Delta(token_ids=(), text=rest)
                self._forget([request])
                yield Completion(
                    request_id=request.request_id,
                    prompt_ids=request.prompt_ids,
                    token_ids=tuple(token_ids),
                    text=text.text,
                    finish_reason=FinishReason.STOP if stopped else event.reason,
                    stop_token_id=event.stop_token_id,
                    usage=dataclasses.replace(event.usage, completion_tokens=len(token_ids)),
                    timings=event.timings,
                    error=event.error,
                    logprobs=None if request.params.logprobs is None else tuple(logprobs),
                )
                return

    def _on_events(self, events: list[Event]) -> None:
        with self._lock:
            targets = [(self._queues.get(event.request_id), event) for event in events]
        for target, event in targets:
            if target is not None:
                target.put(event)

    def _forget(self, requests: Sequence[Request]) -> None:
        """Aborts requests that still run and drops their queues."""
        for request in requests:
            with self._lock:
                known = self._queues.pop(request.request_id, None)
            if known is not None:
                self.engine.abort(request.request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a list of ids or a list of chat messages is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
