"""Certificates of the server: read and tried once at the start, so that a wrong file is no riddle for the first client.

    certificate + key      TLS: the client knows whom it talks to
    + CA certificates      mutual TLS: only clients with a certificate that one of these has signed get in

What a file says is found out by a handshake in memory, with OpenSSL's own words where it fails.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import ssl
import time
from typing import Any

import grpc

from jaxpd.errors import InvalidArgument

logger = logging.getLogger(__name__)

SOON_S = 14 * 86400  # a certificate that ends within this time is worth a word
ENCRYPTED = "is encrypted, and a server cannot ask for its password; write it without: openssl pkey -in OLD -out NEW"
# What OpenSSL calls a certificate that is not valid at this time (X509_V_ERR_...).
NOT_YET_VALID, HAS_EXPIRED = 9, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files of a server, checked when this is made. With `ca_certs` every client must show a certificate.

    Raises InvalidArgument naming the flag, the file, what is wrong and the cure; warns of a certificate that has
    expired or soon will.
    """

    certfile: pathlib.Path
    keyfile: pathlib.Path
    ca_certs: pathlib.Path | None = None

    def __post_init__(self) -> None:
        _read(self.certfile, "--ssl-certfile")
        _read(self.keyfile, "--ssl-keyfile")
        server = self._context()
        if self.ca_certs is not None:
            _read(self.ca_certs, "--ssl-ca-certs")
            _load_ca(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.ca_certs)
        _warn_of_age(server, self.certfile)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""
        pair = (_read(self.keyfile, "--ssl-keyfile"), _read(self.certfile, "--ssl-certfile"))
        ca_certs = None if self.ca_certs is None else _read(self.ca_certs, "--ssl-ca-certs")
        return grpc.ssl_server_credentials([pair], ca_certs, require_client_auth=ca_certs is not None)

    def uvicorn_options(self) -> dict[str, Any]:
        """Arguments of `uvicorn.Config`."""
        options: dict[str, Any] = {"ssl_certfile": str(self.certfile), "ssl_keyfile": str(self.keyfile)}
        if self.ca_certs is not None:
            options |= {"ssl_ca_certs": str(self.ca_certs), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        asked: list[bool] = []

        def password() -> str:
            asked.append(True)
            return ""

        try:
            context.load_cert_chain(self.certfile, self.keyfile, password)
        except (ssl.SSLError, ValueError) as error:
            raise _pair_error(self.certfile, self.keyfile, error, encrypted=bool(asked)) from None
        return context


def tls_of(certfile: pathlib.Path | None, keyfile: pathlib.Path | None, ca_certs: pathlib.Path | None) -> Tls | None:
    """What the three flags mean together; None without any. Raises InvalidArgument, also where one lacks another."""
    if certfile is None and keyfile is None and ca_certs is None:
        return None
    if certfile is None or keyfile is None:
        given = "--ssl-certfile" if certfile else "--ssl-keyfile" if keyfile else "--ssl-ca-certs"
        lacks = " and ".join(f for f, v in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)) if v is None)
        raise InvalidArgument(f"{given} needs {lacks} too; give both files of the server", field="ssl_certfile")
    return Tls(certfile=certfile, keyfile=keyfile, ca_certs=ca_certs)


def _pair_error(certfile: pathlib.Path, keyfile: pathlib.Path, error: Exception, *, encrypted: bool) -> InvalidArgument:
    """OpenSSL does not say which file it means; so each is looked at."""
    reason = getattr(error, "reason", None) or str(error)
    if encrypted:
        return InvalidArgument(f"--ssl-keyfile {keyfile} {ENCRYPTED}", field="ssl_keyfile")
    if reason == "KEY_VALUES_MISMATCH":
        return InvalidArgument(
            f"--ssl-keyfile {keyfile} is not the key of --ssl-certfile {certfile}; give a pair that was made together",
            field="ssl_keyfile",
        )
    if b"PRIVATE KEY-----" not in _read(keyfile, "--ssl-keyfile"):
        return InvalidArgument(
            f"--ssl-keyfile {keyfile} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)", field="ssl_keyfile"
        )
    if b"-----BEGIN CERTIFICATE-----" not in _read(certfile, "--ssl-certfile"):
        return InvalidArgument(
            f"--ssl-certfile {certfile} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)", field="ssl_certfile"
        )
    return InvalidArgument(
        f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be used ({reason}); make them anew",
        field="ssl_certfile",
    )


def _read(path: pathlib.Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{flag} {path} cannot be read ({error.strerror}); name a PEM file that this user may read",
            field=flag.lstrip("-").replace("-", "_"),
        ) from None


def _load_ca(context: ssl.SSLContext, path: pathlib.Path) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidArgument(
            f"--ssl-ca-certs {path} holds no certificates in PEM ({error.reason or error}); name the file of the CA "
            "that has signed the clients' certificates",
            field="ssl_ca_certs",
        ) from None


def _warn_of_age(server: ssl.SSLContext, certfile: pathlib.Path) -> None:
    """Lets a client that trusts exactly this certificate look at it."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certfile)
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (here, there, here):
            _go_on(end)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (NOT_YET_VALID, HAS_EXPIRED):
            logger.warning("--ssl-certfile %s: %s; clients will refuse it", certfile, error.verify_message)
        else:
            logger.warning("--ssl-certfile %s may be refused by clients: %s", certfile, error.verify_message)
        return
    certificate = here.getpeercert() or {}
    left_s = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()
    if left_s < SOON_S:
        logger.warning("--ssl-certfile %s expires in %.0f hours; have a new one by then", certfile, left_s / 3600)


def _go_on(end: ssl.SSLObject) -> None:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return  # the other end's turn
