"""A piece that lies in several processes is one offer: announced when all can be pulled, ended once, freed once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from meshes.devices import assign_devices
from meshes.heads import head_layout
from meshes.sharding import replica_mesh
from meshes.spec import MeshSpec
from meshes.transfer import move, shared
from meshes.transfer.messages import Ack, Offer, Refuse, Revoke, Source
from meshes.transfer.offering import End, OfferLimits, Released
from meshes.transfer.shared import SharedOffering
from tests.meshes.fake_link import FakeArray, FakeClock, FakeLink

LAYOUT = head_layout(9, 3, 4)  # KV slots 0 0 1 2: device 0 owns head 0, device 2 head 1, device 3 head 2
SHAPE = (2, 3, 4, 8)


def staged() -> tuple[jax.Array, ...]:
    (mesh,), _ = assign_devices((MeshSpec(4, 1),), (), jax.devices())
    on = NamedSharding(replica_mesh(mesh, 0), PartitionSpec("model"))
    return (jax.device_put(np.zeros((4, *SHAPE), np.float32), on),)


class Others:
    """The same transport in other processes, as far as it is told."""

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.ended: list[tuple[int, End, str]] = []
        self.closed = 0

    def offer(self, staging: tuple[jax.Array, ...], id: int) -> None:
        self.offered.append(id)

    def end(self, id: int, end: End, reason: str) -> None:
        self.ended.append((id, end, reason))

    def close(self) -> None:
        self.closed += 1


class Side:
    """Process 0 of as many as there are in `owners`, which says whose each KV head is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owners: list[int], max_bytes: int = 1 << 20) -> None:
        by_process: dict[int, tuple[int, ...]] = {}
        for head, owner in enumerate(owners):
            by_process[owner] = (*by_process.get(owner, ()), head)
        whole = move.own_heads
        # All devices of a test are this process's: whose they are is what the test says.
        monkeypatch.setattr(shared, "heads_by_process", lambda staging, layout: by_process)
        monkeypatch.setattr(
            shared,
            "own_heads",
            lambda staging, layout: {
                h: FakeArray(shape=a.shape) for h, a in whole(staging, layout).items() if owners[h] == 0
            },
        )
        self.clock, self.link, self.others = FakeClock(), FakeLink(), Others()
        self.side = SharedOffering(
            self.link, OfferLimits(max_bytes, lease_s=10.0), self.others, clock=self.clock, process=0
        )
        self.offers: list[Offer] = []
        self.released: list[Released] = []

    def offer(self) -> int | None:
        return self.side.offer_piece(staged(), LAYOUT, self.offers.append, self.released.append)

    def offered(self) -> Offer:
        id = self.offer()
        assert id is not None
        self.side.tick()
        self.side.ready(id, 1, "10.0.0.9:9", 77)
        return self.offers[-1]


@pytest.fixture
def s(monkeypatch: pytest.MonkeyPatch) -> Side:
    return Side(monkeypatch, [0, 1, 1])


def test_it_is_announced_when_all_parts_can_be_pulled(s: Side) -> None:
    id = s.offer()
    assert id is not None and s.others.offered == [id]
    s.side.tick()
    assert s.offers == [] and len(s.link.there) == 1
    s.side.ready(id, 1, "10.0.0.9:9", 77)
    s.side.ready(id, 1, "10.0.0.9:9", 77)
    (offer,) = s.offers
    assert (offer.id, offer.generation, offer.address, offer.lease_s) == (id, 1, s.link.address, 10.0)
    assert [*s.link.there] == [offer.key] and len(s.link.there[offer.key]) == 1
    assert offer.elsewhere == (Source("10.0.0.9:9", 77, (1, 2)),) and offer.shape == (1, *SHAPE)
    assert [source.heads for source in offer.sources] == [(0,), (1, 2)]


def test_the_others_may_be_quicker(s: Side) -> None:
    id = s.offer()
    assert id is not None
    s.side.ready(id, 1, "10.0.0.9:9", 77)
    assert s.offers == []
    s.side.tick()
    assert [offer.id for offer in s.offers] == [id]


@pytest.mark.parametrize(("how", "end"), [("ack", End.ACKED), ("refuse", End.REFUSED), ("abort", End.ABORTED)])
def test_it_ends_once_and_is_free_when_all_are(how: str, end: End, s: Side) -> None:
    offer = s.offered()
    if how == "ack":
        assert not s.side.ack(Ack(offer.id, 2)) and not s.side.ack(Ack(offer.id + 1, 1))
        assert s.side.ack(Ack(offer.id, 1)) and not s.side.ack(Ack(offer.id, 1))
    elif how == "refuse":
        assert s.side.refuse(Refuse(offer.id, 1, "no")) and not s.side.refuse(Refuse(offer.id, 1, "no"))
    else:
        assert s.side.abort(offer.id) == Revoke(offer.id, 1, "aborted by the prefill side")
    assert s.side.abort(offer.id) is None
    assert [(id, e) for id, e, _ in s.others.ended] == [(offer.id, end)]
    s.side.tick()
    assert s.link.there == {} and s.side.used_bytes == 0
    assert s.released == [], "the other process still has it"
    s.side.freed(offer.id, 1, end, "")
    (released,) = s.released
    assert (released.id, released.generation, released.end) == (offer.id, 1, end)
    assert released.nbytes == 4 * 2 * 3 * 4 * 8 * 4
    s.side.freed(offer.id, 1, end, "")
    s.side.ready(offer.id, 1, "10.0.0.9:9", 77)
    assert len(s.released) == len(s.offers) == 1


def test_an_abort_before_it_is_announced_tells_the_peer_nothing_it_knows(s: Side) -> None:
    id = s.offer()
    assert id is not None
    revoke = s.side.abort(id)
    assert revoke is not None and revoke.generation == 0
    s.side.tick()
    s.side.ready(id, 1, "10.0.0.9:9", 77)
    assert s.offers == []
    s.side.freed(id, 1, End.ABORTED, "")
    assert [released.end for released in s.released] == [End.ABORTED]


def test_a_part_that_ends_by_itself_ends_the_whole(s: Side) -> None:
    mine = s.offered()
    s.clock.now += 10
    s.side.tick()
    assert s.others.ended == [(mine.id, End.EXPIRED, "nobody took it within its lease of 10.0 s")]
    s.side.freed(mine.id, 1, End.EXPIRED, "")
    theirs = s.offered()
    s.side.freed(theirs.id, 1, End.FAILED, "its program failed")
    s.side.tick()
    assert [(released.end, released.id) for released in s.released] == [
        (End.EXPIRED, mine.id),
        (End.FAILED, theirs.id),
    ]
    assert s.released[1].reason == "its program failed" and not s.side.ack(Ack(theirs.id, 1))
    assert s.link.there == {}


def test_a_piece_that_is_all_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Side(monkeypatch, [1, 2, 2])
    id = s.offer()
    assert id is not None and s.side.tick() is None and s.link.there == {}
    s.side.ready(id, 2, "10.0.0.9:9", 78)
    s.side.ready(id, 1, "10.0.0.8:9", 77)
    (offer,) = s.offers
    assert offer.sources == offer.elsewhere == (Source("10.0.0.8:9", 77, (0,)), Source("10.0.0.9:9", 78, (1, 2)))
    assert s.side.ack(Ack(id, 1))
    s.side.freed(id, 2, End.ACKED, "")
    assert s.released == []
    s.side.freed(id, 1, End.ACKED, "")
    assert len(s.released) == 1


def test_what_does_not_fit_is_not_asked_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Side(monkeypatch, [0, 1, 1], max_bytes=1)
    assert s.offer() is not None, "one alone may be larger than the bound"
    assert s.offer() is None and len(s.others.offered) == 1


def test_closing_ends_all_here_and_elsewhere(s: Side) -> None:
    first, second = s.offered(), s.offer()
    s.side.close()
    s.side.close()
    assert s.others.closed >= 1 and s.link.there == {}
    assert sorted((r.id, r.end) for r in s.released) == sorted([(first.id, End.CLOSED), (second, End.CLOSED)])
    s.side.freed(first.id, 1, End.CLOSED, "")
    assert len(s.released) == 2
    with pytest.raises(RuntimeError, match="closed"):
        s.offer()


def test_a_closed_one_takes_nothing_of_the_others_either(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Side(monkeypatch, [1, 2, 2])
    s.side.close()
    with pytest.raises(RuntimeError, match="closed"):
        s.offer()
    assert s.others.offered == []


@given(st.lists(st.tuples(st.sampled_from("offer tick ready ack refuse abort freed wait".split()), st.integers(0, 5))))
@settings(deadline=None, max_examples=60)
def test_whatever_comes_each_is_released_once(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        s = Side(patch, [0, 1, 1])
        ids: list[int] = []
        for step, which in steps:
            id: Any = ids[which % len(ids)] if ids else 0
            if step == "offer":
                new = s.offer()
                assert new is not None
                ids.append(new)
            elif step == "tick":
                s.side.tick()
            elif step == "ready":
                s.side.ready(id, 1, "10.0.0.9:9", 7)
            elif step == "ack":
                s.side.ack(Ack(id, 1))
            elif step == "refuse":
                s.side.refuse(Refuse(id, 1, ""))
            elif step == "abort":
                s.side.abort(id)
            elif step == "freed":
                s.side.freed(id, 1, End.EXPIRED, "")
            else:
                s.clock.now += which
        s.clock.now += 20
        s.side.tick()
        for id in ids:
            s.side.freed(id, 1, End.EXPIRED, "")
        s.side.tick()
        for id in ids:
            s.side.abort(id)
            s.side.freed(id, 1, End.ABORTED, "")
        s.side.tick()
        assert sorted(released.id for released in s.released) == sorted(ids)
        assert len({offer.id for offer in s.offers}) == len(s.offers)
        assert s.side.used_bytes == 0 and s.link.there == {}
        assert len([id for id, *_ in s.others.ended]) == len({id for id, *_ in s.others.ended}) == len(ids)
