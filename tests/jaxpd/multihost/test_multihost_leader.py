"""The leader's end of its followers: who is ready, what breaks the worker, and which staged pieces nobody wants."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpd.errors import Unavailable
from jaxpd.multihost.channel import Channel, ChannelEnded, accept, connect, listen, new_key
from jaxpd.multihost.descriptors import Descriptor, DropPiece, Failed, Goodbye, OfferPiece, Ready, decode, encode
from jaxpd.multihost.leader import Followers, _Elsewhere


class One:
    """A leader with one follower, process 1, that says what the test says."""

    def __init__(self, silence_s: float = 5.0) -> None:
        key, got = new_key(), queue.Queue[Any]()
        with listen("127.0.0.1") as server:
            threading.Thread(target=lambda: got.put(accept(server, key, silence_s=silence_s)), daemon=True).start()
            self.follower: Channel = connect("127.0.0.1", server.getsockname()[1], key, 1, silence_s=5.0)
            process, channel = got.get(timeout=5)
        self.broken: queue.Queue[str] = queue.Queue()
        self.followers = Followers({process: channel}, on_broken=self.broken.put)

    def say(self, descriptor: Descriptor) -> None:
        self.follower.send(encode(descriptor))

    def hears(self) -> Descriptor:
        while not (message := self.follower.receive()):
            pass
        return decode(message)


@pytest.fixture
def one() -> Iterator[One]:
    one = One()
    yield one
    one.follower.close()
    one.followers.close()


def soon(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_waits_until_all_are_ready(one: One) -> None:
    waiting = threading.Thread(target=one.followers.wait_ready, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    one.say(Ready())
    waiting.join(5.0)
    assert not waiting.is_alive() and one.followers.broken is None


def test_a_follower_that_fails_at_the_start_is_the_reason(one: One) -> None:
    one.say(Failed("no model here"))
    with pytest.raises(Unavailable, match="process 1 has failed: no model here"):
        one.followers.wait_ready()
    assert one.broken.get(timeout=5) == "process 1 has failed: no model here"
    one.follower.close()
    time.sleep(0.2)
    assert one.broken.empty(), "once"


def test_a_follower_that_is_gone_breaks_the_worker(one: One) -> None:
    one.follower.close()
    assert "process 1 is lost" in one.broken.get(timeout=5)


def test_what_no_follower_would_say_breaks_the_worker(one: One) -> None:
    one.follower.send(b"\x05\x00\x00\x00nope")
    assert "was not understood" in one.broken.get(timeout=5)


def test_the_end_that_was_asked_for_breaks_nothing(one: One) -> None:
    closing = threading.Thread(target=one.followers.close)
    closing.start()
    assert one.hears() == Goodbye()
    assert closing.is_alive(), "it waits until the follower has gone"
    one.follower.close()
    closing.join(5.0)
    assert not closing.is_alive() and one.broken.empty() and one.followers.broken is None


def test_pieces_that_nobody_offers_are_dropped_there_too(one: One) -> None:
    array = jnp.zeros(2)
    first = one.followers.number_pieces(2)
    kept, forgotten = one.followers.hold([(array,), (array,)], first)
    assert tuple(kept) == (array,)
    _Elsewhere(one.followers, 1).offer(kept, 99)
    assert one.hears() == OfferPiece(1, first, 99)
    del kept, forgotten
    gc.collect()
    assert one.followers.number_pieces(1) == first + 2
    assert one.hears() == DropPiece(first + 1), "that alone: the other one was offered"
    one.follower.close()
    with pytest.raises(ChannelEnded):
        one.follower.receive()
