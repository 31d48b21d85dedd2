"""The remote transport between two processes of this machine, over the real transfer server.

The test is the decode process; `remote_worker.py` is the other one, and is stopped, slowed and killed.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from meshes.heads import HeadLayout, head_layout
from meshes.transfer.link import JaxLink
from meshes.transfer.messages import Ack, Offer
from meshes.transfer.move import move_heads
from meshes.transfer.offering import End, OfferLimits, Released
from meshes.transfer.pulling import Cause, PullLimits, TransferFailed
from meshes.transfer.remote import RemoteTransport
from tests.meshes.fake_link import LAYOUT, FakeArray, FakeLink, make_offer
from tests.meshes.remote_worker import from_json, mesh_of, stage, to_json

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_S = 30.0  # of the test, for what should take a moment: a busy machine fails nothing
LEASE_S = 30.0
SHAPE = (3, 4, 16, 32)  # L, N, S, W
LARGE = (4, 512, 16, 128)  # 8.4 MB a head in bfloat16


class Worker:
    """The process on the other side."""

    def __init__(self, devices: int = 8) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "tests/meshes/remote_worker.py", str(devices)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "dead"})

    def tell(self, do: str, lease_s: float = LEASE_S, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, "lease_s": lease_s, **values}) + "\n")
        self.process.stdin.flush()

    def event(self, name: str, **values: Any) -> dict[str, Any]:
        """The next event of a name and these values; others are kept for later."""
        end_s = time.monotonic() + PATIENCE_S
        seen, self._kept = self._kept, []
        while True:
            event = seen.pop(0) if seen else self._events.get(timeout=max(end_s - time.monotonic(), 0.01))
            if event["event"] == name and values.items() <= event.items():
                self._kept += seen
                return event
            assert event["event"] != "dead", f"the worker ended while the test waited for {name}"
            self._kept.append(event)

    def ask(self, do: str, answer: str, lease_s: float = LEASE_S, **values: Any) -> dict[str, Any]:
        self.tell(do, lease_s, **values)
        return self.event(answer)

    def offer(
        self,
        seed: int,
        *,
        heads: tuple[int, int] = (8, 8),
        mesh: tuple[int, int, int] = (8, 1, 0),
        shape: tuple[int, ...] = SHAPE,
        dtype: str = "bfloat16",
        lease_s: float = LEASE_S,
    ) -> Offer:
        self.tell("offer", lease_s, heads=heads, mesh=mesh, shape=shape, dtype=dtype, seed=seed)
        return from_json(self.event("offer")["offer"])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # a command that it never read
                continue


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    """One for the tests that leave it alive."""
    worker = Worker()
    worker.event("ready", devices=8)
    yield worker
    worker.end()


@pytest.fixture
def doomed() -> Iterator[Worker]:
    """One to be killed."""
    worker = Worker(devices=1)
    worker.event("ready", devices=1)
    yield worker
    worker.end()


def transport(**pulls: Any) -> RemoteTransport:
    return RemoteTransport(JaxLink(), OfferLimits(1 << 30), PullLimits(**{"max_bytes": 1 << 30, **pulls}))


@pytest.fixture(scope="module")
def decode() -> Iterator[RemoteTransport]:
    here = transport(timeout_s=PATIENCE_S)
    yield here
    here.close()
    assert here.pulling.used_bytes == 0


class Fetch:
    """One pull, and how it ended."""

    def __init__(
        self,
        here: RemoteTransport,
        offer: Offer,
        mesh: tuple[int, int, int] = (1, 1, 0),
        timeout_s: float | None = None,
    ) -> None:
        self.dst = head_layout(offer.layout.num_heads, offer.layout.num_kv_heads, mesh[0])
        self.mesh = mesh_of(*mesh)
        self._answers: queue.Queue[tuple[Any, TransferFailed | None]] = queue.Queue()
        self.began_s = time.monotonic()
        assert here.pull(
            offer, self.dst, self.mesh, lambda arrays, error: self._answers.put((arrays, error)), timeout_s=timeout_s
        )

    def over(self) -> bool:
        return not self._answers.empty()

    def answer(self) -> tuple[Any, TransferFailed | None]:
        return self._answers.get(timeout=PATIENCE_S)

    def arrays(self) -> tuple[jax.Array, ...]:
        arrays, error = self.answer()
        assert error is None, error
        assert all(array.is_ready() for array in arrays)
        return arrays  # type: ignore[no-any-return]

    def error(self) -> TransferFailed:
        arrays, error = self.answer()
        assert arrays is None and error is not None, "it arrived"
        return error


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        time.sleep(0.002)


def in_process(offer: Offer, seed: int, src_mesh: Mesh, dst: HeadLayout, dst_mesh: Mesh) -> tuple[jax.Array, ...]:
    """The same piece, moved by the transport within a process."""
    staging = stage(offer.layout, src_mesh, offer.shape[1:], offer.dtype, seed)
    return move_heads(staging, offer.layout, dst, dst_mesh)


def same(got: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> None:
    assert len(got) == len(expected)
    for mine, other in zip(got, expected, strict=True):
        assert mine.sharding == other.sharding and mine.dtype == other.dtype and mine.shape == other.shape
        for a, b in zip(mine.addressable_shards, other.addressable_shards, strict=True):
            assert a.device == b.device
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()


PAIRS = {
    "8x1->1x2": ((8, 1, 0), (1, 2, 1)),
    "2x1->4x1": ((2, 1, 0), (4, 1, 0)),
    "1x2->2x2": ((1, 2, 1), (2, 2, 1)),
}


@pytest.mark.parametrize("heads", [(8, 8), (9, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pair", PAIRS)
def test_unequal_meshes_get_what_they_get_within_a_process(
    shared: Worker, decode: RemoteTransport, host_reads: Any, pair: str, dtype: str, heads: tuple[int, int]
) -> None:
    src, dst = PAIRS[pair]
    offer = shared.offer(7, heads=heads, mesh=src, dtype=dtype)
    host_reads.count = host_reads.largest_put = 0
    fetch = Fetch(decode, offer, dst)
    got = fetch.arrays()
    assert (host_reads.count, host_reads.largest_put) == (0, 0)
    same(got, in_process(offer, 7, mesh_of(*src), fetch.dst, fetch.mesh))
    ack = decode.pulling.taken(offer.id)
    assert ack == Ack(offer.id, 1)
    assert shared.ask("ack", "acked", id=ack.id, generation=ack.generation)["done"]
    assert shared.event("released", id=offer.id)["end"] == "acked"


def test_chunk_after_chunk_within_the_bounds(shared: Worker) -> None:
    here = transport(max_count=2, max_bytes=3 * 8 * 3 * 4 * 16 * 32 * 2, timeout_s=PATIENCE_S)
    offers = [shared.offer(seed) for seed in range(12)]
    assert shared.ask("memory", "memory")["used"] >= 12 * offers[0].nbytes
    most = 0
    fetches = [Fetch(here, offer, (1, 2, 1)) for offer in offers]
    for seed, (offer, fetch) in enumerate(zip(offers, fetches, strict=True)):
        got = fetch.arrays()
        most = max(most, here.pulling.used_bytes)
        same(got, in_process(offer, seed, mesh_of(8, 1, 0), fetch.dst, fetch.mesh))
        assert (ack := here.pulling.taken(offer.id)) is not None
        assert shared.ask("ack", "acked", id=ack.id, generation=1)["done"]
        assert not shared.ask("ack", "acked", id=ack.id, generation=1)["done"], "twice does no harm"
        shared.event("released", id=offer.id, end="acked")
    assert most <= 3 * offers[0].nbytes and here.pulling.used_bytes == 0
    assert shared.ask("memory", "memory")["used"] == 0
    here.close()


def test_an_offer_that_nobody_takes_gives_its_memory_back(shared: Worker) -> None:
    shared.ask("memory", "memory", lease_s=1.0)
    offer = shared.offer(1, shape=LARGE, lease_s=1.0)
    held = shared.ask("memory", "memory", lease_s=1.0)
    assert held["used"] >= offer.nbytes > 60e6
    assert shared.event("released", id=offer.id)["end"] == "expired"
    free = shared.ask("memory", "memory", lease_s=1.0)
    assert free["used"] == 0 and held["rss"] - free["rss"] > 0.9 * offer.nbytes


def test_a_pull_after_the_lease_fails_at_once_and_the_next_one_arrives(shared: Worker, decode: RemoteTransport) -> None:
    late = shared.offer(1, lease_s=1.0)
    shared.event("released", id=late.id, end="expired")
    good = shared.offer(2, lease_s=LEASE_S)
    fetch = Fetch(decode, late)
    error = fetch.error()
    assert error.cause is Cause.ERROR and time.monotonic() - fetch.began_s < 0.9, "its own deadline is 1 s"
    assert not shared.ask("ack", "acked", lease_s=1.0, id=late.id, generation=1)["done"]
    next_one = Fetch(decode, good)
    same(next_one.arrays(), in_process(good, 2, mesh_of(8, 1, 0), next_one.dst, next_one.mesh))
    assert decode.pulling.taken(good.id) is not None
    shared.ask("refuse", "refused", id=good.id, generation=1)


def test_what_was_pulled_can_be_offered_again(shared: Worker, decode: RemoteTransport) -> None:
    first = shared.offer(3)
    Fetch(decode, first).arrays()
    decode.pulling.abort(first.id)
    assert shared.ask("again", "again", id=first.id)["done"]
    second = from_json(shared.event("offer")["offer"])
    assert (second.id, second.generation) == (first.id, 2)
    fetch = Fetch(decode, second)
    same(fetch.arrays(), in_process(second, 3, mesh_of(8, 1, 0), fetch.dst, fetch.mesh))
    assert decode.pulling.taken(second.id) == Ack(second.id, 2)
    assert not shared.ask("ack", "acked", id=first.id, generation=1)["done"]
    assert shared.ask("ack", "acked", id=first.id, generation=2)["done"]


def test_aborts_on_both_sides_in_the_middle(shared: Worker, decode: RemoteTransport) -> None:
    here = shared.offer(4, shape=LARGE)
    fetch = Fetch(decode, here)
    until(lambda: decode.pulling.used_bytes > 0)
    if decode.pulling.abort(here.id) is not None and not fetch.over():
        assert fetch.error().cause is Cause.ABORTED
    there = shared.offer(5, shape=LARGE)
    fetch = Fetch(decode, there)
    until(lambda: decode.pulling.used_bytes > 0)
    assert shared.ask("abort", "aborted", id=there.id)["revoke"]["generation"] == 1
    shared.event("released", id=there.id, end="aborted")
    arrays, error = fetch.answer()
    if error is None:  # it was under way
        same(arrays, in_process(there, 5, mesh_of(8, 1, 0), fetch.dst, fetch.mesh))
        decode.pulling.taken(there.id)
    else:  # it had not reached the other process
        assert error.cause is Cause.ERROR
    shared.ask("refuse", "refused", id=here.id, generation=1)
    until(lambda: decode.pulling.used_bytes == 0)


def test_closing_the_offering_side_ends_its_offers(shared: Worker, decode: RemoteTransport) -> None:
    offer = shared.offer(6, lease_s=29.0)
    shared.ask("close", "closed", lease_s=29.0)
    assert shared.event("released", id=offer.id)["end"] == "closed"
    fetch = Fetch(decode, offer)
    until(lambda: fetch.over() or time.monotonic() - fetch.began_s > 0.2)
    decode.pulling.drop_peer(offer.address)  # its port may be closed: then only the caller can know
    assert fetch.error().cause is Cause.ERROR
    until(lambda: decode.pulling.used_bytes == 0)


def test_a_stopped_peer_costs_its_transfers_and_their_memory_until_it_goes_on(shared: Worker) -> None:
    here = transport(timeout_s=0.5)
    offers = [shared.offer(seed, shape=LARGE) for seed in (1, 2)]
    shared.signal(signal.SIGSTOP)
    try:
        fetches = [Fetch(here, offer) for offer in offers]
        for fetch in fetches:
            assert fetch.error().cause is Cause.DEADLINE
            assert time.monotonic() - fetch.began_s >= 0.5
        assert here.pulling.used_bytes == sum(offer.nbytes for offer in offers)
    finally:
        shared.signal(signal.SIGCONT)
    until(lambda: here.pulling.used_bytes == 0)
    assert here.pulling.late_bytes == sum(offer.nbytes for offer in offers) and here.pulling.pulled_bytes == 0
    offer = shared.offer(3)
    fetch = Fetch(here, offer, timeout_s=PATIENCE_S)
    same(fetch.arrays(), in_process(offer, 3, mesh_of(8, 1, 0), fetch.dst, fetch.mesh))
    here.close()
    for given in (*offers, offer):
        shared.ask("refuse", "refused", id=given.id, generation=1)
    until(lambda: shared.ask("memory", "memory")["used"] == 0)


def test_a_stopped_peer_that_is_dropped_costs_no_memory(doomed: Worker) -> None:
    here = transport(timeout_s=PATIENCE_S)
    offers = [doomed.offer(seed, mesh=(1, 1, 0)) for seed in range(3)]
    doomed.signal(signal.SIGSTOP)
    fetches = [Fetch(here, offer) for offer in offers]
    until(lambda: here.pulling.used_bytes == 3 * offers[0].nbytes)
    dropped_s = time.monotonic()
    here.pulling.drop_peer(offers[0].address)
    assert all(fetch.error().cause is Cause.ERROR for fetch in fetches) and time.monotonic() - dropped_s < 2
    until(lambda: here.pulling.used_bytes == 0)
    here.close()


def test_a_slow_link_is_waited_for(shared: Worker, decode: RemoteTransport) -> None:
    offer = shared.offer(8, shape=LARGE)
    shared.signal(signal.SIGSTOP)
    fetch = Fetch(decode, offer)
    until(lambda: decode.pulling.used_bytes > 0)
    turns = 0
    while not fetch.over() and turns < 500:  # it runs for 4 ms of every 44
        shared.signal(signal.SIGCONT)
        time.sleep(0.004)
        shared.signal(signal.SIGSTOP)
        time.sleep(0.04)
        turns += 1
    shared.signal(signal.SIGCONT)
    same(fetch.arrays(), in_process(offer, 8, mesh_of(8, 1, 0), fetch.dst, fetch.mesh))
    assert turns >= 2
    decode.pulling.taken(offer.id)
    shared.ask("refuse", "refused", id=offer.id, generation=1)


def test_killed_in_the_middle(doomed: Worker, shared: Worker, decode: RemoteTransport) -> None:
    offers = [doomed.offer(seed, mesh=(1, 1, 0), shape=LARGE) for seed in range(4)]
    fetches = [Fetch(decode, offer) for offer in offers]
    until(lambda: decode.pulling.used_bytes > 0)
    time.sleep(0.01)
    doomed.signal(signal.SIGSTOP)  # caught in the middle of one of them
    time.sleep(0.05)
    caught = [fetch for fetch in fetches if not fetch.over()]
    assert caught, "67 MB each in 10 ms?"
    killed_s = time.monotonic()
    doomed.signal(signal.SIGKILL)
    assert all(fetch.error().cause is Cause.ERROR for fetch in caught)
    assert time.monotonic() - killed_s < 5
    for offer, fetch in zip(offers, fetches, strict=True):
        if fetch not in caught:  # what had arrived is good
            same(fetch.arrays(), in_process(offer, offers.index(offer), mesh_of(1, 1, 0), fetch.dst, fetch.mesh))
            assert decode.pulling.taken(offer.id) is not None
    until(lambda: decode.pulling.used_bytes == 0)
    other = shared.offer(9)
    fetch = Fetch(decode, other)
    same(fetch.arrays(), in_process(other, 9, mesh_of(8, 1, 0), fetch.dst, fetch.mesh))
    assert decode.pulling.taken(other.id) is not None
    shared.ask("refuse", "refused", id=other.id, generation=1)


def test_a_puller_that_is_killed_in_the_middle_costs_the_offering_side_nothing(
    doomed: Worker, shared: Worker, decode: RemoteTransport
) -> None:
    offer = shared.offer(1, shape=(4, 1024, 16, 128), lease_s=2.0)
    doomed.tell("pull", offer=to_json(offer))
    time.sleep(0.03)
    doomed.signal(signal.SIGKILL)
    assert shared.event("released", id=offer.id)["end"] == "expired"
    assert shared.ask("memory", "memory", lease_s=2.0)["used"] == 0
    other = shared.offer(2, lease_s=2.0)
    fetch = Fetch(decode, other)
    same(fetch.arrays(), in_process(other, 2, mesh_of(8, 1, 0), fetch.dst, fetch.mesh))
    assert decode.pulling.taken(other.id) is not None


def test_one_process_can_do_both_sides() -> None:
    offers: queue.Queue[Offer] = queue.Queue()
    ends: queue.Queue[Released] = queue.Queue()
    here = transport()
    layout, mesh = head_layout(8, 8, 2), mesh_of(2, 1, 0)
    staging = stage(layout, mesh, SHAPE, "float32", 5)
    assert here.offer(staging, layout, announce=offers.put, done=ends.put) is not None
    offer = offers.get(timeout=PATIENCE_S)
    there = transport()
    fetch = Fetch(there, offer, (4, 2, 1))
    same(fetch.arrays(), move_heads(staging, layout, fetch.dst, fetch.mesh))
    assert (ack := there.pulling.taken(offer.id)) is not None and here.offering.ack(ack)
    assert ends.get(timeout=PATIENCE_S).end is End.ACKED
    here.close()
    there.close()
    here.close()
    with pytest.raises(RuntimeError, match="closed"):
        here.offer(staging, layout, announce=offers.put, done=ends.put)
    with pytest.raises(RuntimeError, match="closed"):
        Fetch(there, offer)


def test_heads_that_do_not_fit_are_refused_by_name(decode: RemoteTransport, shared: Worker) -> None:
    offer = shared.offer(1, heads=(9, 3))
    with pytest.raises(ValueError, match="the source has 3 KV heads, the destination 8"):
        decode.pull(offer, head_layout(8, 8, 1), mesh_of(1, 1, 0), lambda *_: None)
    with pytest.raises(ValueError, match="1 devices for 2-way"):
        decode.pull(offer, head_layout(9, 3, 2), mesh_of(1, 1, 0), lambda *_: None)
    shared.ask("refuse", "refused", id=offer.id, generation=1)


def test_a_thread_that_fails_answers_everybody(caplog: pytest.LogCaptureFixture) -> None:
    link = FakeLink()
    here = RemoteTransport(link, OfferLimits(1000), PullLimits(1 << 20))
    ends: queue.Queue[Released] = queue.Queue()
    failures: queue.Queue[TransferFailed | None] = queue.Queue()
    ready = threading.Event()

    class Broken(FakeArray):
        def is_ready(self) -> bool:
            if ready.is_set():
                raise RuntimeError("the runtime is gone")
            return False

    arrays: list[Any] = [Broken(), Broken()]
    assert here.pulling.pull(make_offer(1), jax.devices()[:2], tuple, lambda _, error: failures.put(error))
    assert here.offering.offer(arrays, LAYOUT, 10, lambda _: None, ends.put) is not None
    until(lambda: len(link.pulls) == 1)
    ready.set()
    assert ends.get(timeout=PATIENCE_S).end is End.CLOSED
    error = failures.get(timeout=PATIENCE_S)
    assert error is not None and error.cause is Cause.CLOSED
    until(lambda: link.closed)
    here.close()
    with pytest.raises(RuntimeError, match="closed"):
        here.offering.offer(arrays, LAYOUT, 10, lambda _: None, ends.put)
    assert "the thread of the remote transport failed" in caplog.text
