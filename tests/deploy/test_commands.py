"""Every `jaxpd` command of the manifests, the units and the pages is one that the real command line takes."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest
import typer

from jaxpd.cli import main
from tests.deploy.manifests import PLATFORMS, ROOT, documents_of, name_of, pods_of

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
PAGES = [ROOT / "docs" / "cluster.md", ROOT / "docs" / "deploy.md"]


def unit_command(unit: pathlib.Path) -> list[str]:
    """ExecStart, its lines joined."""
    text = unit.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=/opt/jaxpd/bin/jaxpd (.*)$", text, flags=re.MULTILINE)
    return shlex.split(line)


def page_commands(page: pathlib.Path) -> list[list[str]]:
    """Of the indented lines; [A | B] is taken as A."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4,}(?:[$] )?jaxpd ((?:router|worker|workers|serve|up) .*?)(?: #.*)?$", text, re.M)
    lines += re.findall(r"'jaxpd (workers .*?)'", text)
    lines += re.findall(r"`jaxpd ((?:workers|bench serve) --.*?)`", text)
    chosen = [re.sub(r"\[(.*?)( \|.*?)?\]", r"\1", line) for line in lines]
    return [shlex.split(line.replace("$POD_IP", "10.0.0.5")) for line in chosen]


COMMANDS = [
    *(
        pytest.param(pod.command, id=f"{platform}:{name_of(pod.owner)}:{index}")
        for platform in PLATFORMS
        for index, pod in enumerate(pods_of(documents_of(platform)))
        if pod.component
    ),
    *(pytest.param(unit_command(unit), id=unit.name) for unit in UNITS),
    *(
        pytest.param(words, id=f"{page.name}:{' '.join(words[:3])}:{i}")
        for page in PAGES
        for i, words in enumerate(page_commands(page))
    ),
]


def parse(words: list[str]) -> dict[str, Any]:
    """What the command line understands, without running it. Raises what click raises for a wrong flag."""
    command: Any = typer.main.get_command(main.app)
    words = list(words)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command.make_context(command.name, words).params


@pytest.mark.parametrize("words", COMMANDS)
def test_parses(words: list[str]) -> None:
    assert parse(words)


def test_a_wrong_flag_does_not() -> None:
    with pytest.raises(Exception, match="--listne"):
        parse(["serve", "--listne=127.0.0.1:7100"])


def test_there_are_commands_in_each_place() -> None:
    assert len(UNITS) == 3
    assert len(COMMANDS) > 20
    for page in PAGES:
        assert {words[0] for words in page_commands(page)} >= {"router", "worker", "workers"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_gives_time_to_drain(unit: pathlib.Path) -> None:
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(encoding="utf-8"), re.MULTILINE)
    (timeout,) = [word.partition("=")[2] for word in unit_command(unit) if word.startswith("--shutdown-timeout=")]
    assert int(stop) == float(timeout) + 30


def test_units_are_valid(tmp_path: pathlib.Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine")
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("/opt/jaxpd/bin/jaxpd", "/bin/true")
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / unit.name) for unit in UNITS]
    done = subprocess.run([analyze, "verify", *files], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "jaxpd" in line]
    assert not ours
    assert done.returncode == 0, done.stderr


def test_paths_in_the_page_exist() -> None:
    text = PAGES[1].read_text(encoding="utf-8")
    paths = set(re.findall(r"\bdeploy/[\w./-]+", text))
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path.rstrip("/.")).exists()]


def test_ports_in_the_page_are_those_of_the_manifests() -> None:
    text = PAGES[1].read_text(encoding="utf-8")
    listed = set(map(int, re.findall(r"^\| (\d+)(?: to \d+)? \|", text, re.MULTILINE)))
    pods = [pod for pod in pods_of(documents_of("tpu")) if pod.component]
    assert listed == {entry["containerPort"] for pod in pods for entry in pod.container["ports"]}
