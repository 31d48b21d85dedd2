"""The offering side on a fake link and a clock that the test sets: what is staged is freed once, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.transfer.messages import Ack, Offer, Refuse, Revoke
from meshes.transfer.offering import End, OfferingSide, OfferLimits, Released
from tests.meshes.fake_link import LAYOUT, SHAPE, FakeClock, FakeLink, heads


class Side:
    """An offering side, and what it has called back."""

    def __init__(self, max_bytes: int = 1000, max_count: int = 8, lease_s: float = 10.0) -> None:
        self.clock, self.link = FakeClock(), FakeLink()
        self.wakes = 0
        self.side = OfferingSide(
            self.link, OfferLimits(max_bytes, max_count, lease_s), clock=self.clock, wake=self._woken
        )
        self.offers: list[Offer] = []
        self.released: list[Released] = []

    def _woken(self) -> None:
        self.wakes += 1

    def offer(self, nbytes: int = 10, arrays: list[Any] | None = None) -> int | None:
        return self.side.offer(
            heads() if arrays is None else arrays, LAYOUT, nbytes, self.offers.append, self.released.append
        )

    def offered(self) -> Offer:
        """One more that is announced."""
        assert self.offer() is not None
        self.side.tick()
        return self.offers[-1]

    def ends(self) -> list[End]:
        return [released.end for released in self.released]


def test_it_is_announced_when_it_can_be_pulled_and_not_before() -> None:
    s = Side()
    arrays = heads(ready=False)
    id = s.offer(arrays=arrays)
    wait = s.side.tick()
    assert s.offers == [] and s.link.there == {} and wait is not None and wait < 0.01
    s.clock.now += 60
    arrays[0].ready = True
    s.side.tick()
    assert s.offers == [], "one head is still computed"
    arrays[1].ready = True
    assert s.side.tick() == 10.0, "the lease runs from now on"
    (offer,) = s.offers
    assert (offer.id, offer.generation, offer.address) == (id, 1, s.link.address)
    assert (offer.layout, offer.shape, offer.dtype, offer.lease_s) == (LAYOUT, SHAPE, "float32", 10.0)
    assert s.link.there == {offer.key: arrays}
    s.side.tick()
    assert len(s.offers) == 1


def test_an_ack_frees_it_once() -> None:
    s = Side()
    offer = s.offered()
    assert s.side.ack(Ack(offer.id, 1)) and s.wakes == 2
    assert s.side.used_bytes == 10 and s.released == [], "until the thread has freed it"
    assert s.side.tick() is None
    assert s.side.used_bytes == 0 and s.link.there == {} and offer.key in s.link.withdrawn
    assert s.released == [Released(offer.id, 1, 10, End.ACKED, "acknowledged")]
    assert not s.side.ack(Ack(offer.id, 1)) and not s.side.refuse(Refuse(offer.id, 1, "late"))
    assert s.side.abort(offer.id) is None and not s.side.again(offer.id)
    s.clock.now += 100
    s.side.tick()
    assert len(s.released) == 1 and s.side.ends[End.ACKED] == 1 and sum(s.side.ends.values()) == 1


def test_a_refusal_frees_it_and_says_why() -> None:
    s = Side()
    offer = s.offered()
    assert s.side.refuse(Refuse(offer.id, 1, "no pages"))
    s.side.tick()
    assert s.ends() == [End.REFUSED] and s.released[0].reason == "no pages" and s.link.there == {}


def test_an_offer_that_nobody_takes_ends_with_its_lease() -> None:
    s = Side()
    offer = s.offered()
    s.clock.now += 9.9
    wait = s.side.tick()
    assert s.released == [] and wait == pytest.approx(0.1)
    s.clock.now += 0.1
    assert s.side.tick() is None
    assert s.ends() == [End.EXPIRED] and "10.0 s" in s.released[0].reason and s.side.used_bytes == 0
    assert s.link.there == {} and offer.key in s.link.withdrawn
    assert not s.side.ack(Ack(offer.id, 1)), "too late"
    s.side.tick()
    assert len(s.released) == 1


def test_what_failed_to_compute_never_reaches_the_server() -> None:
    s = Side()
    s.offer(arrays=heads(error=RuntimeError("out of memory")))
    s.side.tick()
    assert s.ends() == [End.FAILED] and "out of memory" in s.released[0].reason
    assert s.offers == [] and s.link.there == {} and s.side.used_bytes == 0


def test_a_server_that_fails_fails_this_offer_alone() -> None:
    s = Side()
    kept = s.offered()
    s.link.broken = RuntimeError("no more ports")
    s.offer()
    s.side.tick()
    s.link.broken = None
    assert s.ends() == [End.FAILED] and list(s.link.there) == [kept.key]
    assert s.offered().generation == 1


def test_a_server_that_takes_nothing_back_answers_the_caller_nevertheless() -> None:
    s = Side()
    offer = s.offered()
    s.link.broken = RuntimeError("broken")
    s.side.ack(Ack(offer.id, 1))
    s.side.tick()
    assert s.ends() == [End.ACKED] and s.side.used_bytes == 0


def test_what_cannot_be_offered_is_refused_in_the_callers_thread() -> None:
    s = Side()
    with pytest.raises(ValueError, match=r"\[1, L, N, S, W\], not \(1, 2, 0, 4, 8\)"):
        s.offer(arrays=heads(shape=(1, 2, 0, 4, 8)))
    assert s.side.used_bytes == 0 and s.side.tick() is None


def test_an_abort_before_it_is_ready() -> None:
    s = Side()
    arrays = heads(ready=False)
    id = s.offer(arrays=arrays)
    assert id is not None
    s.side.tick()
    assert s.side.abort(id) == Revoke(id, 0, "aborted by the prefill side")
    s.side.tick()
    assert s.ends() == [End.ABORTED] and s.side.used_bytes == 0
    for array in arrays:
        array.ready = True
    s.side.tick()
    assert s.offers == [] and s.link.there == {} and s.side.abort(id) is None


def test_an_abort_of_what_is_offered() -> None:
    s = Side()
    offer = s.offered()
    revoke = s.side.abort(offer.id)
    assert revoke is not None and (revoke.id, revoke.generation) == (offer.id, 1)
    s.side.tick()
    assert s.ends() == [End.ABORTED] and s.link.there == {}


def test_again_is_the_next_generation_under_another_key() -> None:
    s = Side()
    first = s.offered()
    s.clock.now += 9
    assert s.side.again(first.id)
    s.side.tick()
    second = s.offers[-1]
    assert (second.id, second.generation) == (first.id, 2) and second.key != first.key
    assert list(s.link.there) == [second.key]
    s.clock.now += 9
    s.side.tick()
    assert s.released == [], "its lease is a new one"
    assert not s.side.ack(Ack(first.id, 1)), "of the earlier generation"
    assert s.side.ack(Ack(first.id, 2))
    s.side.tick()
    assert s.ends() == [End.ACKED] and s.released[0].generation == 2 and s.link.there == {}


def test_what_exceeds_a_bound_is_not_taken() -> None:
    s = Side(max_bytes=100, max_count=3)
    assert s.offer(60) is not None and s.offer(41) is None and s.offer(40) is not None and s.offer(1) is None
    s.side.tick()
    assert len(s.offers) == 2 and s.side.used_bytes == 100
    s.side.ack(Ack(s.offers[0].id, 1))
    assert s.offer(60) is None, "not before its memory is free"
    s.side.tick()
    assert s.offer(1) is not None and s.offer(1) is not None and s.offer(1) is None, "three"


def test_one_that_is_larger_than_the_bound_goes_alone() -> None:
    s = Side(max_bytes=100)
    assert s.offer(1000) is not None and s.offer(1) is None


def test_a_call_back_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    s = Side()

    def bad(_: object) -> None:
        raise KeyError("mine")

    s.side.offer(heads(), LAYOUT, 10, bad, bad)
    offer = s.offered()
    s.side.ack(Ack(offer.id, 1))
    s.clock.now += 20
    s.side.tick()
    assert s.ends() == [End.ACKED] and s.side.used_bytes == 0
    assert len([record for record in caplog.records if "call-back" in record.message]) == 2


def test_closing_ends_everything() -> None:
    s = Side()
    s.offered()
    s.offer(arrays=heads(ready=False))
    s.side.close()
    s.side.close()
    assert s.ends() == [End.CLOSED] * 2 and s.side.used_bytes == 0 and s.link.there == {}
    with pytest.raises(RuntimeError, match="closed"):
        s.offer()
    assert s.side.tick() is None


def test_limits_are_positive() -> None:
    for wrong in ({"max_bytes": 0}, {"max_count": 0}, {"lease_s": 0.0}, {"lease_s": float("inf")}):
        with pytest.raises(ValueError, match="positive"):
            OfferLimits(**{"max_bytes": 1, **wrong})  # type: ignore[arg-type]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "slow", "bad", "ready", "tick", "ack", "stale", "refuse", "abort", "again", "wait"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_happens_each_is_freed_once_and_nothing_is_left(steps: list[tuple[str, int]]) -> None:
    s = Side(max_bytes=40, max_count=3)
    taken: list[int] = []
    slow: list[Any] = []
    for step, which in steps:
        if step in ("offer", "slow", "bad"):
            arrays = heads(ready=step != "slow", error=RuntimeError() if step == "bad" else None)
            slow += arrays if step == "slow" else []
            id = s.offer(10 + which, arrays)
            taken += [id] if id is not None else []
        elif step == "ready":
            for array in slow:
                array.ready = True
        elif step == "tick":
            s.side.tick()
        elif step == "wait":
            s.clock.now += which
        elif step == "again" and taken:
            s.side.again(taken[which % len(taken)])
        elif step == "abort" and taken:
            s.side.abort(taken[which % len(taken)])
        elif s.offers:
            offer = s.offers[which % len(s.offers)]
            generation = offer.generation + (step == "stale")
            if step == "refuse":
                s.side.refuse(Refuse(offer.id, generation, ""))
            else:
                s.side.ack(Ack(offer.id, generation))
        assert s.side.used_bytes <= 40 and len(s.link.there) <= 3
    for array in slow:
        array.ready = True
    s.side.tick()
    s.clock.now += 10
    s.side.tick()
    assert sorted(released.id for released in s.released) == sorted(taken)
    assert s.side.used_bytes == 0 and s.link.there == {} and s.side.tick() is None
    assert len({(offer.id, offer.generation) for offer in s.offers}) == len(s.offers)
    assert len({offer.key for offer in s.offers}) == len(s.offers)
