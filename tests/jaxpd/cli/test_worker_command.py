"""`jaxpd worker` before it starts: what is wrong with its flags is said at once."""

from __future__ import annotations

import pathlib

import pytest
from typer.testing import CliRunner

from jaxpd.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("both", "worker both: the role must be prefill, decode or mixed"),
        ("prefill m --mode chunked", "--mode chunked is for a process that does both: a prefill worker has one mesh"),
        ("decode m --prefill-mesh 1x1", "--prefill-mesh 1x1 is for a process that does both"),
        ("decode m --local-prefill auto", "--local-prefill auto is for a process that does both"),
        ("prefill m --mesh 3y", "--mesh"),
        ("mixed m --mesh 1x1", "--mesh 1x1 is for one pool that prefills and decodes: choose --mode"),
        ("decode m --listen nowhere", "--listen nowhere must be HOST:PORT"),
        ("decode m --listen 0.0.0.0:0", "--cluster-secret-file"),
        ("decode m --transfer-listen host:0", "--transfer-listen host:0 must be a numeric address"),
        ("decode m --router r", "--router r must be HOST:PORT"),
        ("decode m --port 70000", "--port 70000 must be between 0"),
        ("decode m --log-format xml", "--log-format xml must be one of text, json"),
        ("decode m --cluster-secret-file missing", "--cluster-secret-file missing cannot be read"),
        ("decode m --ssl-certfile c", "--ssl-certfile needs --ssl-keyfile too"),
        ("decode m --heartbeat-timeout 0", "--heartbeat-timeout 0.0 must be above 0"),
    ],
)
def test_wrong_flags(arguments: str, said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["worker", *arguments.split()])
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "Traceback" not in result.output
