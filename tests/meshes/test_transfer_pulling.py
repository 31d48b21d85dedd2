"""The pulling side on a fake link and a clock that the test sets: nothing unready, failed or late is ever handed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.transfer.messages import Ack, Offer, Refuse, Revoke, Source
from meshes.transfer.pulling import Cause, PullingSide, PullLimits, TransferFailed
from tests.meshes.fake_link import NBYTES, SHAPE, FakeArray, FakeClock, FakeLink, FakePull, make_offer


class Side:
    """A pulling side, and what it has called back, by id."""

    def __init__(self, pieces: float = 100, max_count: int = 8, timeout_s: float = 15.0) -> None:
        self.clock, self.link = FakeClock(), FakeLink()
        self.side = PullingSide(
            self.link, PullLimits(int(pieces * NBYTES), max_count, timeout_s), clock=self.clock, wake=lambda: None
        )
        self.got: dict[int, list[Any]] = {}
        self.failed: dict[int, TransferFailed] = {}

    def pull(
        self,
        id: int,
        *,
        place: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> bool:
        def done(arrays: Any, error: TransferFailed | None) -> None:
            assert (arrays is None) != (error is None)
            assert id not in self.got and id not in self.failed, "called twice"
            if error is not None:
                self.failed[id] = error
            else:
                assert all(array.ready and array.error is None for array in arrays)
                self.got[id] = list(arrays)

        return self.side.pull(make_offer(id, **kwargs), jax.devices()[:2], place, done, timeout_s=timeout_s)

    def of(self, id: int) -> FakePull:
        """The pull of an offer."""
        (found,) = [pull for pull in self.link.pulls if pull.key == id + 100]
        return found

    def started(self) -> list[int]:
        return [pull.key - 100 for pull in self.link.pulls]


def test_a_piece_is_pulled_onto_its_devices_and_handed_on() -> None:
    s = Side()
    assert s.pull(1)
    assert s.started() == [], "the caller's thread does nothing"
    assert 0 < (s.side.tick() or 0) < 0.01 and s.started() == [1]
    pull = s.of(1)
    assert pull.address == "10.0.0.2:7"
    assert [(w.shape, w.dtype) for w in pull.wanted] == [(SHAPE, np.float32)] * 2
    assert [w.sharding.device_set for w in pull.wanted] == [{device} for device in jax.devices()[:2]]
    assert s.side.taken(1) is None, "not yet"
    s.side.tick()
    assert s.got == {}
    pull.arrive()
    s.side.tick()
    assert s.got == {1: pull.arrays} and pull.taken == 1 and s.side.used_bytes == NBYTES
    assert s.side.taken(1) == Ack(1, 1)
    assert s.side.used_bytes == 0 and s.side.taken(1) is None and s.side.abort(1) is None
    assert s.side.tick() is None and s.side.pulled_bytes == NBYTES


def test_what_is_placed_must_settle_too() -> None:
    s = Side()
    copies = [FakeArray(ready=False)]
    s.pull(1, place=lambda arrays: (*arrays, *copies))
    s.side.tick()
    s.of(1).arrive()
    s.side.tick()
    assert s.got == {} and s.side.taken(1) is None
    copies[0].ready = True
    s.side.tick()
    assert s.got[1][-1] is copies[0]


@pytest.mark.parametrize("where", ["connect", "pull", "place", "copies"])
def test_a_failure_is_told_and_never_handed_on(where: str) -> None:
    s = Side()
    error = RuntimeError(f"broken: {where}")

    def place(arrays: Sequence[Any]) -> tuple[Any, ...]:
        if where == "place":
            raise error
        return (FakeArray(error=error),) if where == "copies" else tuple(arrays)

    s.link.broken = error if where == "connect" else None
    s.pull(1, place=place)
    s.side.tick()
    if where == "pull":
        s.of(1).fail(error)
    elif where != "connect":
        s.of(1).arrive()
    s.side.tick()
    assert s.got == {} and s.failed[1].cause is Cause.ERROR and f"broken: {where}" in str(s.failed[1])
    assert s.failed[1].__cause__ is error and s.side.used_bytes == 0 and s.side.tick() is None
    assert s.side.taken(1) is None and s.side.failures[Cause.ERROR] == 1


def test_bytes_in_flight_are_bounded_and_turns_are_in_order() -> None:
    s = Side(pieces=2.5)
    for id in range(1, 6):
        s.pull(id)
    s.side.tick()
    assert s.started() == [1, 2] and s.side.used_bytes == 2 * NBYTES
    s.of(2).arrive()
    s.side.tick()
    assert list(s.got) == [2] and s.started() == [1, 2], "handed on, but not in anybody's pages yet"
    s.side.taken(2)
    s.side.tick()
    assert s.started() == [1, 2, 3]
    s.of(1).fail()
    s.side.tick()
    assert s.started() == [1, 2, 3, 4]


def test_their_number_is_bounded() -> None:
    s = Side(max_count=2)
    for id in range(1, 5):
        s.pull(id)
    s.side.tick()
    assert s.started() == [1, 2]
    s.of(1).arrive()
    s.side.tick()
    assert s.started() == [1, 2, 3], "what was handed on is no longer on the wire"


def test_the_wire_does_not_wait_for_what_is_done_with_a_piece() -> None:
    s = Side(max_count=1)
    copy = FakeArray(ready=False)
    begun: list[list[int]] = []

    def place(arrays: Sequence[Any]) -> tuple[Any, ...]:
        begun.append(s.started())
        return (*arrays, copy)

    s.pull(1, place=place)
    s.pull(2)
    s.side.tick()
    assert s.started() == [1]
    s.of(1).arrive()
    s.side.tick()
    assert begun == [[1, 2]], "the next one was asked for before the first was placed"
    copy.ready = True
    s.of(2).arrive()
    s.side.tick()
    assert sorted(s.got) == [1, 2]


def test_who_waits_is_given_what_to_wait_for() -> None:
    s, waits = Side(), list[Callable[[], object]]()
    s.side = PullingSide(s.link, PullLimits(100 * NBYTES), clock=s.clock, wait_for=waits.append)
    copy = FakeArray(ready=False)
    s.pull(1, place=lambda arrays: (*arrays, copy))
    s.side.tick()
    assert len(waits) == 1, "the pull"
    s.of(1).arrive()
    waits.pop()()
    s.side.tick()
    assert len(waits) == 1, "the copies"
    copy.ready = True
    waits[0]()
    s.side.tick()
    assert list(s.got) == [1]
    s.side.taken(1)
    s.got.clear()
    waits.pop()()  # its turn comes late: there is nothing left to wait for, and no error


def test_one_that_is_larger_than_the_bound_goes_alone() -> None:
    s = Side(pieces=0.5)
    s.pull(1)
    s.pull(2)
    s.side.tick()
    assert s.started() == [1]


@pytest.mark.parametrize(
    ("lease_s", "timeout_s", "own_s", "limit_s"),
    [
        (5.0, 15.0, None, 5.0),
        (30.0, 15.0, None, 15.0),
        (30.0, 15.0, 3.0, 3.0),
        (30.0, 15.0, 20.0, 20.0),
        (4.0, 15.0, 20.0, 4.0),
    ],
)
def test_the_deadline_is_the_shorter_of_lease_and_time_out(
    lease_s: float, timeout_s: float, own_s: float | None, limit_s: float
) -> None:
    s = Side(timeout_s=timeout_s)
    s.pull(1, lease_s=lease_s, timeout_s=own_s)
    s.side.tick()
    s.clock.now += limit_s - 0.001
    wait = s.side.tick()
    assert s.failed == {} and wait is not None and wait <= 0.0011
    s.clock.now += 0.001
    s.side.tick()
    assert s.failed[1].cause is Cause.DEADLINE
    message = str(s.failed[1])
    assert f"within {limit_s} s" in message and f"lease is {lease_s} s" in message and "10.0.0.2:7" in message


def test_a_lost_pull_keeps_its_bytes_until_it_settles_and_is_thrown_away() -> None:
    s = Side(pieces=1)
    s.pull(1)
    s.pull(2, lease_s=40.0)
    s.side.tick()
    s.clock.now += 14
    s.pull(3)
    s.clock.now += 1
    s.side.tick()
    assert {id: failed.cause for id, failed in s.failed.items()} == {1: Cause.DEADLINE, 2: Cause.DEADLINE}
    assert "waited for its turn" in str(s.failed[2]) and "was under way" in str(s.failed[1])
    assert s.side.used_bytes == NBYTES and s.started() == [1]
    wait = s.side.tick()
    assert wait is not None and 0.01 < wait < 0.1
    s.of(1).arrive()
    s.side.tick()
    assert s.got == {} and s.of(1).taken == 0 and s.side.late_bytes == NBYTES
    assert s.started() == [1, 3], "the room is there again"


def test_what_arrives_between_the_deadline_and_the_next_look_is_late() -> None:
    s = Side()
    s.pull(1)
    s.side.tick()
    s.clock.now += 20
    s.of(1).arrive()
    s.side.tick()
    assert s.got == {} and s.failed[1].cause is Cause.DEADLINE and s.side.used_bytes == 0


def test_copies_that_hang_are_given_up_at_the_deadline() -> None:
    s = Side()
    copy = FakeArray(ready=False)
    s.pull(1, place=lambda arrays: (copy,))
    s.side.tick()
    s.of(1).arrive()
    s.side.tick()
    s.clock.now += 15
    s.side.tick()
    assert s.failed[1].cause is Cause.DEADLINE and s.side.used_bytes == NBYTES
    copy.ready = True
    s.side.tick()
    assert s.got == {} and s.side.used_bytes == 0


def test_an_abort_in_the_queue_starts_nothing() -> None:
    s = Side(max_count=1)
    s.pull(1)
    s.pull(2)
    s.side.tick()
    assert s.side.abort(2) == Refuse(2, 1, "aborted by the decode side") and s.side.abort(2) is None
    s.of(1).arrive()
    s.side.tick()
    s.side.tick()
    assert s.failed[2].cause is Cause.ABORTED and s.started() == [1] and list(s.got) == [1]


def test_an_abort_under_way_is_answered_at_once_and_the_data_thrown_away() -> None:
    s = Side()
    s.pull(1)
    s.side.tick()
    assert s.side.abort(1) is not None
    s.of(1).arrive()
    s.side.tick()
    assert s.got == {} and s.failed[1].cause is Cause.ABORTED and s.side.used_bytes == 0
    assert s.side.taken(1) is None


def test_an_abort_at_the_last_moment_hands_nothing_on() -> None:
    s = Side()

    class Aborting(FakeArray):
        def block_until_ready(self) -> FakeArray:
            assert s.side.abort(1) is not None
            return self

    s.pull(1, place=lambda arrays: (Aborting(),))
    s.side.tick()
    s.of(1).arrive()
    s.side.tick()
    assert s.got == {} and s.failed[1].cause is Cause.ABORTED and s.side.used_bytes == 0


def test_an_abort_of_what_was_handed_on_frees_its_room() -> None:
    s = Side()
    s.pull(1)
    s.side.tick()
    s.of(1).arrive()
    s.side.tick()
    assert s.side.used_bytes == NBYTES
    assert s.side.abort(1) == Refuse(1, 1, "aborted by the decode side")
    assert s.side.used_bytes == 0 and s.side.abort(1) is None and s.failed == {}


def test_an_offer_that_comes_twice_is_pulled_once() -> None:
    s = Side()
    assert s.pull(1) and not s.pull(1)
    s.side.tick()
    assert not s.pull(1)
    s.of(1).arrive()
    s.side.tick()
    s.side.taken(1)
    assert not s.pull(1), "not when it is over either"
    assert s.side.tick() is None and s.started() == [1]
    s.got.clear()
    assert s.pull(1, generation=2), "offered again"


def test_a_revocation_ends_its_generation() -> None:
    s = Side()
    s.pull(1, generation=2)
    s.side.tick()
    assert not s.side.revoked(Revoke(1, 1, "old")) and not s.side.revoked(Revoke(9, 2, "unknown"))
    assert s.side.revoked(Revoke(1, 2, "aborted by the prefill side"))
    assert not s.side.revoked(Revoke(1, 2, "twice"))
    s.side.tick()
    assert s.failed[1].cause is Cause.REVOKED and "aborted by the prefill side" in str(s.failed[1])


def test_a_revocation_of_what_was_handed_on_comes_too_late() -> None:
    s = Side()
    s.pull(1)
    s.side.tick()
    s.of(1).arrive()
    s.side.tick()
    assert not s.side.revoked(Revoke(1, 1, "lease")) and s.side.taken(1) == Ack(1, 1)


def test_the_transfers_of_a_dead_peer_fail_now_and_others_go_on() -> None:
    s = Side(max_count=3)
    s.pull(1, address="10.0.0.8:1")
    s.pull(2, address="10.0.0.9:1")
    s.pull(3, address="10.0.0.8:1")
    s.pull(4, address="10.0.0.8:1")
    s.side.tick()
    s.of(1).arrive()
    s.side.tick()
    s.side.drop_peer("10.0.0.8:1")
    assert s.link.cuts == ["10.0.0.8:1"]
    s.side.tick()
    assert sorted(s.failed) == [3, 4] and s.failed[3].cause is Cause.ERROR and "10.0.0.8:1 is gone" in str(s.failed[3])
    assert s.side.taken(1) == Ack(1, 1), "what had arrived is good"
    s.of(2).arrive()
    s.side.tick()
    assert list(s.got) == [1, 2]


def test_a_call_back_that_raises_harms_nobody() -> None:
    s = Side()

    def bad(*_: object) -> None:
        raise KeyError("mine")

    s.side.pull(make_offer(7), jax.devices()[:2], tuple, bad)
    s.pull(1)
    s.side.tick()
    s.of(7).arrive()
    s.of(1).arrive()
    s.side.tick()
    assert list(s.got) == [1] and s.side.taken(7) is not None


def test_closing_ends_everything() -> None:
    s = Side(max_count=2)
    for id in (1, 2, 3):
        s.pull(id)
    s.side.tick()
    s.of(1).arrive()
    s.side.tick()
    s.side.close()
    s.side.close()
    assert {id: failed.cause for id, failed in s.failed.items()} == {2: Cause.CLOSED, 3: Cause.CLOSED}
    assert s.side.taken(1) is None
    with pytest.raises(RuntimeError, match="closed"):
        s.pull(4)
    s.side.tick()
    assert len(s.link.pulls) == 3, "1, 2, and 3 had its turn when 1 was there"


def test_limits_are_positive() -> None:
    for wrong in ({"max_bytes": 0}, {"max_count": 0}, {"timeout_s": 0.0}):
        with pytest.raises(ValueError, match="positive"):
            PullLimits(**{"max_bytes": 1, **wrong})  # type: ignore[arg-type]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pull", "tick", "tick", "arrive", "fail", "abort", "taken", "revoke", "drop", "wait"]),
        st.integers(0, 6),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_happens_each_is_answered_once_and_nothing_is_left(steps: list[tuple[str, int]]) -> None:
    s = Side(pieces=3, max_count=2, timeout_s=10.0)
    asked: set[int] = set()
    for step, which in steps:
        if step == "pull":
            if s.pull(which):
                asked.add(which)
        elif step == "tick":
            s.side.tick()
        elif step == "abort":
            s.side.abort(which)
        elif step == "taken":
            assert (s.side.taken(which) is None) or which in s.got
        elif step == "revoke":
            s.side.revoked(Revoke(which, 1, ""))
        elif step == "drop":
            s.side.drop_peer("10.0.0.2:7")
        elif step == "wait":
            s.clock.now += which
        else:
            open_ = [pull for pull in s.link.pulls if not pull.settled()]
            if open_ and step == "arrive":
                open_[which % len(open_)].arrive()
            elif open_:
                open_[which % len(open_)].fail()
        assert s.side.used_bytes <= 3 * NBYTES
    s.clock.now += 10
    s.side.tick()
    for pull in s.link.pulls:
        if not pull.settled():
            pull.arrive()
    s.side.tick()
    for id in list(s.got):
        s.side.taken(id)
    assert s.got.keys() | s.failed.keys() == asked and not s.got.keys() & s.failed.keys()
    assert s.side.used_bytes == 0 and s.side.tick() is None
    assert len(s.started()) == len(set(s.started())), "each is pulled once"


# -- a worker of several processes


def of_two_processes(id: int) -> Offer:
    """Head 1 is at 10.0.0.3:7, head 0 where the offer comes from."""
    return dataclasses.replace(make_offer(id), elsewhere=(Source("10.0.0.3:7", id + 200, (1,)),))


def pull_of_two(s: Side, id: int) -> tuple[FakePull, FakePull]:
    """Queues it; the pull of head 0 and that of head 1."""

    def done(arrays: Any, error: TransferFailed | None) -> None:
        if error is not None:
            s.failed[id] = error
        else:
            s.got[id] = list(arrays)

    before = len(s.link.pulls)
    assert s.side.pull(of_two_processes(id), jax.devices()[:2], tuple, done)
    s.side.tick()
    first, second = s.link.pulls[before:]
    return first, second


def test_each_process_is_asked_for_its_heads_and_the_piece_is_there_when_all_are() -> None:
    s = Side()
    first, second = pull_of_two(s, 1)
    assert [(p.address, p.key) for p in (first, second)] == [("10.0.0.2:7", 101), ("10.0.0.3:7", 201)]
    wanted = [w.sharding.device_set for p in (first, second) for w in p.wanted]
    assert wanted == [{device} for device in jax.devices()[:2]]
    zero, one = FakeArray(), FakeArray()
    second.arrays = [one]
    s.side.tick()
    assert s.got == {} and second.taken == 0
    first.arrays = [zero]
    s.side.tick()
    assert s.got == {1: [zero, one]}, "in the order of the heads"
    assert s.side.taken(1) == Ack(1, 1) and s.side.used_bytes == 0


def test_a_piece_fails_when_one_of_the_processes_does() -> None:
    s = Side()
    first, second = pull_of_two(s, 1)
    second.fail()
    s.side.tick()
    assert s.failed == {}, "nothing is known of the other part yet"
    first.arrays = [FakeArray()]
    s.side.tick()
    assert s.failed[1].cause is Cause.ERROR and s.got == {}
    assert s.side.used_bytes == 0


def test_a_peer_that_is_gone_is_cut_in_all_its_processes() -> None:
    s = Side()
    pull_of_two(s, 1)
    s.side.drop_peer("10.0.0.2:7")
    assert s.link.cuts == ["10.0.0.2:7", "10.0.0.3:7"]
    s.side.tick()
    assert s.failed[1].cause is Cause.ERROR
