"""A router's workers: who is there, what they are, and whether there are enough to serve.

    listed, or Join --Session--> connecting --joined--> joining --Reading--> ready <--> draining
                                     ^                                          |
                                     +------------------- gone -----------------+

The first worker that joins says which model is served, and with what KV; one that differs is refused with both values,
and dialled again. A worker that comes back is another member: ADDRESS#INSTANCE, and ADDRESS#INSTANCE.2 where it was
only silent. Members live in the roster (`jaxpd.routing`), by these names.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from jaxpd.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from jaxpd.policies.workers import Role, State
from jaxpd.request import Event
from jaxpd.routing.roster import Roster
from jaxpd.stats import EngineStats
from meshes.transfer.identity import Identity, IdentityMismatch, agree
from serving.gateway import State as ServerState
from serving.model import ServedModel
from serving.router.merged import Past
from serving.router.places import Places
from serving.router.session import Channel, Session
from serving.worker.description import Description
from serving.worker.reading import Reading

logger = logging.getLogger(__name__)

FORGOTTEN_S = 30.0  # after which an address that nobody has listed, and that is gone, is dialled no more


class Owner(Protocol):
    """Whom the fleet tells what concerns requests."""

    def heard(self, name: str, events: list[Event]) -> None: ...
    def worker_gone(self, name: str, reason: str) -> None: ...
    def worker_draining(self, name: str) -> None: ...
    def readiness(self, ready: bool) -> None: ...
    def started_s(self) -> Mapping[str, float]: ...


@dataclasses.dataclass(eq=False)
class Member:
    """One incarnation of a worker that is there."""

    name: str
    session: Session
    description: Description
    reading: Reading | None = None
    held: bool = False  # drained by this router, whatever it says of itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """What people are told of a worker; `state` is that of the roster, or "connecting"."""

    name: str
    address: str
    role: Role | None
    state: str
    meshes: tuple[str, ...] = ()
    reading: Reading | None = None
    silent_s: float = 0.0
    trouble: str = ""


class Fleet:
    """All workers of one router. Not thread-safe: it belongs to the router's event loop."""

    def __init__(
        self,
        roster: Roster,
        owner: Owner,
        *,
        channel: Channel,
        metadata: tuple[tuple[str, str], ...] = (),
        heartbeat_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model: ServedModel | None = None
        self.page_bytes = 0
        self.joins: Counter[str] = Counter()  # by role
        self._identity: Identity | None = None
        self._roster = roster
        self._owner = owner
        self._channel = channel
        self._metadata = metadata
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._clock = clock
        self._sessions: dict[str, Session] = {}  # by address
        self._members: dict[str, Member] = {}  # by name
        self._names: Counter[str] = Counter()  # how often each ADDRESS#INSTANCE has joined
        self._listed: set[str] = set()
        self._lost_s: dict[str, float] = {}  # address -> since when it is gone
        self._ready = False
        self.places = Places()
        self.past = Past()

    # -- addresses

    def add(self, address: str, *, role: Role | None, flag: str, listed: bool = False) -> None:
        """Dials a worker from now on; one that is dialled already stays as it is."""
        self._lost_s.pop(address, None)
        if listed:
            self._listed.add(address)
        if address in self._sessions:
            return
        session = self._sessions[address] = Session(
            address,
            self,
            role=role,
            flag=flag,
            channel=self._channel,
            metadata=self._metadata,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        self._lost_s[address] = self._clock()
        session.open()

    async def sweep(self) -> None:
        """Forgets addresses that came by Join and are gone for good."""
        now_s = self._clock()
        for address, since_s in list(self._lost_s.items()):
            if address not in self._listed and now_s - since_s > FORGOTTEN_S:
                del self._lost_s[address]
                await self._sessions.pop(address).close()
                self.places.forget(address)
                logger.info("worker %s has not come back, and is forgotten; it may join again", address)

    async def close(self) -> None:
        """Ends all sessions."""
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()
        self._members.clear()

    # -- what is known

    @property
    def ready(self) -> bool:
        """Whether a request can be served: one of each role is ready, or a mixed one."""
        return self._ready

    def lacking(self) -> str:
        """What it waits for, for a person."""
        ready = self._ready_roles()
        lacks = [role.value for role in (Role.PREFILL, Role.DECODE) if role not in ready]
        trouble = [f"{s.address}: {s.trouble}" for s in self._sessions.values() if s.name is None and s.trouble]
        what = f"a {' and a '.join(lacks)} worker (or a mixed one)" if lacks else "nothing"
        return f"{what}{'; ' if trouble else ''}{'; '.join(trouble[:4])}"

    def session(self, name: str) -> Session | None:
        """The stream to a member; None where it is gone."""
        member = self._members.get(name)
        return None if member is None else member.session

    def member(self, name: str) -> Member | None:
        return self._members.get(name)

    def readings(self) -> list[tuple[str, EngineStats]]:
        """(address, what it last said) of each member."""
        return [(m.session.address, m.reading.stats) for m in self._members.values() if m.reading is not None]

    def infos(self) -> list[Info]:
        """Of all addresses, in the order in which they came."""
        states, members = self._roster.states(), {m.session.address: m for m in self._members.values()}
        infos = []
        for address, session in self._sessions.items():
            member = members.get(address)
            if member is None:
                info = Info(
                    name=address, address=address, role=session.role, state="connecting", trouble=session.trouble
                )
            else:
                meshes = member.description.model.meshes
                info = Info(
                    name=member.name,
                    address=address,
                    role=member.description.role,
                    state=states[member.name].value,
                    meshes=tuple(f"{role}={spec}" for role, specs in meshes.items() for spec in specs),
                    reading=member.reading,
                    silent_s=session.silent_s,
                    trouble=session.trouble,
                )
            infos.append(info)
        return infos

    def find(self, worker: str) -> Member:
        """By name or address. Raises NotFound, naming those there are; Unavailable for one that is not connected."""
        for member in self._members.values():
            if worker in (member.name, member.session.address):
                return member
        if worker in self._sessions:
            raise Unavailable(f"worker {worker} is not connected ({self._sessions[worker].trouble or 'dialling'})")
        known = ", ".join(info.name for info in self.infos()) or "none"
        raise NotFound(f"there is no worker {worker}; there are: {known}", field="worker")

    async def hold(self, worker: str, held: bool) -> Member:
        """Drains a worker, here and for whoever else it serves; or takes it back. Raises NotFound, Unavailable,
        FailedPrecondition."""
        member = self.find(worker)
        member.held = held
        if held:
            self._drain(member)
        await member.session.set_draining(held)
        return member

    # -- the sessions' owner

    @property
    def has_model(self) -> bool:
        """See `session.Owner`."""
        return self.model is not None

    def joined(self, session: Session, description: Description) -> str:
        """See `session.Owner`."""
        self._check(session, description)
        if self.model is None:
            self.model = dataclasses.replace(description.model, meshes=self.places, mode="router")
            self._identity = description.identity
        self.page_bytes = self.page_bytes or description.page_bytes
        base = f"{session.address}#{description.instance}"
        self._names[base] += 1
        name = base if self._names[base] == 1 else f"{base}.{self._names[base]}"
        self._roster.join(
            name,
            description.role,
            replicas=description.replicas,
            pages=description.pages,
            slots=description.slots,
            queue_limit=description.queue_limit,
        )
        self.joins[description.role.value] += 1
        self._members[name] = Member(name, session, description)
        self.places.take(session.address, description.model.meshes)
        self._lost_s.pop(session.address, None)
        logger.info("worker %s has joined, role %s", name, description.role.value)
        return name

    def heard(self, session: Session, events: list[Event]) -> None:
        """See `session.Owner`."""
        assert session.name is not None
        self._owner.heard(session.name, events)

    def read(self, session: Session, reading: Reading) -> None:
        """See `session.Owner`."""
        assert session.name is not None
        member = self._members[session.name]
        member.reading = reading
        for sequences, step_s in reading.steps:
            self._roster.stepped(member.name, sequences=sequences, step_s=step_s)
        if reading.state is ServerState.DRAINING or member.held:
            self._drain(member)
        elif reading.state is ServerState.READY and self._state(member) is not State.READY:
            self._roster.ready(member.name)
            logger.info("worker %s is ready", member.name)
        self._note_readiness()

    def gone(self, session: Session, name: str, reason: str) -> None:
        """See `session.Owner`."""
        reading = self._members.pop(name).reading
        if reading is not None:
            self.past.add(reading.stats)
        self._lost_s[session.address] = self._clock()
        self._roster.gone(name, now_s=self._clock())
        self._note_readiness()
        self._owner.worker_gone(name, reason)

    def started_s(self) -> Mapping[str, float]:
        """See `session.Owner`."""
        return self._owner.started_s()

    # -- inside

    def _check(self, session: Session, description: Description) -> None:
        """Raises FailedPrecondition naming both values where the workers do not fit together."""
        if self.model is None or self._identity is None:
            return
        ours, theirs = self._identity, description.identity
        if description.role is Role.MIXED or not ours.streams:  # it hands over to nobody
            theirs = dataclasses.replace(theirs, streams=ours.streams)
        try:
            agree(ours, theirs, f"worker {session.address}")
        except IdentityMismatch as error:
            message = str(error).replace("this process", "the workers of this router have")
            raise FailedPrecondition(message) from None
        if not self._identity.streams and description.role is not Role.MIXED:
            self._identity = dataclasses.replace(ours, streams=description.identity.streams)
        mine, other = self.model, description.model
        for field, words in (("vocab_size", "a vocabulary of"), ("eos_token_ids", "the EOS tokens")):
            if getattr(mine, field) != getattr(other, field):
                raise FailedPrecondition(
                    f"worker {session.address} has {words} {getattr(other, field)}, this router serves "
                    f"{getattr(mine, field)}: load the same checkpoint in all workers"
                )
        if other.max_model_len < mine.max_model_len:
            raise InvalidArgument(
                f"worker {session.address} has --max-model-len {other.max_model_len}, this router serves "
                f"{mine.max_model_len}: start all workers with the same"
            )

    def _drain(self, member: Member) -> None:
        if self._state(member) is not State.DRAINING:
            self._roster.drain(member.name)
            logger.info("worker %s drains", member.name)
            self._note_readiness()
            self._owner.worker_draining(member.name)

    def _state(self, member: Member) -> State | None:
        return self._roster.states().get(member.name)

    def _ready_roles(self) -> set[Role]:
        states = self._roster.states()
        return {m.description.role for m in self._members.values() if states.get(m.name) is State.READY}

    def _note_readiness(self) -> None:
        roles = self._ready_roles()
        ready = Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles
        if ready != self._ready:
            self._ready = ready
            self._owner.readiness(ready)
