"""Where the failure matrix takes hold of a worker: wrapped parts of the program that is shipped, never others.

    a sequence in a prefill engine's queue     `hold("queued")`: its turn does not come
    messages between engines                   `hold`, `drop`, `duplicate`, `repeat`, by kind and way; all are told
    steps of the device                        `slow_steps`
    leases of offers                           `lease`
    pulls                                      `fail_pulls`; `transfer`: the port that serves them is slow, cut, a hole

A hold takes the first hand-off that comes to it and no other; `disarm` makes one that has taken nothing harmless.
`clear` lets everything go and makes all as it was.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import grpc
import jax

from jaxpd.device import PoolDevice
from jaxpd.engine import Engine
from jaxpd.remote.decode import DecodeSide
from jaxpd.remote.messages import Message, Peer
from jaxpd.remote.prefill import PrefillSide
from jaxpd.sequence import Sequence
from meshes.transfer.link import JaxLink, Pull
from meshes.transfer.offering import OfferingSide, OfferLimits
from tests.cluster.loop import LoopThread
from tests.cluster.proxy import Proxy

QUEUED = "queued"
Deliver = Callable[[], None]


class WrappedPull:
    """A pull that can be made to fail."""

    def __init__(self, pull: Pull, hooks: Hooks) -> None:
        self._pull = pull
        self._hooks = hooks
        self.broken = False

    def settled(self) -> bool:
        return self.broken or self._pull.settled()

    def wait(self) -> None:
        if not self.broken:
            self._pull.wait()

    def take(self) -> list[jax.Array]:
        self._hooks.taken(self)
        if self.broken:
            raise RuntimeError("the tests made this pull fail")
        return self._pull.take()


class WrappedPeer:
    """A peer whose messages pass the hooks on their way out."""

    def __init__(self, peer: Peer, hooks: Hooks) -> None:
        self._peer = peer
        self._hooks = hooks
        self.name = peer.name
        self.transport = peer.transport

    def send(self, message: Message) -> None:
        self._hooks.passing("out", message, lambda: self._peer.send(message))


@dataclasses.dataclass
class _Rule:
    do: str  # hold, drop (the first) or duplicate
    handoff: int | str | None = None  # that it has taken
    armed: bool = True
    held: list[Deliver] = dataclasses.field(default_factory=list)


class Hooks:
    """Installed once in a process. `tell` gets what is seen, as keyword arguments; commands come in another thread."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._lock = threading.RLock()
        self._rules: dict[tuple[str, str], _Rule] = {}  # by way and kind of message
        self._peers: dict[Peer, WrappedPeer] = {}
        self._links: list[Proxy] = []  # to this process's transfer servers
        self._noticed: set[Proxy] = set()  # that are a hole, and something fell into it
        self._hole = False  # so are those to come
        self._thread = LoopThread()
        self._engine: Engine | None = None
        self._side: Any = None
        self._idle: Any = None
        self._slow_s = 0.0
        self._lease_s: float | None = None
        self._next_pull_fails = False
        self._pulls: set[WrappedPull] = set()  # that are under way
        self._last: dict[tuple[str, str], Deliver] = {}  # of each way and kind

    # commands -----------------------------------------------------------------------------------------------------

    def hold(self, *, what: str, way: str = "in") -> None:
        """Messages of a kind wait, of the first hand-off that one comes of."""
        self._rule("hold", what, way)

    def drop(self, *, what: str, way: str = "in") -> None:
        """The next message of a kind is lost."""
        self._rule("drop", what, way)

    def duplicate(self, *, what: str, way: str = "in") -> None:
        """Messages of a kind come twice."""
        self._rule("duplicate", what, way)

    def _rule(self, do: str, what: str, way: str) -> None:
        with self._lock:
            self._rules[way, what] = _Rule(do)

    def disarm(self) -> None:
        """Holds take nobody else, and only the holes into which something fell stay."""
        with self._lock:
            for rule in self._rules.values():
                rule.armed = False
        self._hole = False
        for link in self._links:
            if link not in self._noticed:
                link.heal()

    def release(self) -> None:
        """What is held goes on, in order, and nothing is held any more."""
        with self._lock:
            rules, self._rules = list(self._rules.values()), {}
        for rule in rules:
            for deliver in rule.held:
                deliver()
        if self._engine is not None:
            for pool in self._engine._pools:
                pool.wake()

    def slow_steps(self, *, seconds: float) -> None:
        """Each step takes so much longer."""
        self._slow_s = seconds

    def lease(self, *, seconds: float) -> None:
        """Offers from now on live so long."""
        self._lease_s = seconds

    def repeat(self, *, what: str, way: str = "in") -> bool:
        """The last message of a kind that came through comes once more; False: there was none."""
        with self._lock:
            deliver = self._last.get((way, what))
        if deliver is not None:
            deliver()
        return deliver is not None

    def fail_pulls(self) -> int:
        """Those that are under way fail; where there are none, the next one. How many there were."""
        with self._lock:
            pulls = list(self._pulls)
            self._next_pull_fails = not pulls
        for pull in pulls:
            pull.broken = True
        return len(pulls)

    def taken(self, pull: WrappedPull) -> None:
        """It is over."""
        with self._lock:
            self._pulls.discard(pull)

    def transfer(self, *, how: str, **values: Any) -> None:
        """What a `Proxy` can do, to the ports from which others pull: those that are a hole for somebody, or all."""
        self._hole = how == "hole"
        with self._lock:
            links = list(self._noticed) or self._links
        for link in links:
            getattr(link, how)(**values)

    def clear(self) -> None:
        """Everything as it was, and what was held goes on."""
        self._slow_s, self._lease_s, self._next_pull_fails = 0.0, None, False
        with self._lock:
            self._noticed.clear()
        self.transfer(how="heal")
        self.release()

    def in_use(self) -> str:
        """What is not as it was before the first request, for a person; empty: all is."""
        if self._engine is None:
            return ""
        left = []
        if (stats := self._engine.stats()) != self._idle:
            rooms = [r for r, idle in zip(stats.replicas, self._idle.replicas, strict=True) if r != idle]
            left.append(f"{stats.states=}, {stats.staging_bytes=}, {rooms}")
        with self._lock:
            transports = [peer.transport for peer in self._peers.values() if not peer.transport._closing]
        for transport in transports:
            offered, pulled = transport.offering.used_bytes, transport.pulling.used_bytes
            if offered or pulled:
                left.append(f"{offered} bytes offered and {pulled} pulled at {transport.address}")
        return "; ".join(left)

    # what is wrapped ----------------------------------------------------------------------------------------------

    def install(self, *, dial: dict[str, str] | None = None) -> None:
        """Before the program starts."""
        self._wrap_dialing(dial or {})
        self._wrap_engine()
        for side in (PrefillSide, DecodeSide):
            self._wrap_side(side)
        self._wrap_queue()
        self._wrap_transfers()

    def _wrap_dialing(self, dial: dict[str, str]) -> None:
        def wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
            return lambda target, *rest, **more: make(dial.get(target, target), *rest, **more)

        grpc.aio.insecure_channel = wrapped(grpc.aio.insecure_channel)
        grpc.insecure_channel = wrapped(grpc.insecure_channel)

    def _wrap_engine(self) -> None:
        start, submit, forward = Engine.start, Engine.submit, PoolDevice.forward

        def started(engine: Engine) -> None:
            start(engine)
            self._engine, self._idle = engine, engine.stats()

        def submitted(engine: Engine, request: Any, leg: Any = None) -> None:
            told = {"leg": type(leg).__name__, "handoffs": list(getattr(leg, "handoffs", ()))}
            self._tell(event="submit", request=request.request_id, outputs=len(request.outputs), **told)
            submit(engine, request, leg)

        def slow(device: PoolDevice, *args: Any) -> Any:
            if self._slow_s:
                time.sleep(self._slow_s)
            return forward(device, *args)

        _put(Engine, start=started, submit=submitted)
        _put(PoolDevice, forward=slow)

    def _wrap_side(self, kind: Any) -> None:
        connected, received = kind.connected, kind.received

        def on_connected(side: Any, peer: Peer) -> None:
            self._side = side
            self._tell(event="connected", peer=peer.name)
            connected(side, self._wrapped(peer))

        def on_received(side: Any, peer: Peer, message: Message) -> None:
            wrapped = self._wrapped(peer)
            self.passing("in", message, lambda: received(side, wrapped, message))

        kind.connected, kind.received = on_connected, on_received

    def _wrapped(self, peer: Peer) -> Any:
        with self._lock:
            return self._peers.setdefault(peer, WrappedPeer(peer, self))

    def _wrap_queue(self) -> None:
        reserve = PrefillSide.reserve

        def reserved(side: PrefillSide, seq: Sequence, pool: Any) -> bool:
            return not self._held(QUEUED, QUEUED, seq.request_id, lambda: None) and reserve(side, seq, pool)

        _put(PrefillSide, reserve=reserved)

    def _wrap_transfers(self) -> None:
        init, pull, offer = JaxLink.__init__, JaxLink.pull, OfferingSide.offer
        usual: weakref.WeakKeyDictionary[OfferingSide, OfferLimits] = weakref.WeakKeyDictionary()

        def made(link: JaxLink, *args: Any, **more: Any) -> None:
            init(link, *args, **more)
            proxy = Proxy(link._address)
            proxy.noticed = lambda: self._fell(proxy)
            self._thread.run(proxy.start())
            if self._hole:
                proxy.hole()
            self._links.append(proxy)
            link._announced = proxy.address  # type: ignore[attr-defined]

        def pulled(link: JaxLink, address: str, *rest: Any) -> Pull:
            wrapped = WrappedPull(pull(link, address, *rest), self)
            with self._lock:
                self._pulls.add(wrapped)
                wrapped.broken, self._next_pull_fails = self._next_pull_fails, False
            return wrapped

        def offered(side: OfferingSide, *args: Any) -> int | None:
            limits = usual.setdefault(side, side._limits)
            side._limits = dataclasses.replace(limits, lease_s=self._lease_s or limits.lease_s)
            return offer(side, *args)

        _put(JaxLink, __init__=made, pull=pulled, address=property(lambda link: link._announced))
        _put(OfferingSide, offer=offered)

    def _fell(self, proxy: Proxy) -> None:
        with self._lock:
            self._noticed.add(proxy)
        self._tell(event="held", what="pull")

    # messages -----------------------------------------------------------------------------------------------------

    def passing(self, way: str, message: Message, deliver: Deliver) -> None:
        """A message on its way, one way or the other."""
        what, handoff = type(message).__name__, getattr(message, "handoff", None)
        self._tell(event=way, what=what, handoff=handoff)
        if self._held(way, what, handoff, deliver):
            return
        with self._lock:
            rule = self._rules.get((way, what))
            do = rule.do if rule is not None and rule.armed else ""
            if rule is not None and do == "drop":
                rule.armed = False
            self._last[way, what] = deliver
        if do == "drop":
            self._tell(event="dropped", what=what, handoff=handoff)
            return
        deliver()
        if do == "duplicate":
            self._tell(event="duplicated", what=what, handoff=handoff)
            deliver()

    def _held(self, way: str, what: str, handoff: int | str | None, deliver: Deliver) -> bool:
        with self._lock:
            rule = self._rules.get((way, what))
            if rule is None or rule.do != "hold":
                return False
            if rule.armed and not rule.held:
                rule.handoff = handoff
            elif rule.handoff != handoff or not rule.held:
                return False
            first = not rule.held
            rule.held.append(deliver)
        if first:
            self._tell(event="held", what=what, handoff=handoff)
        return True


def _put(owner: type, **parts: Any) -> None:
    """Takes the place of parts of a class."""
    for name, part in parts.items():
        setattr(owner, name, part)
