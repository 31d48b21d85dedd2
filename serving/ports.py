"""Which addresses a host name means, and why a port cannot be had.

gRPC resolves names by itself, takes what it can get of the result and says no more than "failed". So a server on
`localhost` would run on ::1 alone where 127.0.0.1 is taken, and half its clients would talk to somebody else.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from jaxpd.errors import FailedPrecondition, InvalidArgument

GRPC, HTTP, HOST = "--grpc-port", "--port", "--host"


def check_port(port: int, flag: str = GRPC) -> None:
    """Raises InvalidArgument for a number that is no port."""
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"{flag} {port} must be between 0 (any free port) and 65535", field=_field(flag))


def addresses(host: str, host_flag: str = HOST) -> list[str]:
    """Numeric addresses of `host`, in brackets for IPv6. Raises FailedPrecondition if it has none here."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return [f"[{address}]" if address.version == 6 else str(address)]
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise FailedPrecondition(
            f"{host_flag} {host} has no address ({error}); use an address of this machine, such as 127.0.0.1",
            field=_field(host_flag),
        ) from None
    numeric = [(family, info[0]) for family, _, _, _, info in found]
    usable = [str(a) if f == socket.AF_INET else f"[{a}]" for f, a in dict.fromkeys(numeric) if _is_here(f, str(a))]
    if not usable:
        raise FailedPrecondition(
            f"{host_flag} {host} is {numeric[0][1]}, no address of this machine; use one of its own, such as "
            "127.0.0.1, or 0.0.0.0 for all of them",
            field=_field(host_flag),
        )
    return usable


def _is_here(family: int, address: str) -> bool:
    """False for an address this machine does not have, such as ::1 where IPv6 is off."""
    return _probe(family, address, 0) not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def _probe(family: int, address: str, port: int) -> int:
    """errno of binding there, 0 if it works."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def listening_sockets(host: str, port: int, flag: str) -> list[socket.socket]:
    """A socket bound to `port` (0: any free one, the same for all) on every address of `host`.

    Raises InvalidArgument for a number that is no port, FailedPrecondition for a host or port that cannot be had.
    """
    check_port(port, flag)
    bound: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        for address in addresses(host):
            address = address.strip("[]")
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _ask_after_the_silent(sock)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address, port))
                sock.listen()  # a second server that binds it finds it taken
            except OSError:
                raise bind_error(host, address, port, flag) from None
            port = sock.getsockname()[1]
            bound.append(sock)
        undo.pop_all()
    return bound


def _ask_after_the_silent(sock: socket.socket) -> None:
    """Makes the system find out about clients that vanished without a word, in two minutes; what is accepted inherits
    it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def bind_error(host: str, address: str, port: int, flag: str = GRPC, *, host_flag: str = HOST) -> FailedPrecondition:
    """Why `port` of `address`, one of those of `host`, could not be bound; the flags are where they were given."""
    code = _probe(socket.AF_INET6 if ":" in address else socket.AF_INET, address, port)
    if code == errno.EADDRNOTAVAIL:
        return FailedPrecondition(
            f"{host_flag} {host} is no address of this machine; use one of its own, such as 127.0.0.1, or 0.0.0.0 for "
            "all",
            field=_field(host_flag),
        )
    if code == errno.EACCES:
        return FailedPrecondition(
            f"{flag} {port} needs rights that this user does not have; use one from 1024 up", field=_field(flag)
        )
    why = "is in use" if code in (errno.EADDRINUSE, 0) else f"cannot be bound (error {errno.errorcode.get(code, code)})"
    return FailedPrecondition(
        f"{flag} {port} on {host_flag} {host} {why}; stop what listens there or use another port (0: any free one)",
        field=_field(flag),
    )


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
