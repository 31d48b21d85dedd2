"""TLS and mutual TLS over real connections, with certificates of a CA made here; and what is said of wrong files."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import ipaddress
import logging
import pathlib
import ssl
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from jaxpd.errors import InvalidArgument, JaxpdError, Unavailable
from serving.client import AsyncClient, Client
from serving.http.front import HttpFront
from serving.messages import GenerateRequest
from serving.tls import Tls, tls_of

Served = Callable[..., Any]
ASKED = GenerateRequest(text="abc", max_tokens=4)
DAY = datetime.timedelta(days=1)


@dataclasses.dataclass
class Files:
    """PEM files: two CAs that know nothing of each other, a server of the first and a client of each."""

    folder: pathlib.Path

    def __post_init__(self) -> None:
        self.ca, ca = self.make("ca")
        self.other_ca, other_ca = self.make("other-ca")
        self.server, _ = self.make("server", ca)
        self.client, _ = self.make("client", ca)
        self.stranger, _ = self.make("stranger", other_ca)

    def make(
        self, name: str, issuer: Any = None, *, begins_days: float = -1, ends_days: float = 100, password: bytes = b""
    ) -> tuple[dict[str, pathlib.Path], Any]:
        """NAME.crt and NAME.key, signed by `issuer` (certificate, key), else by itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
        builder = builder.issuer_name(issuer[0].subject if issuer else subject)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + begins_days * DAY).not_valid_after(now + ends_days * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
        encryption: Any = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        certfile, keyfile = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certfile.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pem = serialization.Encoding.PEM
        keyfile.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
        return {"certfile": certfile, "keyfile": keyfile}, (certificate, key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def ask(served: Served, of_server: Tls | None, host: str = "127.0.0.1", **client: Any) -> str:
    """The answer that both clients get, or the error that both raise."""

    async def run() -> list[str]:
        async with served(tls=of_server) as running:
            address = running.address.replace("127.0.0.1", host)

            async def asynchronous() -> str:
                async with AsyncClient(address, timeout_s=10, **client) as asking:
                    return (await asking.generate(ASKED)).text

            def blocking() -> str:
                with Client(address, timeout_s=10, **client) as asking:
                    return asking.generate(ASKED).text

            async def said(answer: Any) -> str:
                try:
                    return str(await answer)
                except JaxpdError as error:
                    assert isinstance(error, Unavailable), error
                    return error.message

            return [await said(asynchronous()), await said(asyncio.to_thread(blocking))]

    first, second = asyncio.run(run())
    assert first == second or (first[:20] == second[:20])  # but for the port
    return first


def pair(files: dict[str, pathlib.Path]) -> Any:
    return files


def test_tls(served: Served, files: Files) -> None:
    tls = Tls(**files.server)
    assert ask(served, tls, ca_certs=files.ca["certfile"]) == "abca"
    foreign = ask(served, tls, ca_certs=files.other_ca["certfile"])
    assert "no CA that is trusted here has signed its certificate; name its CA as ca_certs" in foreign
    assert "name its CA as ca_certs" in ask(served, tls, tls=True)
    renamed = ask(served, tls, "localhost", ca_certs=files.ca["certfile"])
    assert "its certificate is for other names; use one of those as the address" in renamed
    plain = ask(served, tls)
    assert "hangs up" in plain and "if it speaks TLS, give tls or ca_certs" in plain


def test_mutual_tls(served: Served, files: Files) -> None:
    tls = Tls(**files.server, ca_certs=files.ca["certfile"])
    assert ask(served, tls, ca_certs=files.ca["certfile"], **pair(files.client)) == "abca"
    missing = ask(served, tls, ca_certs=files.ca["certfile"])
    assert "hangs up" in missing and "if it wants a certificate of the client, give certfile and keyfile" in missing
    wrong = ask(served, tls, ca_certs=files.ca["certfile"], **pair(files.stranger))
    assert "it may not accept the client's certificate; give one that its CA has signed" in wrong


def test_tls_to_a_plain_port(served: Served, files: Files) -> None:
    assert "the server speaks no TLS; leave tls and ca_certs out" in ask(served, None, ca_certs=files.ca["certfile"])


def test_a_key_goes_over_tls(served: Served, files: Files) -> None:
    async def run() -> None:
        from serving.callers import load_keys

        async with served(tls=Tls(**files.server), keys=load_keys(None, ["sesame"])) as running:
            async with AsyncClient(running.address, ca_certs=files.ca["certfile"], api_key="sesame") as client:
                assert (await client.generate(ASKED)).text == "abca"

    asyncio.run(run())


def test_http_speaks_it_too(opened: Callable[..., Any], files: Files) -> None:
    async def run() -> None:
        gateway, engine = opened()
        front = HttpFront(gateway, tls=Tls(**files.server, ca_certs=files.ca["certfile"]))
        port = front.bind("127.0.0.1", 0)
        await front.start()
        await front.set_ready(True)
        body = {"prompt": "abc", "max_tokens": 4}

        async def post(**client: Any) -> str:
            trusting = ssl.create_default_context(cafile=files.ca["certfile"])
            if client:
                trusting.load_cert_chain(**client)
            async with httpx.AsyncClient(verify=trusting, base_url=f"https://127.0.0.1:{port}") as asking:
                return str((await asking.post("/v1/completions", json=body)).json()["choices"][0]["text"])

        try:
            assert await post(**pair(files.client)) == "abca"
            with pytest.raises(httpx.TransportError):
                await post()
            with pytest.raises(httpx.TransportError):
                await post(**pair(files.stranger))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as plain:
                with pytest.raises(httpx.TransportError):
                    await plain.post("/v1/completions", json=body)
            assert await post(**pair(files.client)) == "abca"
        finally:
            await front.stop(0)
            engine.close()

    asyncio.run(run())


def test_files_that_cannot_be_used(files: Files, tmp_path: pathlib.Path) -> None:
    encrypted, _ = files.make("encrypted", password=b"secret")
    empty, nonsense = tmp_path / "empty.pem", tmp_path / "nonsense.pem"
    empty.write_bytes(b"")
    nonsense.write_bytes(b"-----BEGIN CERTIFICATE-----\nbm8=\n-----END CERTIFICATE-----\n")
    server, client = files.server, files.client
    for given, said in (
        ({**server, "certfile": tmp_path / "none"}, r"--ssl-certfile .*none cannot be read \(No such file"),
        ({**server, "keyfile": tmp_path}, r"--ssl-keyfile .* cannot be read \(Is a directory\)"),
        ({**server, "keyfile": client["keyfile"]}, "--ssl-keyfile .*client.key is not the key of --ssl-certfile"),
        (encrypted, "--ssl-keyfile .*encrypted.key is encrypted, .*openssl pkey"),
        ({**server, "keyfile": server["certfile"]}, "--ssl-keyfile .*server.crt holds no private key in PEM"),
        ({**server, "keyfile": empty}, "--ssl-keyfile .*empty.pem holds no private key in PEM"),
        ({**server, "certfile": empty}, "--ssl-certfile .*empty.pem holds no certificate in PEM"),
        ({**server, "certfile": server["keyfile"]}, "--ssl-certfile .*server.key holds no certificate in PEM"),
        ({**server, "certfile": nonsense}, "--ssl-certfile .*nonsense.pem and --ssl-keyfile .* cannot be used"),
        ({**server, "ca_certs": empty}, "--ssl-ca-certs .*empty.pem holds no certificates in PEM"),
        ({**server, "ca_certs": server["keyfile"]}, "--ssl-ca-certs .*server.key holds no certificates in PEM"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            Tls(**given)


@pytest.mark.parametrize(
    "begins, ends, said",
    [(-3, -1, "certificate has expired"), (1, 9, "not yet valid"), (-9, 0.5, "expires in 12 hours"), (-9, 100, "")],
)
def test_the_age_of_a_certificate(
    files: Files, caplog: pytest.LogCaptureFixture, begins: float, ends: float, said: str
) -> None:
    pair, _ = files.make("aged", begins_days=begins, ends_days=ends)
    with caplog.at_level(logging.WARNING, logger="serving.tls"):
        Tls(**pair)
    assert (said in caplog.text) if said else not caplog.records


def test_flags_that_go_together(files: Files) -> None:
    assert tls_of(None, None, None) is None
    certfile, keyfile = files.server["certfile"], files.server["keyfile"]
    assert tls_of(certfile, keyfile, None) == Tls(certfile=certfile, keyfile=keyfile)
    for given, said in (
        ((certfile, None, None), "--ssl-certfile needs --ssl-keyfile too"),
        ((None, keyfile, None), "--ssl-keyfile needs --ssl-certfile too"),
        ((None, None, certfile), "--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile too"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            tls_of(*given)


def test_what_uvicorn_gets(files: Files) -> None:
    tls = Tls(**files.server, ca_certs=files.ca["certfile"])
    assert tls.uvicorn_options() == {
        "ssl_certfile": str(files.server["certfile"]),
        "ssl_keyfile": str(files.server["keyfile"]),
        "ssl_ca_certs": str(files.ca["certfile"]),
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    }


def test_a_client_with_files_that_cannot_be(files: Files, tmp_path: pathlib.Path) -> None:
    server = "127.0.0.1:50051"
    with pytest.raises(InvalidArgument, match="ca_certs .*none cannot be read"):
        Client(server, ca_certs=tmp_path / "none")
    with pytest.raises(InvalidArgument, match="certfile and keyfile are a pair"):
        Client(server, certfile=files.client["certfile"])
    with pytest.raises(InvalidArgument, match="api_key must be visible ASCII") as caught:
        Client(server, api_key="secret\n")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("mutual", [False, True])
def test_https(opened: Callable[..., Any], files: Files, mutual: bool) -> None:
    server = Tls(**files.server, ca_certs=files.ca["certfile"] if mutual else None)

    async def run() -> None:
        gateway, engine = opened()
        front = HttpFront(gateway, tls=server)
        url = f"https://127.0.0.1:{front.bind('127.0.0.1', 0)}"
        await front.start()
        await front.set_ready(True)
        strangers = ssl.create_default_context(cafile=str(files.ca["certfile"]))
        known = ssl.create_default_context(cafile=str(files.ca["certfile"]))
        known.load_cert_chain(files.client["certfile"], files.client["keyfile"])
        async with httpx.AsyncClient(base_url=url, verify=known, trust_env=False) as client:
            asked = {"prompt": "abc", "stream": True, "max_tokens": 3}
            assert (await client.post("/v1/completions", json=asked)).text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=url, verify=strangers, trust_env=False) as client:
            if mutual:
                with pytest.raises(httpx.HTTPError):
                    await client.get("/health")
            else:
                assert (await client.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=url.replace("https", "http"), trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/health")
        await front.stop(0)
        engine.close()

    asyncio.run(run())
