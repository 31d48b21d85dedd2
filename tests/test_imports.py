"""The arrows between the packages, read from the source: who may import whom.

pallas_kernels, meshes    nothing of jaxpd or serving, nor of each other in one direction
jaxpd                     nothing of serving, but in jaxpd.cli
serving                   anything
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("jaxpd", "pallas_kernels", "meshes", "serving")


def imports_of(source: str) -> set[str]:
    """Top-level packages of ours that `source` imports anywhere in it, also inside functions and by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value).partition(".")[0])
    return found & set(PACKAGES)


def allowed(path: pathlib.PurePath) -> set[str]:
    """What a file, relative to the root, may import of our packages."""
    match path.parts[:2]:
        case ("pallas_kernels", _):
            return {"pallas_kernels"}
        case ("meshes", _):
            return {"meshes"}
        case ("jaxpd", "cli" | "__main__.py"):
            return set(PACKAGES)
        case ("jaxpd", _):
            return {"jaxpd", "meshes", "pallas_kernels"}
        case _:
            return set(PACKAGES)


FILES = sorted(p.relative_to(ROOT) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_only_what_the_design_allows(path: pathlib.Path) -> None:
    extra = imports_of((ROOT / path).read_text(encoding="utf-8")) - allowed(path)
    assert not extra, f"{path} imports {', '.join(sorted(extra))}; docs of the layout allow {sorted(allowed(path))}"


def test_the_walk_sees_every_kind_of_import() -> None:
    source = (
        "import serving.client as c\n"
        "def f():\n"
        "    from jaxpd.llm import LLM\n"
        "    importlib.import_module('meshes.heads')"
    )
    assert imports_of(source) == {"serving", "jaxpd", "meshes"}


@pytest.mark.parametrize("module", ["jaxpd.cli.main", "jaxpd.errors", "jaxpd.request", "jaxpd.config"])
def test_light_modules_do_not_import_jax(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'jax', 'grpc', 'flax', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'it imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
