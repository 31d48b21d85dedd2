"""Messages between two processes that share a key: TCP, in order, each whole or not at all.

    leader                                              follower
    listens                                     <---    connects
    challenge: 32 random bytes                  --->
                                                <---    its number, its challenge, HMAC(key, "follower" + both + number)
    HMAC(key, "leader" + both challenges)       --->    ... or the connection ends

A message is its length in four bytes, then its bytes; an empty one is a sign of life. The key proves who is there when
the connection is made. What follows is plain text, like all that `jax.distributed` and collectives send: these ports
belong inside a private network.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading

KEY_BYTES = 32
MAX_BYTES = 1 << 30  # of one message: more is no message of ours
HANDSHAKE_S = 10.0
_LENGTH = struct.Struct("<I")


class ChannelEnded(ConnectionError):
    """The other end is gone, or says nothing; the message says which."""


class Channel:
    """One end. `send` from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, *, silence_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step must not wait for the ack of the one before
        sock.settimeout(silence_s)
        self._socket = sock
        self._silence_s = silence_s
        self._sending = threading.Lock()

    def expect(self, silence_s: float) -> None:
        """From the next message on, the other end is gone after `silence_s` seconds of silence."""
        self._silence_s = silence_s
        self._socket.settimeout(silence_s)

    def send(self, message: bytes) -> None:
        """Sends a message. Raises ChannelEnded where the other end is gone, or reads nothing for `silence_s` s."""
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(message)) + message)
            except TimeoutError:
                raise ChannelEnded(f"it has read nothing for {self._silence_s:g} s") from None
            except OSError as error:
                raise ChannelEnded(f"its connection has ended ({error.strerror or error})") from error

    def receive(self) -> bytes:
        """The next message. Raises ChannelEnded where the other end is gone, or silent for `silence_s` seconds."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_BYTES:
            raise ChannelEnded(f"it sent a message of {length} bytes, the limit is {MAX_BYTES}")
        return self._exactly(length)

    def close(self) -> None:
        """Ends the connection; a `receive` that waits fails. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is not connected any more
            return
        finally:
            self._socket.close()

    def _exactly(self, count: int) -> bytes:
        buffer = bytearray(count)
        view, got = memoryview(buffer), 0
        while got < count:
            try:
                read = self._socket.recv_into(view[got:])
            except TimeoutError:
                raise ChannelEnded(f"it has said nothing for {self._silence_s:g} s") from None
            except OSError as error:
                raise ChannelEnded(f"its connection has ended ({error.strerror or error})") from error
            if not read:
                raise ChannelEnded("its connection has ended")
            got += read
        return bytes(buffer)


def new_key() -> bytes:
    """A key for one start of a worker."""
    return secrets.token_bytes(KEY_BYTES)


def listen(host: str) -> socket.socket:
    """A listening socket at `host`, on a port that the system chooses. Raises OSError where that is not this host's."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server((address[0], 0), family=family)


def accept(server: socket.socket, key: bytes, *, silence_s: float) -> tuple[int, Channel] | None:
    """The next follower's number and channel; None: somebody without the key. Raises TimeoutError as `server` does."""
    sock, _ = server.accept()
    channel = Channel(sock, silence_s=HANDSHAKE_S)
    try:
        ours = secrets.token_bytes(KEY_BYTES)
        channel.send(ours)
        answer = channel.receive()
        number, theirs, proof = answer[:4], answer[4 : 4 + KEY_BYTES], answer[4 + KEY_BYTES :]
        if not hmac.compare_digest(proof, _proof(key, b"follower", ours, theirs, number)):
            raise ChannelEnded("it does not have the key")
        channel.send(_proof(key, b"leader", ours, theirs))
    except ChannelEnded:
        channel.close()
        return None
    return _LENGTH.unpack(number)[0], Channel(sock, silence_s=silence_s)


def connect(host: str, port: int, key: bytes, number: int, *, silence_s: float) -> Channel:
    """Follower `number`'s channel to the leader. Raises ChannelEnded, or OSError where nobody listens."""
    sock = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    channel = Channel(sock, silence_s=HANDSHAKE_S)
    try:
        theirs, ours = channel.receive(), secrets.token_bytes(KEY_BYTES)
        packed = _LENGTH.pack(number)
        channel.send(packed + ours + _proof(key, b"follower", theirs, ours, packed))
        if not hmac.compare_digest(channel.receive(), _proof(key, b"leader", theirs, ours)):
            raise ChannelEnded("it does not have the key")
    except ChannelEnded:
        channel.close()
        raise
    return Channel(sock, silence_s=silence_s)


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")
