"""The built wheel holds everything and works from another folder. No network: setuptools of this environment builds."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKAGES = ("jaxpd", "pallas_kernels", "meshes", "serving")
SHIPPED = (".py", ".pyi", ".proto", ".typed", ".jinja", ".html", ".js", ".css")


def shipped_files() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix in SHIPPED
    )


def call(*command: object, cwd: pathlib.Path, **env: str) -> str:
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env or None, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    source = tmp_path_factory.mktemp("source")  # building leaves files beside pyproject.toml
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, source, cwd=out)
    (path,) = out.glob("jaxpd-*.whl")
    return path


def test_the_wheel_holds_every_module_proto_and_type_marker(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert not set(shipped_files()) - set(names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith(".proto") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)  # no tests, no benchmarks
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_module_imports_from_another_folder(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel, cwd=elsewhere)
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in shipped_files()
        if name.endswith(".py") and not name.endswith("__main__.py")
    ]
    code = (
        "import importlib, pathlib, sys\n"
        f"for name in {modules!r}:\n"
        "    path = pathlib.Path(importlib.import_module(name).__file__)\n"
        f"    assert path.is_relative_to({str(target)!r}), path\n"
        "import jaxpd\n"
        "print(jaxpd.LLM.__name__, jaxpd.SamplingParams.__name__)\n"
    )
    env = {"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    assert call(sys.executable, "-c", code, cwd=elsewhere, **env).split() == ["LLM", "SamplingParams"]
    script = call(target / "bin" / "jaxpd", "--version", cwd=elsewhere, **env)
    assert script.startswith("jaxpd ")
