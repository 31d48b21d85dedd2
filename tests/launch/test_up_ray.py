"""`jaxpd up --ray` over two simulated nodes of Ray, with real workers: an actor dies, a node dies, a role is scaled."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch import clusters
from tests.launch.clusters import Running, Traffic, alive, environment, parent_of, run, small

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'jaxpd[ray]'"),
]

# Its own process: Ray's threads and warnings stay out of this one. A line on stdin removes the second node as if it had
# lost its power; the end of stdin removes everything.
NODES = """
import sys
from ray.cluster_utils import Cluster
node = dict(num_cpus=3, object_store_memory=100 * 2**20, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=node)
second = cluster.add_node(num_cpus=3, object_store_memory=100 * 2**20)
print("address", cluster.address, cluster.head_node.node_id, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    print("removed", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@dataclasses.dataclass
class Nodes:
    process: subprocess.Popen[str]
    address: str
    head: str  # the node that stays

    def remove_second(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()
        while "removed" not in (line := self.process.stdout.readline()):
            assert line, "the nodes have ended"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    process = subprocess.Popen(
        [sys.executable, "-c", NODES],
        env=environment() | {"RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdin is not None
        words = next((line.split() for line in process.stdout if line.startswith("address")), None)
        assert words is not None, "Ray did not start"
        yield Nodes(process, *words[1:])
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="module")
def cluster(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ("--ray", "--address", nodes.address)
    cache = tmp_path_factory.mktemp("programs")
    here = ("--node-host", "127.0.0.1")
    done = run("up", *flags, *here, "--prefill", 1, "--decode", 1, *clusters.MESHES, *small(cache))
    assert "1 prefill, 1 decode" in done.stdout and "up --ray --address" in done.stdout
    yield Running(flags)
    pids = [unit["pid"] for unit in Running(flags).status()["units"]]
    assert "cluster jaxpd is down" in run("down", *flags).stdout
    assert not any(map(alive, pids))
    refused = run("up", *flags, "--status", code=2)
    assert "no cluster jaxpd runs on this Ray; start one with: jaxpd up --ray" in refused.stderr


def test_scaling_up_under_load_spreads_over_the_nodes_and_loses_nothing(cluster: Running) -> None:
    with Traffic(cluster.status()["http"], clients=3) as traffic:
        traffic.more(5)
        status = cluster.scale("decode=2")
        traffic.more(10)
    assert not traffic.wrong
    workers = {unit["name"]: unit["where"] for unit in status["units"] if unit["role"] != "router"}
    assert workers.keys() == {"prefill-0", "decode-0", "decode-1"} and len(set(workers.values())) == 2


@pytest.mark.parametrize("victim", ["process", "actor"])
def test_what_is_killed_starts_again_while_traffic_goes_on(cluster: Running, victim: str) -> None:
    before = cluster.unit("decode-1")
    pid = before["pid"]
    with Traffic(cluster.status()["http"], clients=3) as traffic:
        traffic.more(5)
        os.kill(pid if victim == "process" else parent_of(pid), signal.SIGKILL)
        traffic.more(10)
        after = cluster.until(lambda status: status["serves"])
        traffic.more(5)
    assert not traffic.wrong
    unit = next(unit for unit in after["units"] if unit["name"] == "decode-1")
    assert unit["generation"] == before["generation"] + 1
    end_s = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end_s, "the process outlived its actor"


def test_a_keeper_that_is_killed_finds_everything_as_it_was(cluster: Running) -> None:
    before = cluster.status()
    os.kill(keeper_pid(), signal.SIGKILL)
    with Traffic(before["http"]) as traffic:
        traffic.more(5)
        after = cluster.until(lambda status: status["serves"])
        traffic.more(5)
    assert not traffic.wrong
    assert after["wanted"] == before["wanted"] == {"prefill": 1, "decode": 2, "mixed": 0}
    assert {u["name"]: u["pid"] for u in after["units"]} == {u["name"]: u["pid"] for u in before["units"]}


def test_scaling_down_under_load_loses_nothing(cluster: Running) -> None:
    with Traffic(cluster.status()["http"], clients=3) as traffic:
        traffic.more(5)
        cluster.scale("decode=1")
        traffic.more(10)
    assert not traffic.wrong
    assert cluster.ready() == {"router", "prefill-0", "decode-0"}


def test_what_ran_on_a_lost_node_starts_on_another_one(cluster: Running, nodes: Nodes) -> None:
    def only_on_the_head(status: dict[str, Any]) -> bool:
        return status["serves"] and all(nodes.head[:8] in unit["where"] for unit in status["units"])

    status = cluster.scale("decode=2")  # the head has room for three workers, and the second node has one at least
    assert not only_on_the_head(status)
    nodes.remove_second()
    after = cluster.until(only_on_the_head)
    assert after["wanted"] == {"prefill": 1, "decode": 2, "mixed": 0}
    with Traffic(after["http"]) as traffic:
        traffic.more(5)
    assert not traffic.wrong


def keeper_pid() -> int:
    """Ray gives an actor's process a name, which is its command line."""
    found = [
        int(path.parent.name)
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
        if path.read_bytes().startswith(b"ray::Keeper")
    ]
    assert len(found) == 1
    return found[0]
