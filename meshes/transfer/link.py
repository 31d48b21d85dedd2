"""The wire: `jax.experimental.transfer` behind the few verbs that the remote transport needs.

    put(key, arrays)    they can be pulled, once, until ...
    withdraw(key)       ... they cannot: what a peer has begun to pull still arrives, a later pull fails at once
    pull(address, key)  asks for them; the answer settles (arrives or fails) some time, or never

How the server behaves, and what is done about it here (measured on jax 0.10.2 and 0.12.0.1):

- Without `transport_addresses` a process dies at the first pull, and so does one that has fewer of them than its peer.
  They are always given, and their number (`streams`) is part of the hand-shake.
- Time-outs of `await_pull` and `pull` are looked at only when something is offered next, and are wall-clock times. They
  are not used to end anything: deadlines are the callers', by their own monotonic clocks.
- What was offered stays until pulled. But a key that is offered again replaces what was there: offered again as *no
  arrays* it frees the memory at once and answers a late pull with an error, and a pull under way is not disturbed. That
  is `withdraw`. The empty offer has a time-out, so that such entries do not pile up.
- A pull of a key that is not there waits; so does one from a host that is down or stopped (it connects anew every 2 s).
  Nothing but the end of its connection ends it, and that is not harmless: a stopped server that finds, when it goes on,
  that a connection with requests for more than 8 buffers was ended meanwhile, sends nothing any more, to anybody. So a
  pull that nobody waits for is left to settle, and only what is known to be gone is `cut`.
- Likewise a peer that is stopped in the middle of a pull holds up the server for all who pull from it (they share 8
  slots), until it goes on or its process ends. Hence one link for each peer: what goes wrong stays between the two.
- A connection that has failed once fails every later pull: it is given up, and the next pull makes a new one.
- A second server on a port that is taken starts without complaint and gets some of the connections: asked before.
- Arrays of a failed program that are offered are a fault of the server's process: only settled ones may be `put`.
- The port is plaintext and asks nobody for a name. The key is the only secret, and the address is loopback by default.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from meshes.transfer.settle import are_ready

log = logging.getLogger(__name__)

FORGET_WITHDRAWN_S = 600.0  # a pull that comes later than this waits until its own deadline


class Pull(Protocol):
    """Arrays that were asked for. Taken or not, they hold memory until they settle, or their peer is cut."""

    def settled(self) -> bool:
        """Whether they have arrived or failed. Never blocks."""

    def wait(self) -> None:
        """Blocks until then, which may be never; nothing interrupts it. Raises what `take` raises, or nothing."""

    def take(self) -> list[jax.Array]:
        """The arrays, once settled; raises what they failed with."""


class Link(Protocol):
    """One process's end of the wire to a peer (or several, see above)."""

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


class JaxLink:
    """A transfer server of this process and its connections to others. Safe to use from several threads.

    `listen` is `ADDRESS:PORT` with a numeric address that the peers can reach (port 0: any free one); `streams` are the
    TCP connections over which the bytes of one peer pair go, on ports that the system chooses; the same number at both
    ends, or the process with fewer dies. Raises ValueError for an address that peers cannot use, OSError for one that
    is taken or not this host's.
    """

    def __init__(self, listen: str = "127.0.0.1:0", *, streams: int = 1) -> None:
        from jax.experimental import transfer  # here: what has no use for it does not load it

        host = _host(listen)
        if streams < 1:
            raise ValueError(f"{streams=} must be at least 1: without one the server cannot send")
        _free(host, listen)
        self._server: Any = transfer.start_transfer_server(jax.devices()[0].client, listen, [f"{host}:0"] * streams)
        self._address: str = self._server.address()
        self._lock = threading.Lock()
        self._put: set[int] = set()
        self._connections: dict[str, Any] = {}  # that have not failed, by address
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
            connection = self._connections.get(address)
            if connection is None:
                _host(address)
                connection = self._connections[address] = self._server.connect(address)
        return _JaxPull(self, connection, connection.pull(key, list(wanted)))

    def cut(self, address: str) -> None:
        """See `Link`."""
        with self._lock:
            connection = self._connections.pop(address, None)
            if connection is not None:
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
            for connection in self._connections.values():
                _cut(connection)
            self._connections.clear()
            self._server = None

    def give_up(self, connection: Any) -> None:
        """A pull of this connection has failed: the next one gets a new connection."""
        with self._lock:
            for address in [a for a, c in self._connections.items() if c is connection]:
                del self._connections[address]

    def _withdraw(self, key: int) -> None:
        # naive local time is what the binding expects
        until = datetime.datetime.now() + datetime.timedelta(seconds=FORGET_WITHDRAWN_S)
        self._server.await_pull(key, [], timeout=until)


class _JaxPull:
    def __init__(self, link: JaxLink, connection: Any, arrays: list[jax.Array]) -> None:
        self._link = link
        self._connection = connection
        self._arrays = arrays

    def settled(self) -> bool:
        return are_ready(self._arrays)

    def wait(self) -> None:
        jax.block_until_ready(self._arrays)

    def take(self) -> list[jax.Array]:
        try:
            jax.block_until_ready(self._arrays)
        except Exception:
            self._link.give_up(self._connection)
            raise
        return self._arrays


def _cut(connection: Any) -> None:
    """Fails all that is under way on a connection. Not public in JAX, and there is no other way to end a pull."""
    end = getattr(connection, "_poison_connection", None)
    if end is None:
        log.warning("this JAX cannot end a connection: lost pulls keep their memory until the peer's process ends")
    else:
        end()


def _free(host: str, listen: str) -> None:
    """Raises OSError where somebody else listens at `listen` already."""
    numeric = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended are no obstacle
        try:
            probe.bind((numeric, int(listen.rpartition(":")[2])))
            probe.listen()
        except OSError as error:
            raise OSError(
                error.errno, f"the transfer server cannot listen at {listen} ({error.strerror}): choose another port"
            ) from error


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
