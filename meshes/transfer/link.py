"""The wire: `jax.experimental.transfer` behind the few verbs that the remote transport needs.

    put(key, arrays)    they can be pulled, once, until ...
    withdraw(key)       ... they cannot: what a peer has begun to pull still arrives, a later pull fails at once
    pull(address, key)  asks for them; the answer settles (arrives or fails) some time, or never

How the server behaves, and what is done about it here (measured on jax 0.10.2 and 0.12.0.1):

- Without `transport_addresses` the process dies at the first pull. They are always given.
- Time-outs of `await_pull` and `pull` are looked at only when something is offered next, and are wall-clock times. They
  are not used to end anything: deadlines are the callers', by their own monotonic clocks.
- What was offered stays until pulled. But a key that is offered again replaces what was there: offered again as *no
  arrays* it frees the memory at once and answers a late pull with an error, and a pull under way is not disturbed. That
  is `withdraw`. The empty offer has a time-out, so that such entries do not pile up.
- A pull of a key that is not there waits; so does one from a host that is down or stopped (it connects anew every 2 s).
  Nothing but the end of its connection ends it. So a connection on which somebody lost patience gets no new pulls, and
  is cut as soon as everybody has: a healthy pull beside a lost one arrives.
- A connection that has failed once fails every later pull: it is given up, and the next pull makes a new one.
- Arrays of a failed program that are offered are a fault of the server's process: only settled ones may be `put`.
- The port is plaintext and asks nobody for a name. The key is the only secret, and the address is loopback by default.
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from meshes.transfer.settle import are_ready

log = logging.getLogger(__name__)

FORGET_WITHDRAWN_S = 60.0  # a pull that comes later than this waits until its own deadline


class Pull(Protocol):
    """Arrays that were asked for."""

    def settled(self) -> bool:
        """Whether they have arrived or failed. Never blocks."""

    def take(self) -> list[jax.Array]:
        """The arrays, once settled; raises what they failed with."""

    def abandon(self) -> None:
        """Nobody will take them. They settle nevertheless, and until then they take memory."""


class Link(Protocol):
    """One process's end of the wire to all its peers."""

    @property
    def address(self) -> str:
        """Where peers reach this end."""

    def put(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """Lets the peers pull settled `arrays` by `key`, once."""

    def withdraw(self, key: int) -> None:
        """Ends that, pulled or not; also of a key that was never put."""

    def pull(self, address: str, key: int, wanted: Sequence[jax.ShapeDtypeStruct]) -> Pull:
        """Asks the peer at `address` for the arrays under `key`; the shapes must be theirs, each on one device."""

    def cut(self, address: str) -> None:
        """Ends everything that is under way from a peer: it is known to be gone."""

    def close(self) -> None:
        """Ends everything. Idempotent."""


@dataclasses.dataclass(eq=False)
class _Connection:
    to_peer: Any  # jax.experimental.transfer.TransferConnection
    waited_for: int = 0  # pulls that somebody waits for
    lost: bool = False  # somebody has lost patience with one


class JaxLink:
    """A transfer server of this process and its connections to others. Safe to use from several threads.

    `listen` is `ADDRESS:PORT` with a numeric address that the peers can reach (port 0: any free one); `streams` are the
    TCP connections over which the bytes of one peer pair go, on ports that the system chooses.
    """

    def __init__(self, listen: str = "127.0.0.1:0", *, streams: int = 1) -> None:
        from jax.experimental import transfer  # here: what has no use for it does not load it

        host = _host(listen)
        if streams < 1:
            raise ValueError(f"{streams=} must be at least 1: without one the server cannot send")
        self._server: Any = transfer.start_transfer_server(jax.devices()[0].client, listen, [f"{host}:0"] * streams)
        self._address: str = self._server.address()
        self._lock = threading.Lock()
        self._put: set[int] = set()
        self._open: dict[str, _Connection] = {}  # those that take new pulls, by address
        self._given_up: list[_Connection] = []  # those that do not, and have pulls that somebody waits for
        self._closed = False

    @property
    def address(self) -> str:
        """Where peers reach this end."""
        return self._address

    def put(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """See `Link`."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the link of {self._address} is closed")
            self._put.add(key)
            self._server.await_pull(key, list(arrays))

    def withdraw(self, key: int) -> None:
        """See `Link`."""
        with self._lock:
            self._put.discard(key)
            if not self._closed:
                self._withdraw(key)

    def pull(self, address: str, key: int, wanted: Sequence[jax.ShapeDtypeStruct]) -> Pull:
        """See `Link`. Raises what the runtime raises for an address that does not parse."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the link of {self._address} is closed")
            connection = self._open.get(address)
            if connection is None:
                _host(address)
                connection = self._open[address] = _Connection(self._server.connect(address))
            connection.waited_for += 1
        try:
            return _JaxPull(self, connection, connection.to_peer.pull(key, list(wanted)))
        except Exception:
            self.release(connection, failed=True)
            raise

    def cut(self, address: str) -> None:
        """See `Link`."""
        with self._lock:
            connection = self._open.pop(address, None)
            if connection is not None:
                if connection.waited_for:
                    self._given_up.append(connection)
                _cut(connection)

    def close(self) -> None:
        """See `Link`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for key in self._put:
                self._withdraw(key)
            self._put.clear()
            for connection in (*self._given_up, *self._open.values()):
                _cut(connection)
            self._open.clear()
            self._given_up.clear()
            self._server = None

    def release(self, connection: _Connection, *, failed: bool = False, lost: bool = False) -> None:
        """Nobody waits for one pull of a connection any more: it arrived, failed, or was lost patience with."""
        with self._lock:
            connection.waited_for -= 1
            connection.lost |= lost
            if failed or lost:
                for address in [a for a, c in self._open.items() if c is connection]:
                    del self._open[address]
                    self._given_up.append(connection)
            if connection in self._given_up and not connection.waited_for:
                self._given_up.remove(connection)
                if connection.lost:
                    _cut(connection)

    def _withdraw(self, key: int) -> None:
        # naive local time is what the binding expects
        until = datetime.datetime.now() + datetime.timedelta(seconds=FORGET_WITHDRAWN_S)
        self._server.await_pull(key, [], timeout=until)


class _JaxPull:
    def __init__(self, link: JaxLink, connection: _Connection, arrays: list[jax.Array]) -> None:
        self._link = link
        self._connection = connection
        self._arrays = arrays
        self._released = False

    def settled(self) -> bool:
        return are_ready(self._arrays)

    def take(self) -> list[jax.Array]:
        try:
            jax.block_until_ready(self._arrays)
        except Exception:
            self._release(failed=True)
            raise
        self._release()
        return self._arrays

    def abandon(self) -> None:
        self._release(lost=not self.settled())

    def _release(self, *, failed: bool = False, lost: bool = False) -> None:
        if not self._released:
            self._released = True
            self._link.release(self._connection, failed=failed, lost=lost)


def _cut(connection: _Connection) -> None:
    """Fails all that is under way on a connection. Not public in JAX, and there is no other way to end a pull."""
    end = getattr(connection.to_peer, "_poison_connection", None)
    if end is None:
        log.warning("this JAX cannot end a connection: lost pulls keep their memory until the peer's process ends")
    else:
        end()


def _host(address: str) -> str:
    """The host of `ADDRESS:PORT`. Raises ValueError where peers could not connect to it."""
    host, colon, port = address.rpartition(":")
    try:
        numeric = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        numeric = None
    if not colon or not port.isdecimal() or int(port) > 65535 or numeric is None:
        raise ValueError(
            f'the transfer address "{address}" must be a numeric address and a port, for example 10.0.0.5:7000 or '
            "[fd00::5]:7000: the transfer server resolves no names"
        )
    if numeric.is_unspecified:
        raise ValueError(
            f'the transfer address "{address}" means every interface, and that is what peers would be told to connect '
            "to: give the address at which they reach this host"
        )
    return host
