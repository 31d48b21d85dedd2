"""Who may connect to whom by the NetworkPolicies, against the table that stands above them."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import PLATFORMS, Document, Pod, documents_of, name_of, pods_of, ports_of, selects

TRANSFER = set(range(7200, 7264))
WORKERS = {"prefill", "decode"}
# (from, to): ports. Everything else is closed.
ALLOWED: dict[tuple[str, str], set[int]] = {
    ("clients", "router"): {8000, 50051},
    ("monitoring", "router"): {8000},
    **{("monitoring", role): {8001} for role in WORKERS},
    **{(role, "router"): {7000, 8000, 50051} for role in WORKERS},
    **{("router", role): {7100} for role in WORKERS},
    **{(here, there): {7100} | TRANSFER for here in WORKERS for there in WORKERS},
    ("router", "router"): {8000, 50051},
}
NAMESPACES = {
    "clients": {"jaxpd-clients": "allow"},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring"},
    "elsewhere": {"kubernetes.io/metadata.name": "default"},
}


def policies_of(documents: list[Document]) -> list[Document]:
    return [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]


def open_ports(policies: list[Document], origin: str, labels: dict[str, str] | None, target: Pod) -> set[int] | None:
    """Ports of `target` that pods with `labels` (None: of another namespace, `origin`) may reach; None: all."""
    selecting = [policy for policy in policies if selects(policy["podSelector"], target.labels)]
    assert selecting, "a pod that no policy selects is open to all"
    ports: set[int] = set()
    for rule in (rule for policy in selecting for rule in policy.get("ingress", ())):
        for peer in rule["from"]:
            if labels is None:
                matches = "namespaceSelector" in peer and selects(peer["namespaceSelector"], NAMESPACES[origin])
            else:
                matches = "podSelector" in peer and selects(peer["podSelector"], labels)
            if not matches:
                continue
            if "ports" not in rule:
                return None
            for port in rule["ports"]:
                ports |= set(range(port["port"], port.get("endPort", port["port"]) + 1))
    return ports


@pytest.mark.parametrize("platform", PLATFORMS)
def test_only_those_of_the_table_get_in(platform: str) -> None:
    documents = documents_of(platform)
    policies = policies_of(documents)
    pods = [pod for pod in pods_of(documents) if pod.component]
    origins: list[tuple[str, dict[str, str] | None]] = [(pod.component, pod.labels) for pod in pods]
    origins += [(name, None) for name in NAMESPACES]
    for target in pods:
        for origin, labels in origins:
            found = open_ports(policies, origin, labels, target)
            if platform == "tpu" and origin == target.component == "prefill":
                assert found is None  # the processes of one mesh
            else:
                assert found == ALLOWED.get((origin, target.component), set()), (origin, target.component)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_port_of_a_policy_is_listened_on(platform: str) -> None:
    documents = documents_of(platform)
    for document in documents:
        if document["kind"] != "NetworkPolicy":
            continue
        targets = [pod for pod in pods_of(documents) if selects(document["spec"]["podSelector"], pod.labels)]
        for rule in document["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                wanted = set(range(port["port"], port.get("endPort", port["port"]) + 1))
                for pod in targets:
                    declared = {entry["containerPort"] for entry in pod.container["ports"]}
                    assert wanted <= ports_of(pod) | declared, (name_of(document), name_of(pod.owner))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_transfer_ports_are_those_of_the_flag(platform: str) -> None:
    documents = documents_of(platform)
    (policy,) = [d["spec"] for d in documents if name_of(d) == "NetworkPolicy/worker-transfer"]
    (port,) = policy["ingress"][0]["ports"]
    workers = [pod for pod in pods_of(documents) if pod.component in WORKERS]
    assert len(workers) >= 2
    for pod in workers:
        assert pod.flag("--transfer-listen") == f"10.0.0.5:{port['port']}-{port['endPort']}"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_named_and_probed_ports_are_listened_on(platform: str) -> None:
    for pod in pods_of(documents_of(platform)):
        if not pod.component:
            continue
        named = {entry["name"]: entry["containerPort"] for entry in pod.container["ports"]}
        assert set(named.values()) <= ports_of(pod)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for way in pod.container.get(probe, {}).values():
                if isinstance(way, dict):
                    assert named.get(way["port"], way["port"]) in named.values()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_workers_find_the_routers(platform: str) -> None:
    documents = documents_of(platform)
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    for pod in pods_of(documents):
        if pod.component not in WORKERS:
            continue
        owner = next(pod.owner for pod in pods_of(documents) if pod.component == "router")
        hosts = set()
        for address in pod.flags("--router"):
            host, _, port = address.rpartition(":")
            name, service, namespace, suffix = host.split(".")
            assert (service, namespace, suffix) == (owner["spec"]["serviceName"], "jaxpd", "svc")
            assert int(port) in {entry["port"] for entry in services[service]["ports"]}
            assert services[service]["publishNotReadyAddresses"]  # a router is not ready before workers are
            hosts.add(name)
        assert hosts == {f"jaxpd-router-{index}" for index in range(owner["spec"]["replicas"])}
