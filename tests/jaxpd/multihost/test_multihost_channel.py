"""Channels, and the watch over them: who gets in, what arrives, and how soon it is noticed that nobody is there."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jaxpd.multihost import channel, watch
from jaxpd.multihost.channel import Channel, ChannelEnded, accept, connect, listen, new_key
from jaxpd.multihost.watch import Watched

KEY = new_key()


@contextlib.contextmanager
def connected(silence_s: float = 5.0) -> Iterator[tuple[Channel, Channel]]:
    """Leader's and follower's end."""
    with listen("127.0.0.1") as server:
        got: queue.Queue[tuple[int, Channel] | None] = queue.Queue()
        threading.Thread(target=lambda: got.put(accept(server, KEY, silence_s=silence_s)), daemon=True).start()
        follower = connect("127.0.0.1", server.getsockname()[1], KEY, 3, silence_s=silence_s)
        came = got.get(timeout=5)
    assert came is not None and came[0] == 3
    yield came[1], follower
    came[1].close()
    follower.close()


def test_messages_arrive_whole_and_in_order() -> None:
    with connected() as (leader, follower):
        messages = [b"", b"a", b"x" * 3_000_000, b"b"]

        def send() -> None:
            for message in messages:
                leader.send(message)

        thread = threading.Thread(target=send)
        thread.start()
        assert [follower.receive() for _ in messages] == messages
        thread.join()
        follower.send(b"back")
        assert leader.receive() == b"back"


def test_who_does_not_have_the_key_gets_in_on_neither_side() -> None:
    with listen("127.0.0.1") as server:
        got: queue.Queue[object] = queue.Queue()
        threading.Thread(target=lambda: got.put(accept(server, KEY, silence_s=5.0)), daemon=True).start()
        with pytest.raises(ChannelEnded):
            connect("127.0.0.1", server.getsockname()[1], new_key(), 1, silence_s=5.0)
        assert got.get(timeout=5) is None

        def pretend() -> None:  # a leader that repeats what it is told
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"\x20\0\0\0" + bytes(32))
                sock.recv(4096)
                sock.sendall(b"\x20\0\0\0" + bytes(32))
                time.sleep(0.2)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ChannelEnded, match="key"):
            connect("127.0.0.1", server.getsockname()[1], KEY, 1, silence_s=5.0)


def test_one_that_says_nothing_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.2)
    with listen("127.0.0.1") as server, socket.create_connection(server.getsockname()[:2]):
        assert accept(server, KEY, silence_s=5.0) is None


def test_a_huge_length_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as theirs, server.accept()[0] as ours:
            theirs.sendall(b"\xff\xff\xff\xff")
            with pytest.raises(ChannelEnded, match="4294967295 bytes"):
                Channel(ours, silence_s=1.0).receive()


class End:
    """A watched end."""

    def __init__(self, name: str, of: Channel) -> None:
        self.messages: queue.Queue[bytes] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        self.watched = Watched(name, of, on_message=self.messages.put, on_end=self.ends.put)
        self.watched.start()


def test_signs_of_life_keep_a_silent_pair_alive_and_messages_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 0.1)
    with connected(silence_s=1.0) as (leader, follower):
        here, there = End("there", leader), End("here", follower)
        time.sleep(2.0)
        here.watched.send(b"a step")
        assert there.messages.get(timeout=2) == b"a step"
        assert here.ends.empty() and there.ends.empty() and here.messages.empty()
        here.watched.close()
        assert "has ended" in there.ends.get(timeout=2)
        time.sleep(0.3)
        assert here.ends.empty(), "who closes it is not told"
        assert there.ends.empty(), "told once"


def test_an_end_that_says_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(silence_s=0.5) as (leader, _):
        began = time.monotonic()
        here = End("there", leader)
        assert here.ends.get(timeout=5) == "it has said nothing for 0.5 s"
        assert time.monotonic() - began < 2.5


def test_an_end_that_reads_nothing_is_noticed_by_who_sends() -> None:
    with connected(silence_s=0.5) as (leader, _):
        with pytest.raises(ChannelEnded, match="has read nothing for 0.5 s"):
            leader.send(bytes(64_000_000))
