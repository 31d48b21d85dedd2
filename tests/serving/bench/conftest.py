"""Servers to measure: one of known delays (in a process of its own, or here), one that says whatever a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.util
import ipaddress
import json
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DELAY_SERVER = pathlib.Path(__file__).parent / "delay_server.py"


@pytest.fixture(scope="session")
def delays() -> ModuleType:
    """tests/serving/bench/delay_server.py"""
    spec = importlib.util.spec_from_file_location("delay_server", DELAY_SERVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["delay_server"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def delay_process() -> Iterator[Callable[..., str]]:
    """`delay_process(**options)` -> URL of a delay server in a process of its own."""
    pytest.importorskip("aiohttp")
    started: list[subprocess.Popen[str]] = []

    def start(**options: Any) -> str:
        command = [sys.executable, str(DELAY_SERVER), json.dumps(options)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield start
    for process in started:
        process.communicate("")
        assert process.returncode == 0


@pytest.fixture
def delaying(delays: ModuleType) -> Callable[..., Any]:
    """`async with delaying(**options) as (url, server):` on the running loop."""
    pytest.importorskip("aiohttp")

    @contextlib.asynccontextmanager
    async def serve(**options: Any) -> AsyncIterator[tuple[str, Any]]:
        server = delays.Server(delays.Options(**options))
        port = await server.start()
        try:
            yield f"{'https' if server.options.certfile else 'http'}://127.0.0.1:{port}", server
        finally:
            await server.stop()

    return serve


@pytest.fixture
def saying() -> Callable[..., Any]:
    """`async with saying(pieces) as url:` a server that lists a model and answers every call with `pieces` of bytes.

    A float among them is a pause in seconds. The connection is closed after the last.
    """
    pytest.importorskip("aiohttp")

    @contextlib.asynccontextmanager
    async def serve(*pieces: bytes | float) -> AsyncIterator[str]:
        tasks: list[asyncio.Task[Any]] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), b":0"
                )
                await reader.readexactly(int(length.split(b":")[1]))
                if b"/v1/models" in head:
                    writer.write(b'HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{"data": [{"id": "m"}]}')
                elif b"/tokenize" in head:
                    writer.write(b"HTTP/1.0 404 No\r\n\r\n")
                else:
                    for piece in pieces:
                        if isinstance(piece, bytes):
                            writer.write(piece)
                            await writer.drain()
                        else:
                            await asyncio.sleep(piece)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    return serve


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """`certfile` and `keyfile` of 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "delays")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = builder.add_extension(here, critical=False).sign(key, hashes.SHA256())
    folder, pem = tmp_path_factory.mktemp("tls"), serialization.Encoding.PEM
    files = {"certfile": folder / "cert.pem", "keyfile": folder / "key.pem"}
    files["certfile"].write_bytes(signed.public_bytes(pem))
    plain = serialization.NoEncryption()
    files["keyfile"].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return files
