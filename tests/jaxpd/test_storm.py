"""A storm of 2,000 random requests leaves nothing behind, leaves nobody without an answer, and changes no token.

Clients in four threads send more than the queue takes to pools with few pages: prompts that begin alike and others,
greedy and seeded. Requests are cancelled in every state of the table and at random times, twice; others are wrong, or
use an id that is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxpd.errors import InvalidArgument, ResourceExhausted
from jaxpd.request import FinishReason, Request, SamplingParams
from jaxpd.sequence import Sequence, State
from tests.jaxpd.few_pages import kv_memory_of
from tests.jaxpd.random_requests import EOS, MODEL, decoder, params_of, possible_tokens

Started = Callable[..., Any]
pytestmark = pytest.mark.heavy

SAMPLES = (1, 1, 1, 2)
OF_REQUEST: tuple[dict[str, Any], ...] = ({}, {}, {"priority": -1}, {"priority": 1}, {"cache_salt": "a tenant"})
WAYS: dict[str, tuple[str | None, str | None, dict[str, Any]]] = {
    "disaggregated": ("2x1,1x1", "1x2,2x1", {}),
    "chunked": (None, None, {"mode": "chunked", "mesh": "1x2"}),
    "decoupled": (None, None, {"mode": "decoupled", "mesh": "2x1"}),
}
REQUESTS = 700  # each way
CLIENTS = 4
OUTSTANDING = 8  # requests that each client has on their way: together more than pools and queue take
LIMITS = {
    "max_model_len": 160,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_queued_requests": 12,
    "reserve_tokens": 1,
}
PAGES = 11  # of a replica, where pages are largest; a prompt takes up to 7 of them
MOST_TOKENS = 24
WRONG: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([10**9], {}),
    ([-1], {}),
    ([], {}),
    ([1] * 150, {"max_tokens": 100}),
    ([1], {"temperature": float("nan")}),
    ([1], {"top_p": 0.0}),
    ([1], {"logit_bias": {10**6: 1.0}}),
    ([1], {"min_tokens": 1, "stop_token_ids": tuple(range(200))}),
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A prompt and what it gets when it runs alone."""

    prompt: list[int]
    options: dict[str, Any]
    token_ids: list[int]


@dataclasses.dataclass
class Plan:
    """One request of the storm."""

    name: str
    reference: Reference
    max_tokens: int
    samples: int
    of_request: dict[str, Any]
    abort_in: State | None  # as soon as it gets there
    abort_after_s: float | None
    has_twin: bool  # its id is used again while it runs

    @property
    def is_aborted(self) -> bool:
        return self.abort_in is not None or self.abort_after_s is not None


@pytest.fixture(scope="module")
def references(started: Started) -> list[Reference]:
    """Answers of requests that ran one by one, on 1x1 and 1x1, without a prefix cache; no choice in them is near."""
    rng = np.random.default_rng(11)
    running = started(MODEL, "1x1", "1x1", prefix_cache=False)
    shared = rng.choice(EOS[0], 64).tolist()
    found: list[Reference] = []
    for i in range(30):
        prompt = rng.choice(EOS[0], int(rng.integers(1, 50))).tolist()
        prompt = [*shared, *prompt][: 16 * int(rng.integers(1, 7))] if i % 3 == 0 else prompt
        options = {"temperature": 0.9, "top_k": 40, "seed": i} if i % 4 == 1 else {}
        answer = running.submit(f"r{i}", prompt, max_tokens=MOST_TOKENS, **options)
        running.wait()
        logits_TV, tokens, params = decoder()((*prompt, *answer.token_ids)), answer.token_ids, params_of(options)
        possible = [
            possible_tokens(logits_TV[len(prompt) + n - 1], params, prompt=prompt, outputs=tokens[:n])
            for n in range(MOST_TOKENS)
        ]
        if possible == [{token} for token in tokens]:
            found.append(Reference(prompt, options, tokens))
    assert len(found) >= 25
    return found


def plans(rng: random.Random, references: list[Reference], states: list[State]) -> list[Plan]:
    """Requests by chance; one in six is cancelled in a given state, and one in six after some time."""
    out = []
    for i in range(REQUESTS):
        fate = rng.randrange(6)
        out.append(
            Plan(
                name=f"storm{i}",
                reference=rng.choice(references),
                max_tokens=rng.choice([1, 2, 6, 12, MOST_TOKENS]),
                samples=rng.choice(SAMPLES),
                of_request=rng.choice(OF_REQUEST),
                abort_in=states[i // 6 % len(states)] if fate == 0 else None,
                abort_after_s=rng.random() ** 3 * 0.3 if fate == 1 else None,
                has_twin=fate == 2 and rng.random() < 0.5,
            )
        )
    return out


class Storm:
    """What happened: every thread's faults, how many were refused, and the states that requests went through."""

    def __init__(self, running: Any, planned: list[Plan]) -> None:
        self.running = running
        self.planned = {plan.name: plan for plan in planned}
        self.counts: Counter[str] = Counter()
        self.faults: list[BaseException] = []
        self.paths: dict[str, list[State]] = {}  # of sample 0 and the others, in the order of what happened
        self.timers: list[threading.Timer] = []
        self._lock = threading.Lock()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sees each change of state; cancels those that were to be cancelled there, from another thread."""
        move = Sequence.move

        def watched(seq: Sequence, state: State) -> None:
            move(seq, state)
            self.paths.setdefault(seq.request_id, []).append(state)
            plan = self.planned.get(seq.request_id)
            if plan is not None and plan.abort_in is state:
                canceller = threading.Thread(target=self._noting(self.abort), args=(plan.name,))
                canceller.start()
                canceller.join(0.2)  # the pool's thread may hold what `abort` needs

        monkeypatch.setattr(Sequence, "move", watched)
        self.running.on_token = self._send_twin

    def abort(self, name: str) -> None:
        """Twice, which is as good as once."""
        self.running.engine.abort(name)
        self.running.engine.abort(name)

    def _send_twin(self, event: Any) -> None:
        """The same id again, while its request surely runs: it has not had its last token and nobody cancels it."""
        plan = self.planned.get(event.request_id)
        if plan is not None and plan.has_twin and event.first_index == 0 and plan.max_tokens > 1:
            twin = Request(
                request_id=plan.name, prompt_ids=(1,), params=SamplingParams(seed=0), arrival_s=time.monotonic()
            )
            self._expect_refusal(lambda: self.running.engine.submit(twin), "twins")

    def _expect_refusal(self, submit: Callable[[], Any], what: str) -> None:
        try:
            submit()
        except InvalidArgument:
            self._count(what)
        else:
            self.faults.append(AssertionError(f"{what} were not refused"))

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _noting(self, work: Callable[..., None]) -> Callable[..., None]:
        """`work`, which notes what it raises instead of ending its thread unseen."""

        def run(*args: Any) -> None:
            try:
                work(*args)
            except BaseException as fault:
                self.faults.append(fault)

        return run

    def rage(self, seed: int) -> None:
        """Runs all clients to their end."""
        everything = list(self.planned.values())
        clients = [
            threading.Thread(target=self._noting(self._client), args=(everything[i::CLIENTS], random.Random(seed + i)))
            for i in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in [*clients, *self.timers]:
            client.join(120)
            assert not client.is_alive()

    def _client(self, planned: list[Plan], rng: random.Random) -> None:
        on_their_way: list[Any] = []
        for plan in planned:
            if rng.random() < 0.1:
                prompt, options = rng.choice(WRONG)
                wrong = f"wrong-{plan.name}"
                self._expect_refusal(functools.partial(self.running.submit, wrong, prompt, **options), "wrong")
            on_their_way = [answer for answer in on_their_way if not answer.ended.is_set()]
            while len(on_their_way) >= OUTSTANDING:
                assert on_their_way.pop(0).ended.wait(60)
            on_their_way.append(self._submit(plan))
            if plan.abort_in is State.QUEUED:
                self.abort(plan.name)
            elif plan.abort_after_s is not None:
                timer = threading.Timer(plan.abort_after_s, self._noting(self.abort), (plan.name,))
                self.timers.append(timer)
                timer.start()
            if rng.random() < 0.05:
                time.sleep(0.05)  # so that pools run empty, too

    def _submit(self, plan: Plan) -> Any:
        """Sends a request until the queue takes it; a minute is for ever."""
        deadline = time.monotonic() + 60
        options = {"max_tokens": plan.max_tokens, **plan.reference.options, **plan.of_request}
        if plan.samples > 1:
            options["n"] = plan.samples
        while True:
            try:
                return self.running.submit(plan.name, plan.reference.prompt, **options)
            except ResourceExhausted as error:
                assert error.retry_after_s > 0 and time.monotonic() < deadline
                self._count("queue full")
                time.sleep(0.01)


def reachable(mode: str | None) -> list[State]:
    """The states in which a request can be cancelled."""
    handed_off = {"offered", "settled"}
    return [s for s in State if s is not State.FINISHED and (mode is None or s.value not in handed_off)]


def jaxpd_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("jaxpd-")}


@contextlib.contextmanager
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The engine logs no error: whatever fails in a step, a hand-off or a listener would be one."""
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_and_nobody_is_forgotten(
    way: str,
    started: Started,
    tiny_folders: dict[str, pathlib.Path],
    references: list[Reference],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode, config = WAYS[way]
    states = reachable(config.get("mode"))
    config = {**LIMITS, **config}
    few = kv_memory_of(PAGES, tiny_folders[MODEL], prefill_mesh=prefill, decode_mesh=decode, **config)
    running = started(MODEL, prefill, decode, kv_memory=few, **config)
    threads = jaxpd_threads()
    storm = Storm(running, plans(random.Random(4), references, states))
    storm.watch(monkeypatch)
    with quiet(caplog):
        storm.rage(seed=5)
        running.wait(60)
        assert_at_baseline(running)
        assert storm.faults == []
        assert threads <= jaxpd_threads(), "a thread died"
        check_answers(storm)
        for i, reference in enumerate(references):  # and it still serves
            again = running.submit(f"after{i}", reference.prompt, max_tokens=MOST_TOKENS, **reference.options)
            assert again.ended.wait(30) and again.token_ids == reference.token_ids
        assert_at_baseline(running)
    check_it_was_a_storm(storm, states)


def assert_at_baseline(running: Any) -> None:
    """All pages, slots and staging bytes are free, and no request is known; a transfer may take a while to drain."""
    deadline = time.monotonic() + 10.0
    while (stats := running.engine.stats()) != running.baseline and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stats == running.baseline
    assert stats.live == 0 and stats.staging_bytes == 0
    assert all(r.free_pages == r.num_pages and r.free_slots == r.num_slots for r in stats.replicas)


def check_answers(storm: Storm) -> None:
    """One end each; all tokens of who was not cancelled, the first of them of who was."""
    for plan in storm.planned.values():
        want = plan.reference.token_ids[: plan.max_tokens]
        is_greedy = not plan.reference.options
        for sample in range(plan.samples):
            answer = storm.running.answers[f"{plan.name}/{sample}" if sample else plan.name]
            reason, got = answer.finish.reason, answer.token_ids  # `finish` fails unless there was exactly one
            assert reason is FinishReason.LENGTH or (reason is FinishReason.ABORT and plan.is_aborted), plan
            assert answer.finish.usage.completion_tokens == len(got)
            if sample == 0 or is_greedy:  # other samples have seeds of their own
                assert got == want[: len(got)], plan
            assert reason is FinishReason.ABORT or len(got) == plan.max_tokens, plan


def check_it_was_a_storm(storm: Storm, states: list[State]) -> None:
    """What the test above stands on: cancels took effect in every state, and there was every kind of refusal."""
    aborted_from: Counter[State] = Counter()
    for plan in storm.planned.values():
        if storm.running.answers[plan.name].finish.reason is FinishReason.ABORT and plan.samples == 1:
            aborted_from[[State.QUEUED, *storm.paths[plan.name]][-2]] += 1
    assert all(aborted_from[state] >= 3 for state in states), aborted_from
    assert all(storm.counts[what] >= 10 for what in ("queue full", "wrong", "twins")), storm.counts
    assert sum(path.count(State.QUEUED) for path in storm.paths.values()) >= 10, "preemptions"
