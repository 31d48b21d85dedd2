"""README and docs/layout.md say what is true: the layout exists, Python compiles, commands and flags are there."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest
from typer.testing import CliRunner

from jaxpd.cli import main

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def layout_paths() -> list[str]:
    """Paths of the tree in docs/layout.md, by indentation."""
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    tree = text[text.index("    jaxpd/ ") :].partition("\n\n")[0]
    paths: list[str] = []
    parents: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 2  # the tree is indented by four spaces
        parents[depth:] = [line.split()[0]]
        paths.append("".join(parents))
    return paths


@pytest.mark.parametrize("path", layout_paths())
def test_the_layout_exists(path: str) -> None:
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


def test_every_module_of_the_engine_is_in_the_layout() -> None:
    modules = {f"jaxpd/{p.name}" for p in (ROOT / "jaxpd").glob("*.py")}
    assert modules - set(layout_paths()) == {"jaxpd/__init__.py", "jaxpd/__main__.py", "jaxpd/version.py"}


def test_python_blocks_compile() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "README.md", "exec")


def test_commands_and_flags_exist() -> None:
    lines = re.findall(r"^    (?:\.venv/bin/)?jaxpd (.*?)(?: #.*)?$", README, flags=re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line)
        command, args = words[: 2 if words[0] == "bench" else 1], words[1:]
        shown = CliRunner().invoke(main.app, [*command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, command
        missing = {arg for arg in args if arg.startswith("--")} - set(re.findall(r"--[a-z][a-z-]*", shown.output))
        assert not missing, line


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^    )make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"serve", "test", "lint", "clean"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
