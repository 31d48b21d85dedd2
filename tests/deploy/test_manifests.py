"""Every manifest fits its schema, and what one says of another is so."""

from __future__ import annotations

import copy
import json
import math
import pathlib
from typing import Any

import jsonschema
import pytest

from jaxpd.version import __version__
from tests.deploy.manifests import (
    ADDITIONS,
    KUBERNETES,
    PLATFORMS,
    ROOT,
    Document,
    Pod,
    documents_of,
    files_of,
    name_of,
    pods_of,
    read,
    rendered,
    selects,
)
from tests.deploy.schemas import check

KUSTOMIZATIONS = sorted(file.parent for file in KUBERNETES.glob("*/kustomization.yaml"))
# mtls is a component of patches: test_mtls.py checks what it makes.
COMPONENT = KUBERNETES / "mtls"
FILES = sorted(f for f in KUBERNETES.rglob("*.yaml") if f.name != "kustomization.yaml" and f.parent != COMPONENT)
DOCUMENTS = [
    pytest.param(document, id=f"{file.relative_to(KUBERNETES)}:{name_of(document)}")
    for file in FILES
    for document in read(file)
]
PODS = [
    pytest.param(pod, id=f"{platform}:{name_of(pod.owner)}")
    for platform in PLATFORMS
    for pod in pods_of(documents_of(platform))
    if pod.component
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_fits_its_schema(document: Document) -> None:
    check(document)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_field_too_many_does_not(document: Document) -> None:
    for place in ("", "spec", "metadata"):
        broken = copy.deepcopy(document)
        if place and place not in broken:
            continue
        (broken[place] if place else broken)["replicsa"] = 1
        with pytest.raises(jsonschema.ValidationError, match="replicsa"):
            check(broken)


def test_a_field_too_many_in_a_pod_template_does_not() -> None:
    for pod in pods_of(documents_of("tpu")):
        broken = copy.deepcopy(pod.owner)
        for template in pods_of([broken]):
            template.template["spec"]["containers"][0]["livenesProbe"] = {}
        with pytest.raises(jsonschema.ValidationError, match="livenesProbe"):
            check(broken)


def test_an_unknown_kind_is_no_success() -> None:
    with pytest.raises(LookupError):
        check({"apiVersion": "example.com/v1", "kind": "Unknown", "metadata": {"name": "x"}})


def test_every_file_is_applied_by_some_kustomization() -> None:
    applied = {file for folder in KUSTOMIZATIONS if folder != COMPONENT for file in files_of(folder)}
    assert applied == set(FILES)
    (component,) = read(COMPONENT / "kustomization.yaml")
    assert {patch["path"] for patch in component["patches"]} == {file.name for file in COMPONENT.glob("*.patch.yaml")}
    assert {folder.name for folder in KUSTOMIZATIONS} == {*PLATFORMS, *ADDITIONS, "base", "storage", "copier", "mtls"}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_names_are_unique_and_in_the_namespace(platform: str) -> None:
    documents = documents_of(platform)
    names = [name_of(document) for document in documents]
    assert len(set(names)) == len(names)
    assert {d["metadata"].get("namespace") for d in documents if d["kind"] != "Namespace"} == {"jaxpd"}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_selectors_match_pods(platform: str) -> None:
    documents = documents_of(platform)
    pods = pods_of(documents)
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if selector is None:
            assert document["kind"] not in ("Deployment", "StatefulSet", "Service", "PodDisruptionBudget"), document
            continue
        if document["kind"] in ("Deployment", "StatefulSet"):
            assert selects(selector, spec["template"]["metadata"]["labels"]), name_of(document)
        matched = [pod for pod in pods if selects(selector, pod.labels)]
        assert matched, name_of(document)
        if document["kind"] == "Service":
            for port in spec["ports"]:
                for pod in matched:
                    names = {entry["name"] for entry in pod.container["ports"]}
                    assert port["targetPort"] in names, name_of(document)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_gateway_reaches_what_it_names(platform: str) -> None:
    documents = {name_of(document): document for document in documents_of(platform)}
    pool = documents["InferencePool/jaxpd"]["spec"]
    picker = documents[f"Service/{pool['endpointPickerRef']['name']}"]["spec"]
    assert pool["endpointPickerRef"]["port"]["number"] in {port["port"] for port in picker["ports"]}
    (router,) = [pod for pod in pods_of(list(documents.values())) if pod.component == "router"]
    assert selects(pool["selector"], router.labels)
    assert {port["number"] for port in pool["targetPorts"]} == {int(router.flag("--port") or 0)}
    (rule,) = documents["HTTPRoute/jaxpd"]["spec"]["rules"]
    for backend in rule["backendRefs"]:
        assert f"{backend['kind']}/{backend['name']}" in documents
    arguments = next(p for p in pods_of(list(documents.values())) if not p.component).container["args"]
    assert f"--pool-name={documents['InferencePool/jaxpd']['metadata']['name']}" in arguments
    monitor = documents["PodMonitor/jaxpd"]["spec"]
    assert {e["port"] for e in monitor["podMetricsEndpoints"]} <= {p["name"] for p in router.container["ports"]}


@pytest.mark.parametrize("pod", PODS)
def test_metrics_are_where_the_annotations_say(pod: Pod) -> None:
    annotations = pod.template["metadata"].get("annotations", {})
    ports = {entry["name"]: str(entry["containerPort"]) for entry in pod.container["ports"]}
    assert annotations.get("prometheus.io/port") == ports.get("http") == (None if pod.follows else pod.flag("--port"))


@pytest.mark.parametrize("pod", PODS)
def test_volumes_are_there_and_hold_what_flags_name(pod: Pod) -> None:
    volumes = {volume["name"]: volume for volume in pod.template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in pod.container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)
    for word in pod.command:
        path = word.partition("=")[2] if word.startswith("-") else word
        if path.startswith("/"):
            assert any(path.startswith(f"{place}/") for place in mounts), word
    secret = pathlib.PurePosixPath(pod.flag("--cluster-secret-file") or "")
    volume = volumes[mounts[str(secret.parent)]["name"]]
    assert volume["secret"]["secretName"] == "jaxpd-cluster" and secret.name == "secret"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_claims_and_secrets_exist(platform: str) -> None:
    documents = documents_of(platform)
    claims = {d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    maps = {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}
    used = [volume for pod in pods_of(documents) for volume in pod.template["spec"]["volumes"]]
    assert {v["persistentVolumeClaim"]["claimName"] for v in used if "persistentVolumeClaim" in v} == claims
    assert {v["configMap"]["name"] for v in used if "configMap" in v} == maps
    made = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    for secret in {v["secret"]["secretName"] for v in used if "secret" in v}:
        assert f"create secret generic {secret} --from-file=secret=" in made
    # Nobody's secret is in the repository.
    assert not [d for d in documents if d["kind"] == "Secret"]


def test_the_copier_has_the_volume_that_workers_read() -> None:
    documents = [document for file in files_of(KUBERNETES / "copier") for document in read(file)]
    (copier,) = [document["spec"] for document in documents if document["kind"] == "Pod"]
    workers = [p for p in pods_of(documents_of("gpu")) if p.component in ("prefill", "decode")]
    for worker in workers:
        volumes = {volume["name"]: volume for volume in worker.template["spec"]["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in worker.container["volumeMounts"]}
        (volume,) = copier["volumes"]
        (mount,) = copier["containers"][0]["volumeMounts"]
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert (volume["persistentVolumeClaim"]["claimName"], mount["mountPath"]) == (claim, mounts["models"])
    assert f"copier:{mount['mountPath']}/model\n" in (ROOT / "docs" / "deploy.md").read_text("utf-8")


@pytest.mark.parametrize("pod", PODS)
def test_there_is_time_to_drain(pod: Pod) -> None:
    grace_s = pod.template["spec"]["terminationGracePeriodSeconds"]
    assert grace_s == float(pod.flag("--shutdown-timeout") or math.inf) + 30
    assert "lifecycle" not in pod.container  # SIGTERM is what drains


@pytest.mark.parametrize("pod", PODS)
def test_pods_are_restricted(pod: Pod) -> None:
    spec, security = pod.template["spec"], pod.container["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]
    assert not security["allowPrivilegeEscalation"] and security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] and not spec["automountServiceAccountToken"]


@pytest.mark.parametrize("pod", PODS)
def test_a_mesh_has_as_many_devices_as_its_pods(pod: Pod) -> None:
    limits = pod.container["resources"]["limits"]
    accelerators = [int(count) for name, count in limits.items() if "/" in name]
    if not accelerators:
        assert pod.container["image"] == "jaxpd-cpu"
        return
    size = pod.owner["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
    tensor, data = map(int, (pod.flag("--mesh") or "").split("x"))
    assert tensor * data == size * sum(accelerators)
    topology = pod.template["spec"].get("nodeSelector", {}).get("cloud.google.com/gke-tpu-topology")
    if topology is not None:
        assert math.prod(map(int, topology.split("x"))) == tensor * data


def without_images(documents: list[Document]) -> list[str]:
    """In an order and without what kustomizations change."""
    documents = copy.deepcopy(documents)
    specs = [pod.template["spec"] for pod in pods_of(documents)]
    for spec in specs + [document["spec"] for document in documents if document["kind"] == "Pod"]:
        spec["containers"][0].pop("image")
    return sorted(json.dumps(document, sort_keys=True) for document in documents)


@pytest.mark.parametrize("name", [*PLATFORMS, *ADDITIONS, "copier"])
def test_kustomize_renders_what_the_other_tests_read(name: str) -> None:
    folder = KUBERNETES / name
    documents = rendered(folder)
    assert without_images(documents) == without_images([d for file in files_of(folder) for d in read(file)])
    for pod in pods_of(documents):
        image, _, tag = pod.container["image"].rpartition(":")
        assert "/" in image and tag not in ("", "latest")
        assert not pod.component or tag == __version__


def test_versions_of_images_are_ours() -> None:
    images: list[dict[str, Any]] = []
    for platform in PLATFORMS:
        (kustomization,) = read(KUBERNETES / platform / "kustomization.yaml")
        named = {image["name"] for image in kustomization["images"]}
        assert named == {pod.container["image"] for pod in pods_of(documents_of(platform)) if pod.component}
        images += kustomization["images"]
    images += read(KUBERNETES / "copier" / "kustomization.yaml")[0]["images"]
    assert {image["newTag"] for image in images} == {__version__}
