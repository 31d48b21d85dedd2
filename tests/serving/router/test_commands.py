"""`jaxpd router` and `jaxpd workers`, as far as their flags and what they print."""

from __future__ import annotations

import asyncio
import json
import pathlib
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jaxpd.cli import main
from jaxpd.policies.workers import Role
from serving.cluster import Cluster
from serving.config import ServerConfig
from serving.router import process
from serving.router.config import RouterConfig

SECRET = "0123456789abcdef0123"


def run(*args: str) -> Result:
    return CliRunner().invoke(main.app, args, env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("router", "--prefill", "a:1,,b:2"), "--prefill a:1,,b:2 holds an empty address"),
        (("router", "--decode", "a"), "--decode a must be HOST:PORT"),
        (("router", "--decode-policy", "best"), "--decode-policy best does not exist"),
        (("router", "--ttft-slo", "3"), "--ttft-slo 3 is not a time; write a number with its unit"),
        (("router", "--ttft-slo", "3s"), "--prefill-policy ttft_estimate"),
        (("router", "--listen", "0.0.0.0:0", "--port", "0", "--grpc-port", "0"), "--cluster-secret-file"),
        (
            ("router", "--cluster-secret-file", "/does/not/exist"),
            "--cluster-secret-file /does/not/exist cannot be read",
        ),
        (("workers", "--router", "x"), "--router x must be HOST:PORT"),
        (("workers", "--drain", "a", "--resume", "a"), "--drain and --resume are opposites"),
        (("workers", "--router", "127.0.0.1:1"), "127.0.0.1:1"),
    ],
)
def test_wrong_flags_end_with_a_message(args: tuple[str, ...], words: str) -> None:
    result = run(*args)
    assert result.exit_code in (1, 2) and words in result.output.replace("\n", " ")


def test_workers_are_listed_and_drained(worker_script: ModuleType, soon: Any, tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")

    async def go() -> None:
        async with worker_script.workers(Role.PREFILL, Role.DECODE) as (p, d):
            stop, control = asyncio.Event(), list[str]()
            config = RouterConfig(
                listen="127.0.0.1:0",
                prefill=(p.address,),
                decode=(d.address, "127.0.0.1:1"),
                cluster=Cluster(secret=SECRET),
            )
            ready = asyncio.Event()
            task = asyncio.create_task(
                process.run(
                    config,
                    ServerConfig(port=0, grpc_port=0),
                    on_listening=lambda address, engine: control.append(address),
                    on_ready=lambda ports: ready.set(),
                    stop=stop,
                )
            )
            await asyncio.wait_for(ready.wait(), 10)
            args = ("workers", "--router", control[0], "--cluster-secret-file", str(secret))
            shown = await asyncio.to_thread(run, *args)
            assert shown.exit_code == 0, shown.output
            assert f"{p.name}  prefill  ready" in shown.output and "nobody answers there" in shown.output
            listed = json.loads((await asyncio.to_thread(run, *args, "--json")).stdout)["workers"]
            assert [worker["state"] for worker in listed] == ["ready", "ready", "connecting"]
            assert listed[0]["reading"]["pages"] == 128 and listed[2]["reading"] is None
            drained = await asyncio.to_thread(run, *args, "--drain", d.address, "--json")
            assert json.loads(drained.stdout)["workers"][1]["state"] == "draining" and d.draining
            await asyncio.to_thread(run, *args, "--resume", d.name)
            assert not d.draining
            nobody = await asyncio.to_thread(run, *args, "--drain", "x:1")
            assert nobody.exit_code == 2 and "there is no worker x:1" in nobody.output
            without = await asyncio.to_thread(run, *args[:3])
            assert without.exit_code == 2 and "cluster secret" in without.output
            stop.set()
            await asyncio.wait_for(task, 10)

    asyncio.run(go())
