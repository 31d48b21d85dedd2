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

from jaxpd.answers import Answer, Completion, Delta
from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.errors import InvalidArgument, JaxpdError
from jaxpd.progress import Progress, SilentProgress
from jaxpd.request import MAX_SEED, Event, Request, SamplingParams
from jaxpd.startup import prepare_devices
from jaxpd.text import to_prompt_ids
from jaxpd.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Delta", "Prompt"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids or chat messages


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
        self._inboxes: dict[str, queue.SimpleQueue[Event]] = {}
        self._lock = threading.Lock()
        self.engine = Engine(checkpoint, asked, on_events=self._on_events, progress=shown)
        for line in self.engine.limits.plan_lines():
            shown.note(line)
        self.engine.start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[Completion]:
        """Answers to all prompts, run concurrently, in order: the `n` samples of a prompt one after another.

        A sample that fails carries its `error`. A single prompt may be given alone. `priority` and `cache_salt` are
        those of `jaxpd.request.Request`, for all prompts of this call. Raises InvalidArgument for a prompt or parameter
        that cannot be served, before anything runs.
        """
        many = _as_list(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise InvalidArgument(f"{len(each)} sampling params for {len(many)} prompts; give one, or one for each")
        requests = [self._request(prompt, p, priority, cache_salt) for prompt, p in zip(many, each, strict=True)]
        completions: dict[tuple[str, int], Completion] = {}
        waiting, running, unfinished = list(reversed(requests)), dict[str, Answer](), 0
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()  # of all of them, so that no stop string is found late
        try:
            while waiting or running:
                while waiting and unfinished < self.engine.limits.max_queued_requests:  # which counts samples
                    request = waiting.pop()
                    running[request.request_id] = self._submit(request, inbox)
                    unfinished += request.params.n
                event = inbox.get()
                answer = running[event.request_id]
                for item in answer.take(event):
                    if isinstance(item, Completion):
                        completions[item.request_id, item.sample] = item
                        unfinished -= 1
                if not answer.unfinished:
                    self._forget(running.pop(event.request_id).request)
        finally:
            for answer in running.values():
                self._forget(answer.request)
        return [completions[r.request_id, i] for r in requests for i in range(r.params.n)]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> Iterator[Delta | Completion]:
        """Deltas as they come, and a `Completion` for each of the `n` samples when it ends; `sample` says which it is.

        Closing the iterator early aborts the request with all its samples. Options and errors are those of `generate`.
        """
        request = self._request(prompt, params or SamplingParams(), priority, cache_salt)
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        answer = self._submit(request, inbox)
        try:
            while answer.unfinished:
                yield from answer.take(inbox.get())
        finally:
            self._forget(request)

    def close(self) -> None:
        """Ends running requests and frees the devices. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str) -> Request:
        if isinstance(prompt, str):
            ids = to_prompt_ids(self.tokenizer, text=prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = to_prompt_ids(self.tokenizer, chat=prompt)  # type: ignore[arg-type]
        else:
            ids = to_prompt_ids(self.tokenizer, token_ids=prompt)  # type: ignore[arg-type]
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        request = Request(
            request_id=f"req-{secrets.token_hex(8)}",
            prompt_ids=ids,
            params=params,
            arrival_s=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )
        limits = self.engine.limits
        request.validate(vocab_size=self.engine.checkpoint.config.vocab_size, max_model_len=limits.max_model_len)
        return request

    def _submit(self, request: Request, inbox: queue.SimpleQueue[Event]) -> Answer:
        """Starts a request whose events go to `inbox`. Raises JaxpdError where the engine refuses it."""
        with self._lock:
            self._inboxes[request.request_id] = inbox
        try:
            self.engine.submit(dataclasses.replace(request, arrival_s=time.monotonic()))
        except JaxpdError:
            self._forget(request)
            raise

        def abort(sample: int) -> None:
            self.engine.abort(request.request_id, sample=sample)

        return Answer(request, self.tokenizer, self.engine.checkpoint.config.eos_token_ids, abort=abort)

    def _on_events(self, events: list[Event]) -> None:
        with self._lock:
            targets = [(self._inboxes.get(event.request_id), event) for event in events]
        for target, event in targets:
            if target is not None:
                target.put(event)

    def _forget(self, request: Request) -> None:
        """Aborts what still runs of a request; nobody reads its events any more."""
        with self._lock:
            known = self._inboxes.pop(request.request_id, None)
        if known is not None:
            self.engine.abort(request.request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a list of ids or a list of chat messages is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
