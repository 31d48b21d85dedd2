"""Two engines of this process that hand over to each other as if they were in two: the real transport, and a carrier
of messages that a test can hold up, drop and repeat."""

from __future__ import annotations

import pathlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.progress import SilentProgress
from jaxpd.remote.messages import Message, Peer, Side
from jaxpd.request import DecodeLeg, Event, FinishEvent, FinishReason, PrefillLeg, Request, SamplingParams, TokensEvent
from meshes.transfer.link import JaxLink
from meshes.transfer.offering import OfferLimits
from meshes.transfer.pulling import PullLimits
from meshes.transfer.remote import RemoteTransport

Filter = Callable[[Message], list[Message]]


class CarriedPeer:
    """One end's view of the other. What is sent goes through `filter` and is received there in order, in a thread."""

    def __init__(self, name: str, transport: RemoteTransport) -> None:
        self.name = name
        self.transport = transport
        self.filter: Filter = lambda message: [message]
        self.sent: list[Message] = []
        self._mail: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, message: Message) -> None:
        self.sent.append(message)
        for each in self.filter(message):
            self._mail.put(each)

    def deliver(self, side: Side, sender: Peer) -> None:
        """Everything that is sent to this peer is received by `side`, as coming from `sender`."""

        def run() -> None:
            while (message := self._mail.get()) is not None:
                side.received(sender, message)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._mail.put(None)
        self.transport.close()


class Pair:
    """A prefill and a decode engine, connected, and what a client would have collected of both."""

    def __init__(self, folder: pathlib.Path, prefill: dict[str, Any], decode: dict[str, Any], lease_s: float = 30.0):
        checkpoint = resolve(str(folder), progress=SilentProgress())
        self.events: dict[str, list[tuple[str, Event]]] = {}
        self._news = threading.Condition()
        self.prefill = Engine(checkpoint, EngineConfig(role="prefill", **prefill), on_events=self._heard("P"))
        self.decode = Engine(checkpoint, EngineConfig(role="decode", **decode), on_events=self._heard("D"))
        self.prefill.start()
        self.decode.start()
        self.lease_s = lease_s
        self.connect()
        self.baseline = self.readings()

    def connect(self) -> None:
        offers, pulls = OfferLimits(max_bytes=1 << 30, lease_s=self.lease_s), PullLimits(max_bytes=1 << 30)
        self.to_decode = CarriedPeer("D", RemoteTransport(JaxLink(), offers, pulls))
        self.to_prefill = CarriedPeer("P", RemoteTransport(JaxLink(), offers, pulls))
        self.to_decode.deliver(self.decode.side, self.to_prefill)
        self.to_prefill.deliver(self.prefill.side, self.to_decode)
        self.decode.side.connected(self.to_prefill)
        self.prefill.side.connected(self.to_decode)

    def submit(self, name: str, prompt: Any, *, legs: str = "DP", **params: Any) -> list[int]:
        """Starts the legs of a request in the order of `legs`; returns the ids of its hand-offs.

        `outputs` is the request's, everything else its sampling parameters.
        """
        assert name not in self.events, "another name, please: events are kept"
        options = {"ignore_eos": True, "seed": 0, **params}
        handoffs = [secrets.randbits(64) for _ in range(options.get("n", 1))]
        for leg in legs:
            self.start(leg, name, prompt, handoffs, options)
        return handoffs

    def start(self, leg: str, name: str, prompt: Any, handoffs: list[int], options: dict[str, Any]) -> None:
        params = {key: value for key, value in options.items() if key != "outputs"}
        request = Request(
            request_id=name,
            prompt_ids=tuple(prompt),
            params=SamplingParams(**params),
            arrival_s=time.monotonic(),
            outputs=tuple(options.get("outputs", ())),
        )
        with self._news:
            self.events.setdefault(name, [])
        if leg == "P":
            self.prefill.submit(request, PrefillLeg(peer="D", handoffs=tuple(handoffs)))
        else:
            self.decode.submit(request, DecodeLeg(handoffs=tuple(handoffs)))

    def wait(self, name: str, done: Callable[[list[tuple[str, Event]]], bool], timeout_s: float = 30.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: done(self.events[name]), timeout_s), self.events[name]

    def ends(self, name: str, samples: int = 1, timeout_s: float = 30.0) -> dict[tuple[str, int], FinishEvent]:
        """How each sample ended in each engine, once all have."""

        def found(events: list[tuple[str, Event]]) -> dict[tuple[str, int], FinishEvent]:
            return {(who, e.sample): e for who, e in events if isinstance(e, FinishEvent)}

        self.wait(name, lambda events: len(found(events)) == 2 * samples, timeout_s)
        return found(self.events[name])

    def end(self, name: str, who: str, timeout_s: float = 30.0) -> FinishEvent:
        """How a request of one sample ended in one engine."""

        def found(events: list[tuple[str, Event]]) -> list[FinishEvent]:
            return [e for w, e in events if w == who and isinstance(e, FinishEvent)]

        self.wait(name, lambda events: bool(found(events)), timeout_s)
        assert len(found(self.events[name])) == 1
        return found(self.events[name])[0]

    def tokens(self, name: str, sample: int = 0, *, first: int = 0) -> list[int]:
        """Of both engines, by output index from `first` on, each of which there must be once."""
        by_index: dict[int, int] = {}
        for _, event in self.events[name]:
            if isinstance(event, TokensEvent) and event.sample == sample:
                for i, token in enumerate(event.token_ids, event.first_index):
                    assert i not in by_index
                    by_index[i] = token
        assert sorted(by_index) == list(range(first, first + len(by_index)))
        return [by_index[i] for i in sorted(by_index)]

    def generate(self, name: str, prompt: Any, **params: Any) -> list[int]:
        """The whole answer of one sample."""
        self.submit(name, prompt, **params)
        ends = self.ends(name)
        assert ends["P", 0].reason is FinishReason.HANDED_OFF, ends
        assert ends["D", 0].reason in (FinishReason.LENGTH, FinishReason.STOP), ends
        return self.tokens(name)

    def readings(self) -> tuple[Any, Any]:
        return self.prefill.stats(), self.decode.stats()

    def settle(self, timeout_s: float = 10.0) -> None:
        """Waits until both engines have back what they had at the start."""
        end = time.monotonic() + timeout_s
        while self.readings() != self.baseline:
            assert time.monotonic() < end, f"{self.readings()}\nis not\n{self.baseline}"
            time.sleep(0.02)

    def close(self) -> None:
        for peer in (self.to_decode, self.to_prefill):
            peer.close()
        self.prefill.close()
        self.decode.close()

    def _heard(self, who: str) -> Callable[[list[Event]], None]:
        def heard(events: list[Event]) -> None:
            with self._news:
                for event in events:
                    self.events[event.request_id].append((who, event))
                self._news.notify_all()

        return heard
