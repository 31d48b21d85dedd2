"""Reads the manifests under deploy/kubernetes as kustomize does, as far as they use it: lists of files and folders."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "deploy" / "kubernetes"
PLATFORMS = ("cpu", "gpu", "tpu")
# What is applied beside a platform.
ADDITIONS = ("gateway", "monitoring")
# What the controller of LeaderWorkerSets adds to the environment of each container.
LWS_VARIABLES = {
    "LWS_LEADER_ADDRESS": "jaxpd-prefill-0.jaxpd-prefill.jaxpd",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "0",
}

Document = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod template with what it belongs to."""

    owner: Document
    template: Document

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def component(self) -> str:
        """router, prefill, decode or mixed; empty where it is none of ours."""
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def container(self) -> Document:
        (container,) = self.template["spec"]["containers"]
        return container

    @property
    def variables(self) -> dict[str, str]:
        """The environment, with samples of what only a cluster knows."""
        samples = {"POD_IP": "10.0.0.5", "POD_NAME": f"{self.owner['metadata']['name']}-0"}
        values = {entry["name"]: samples[entry["name"]] for entry in self.container.get("env", ())}
        return values | (LWS_VARIABLES if self.owner["kind"] == "LeaderWorkerSet" else {})

    @property
    def command(self) -> list[str]:
        """The arguments, with their variables replaced. KeyError for one that nobody sets."""
        arguments = list(self.container["args"])
        for index, argument in enumerate(arguments):
            while "$(" in argument:
                before, _, rest = argument.partition("$(")
                name, _, after = rest.partition(")")
                argument = before + self.variables[name] + after
            arguments[index] = argument
        return arguments

    def flags(self, name: str) -> list[str]:
        """The values of each `name=value`."""
        return [word.partition("=")[2] for word in self.command if word.startswith(f"{name}=")]

    def flag(self, name: str) -> str | None:
        """The value of `name=value`; None where it is not given."""
        return next(iter(self.flags(name)), None)

    @property
    def follows(self) -> bool:
        """Whether it is a process of a mesh over several pods, and not the first one."""
        group = self.owner["spec"].get("leaderWorkerTemplate", {})
        return self.template is group.get("workerTemplate")


def read(file: pathlib.Path) -> list[Document]:
    """All documents of a file."""
    return [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document]


def files_of(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The files that a folder's kustomization takes in, those of other folders too."""
    (kustomization,) = read(folder / "kustomization.yaml")
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        if path.is_dir():
            yield from files_of(path)
        else:
            yield path


def documents_of(platform: str) -> list[Document]:
    """What is in a cluster with this platform's workers, and with the additions."""
    files = [file for folder in (platform, *ADDITIONS) for file in files_of(KUBERNETES / folder)]
    return [document for file in files for document in read(file)]


def pods_of(documents: list[Document]) -> list[Pod]:
    """The pod templates of Deployments, StatefulSets and LeaderWorkerSets."""
    pods = []
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            pods.append(Pod(document, document["spec"]["template"]))
        elif document["kind"] == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            pods += [Pod(document, group[name]) for name in ("leaderTemplate", "workerTemplate")]
    return pods


def selects(selector: Document | None, labels: dict[str, str]) -> bool:
    """Of a Service (plain labels), or of matchLabels and matchExpressions with In; {} selects everything."""
    selector = selector or {}
    if not {"matchLabels", "matchExpressions"} & set(selector):
        return all(labels.get(key) == value for key, value in selector.items())
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def name_of(document: Document) -> str:
    """For the names of tests."""
    return f"{document['kind']}/{document['metadata']['name']}"


def ports_of(pod: Pod) -> set[int]:
    """What its processes listen on, by their command lines."""
    flags = ("--listen", "--port", "--grpc-port", "--coordinator", "--transfer-listen")
    ports: set[int] = set()
    for value in filter(None, map(pod.flag, flags)):
        first, _, last = value.rpartition(":")[2].partition("-")
        ports |= set(range(int(first), int(last or first) + 1))
    return ports


def rendered(folder: pathlib.Path) -> list[Document]:
    """What `kubectl apply -k` would send. Skips the test where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on this machine")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]
