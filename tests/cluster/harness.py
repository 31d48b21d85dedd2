"""A cluster of real processes for the tests: `jaxpd worker ...` and `jaxpd router`, their logs, and what to do to them.

    with Cluster(folder, prefill=["2x1"], decode=["1x2"]) as cluster:     every process started, each worker ready
        answer = cluster.ask(prompt, 24)                                  a client of the router, on a loop of its own
        cluster.workers["p0"].kill()                                      and `stop`, `cont`, `restart`
        cluster.baseline()                                                what the workers have in use is nothing

Everything is ended when the block is left, however it is left, and the logs' tails are shown when that is by an error.
With `faulty` the workers run `faulty_worker.py`, the same program with hooks, and every control connection goes over a
`Proxy`, so that links can be slow or cut.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from serving.client import AsyncClient
from serving.proto.jaxpd.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.asked import Asked
from tests.cluster.loop import LoopThread
from tests.cluster.process import Process, Worker
from tests.cluster.proxy import Proxy
from tests.cluster.reference import MODEL

FAULTY = pathlib.Path(__file__).parent / "faulty_worker.py"
READING_S = 1.2  # workers tell the router once a second what they have in use
SMALL = ("--max-model-len", 256, "--max-num-seqs", 4, "--max-num-batched-tokens", 32)


class Cluster:
    """Router and workers. `prefill`, `decode` and `mixed` are the meshes of the workers of each role, one a worker.

    Workers are called p0, p1 ..., d0, ..., m0, ...; `flags` go to all of them, `role_flags` to those of a role, and
    `router_flags` to the router. `join`: the workers come to the router, which knows none of them; otherwise it is told
    their addresses. `cache` is the folder of compiled programs; with one that is filled, a start takes seconds.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        mixed: Sequence[str] = (),
        model: str | pathlib.Path = MODEL,
        flags: Sequence[object] = SMALL,
        role_flags: dict[str, Sequence[object]] | None = None,
        router_flags: Sequence[object] = (),
        join: bool = False,
        faulty: bool = False,
        cache: pathlib.Path | None = None,
    ) -> None:
        assert not (join and faulty), "who joins says where it listens itself, and no proxy stands in between"
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.faulty = faulty
        self.workers: dict[str, Worker] = {}
        self._join = join
        self._thread = LoopThread()
        self._proxies: list[Proxy] = []
        roles = {"prefill": prefill, "decode": decode, "mixed": mixed}
        self.control = free_address()
        self._cache = cache or folder / "programs"
        more = ["--compile-cache", self._cache, *flags]
        for role, meshes in roles.items():
            for i, mesh in enumerate(meshes):
                address = free_address()
                start: list[object] = [FAULTY] if faulty else ["-m", "jaxpd"]
                command = [sys.executable, *start, "worker", role, model, "--mesh", mesh, "--listen", address]
                command += [*more, *(role_flags or {}).get(role, ())]
                command += ["--router", self.control] if join else []
                worker = Worker(f"{role[0]}{i}", role, mesh, address, command, folder)
                self.workers[worker.name] = worker
        if faulty:
            self._lay_links()
        command = [sys.executable, "-m", "jaxpd", "router", "--listen", self.control, "--port", 0, "--grpc-port", 0]
        for role in roles if not join else ():
            if addresses := [w.reached for w in self.of(role)]:
                command += [f"--{role}", ",".join(addresses)]
        self.router = Process("router", [*command, *router_flags], folder)
        self.url = self.grpc = ""
        self._client: AsyncClient | None = None

    def _lay_links(self) -> None:
        for worker in self.workers.values():
            worker.link = self._proxy(worker.address)
            worker.reached = worker.link.address
        for worker in self.of("prefill"):
            worker.peers = {peer.name: self._proxy(peer.address) for peer in self.of("decode")}
            dial = {peer.reached: worker.peers[peer.name].address for peer in self.of("decode")}
            worker.command.insert(2, json.dumps({"dial": dial}))
        for worker in self.workers.values():
            if worker.role != "prefill":
                worker.command.insert(2, "{}")

    def _proxy(self, target: str) -> Proxy:
        proxy = Proxy(target)
        self._thread.run(proxy.start())
        self._proxies.append(proxy)
        return proxy

    # life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self._show_logs()
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self._show_logs()
        self.close()

    def start(self) -> None:
        """Everything, and waits until the router serves and every worker is ready there."""
        self.router.start()
        for wave in self._waves():
            for worker in wave:
                worker.start()
            for worker in wave:
                worker.ready()
        self.url = self.router.wait_for(r"curl (http://[^/\s]+)")[1]
        self.grpc = self.router.wait_for(r"generate --server (\S+)")[1]
        self._client = self._thread.run(_client(self.grpc))
        self.wait_ready()

    def _waves(self) -> list[list[Worker]]:
        """Where nothing is compiled yet, first one of each kind: the others find its programs."""
        if self._cache.exists() and any(self._cache.iterdir()):
            return [list(self.workers.values())]
        first = {(worker.role, worker.mesh): worker for worker in reversed(self.workers.values())}
        return [list(first.values()), [w for w in self.workers.values() if w not in first.values()]]

    def close(self) -> None:
        """Ends every process that this has started. Idempotent."""
        for process in (self.router, *self.workers.values()):
            with contextlib.suppress(ProcessLookupError):  # it has ended between two looks
                process.kill()
        for proxy in self._proxies:
            proxy.close()
        self._proxies.clear()
        self._thread.close()

    def _show_logs(self) -> None:
        for process in (self.router, *self.workers.values()):
            print(f"\n{process.tail()}", file=sys.stderr)

    def of(self, role: str) -> list[Worker]:
        """The workers of a role."""
        return [worker for worker in self.workers.values() if worker.role == role]

    def restart(self, *workers: Worker) -> None:
        """Starts workers again that have ended, at the same address, and waits until they are ready here and there."""
        for worker in workers:
            worker.events.clear()
            worker.start()
        for worker in workers:
            worker.ready()
        self.wait_ready()

    # clients ------------------------------------------------------------------------------------------------------

    def ask(self, prompt: Sequence[int], max_tokens: int, *, leaves_at: int | None = None, **options: Any) -> Asked:
        """Sends a request to the router, greedy with EOS ignored unless told otherwise, and does not wait for it.

        `leaves_at`: the client goes away when it has so many tokens.
        """
        assert self._client is not None
        asked = Asked(tuple(prompt), max_tokens, options, leaves_at)
        asked.task = self._thread.start(asked.run(self._client))
        return asked

    # what the router says -----------------------------------------------------------------------------------------

    def listed(self, timeout_s: float = 10.0) -> list[Any]:
        """ListWorkers: a `worker_pb2.WorkerInfo` for each."""
        with grpc.insecure_channel(self.control) as channel:
            stub = worker_pb2_grpc.RouterStub(channel)
            return list(stub.ListWorkers(worker_pb2.ListWorkersRequest(), timeout=timeout_s).workers)

    def drain(self, worker: Worker, draining: bool = True) -> None:
        """DrainWorker: nothing new for it, or again."""
        with grpc.insecure_channel(self.control) as channel:
            stub = worker_pb2_grpc.RouterStub(channel)
            stub.DrainWorker(worker_pb2.DrainWorkerRequest(worker=worker.reached, draining=draining), timeout=10.0)

    def reading(self, worker: Worker) -> Any:
        """What a worker last told the router of itself: a `worker_pb2.Reading`."""
        [info] = [info for info in self.listed() if info.address == worker.reached]
        return info.reading

    def wait_ready(self, timeout_s: float = 60.0) -> float:
        """Waits until the router calls every worker that runs ready, and returns the seconds it took."""
        wanted = {worker.reached for worker in self.workers.values() if worker.alive}

        def said() -> str:
            states = {info.address: info.state for info in self.listed() if info.state != "gone"}
            late = {address: states.get(address, "unknown") for address in wanted}
            return "" if set(late.values()) <= {"ready"} else f"the router says {states}, of {wanted}"

        return until(said, timeout_s)

    def baseline(self, timeout_s: float, *, but: Sequence[Worker] = ()) -> float:
        """Waits until no worker has anything in use and the router has charged nothing, all but `but`; the seconds.

        Raises AssertionError that says what is left.
        """
        workers = [worker for worker in self.workers.values() if worker.alive and worker not in but]
        if not self.faulty:  # hooks would know at once; what the router knows may be so old
            time.sleep(READING_S)

        def said() -> str:
            left = []
            if self.faulty:
                for worker in workers:
                    if in_use := worker.do("in_use"):
                        left.append(f"{worker.name} has {in_use}")
            addresses = {worker.reached for worker in workers}
            for info in self.listed():
                if info.address in addresses and info.state != "gone":
                    if busy := _busy(info):
                        left.append(f"{info.name}, says the router, has {busy}")
            return "; ".join(left)

        return until(said, timeout_s)


def _busy(info: Any) -> dict[str, object]:
    """What a WorkerInfo says is in use."""
    reading = info.reading
    busy: dict[str, object] = {"legs": info.legs, "queued": reading.queued, "running": reading.running}
    busy["staging_bytes"] = reading.staging_bytes
    for r in reading.replicas:
        where = f"{r.role}[{r.pool}][{r.replica}]"
        busy[f"{where} pages"] = r.num_pages - r.free_pages
        busy[f"{where} slots"] = r.num_slots - r.free_slots
        busy[f"{where} pinned"] = r.pinned_pages
    return {name: value for name, value in busy.items() if value}


async def _client(server: str) -> AsyncClient:
    return AsyncClient(server)


def until(said: Callable[[], str], timeout_s: float, every_s: float = 0.1) -> float:
    """Waits until `said` has nothing more to say; the seconds it took. Raises AssertionError with the last it said."""
    began_s = time.monotonic()
    while text := said():
        assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s} s: {text}"
        time.sleep(every_s)
    return time.monotonic() - began_s


def free_address() -> str:
    """A loopback address that nobody listens at just now; whoever is to come back there needs to know it before."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"
