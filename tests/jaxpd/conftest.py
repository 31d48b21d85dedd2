"""Fixtures of the engine's tests: an engine on a tiny checkpoint, and what a client would have collected from it."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.progress import SilentProgress
from jaxpd.request import Event, FinishEvent, Request, SamplingParams, TokenLogprobs, TokensEvent
from jaxpd.stats import EngineStats


@dataclasses.dataclass
class Answer:
    """Everything one request got, as it came."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finishes: list[FinishEvent] = dataclasses.field(default_factory=list)
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def finish(self) -> FinishEvent:
        assert len(self.finishes) == 1, f"{len(self.finishes)} finish events"
        return self.finishes[0]


class Running:
    """A started engine and the answers it gave."""

    def __init__(self, folder: pathlib.Path, config: EngineConfig) -> None:
        self.answers: dict[str, Answer] = {}
        self.on_token: Callable[[TokensEvent], None] = lambda event: None
        checkpoint = resolve(str(folder), progress=SilentProgress())
        self.engine = Engine(checkpoint, config, on_events=self._on_events)
        self.engine.start()
        self.baseline = self.engine.stats()

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            answer = self.answers[f"{event.request_id}/{event.sample}" if event.sample else event.request_id]
            if isinstance(event, TokensEvent):
                assert event.first_index == len(answer.token_ids)
                assert not answer.finishes, "a token after the end"
                answer.token_ids.extend(event.token_ids)
                answer.logprobs.extend(event.logprobs or ())
                if event.prompt_logprobs is not None:
                    assert event.first_index == event.sample == 0
                    answer.prompt_logprobs = event.prompt_logprobs
                self.on_token(event)
            else:
                answer.finishes.append(event)
                answer.ended.set()

    def submit(self, name: str, prompt_ids: Any, **params: Any) -> Answer:
        """Submits a request; greedy with EOS ignored unless told otherwise.

        `priority`, `cache_salt` and `outputs` are the request's, everything else its sampling parameters. The answers
        of the samples after the first are filed as `NAME/1`, `NAME/2` ... An answer begins with `outputs`.
        """
        of_request = {key: params.pop(key) for key in ("priority", "cache_salt", "outputs") if key in params}
        options = {"ignore_eos": True, "seed": 0, **params}
        answer = self.answers[name] = Answer(token_ids=list(of_request.get("outputs", ())))
        others = [f"{name}/{i}" for i in range(1, options.get("n", 1))]
        self.answers.update({other: Answer() for other in others})
        request = Request(
            request_id=name,
            prompt_ids=tuple(prompt_ids),
            params=SamplingParams(**options),
            arrival_s=time.monotonic(),
            **of_request,
        )
        try:
            self.engine.submit(request)
        except Exception:
            for refused in (name, *others):
                del self.answers[refused]
            raise
        return answer

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until every request has ended."""
        deadline = time.monotonic() + timeout_s
        for name, answer in self.answers.items():
            assert answer.ended.wait(max(deadline - time.monotonic(), 0.0)), f"request {name} got no answer"

    def assert_at_baseline(self) -> EngineStats:
        """Pages, slots and staging bytes are as they were before the first request.

        What was on its way when its request ended may take a moment to arrive and be dropped.
        """
        deadline = time.monotonic() + 10.0
        while (stats := self.engine.stats()) != self.baseline and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stats == self.baseline
        return stats


@pytest.fixture(scope="module")
def started(tiny_folders: dict[str, pathlib.Path]) -> Iterator[Callable[..., Running]]:
    """`started(model, prefill, decode, **config)` -> Running; equal calls of one module share an engine.

    Programs are compiled as they are used, most of them never, unless `precompile=True`.

    A mode that shares one mesh is asked for as `started(model, None, None, mode=..., mesh=...)`.
    """
    engines: dict[Any, Running] = {}

    def start(model: str, prefill: str | None, decode: str | None, **config: Any) -> Running:
        small = {"precompile": False, "max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 4, **config}
        key = (model, prefill, decode, tuple(sorted(small.items())))
        if key not in engines:
            engines[key] = Running(tiny_folders[model], EngineConfig(prefill_mesh=prefill, decode_mesh=decode, **small))
        engines[key].answers.clear()
        engines[key].on_token = lambda event: None
        return engines[key]

    yield start
    for running in engines.values():
        running.engine.close()
