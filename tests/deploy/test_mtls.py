"""The component that puts a platform on mutual TLS, the certificate that the page makes for it, and its probe."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from serving.tls import Tls
from tests.deploy.manifests import KUBERNETES, PLATFORMS, ROOT, Pod, pods_of, rendered
from tests.deploy.schemas import check
from tests.deploy.test_commands import parse

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
PROBE = KUBERNETES / "mtls" / "probe.py"


def pods_with_tls(platform: str, folder: pathlib.Path) -> list[Pod]:
    """As a user's kustomization with the component makes them."""
    places = [os.path.relpath(KUBERNETES / name, folder) for name in (platform, "mtls")]
    kinds = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    text = f"{kinds}resources: [{places[0]}]\ncomponents: [{places[1]}]\n"
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
    documents = rendered(folder)
    for document in documents:
        check(document)
    return [pod for pod in pods_of(documents) if pod.component]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_process_gets_the_files_and_a_probe_that_shows_them(platform: str, tmp_path: pathlib.Path) -> None:
    pods = pods_with_tls(platform, tmp_path)
    assert {pod.component for pod in pods} == {"router", "prefill", "decode"}
    for pod in pods:
        if pod.follows:
            continue  # it has no control port
        volumes = {volume["name"]: volume for volume in pod.template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod.container["volumeMounts"]}
        assert mounts["/etc/jaxpd/tls"]["secret"]["secretName"] == "jaxpd-tls"
        for flag, file in (("certfile", "tls.crt"), ("keyfile", "tls.key"), ("ca-certs", "ca.crt")):
            assert pod.flag(f"--ssl-{flag}") == f"/etc/jaxpd/tls/{file}"
            assert f"--from-file={file}" in PAGE
        domain = f"jaxpd-{pod.component}.jaxpd.svc.cluster.local"
        assert f"DNS:*.{domain}," in PAGE
        if pod.component != "router":
            assert pod.flag("--listen") == f"jaxpd-{pod.component}-0.{domain}:7100"
        ports = {entry["name"]: entry["containerPort"] for entry in pod.container["ports"]}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = pod.container[name]
            assert "grpc" not in probe
            if pod.component == "router":
                *python, port, _, where = probe["exec"]["command"]
                assert python == ["python", f"/etc/jaxpd/probe/{PROBE.name}"] and where == domain
                assert "/etc/jaxpd/probe" in mounts and int(port) in ports.values()
            else:
                assert probe["httpGet"]["scheme"] == "HTTPS" and probe["httpGet"]["port"] in ports


@pytest.mark.parametrize("platform", PLATFORMS)
def test_its_commands_parse(platform: str, tmp_path: pathlib.Path) -> None:
    for pod in pods_with_tls(platform, tmp_path):
        assert parse(pod.command)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The files that the page's commands make, in a folder."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    folder = tmp_path_factory.mktemp("certificates")
    lines = re.findall(r"^    ((?:openssl|printf) .*)$", PAGE, re.MULTILINE)
    assert len(lines) == 7
    script = "\n".join(lines)
    done = subprocess.run(["sh", "-ec", script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def served(certificate: pathlib.Path) -> Iterator[str]:
    """The address of a server that is alive and not ready, with mutual TLS as workers have it."""
    tls = Tls(certfile=certificate / "tls.crt", keyfile=certificate / "tls.key", ca_certs=certificate / "ca.crt")
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("jaxpd.v1.Worker", health_pb2.HealthCheckResponse.NOT_SERVING)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_secure_port("127.0.0.1:0", tls.grpc_credentials())
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def load_probe() -> Any:
    spec = importlib.util.spec_from_file_location("probe", PROBE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    [
        "jaxpd-prefill-0.jaxpd-prefill.jaxpd.svc.cluster.local",
        "jaxpd-decode-11.jaxpd-decode.jaxpd.svc.cluster.local",
        "jaxpd-router-1.jaxpd-router.jaxpd.svc",
        "jaxpd.jaxpd.svc",
    ],
)
def test_the_probe_over_the_certificate_of_the_page(served: str, certificate: pathlib.Path, name: str) -> None:
    probe = load_probe()
    assert probe.serving(served, "", name, certificate)
    assert not probe.serving(served, "jaxpd.v1.Worker", name, certificate)


def test_the_probe_refuses_another_name(served: str, certificate: pathlib.Path) -> None:
    with pytest.raises(grpc.RpcError):
        load_probe().serving(served, "", "jaxpd-other-0.jaxpd-other.jaxpd.svc.cluster.local", certificate)
