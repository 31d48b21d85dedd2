"""The secret of a cluster, the addresses of its processes, and what is said where they cannot be used."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from jaxpd.errors import FailedPrecondition, InvalidArgument
from jaxpd.policies.workers import Role
from serving.cluster import Cluster, check_exposed, join_address, read_secret, split_address
from serving.worker.config import WorkerConfig, transfer_ports

SECRET = "0123456789abcdef"


def test_a_secret_is_the_first_line_of_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"  {SECRET}\nanything\n")
    assert read_secret(file) == SECRET and read_secret(None) is None
    cluster = Cluster(secret=SECRET)
    assert cluster.metadata == (("x-jaxpd-cluster", SECRET),) and SECRET not in repr(cluster)
    assert Cluster().metadata == ()


@pytest.mark.parametrize("text", [b"short", b"", "naïve naïve naïve naïve".encode(), b"\xff" * 20])
def test_a_secret_that_is_none_is_refused_and_not_repeated(tmp_path: pathlib.Path, text: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(text)
    with pytest.raises(InvalidArgument, match="--cluster-secret-file") as error:
        read_secret(file)
    assert error.value.field == "cluster_secret_file" and "naïve" not in error.value.message
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_secret(tmp_path / "missing")


@pytest.mark.parametrize("listen", ["0.0.0.0:7100", "10.0.0.5:7100", "[::]:7100", "worker-0:7100"])
def test_who_can_be_reached_needs_a_secret(listen: str) -> None:
    with pytest.raises(FailedPrecondition, match=r"--listen .* --cluster-secret-file, .* --insecure-cluster"):
        check_exposed(listen, Cluster(), insecure=False)
    check_exposed(listen, Cluster(), insecure=True)
    check_exposed(listen, Cluster(secret=SECRET), insecure=False)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:7100", "[::1]:7100", "localhost:7100"])
def test_who_cannot_be_reached_needs_none(listen: str) -> None:
    check_exposed(listen, Cluster(), insecure=False)
    assert WorkerConfig(role=Role.DECODE, listen=listen).listen == listen


@pytest.mark.parametrize("text", ["7100", ":7100", "host", "host:", "host:x", "host:70000", "host:-1", "host:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--listen .* must be HOST:PORT"):
        split_address(text, "--listen")


def test_addresses_are_taken_apart_and_put_together() -> None:
    for text, host, port in (("a:0", "a", 0), ("[fd00::5]:7100", "fd00::5", 7100), ("10.0.0.1:1", "10.0.0.1", 1)):
        assert split_address(text, "--listen") == (host, port) and join_address(host, port) == text


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("10.0.0.5:0", "10.0.0.5", range(0, 1)),
        ("10.0.0.5:7200", "10.0.0.5", range(7200, 7201)),
        ("[fd00::5]:7200-7299", "[fd00::5]", range(7200, 7300)),
        ("localhost:0", "127.0.0.1", range(0, 1)),
    ],
)
def test_ports_of_the_transfer(text: str, host: str, ports: range) -> None:
    assert transfer_ports(text) == (host, ports)


@pytest.mark.parametrize("text", ["0.0.0.0:0", "[::]:0", "worker:0", "10.0.0.5", "10.0.0.5:9-7", "10.0.0.5:0-7"])
def test_ports_that_peers_could_not_use(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--transfer-listen .* numeric address"):
        transfer_ports(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"listen": "0.0.0.0:1", "routers": ("r:1",), "insecure_cluster": True}, "--listen 0.0.0.0:1 means every"),
        ({"listen": "0.0.0.0:1", "insecure_cluster": True}, "--transfer-listen 0.0.0.0:0"),
        ({"routers": ("nowhere",)}, "--router nowhere must be HOST:PORT"),
        ({"heartbeat_timeout_s": 0.0}, "--heartbeat-timeout 0.0 must be above 0"),
        ({"shutdown_timeout_s": float("nan")}, "--shutdown-timeout nan must be above 0"),
        ({"transfer_streams": 0}, "--transfer-streams 0 must be at least 1"),
        ({"transfer_listen": "everywhere"}, "--transfer-listen everywhere"),
    ],
)
def test_a_configuration_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        WorkerConfig(role=Role.DECODE, **fields)
    assert WorkerConfig(role=Role.DECODE)
