"""`jaxpd up` on this machine, with real workers: what dies is replaced while traffic goes on, and nothing is left."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from serving.launch.local import cluster_folder
from tests.launch import clusters
from tests.launch.clusters import PATIENCE_S, Running, Traffic, alive, command, environment, run, small, up_here

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]
NAME = f"test-{os.getpid()}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def cluster(cache: pathlib.Path) -> Iterator[Running]:
    with up_here(NAME, "--prefill", 1, "--decode", 2, *clusters.MESHES, *small(cache)) as (running, _):
        yield running


def test_a_killed_worker_is_replaced_and_nobody_sees_it(cluster: Running) -> None:
    before = cluster.unit("decode-1")
    with Traffic(cluster.status()["http"]) as traffic:
        traffic.more(5)
        os.kill(before["pid"], signal.SIGKILL)
        traffic.more(10)
        after = cluster.until(lambda status: status["serves"])
        traffic.more(5)
    assert not traffic.wrong
    unit = next(unit for unit in after["units"] if unit["name"] == "decode-1")
    assert unit["generation"] == before["generation"] + 1 and unit["pid"] != before["pid"]
    assert "killed by signal 9" in unit["trouble"]


def test_scaling_down_and_up_under_load_loses_nothing(cluster: Running) -> None:
    with Traffic(cluster.status()["http"], clients=3) as traffic:
        traffic.more(5)
        assert cluster.scale("decode=1")["wanted"]["decode"] == 1
        assert cluster.ready() == {"router", "prefill-0", "decode-0"}
        traffic.more(5)
        assert cluster.scale("decode=2")["serves"]
        assert cluster.ready() == {"router", "prefill-0", "decode-0", "decode-1"}
        traffic.more(5)
    assert not traffic.wrong


def test_a_killed_router_comes_back_where_clients_know_it(cluster: Running) -> None:
    before = cluster.status()
    os.kill(cluster.unit("router")["pid"], signal.SIGKILL)
    after = cluster.until(lambda status: status["serves"] and status["units"] != before["units"])
    assert (after["http"], after["grpc"], after["control"]) == (before["http"], before["grpc"], before["control"])
    workers = [[u for u in status["units"] if u["role"] != "router"] for status in (before, after)]
    assert workers[0] == workers[1]
    with Traffic(after["http"]) as traffic:
        traffic.more(3)
    assert not traffic.wrong


def test_a_second_cluster_of_that_name_and_a_wish_that_cannot_be_are_refused(cluster: Running) -> None:
    refused = run("up", "--name", NAME, clusters.MODEL, code=2)
    assert f"cluster {NAME} runs on this machine already" in refused.stderr
    refused = run("up", *cluster.flags, "--scale", "decode=0", code=2)
    assert "decode.count = 0" in refused.stderr and "can serve nothing" in refused.stderr
    refused = run("up", "--name", "nobody", "--status", code=2)
    assert "no cluster nobody runs on this machine; start one with: jaxpd up" in refused.stderr


def test_down_leaves_no_process(cache: pathlib.Path) -> None:
    with up_here(f"{NAME}-mixed", "--mixed", 1, *small(cache)) as (running, process):
        status = running.status()
        pids = [unit["pid"] for unit in status["units"]]
        assert len(pids) == 2 and all(map(alive, pids))
        with Traffic(status["http"]) as traffic:
            traffic.more(2)
        assert not traffic.wrong
        assert f"cluster {NAME}-mixed is down" in run("down", *running.flags).stdout
        assert process.wait(PATIENCE_S) == 0
        assert not any(map(alive, pids))


def test_everything_ends_with_the_command_that_owns_it(cache: pathlib.Path) -> None:
    with up_here(f"{NAME}-owner", "--mixed", 1, *small(cache)) as (running, process):
        pids = [unit["pid"] for unit in running.status()["units"]]
        process.kill()
        end_s = time.monotonic() + PATIENCE_S
        while any(map(alive, pids)):
            assert time.monotonic() < end_s, "a process outlived its owner"
            time.sleep(0.05)


def test_a_flag_that_no_worker_takes_ends_the_command_with_the_workers_own_words() -> None:
    flags = ("--name", f"{NAME}-bad", "--port", 0, "--grpc-port", 0, "--decode-flags", "--page-size 9")
    done = subprocess.run(
        command("up", *flags, clusters.MODEL), env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    shutil.rmtree(cluster_folder(f"{NAME}-bad"))
    assert done.returncode == 2
    assert "decode-0 cannot start, so the cluster was stopped" in done.stderr
    assert "--page-size 9 must be a power of two" in done.stderr and "Traceback" not in done.stderr
