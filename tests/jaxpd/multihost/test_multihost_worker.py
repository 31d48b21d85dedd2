"""A worker that is two processes: reference tokens, hand-offs from both, and its end when one of them is lost."""

from __future__ import annotations

import json
import pathlib
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.multihost import EXIT_BROKEN
from jaxpd.progress import SilentProgress
from jaxpd.remote.messages import Message, Piece
from jaxpd.request import DecodeLeg, Event, FinishReason, PrefillLeg, Request, SamplingParams, TokensEvent
from meshes.transfer.link import JaxLink
from meshes.transfer.offering import OfferLimits
from meshes.transfer.pulling import PullLimits
from meshes.transfer.remote import RemoteTransport
from tests.jaxpd.multihost.several import Several

TINY = pathlib.Path(__file__).parents[2] / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
SMALL: dict[str, Any] = {"precompile": False, "max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 4}
LONG = [(i * 37) % 250 + 1 for i in range(100)]
pytestmark = pytest.mark.clusters

Start = Callable[..., Several]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    started: list[Several] = []

    def make(**config: Any) -> Several:
        started.append(Several(TINY, logs=tmp_path, **{**SMALL, **config}))
        return started[-1]

    yield make
    for several in started:
        several.close()


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_greedy_tokens_are_the_reference(mesh: str, start: Start) -> None:
    several = start(mode="chunked", mesh=mesh)
    for name, prompt in PROMPTS.items():
        several.submit(name, prompt["prompt_ids"], max_tokens=24)
    for name, prompt in PROMPTS.items():
        assert several.end(name) == (FinishReason.LENGTH, "")
        assert several.answer(name) == prompt["greedy_ids"], name
    several.close()
    assert [process.returncode for process in several.processes] == [0, 0], several.what_they_logged()


class Decoder:
    """A decode engine of this process, whose peer is the leader of a worker of several."""

    name = "P"

    def __init__(self, mesh: str) -> None:
        self.news = threading.Condition()
        self.tokens: dict[str, dict[int, int]] = {}
        self.ends: dict[str, Any] = {}
        self.pieces: list[Piece] = []
        checkpoint = resolve(str(TINY), progress=SilentProgress())
        self.engine = Engine(checkpoint, EngineConfig(role="decode", mesh=mesh, **SMALL), on_events=self._on_events)
        self.engine.start()
        self.transport = RemoteTransport(JaxLink(), OfferLimits(1 << 30), PullLimits(1 << 30))
        self.send: Callable[[Message], None]

    def connect(self, several: Several) -> None:
        self.send = lambda message: several.say("message", message)
        several.connect(self.engine.side, self)
        receive = several.receive

        def noted(message: Message) -> None:
            if isinstance(message, Piece):
                self.pieces.append(message)
            receive(message)

        several.receive = noted

    def submit(self, name: str, prompt: Any, handoff: int, **params: Any) -> None:
        options = SamplingParams(ignore_eos=True, seed=0, **params)
        request = Request(request_id=name, prompt_ids=tuple(prompt), params=options, arrival_s=time.monotonic())
        self.engine.submit(request, DecodeLeg(handoffs=(handoff,)))

    def end(self, name: str, timeout_s: float = 150.0) -> Any:
        with self.news:
            assert self.news.wait_for(lambda: name in self.ends, timeout_s)
            return self.ends[name]

    def close(self) -> None:
        self.transport.close()
        self.engine.close()

    def _on_events(self, events: list[Event]) -> None:
        with self.news:
            for event in events:
                if isinstance(event, TokensEvent):
                    of = self.tokens.setdefault(event.request_id, {})
                    of.update({event.first_index + i: token for i, token in enumerate(event.token_ids)})
                else:
                    self.ends[event.request_id] = event
            self.news.notify_all()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    decoder = Decoder("1x2")
    yield decoder
    decoder.close()


def generate(several: Several, decoder: Decoder, turn: str) -> None:
    """All prompts with both workers."""
    for name, prompt in PROMPTS.items():
        handoff = secrets.randbits(64)
        decoder.submit(f"{turn} {name}", prompt["prompt_ids"], handoff, max_tokens=24)
        leg = PrefillLeg(peer="D", handoffs=(handoff,))
        several.submit(f"{turn} {name}", prompt["prompt_ids"], leg, max_tokens=24)
    for name, prompt in PROMPTS.items():
        assert several.end(f"{turn} {name}") == (FinishReason.HANDED_OFF, "")
        end = decoder.end(f"{turn} {name}")
        assert end.reason is FinishReason.LENGTH, end.error
        tokens = {**dict(enumerate(several.answer(f"{turn} {name}"))), **decoder.tokens[f"{turn} {name}"]}
        assert [tokens[i] for i in range(24)] == prompt["greedy_ids"], name


@pytest.mark.parametrize("mesh", ["2x1", "2x2"])
def test_both_processes_hand_over_what_is_theirs(mesh: str, start: Start, decoder: Decoder) -> None:
    several = start(role="prefill", mesh=mesh)
    several.say("stats")
    baseline = several.hears("stats")[1]
    decoder.connect(several)
    generate(several, decoder, "cold")
    addresses = {source.address for piece in decoder.pieces for offer in piece.offers for source in offer.sources}
    assert len(addresses) == 2, "each process offers from its own server"
    if mesh == "2x1":
        for piece in decoder.pieces:
            for offer in piece.offers:
                assert sorted(h for s in offer.sources for h in s.heads) == [0, 1, 2]
    generate(several, decoder, "warm")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        several.say("stats")
        stats = several.hears("stats")[1]
        if stats == baseline:
            break
        time.sleep(0.05)
    assert stats == baseline


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "nothing for 5 s")])
def test_a_lost_follower_ends_the_worker_with_an_answer_to_everybody(number: int, words: str, start: Start) -> None:
    several = start(mode="chunked", mesh="2x1", silence_s=5.0)
    several.submit("warm", LONG, max_tokens=4)
    several.end("warm")
    several.submit("running", LONG, max_tokens=59)
    several.wait_token("running")
    began = time.monotonic()
    several.follower.send_signal(number)
    reason, error = several.end("running", timeout_s=10.0)
    assert reason is FinishReason.ERROR and error.startswith("UNAVAILABLE"), error
    assert several.leader.wait(timeout=10.0) == EXIT_BROKEN
    assert time.monotonic() - began < 10.0
    assert several.broken is not None and words in several.broken and "process 1" in several.broken
    several.follower.send_signal(signal.SIGCONT)
    assert several.follower.wait(timeout=10.0) != 0


def test_a_lost_leader_ends_its_follower(start: Start) -> None:
    several = start(mode="chunked", mesh="2x1", silence_s=5.0)
    several.leader.kill()
    assert several.follower.wait(timeout=10.0) != 0
    assert "the leader is lost" in several.logs[1].read_text() or "coordination service" in several.logs[1].read_text()


def test_a_follower_that_is_asked_to_end_waits_for_its_leader(start: Start) -> None:
    several = start(mode="chunked", mesh="2x1")
    several.follower.terminate()
    several.submit("after", LONG, max_tokens=4)
    assert several.end("after") == (FinishReason.LENGTH, "")
    several.close()
    assert [process.returncode for process in several.processes] == [0, 0], several.what_they_logged()
