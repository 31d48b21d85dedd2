"""The proxy of the failure matrix does what it says: a matrix on links that are well would show nothing."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster.loop import LoopThread
from tests.cluster.proxy import Proxy


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets."""

    def handle(self) -> None:
        try:
            while data := self.request.recv(1000):
                self.request.sendall(data)
        except ConnectionError:
            return  # that is what some of the tests do


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A link to a server that sends back what it gets."""
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        thread = LoopThread()
        link = Proxy(f"127.0.0.1:{server.server_address[1]}")
        thread.run(link.start())
        try:
            yield link
        finally:
            link.close()
            thread.close()
            server.shutdown()


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def said(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    got = b""
    while len(got) < len(data):
        got += client.recv(len(data) - len(got))
    return got


def test_it_passes_everything_on(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert said(client, b"x" * 30_000) == b"x" * 30_000
    assert proxy.passed == 60_000 and proxy.connections == 1


def test_a_slow_link(proxy: Proxy) -> None:
    with connect(proxy) as client:
        for slow in ({"latency_s": 0.2}, {"bytes_per_s": 1000}):
            proxy.slow(**slow)
            began_s = time.monotonic()
            said(client, b"x" * 200)
            assert 0.4 <= time.monotonic() - began_s < 5
        proxy.heal()
        began_s = time.monotonic()
        said(client, b"x" * 200)
        assert time.monotonic() - began_s < 0.2


def test_what_is_sent_into_a_hole_waits(proxy: Proxy) -> None:
    noticed = threading.Event()
    proxy.noticed = noticed.set
    with connect(proxy) as client:
        for _ in range(2):
            assert said(client, b"before") == b"before"
            proxy.hole()
            client.sendall(b"during")
            assert noticed.wait(10)
            noticed.clear()
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
            proxy.open()
            client.settimeout(10)
            assert client.recv(100) == b"during"


def test_a_cut_link_resets_what_is_open_and_what_is_new(proxy: Proxy) -> None:
    with connect(proxy) as client:
        said(client, b"before")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionResetError), connect(proxy) as client:
        client.recv(1)
    proxy.heal()
    with connect(proxy) as client:
        assert said(client, b"again") == b"again"


def test_nobody_behind_it(proxy: Proxy) -> None:
    proxy.target = "127.0.0.1:1"
    with pytest.raises(ConnectionResetError), connect(proxy) as client:
        client.recv(1)
