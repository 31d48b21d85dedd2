"""What the fronts cost: tokens/s of many streaming clients over gRPC and over SSE, as a share of the engine's own.

    python -m benchmarks.fronts [--clients 64 256] [--seconds 20 60] [--fronts grpc http]

A tiny model (tests/data/tiny/smollm2) makes tokens faster than any real one of this machine, so that what is around the
engine sets the pace. Each client streams one answer after another. `engine` is the same load without any network: an
engine in a process of its own whose events are counted and dropped. The server is `jaxpd serve`, a process too, and the
clients are in another, which reads bytes and parses only the last message of a stream (its token count): a client that
parsed everything would be the bottleneck. All of them share this machine's cores, so that a front is charged for its
clients too.

`dropped` counts streams that ended in any way but with all of their tokens. A message holds what has piled up for its
stream since the last one: `tokens/message` says how many that was.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.machine import describe, slug

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = pathlib.Path(__file__).parent / "results"
MODEL = ROOT / "tests" / "data" / "tiny" / "smollm2"
PACKAGES = ("jax", "jaxlib", "grpcio", "fastapi", "uvicorn")
PROMPT, ANSWER = 16, 200  # tokens
LIMITS = {"max_model_len": 256, "max_num_seqs": 256, "max_queued_requests": 1024, "kv_memory": 64 << 20}
CHANNELS = 16  # clients to a gRPC connection


@dataclasses.dataclass
class Tally:
    """What the clients saw."""

    tokens: int = 0
    answers: int = 0
    messages: int = 0
    dropped: int = 0
    first_s: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)


# -- the engine alone


def engine_alone(clients: int, seconds: float) -> dict[str, Any]:
    """Tokens/s of the engine with nobody listening; in this process."""
    from jaxpd.checkpoints import resolve
    from jaxpd.config import EngineConfig
    from jaxpd.engine import Engine
    from jaxpd.progress import SilentProgress
    from jaxpd.request import Event, FinishEvent, Request, SamplingParams
    from jaxpd.startup import prepare_devices

    config = EngineConfig(**LIMITS)  # type: ignore[arg-type]
    prepare_devices(config)
    counted = {"tokens": 0, "answers": 0}
    ended: list[str] = []
    some = threading.Event()

    def on_events(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, FinishEvent):
                counted["answers"] += 1
                ended.append(event.request_id)
                some.set()
            else:
                counted["tokens"] += len(event.token_ids)

    engine = Engine(resolve(str(MODEL), progress=SilentProgress()), config, on_events=on_events)
    engine.start()
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=0)

    def submit(name: str) -> None:
        ids = tuple(range(3, 3 + PROMPT))
        engine.submit(Request(request_id=name, prompt_ids=ids, params=params, arrival_s=time.monotonic()))

    for index in range(clients):
        submit(str(index))
    time.sleep(2.0)
    start_s, before = time.monotonic(), dict(counted)
    while (elapsed := time.monotonic() - start_s) < seconds:
        some.wait(0.1)
        some.clear()
        while ended:
            submit(ended.pop())
    made = counted["tokens"] - before["tokens"]
    engine.close()
    return {"tokens_per_s": made / elapsed, "answers": counted["answers"] - before["answers"]}


# -- clients


async def grpc_clients(address: str, clients: int, seconds: float) -> Tally:
    """Streams over gRPC."""
    import grpc

    from serving.proto.jaxpd.v1 import inference_pb2 as pb

    stopping = pb.StoppingOptions(max_tokens=ANSWER, ignore_eos=True)
    ids = pb.TokenIds(ids=range(3, 3 + PROMPT))
    request = pb.GenerateRequest(token_ids=ids, stopping=stopping).SerializeToString()
    count = -(-clients // CHANNELS)
    channels = [grpc.aio.insecure_channel(address, options=(("channel", index),)) for index in range(count)]
    calls = [channel.unary_stream("/jaxpd.v1.Inference/GenerateStream") for channel in channels]

    async def ask(index: int, tally: Tally) -> None:
        begun, last = time.monotonic(), b""
        messages = 0
        async for data in calls[index % count](request):
            messages += 1
            if messages == 2:  # the first one says what was understood
                tally.first_s.append(time.monotonic() - begun)
            last = data
        end = pb.GenerateStreamResponse.FromString(last)
        _count(tally, end.finish.usage.completion_tokens, messages - 2)

    tally = await _run(ask, clients, seconds)
    for channel in channels:
        await channel.close()
    return tally


async def http_clients(address: str, clients: int, seconds: float) -> Tally:
    """Streams over HTTP, server-sent events of /v1/completions."""
    host, _, port = address.rpartition(":")
    body = json.dumps(
        {
            "prompt": list(range(3, 3 + PROMPT)),
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    request = head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def ask(_: int, tally: Tally) -> None:
        begun = time.monotonic()
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            tail, messages = b"", 0
            while data := await reader.read(1 << 16):
                found = data.count(b"data: {")
                if found and not messages:
                    tally.first_s.append(time.monotonic() - begun)
                messages += found
                tail = (tail + data)[-4096:]
            used = re.search(rb'"completion_tokens": ?(\d+)', tail)
            whole = used is not None and b"data: [DONE]" in tail
            _count(tally, int(used[1]) if used is not None and whole else 0, messages - 1)
        finally:
            writer.close()

    return await _run(ask, clients, seconds)


def _count(tally: Tally, tokens: int, messages: int) -> None:
    tally.tokens += tokens
    tally.messages += messages
    tally.answers += tokens == ANSWER
    tally.dropped += tokens != ANSWER


async def _run(ask: Callable[[int, Tally], Awaitable[None]], clients: int, seconds: float) -> Tally:
    """`clients` at once, each one answer after another; what is under way after `seconds` ends in peace."""
    tally, end_s = Tally(), time.monotonic() + seconds

    async def client(index: int) -> None:
        while time.monotonic() < end_s:
            try:
                await ask(index, tally)
            except Exception as error:  # whatever it was, this stream is lost: that is what is counted
                tally.dropped += 1
                tally.errors.append(f"{type(error).__name__}: {error}"[:200])
                await asyncio.sleep(0.1)

    await asyncio.gather(*(client(index) for index in range(clients)))
    return tally


def measure_clients(front: str, address: str, clients: int, seconds: float) -> dict[str, Any]:
    """A run of clients in this process; first one of two seconds that does not count."""
    ask = grpc_clients if front == "grpc" else http_clients
    asyncio.run(ask(address, clients, 2.0))
    begun = time.monotonic()
    tally = asyncio.run(ask(address, clients, seconds))
    elapsed = time.monotonic() - begun
    first = sorted(tally.first_s)
    return {
        "tokens_per_s": tally.tokens / elapsed,
        "answers": tally.answers,
        "dropped": tally.dropped,
        "errors": tally.errors[:5],
        "tokens_per_message": tally.tokens / max(tally.messages, 1),
        "first_message_ms": {
            "p50": statistics.median(first) * 1e3 if first else None,
            "p99": first[int(len(first) * 0.99)] * 1e3 if first else None,
        },
        "seconds": elapsed,
    }


# -- processes


def _child(what: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.fronts", "--child", *what]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


class Server:
    """`jaxpd serve` on free ports; `addresses` by front."""

    def __init__(self) -> None:
        flags = [f for k, v in LIMITS.items() for f in (f"--{k.replace('_', '-')}", str(v))]
        command = [sys.executable, "-m", "jaxpd", "serve", str(MODEL), "--port", "0", "--grpc-port", "0", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.addresses: dict[str, str] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"gRPC on ([0-9.]+:\d+)", line):
                self.addresses["grpc"] = found[1]
            if found := re.search(r"HTTP on (?:http://)?([0-9.]+:\d+)", line):
                self.addresses["http"] = found[1]
            if "ready in" in line:
                return
        raise SystemExit("the server did not start; run it by hand: " + " ".join(command))

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return self.process.wait(60)


def main() -> None:
    """Runs all of it, or (`--child`) one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, nargs="+", default=[20.0, 60.0], help="one for each of --clients")
    parser.add_argument("--fronts", nargs="+", default=["grpc", "http"], choices=["grpc", "http"])
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, *rest = args.child
        if kind == "engine":
            print(json.dumps(engine_alone(int(rest[0]), float(rest[1]))))
        else:
            print(json.dumps(measure_clients(kind, rest[0], int(rest[1]), float(rest[2]))))
        return
    if len(args.clients) != len(args.seconds):
        parser.error(
            f"--seconds has {len(args.seconds)} values for {len(args.clients)} of --clients; give one for each"
        )
    rows: list[dict[str, Any]] = []
    for clients, seconds in zip(args.clients, args.seconds, strict=True):
        alone = _child(["engine", str(clients), str(min(seconds, 20.0))])
        rows.append({"front": "engine", "clients": clients, **alone})
        print(json.dumps(rows[-1]), flush=True)
        for front in args.fronts:
            server = Server()
            row = _child([front, server.addresses[front], str(clients), str(seconds)])
            row |= {"share": row["tokens_per_s"] / alone["tokens_per_s"], "exit_code": server.stop()}
            rows.append({"front": front, "clients": clients, **row})
            print(json.dumps(rows[-1]), flush=True)
    about = describe(PACKAGES)
    stem = args.output or RESULTS / f"fronts-{slug(about)}.json"
    stem.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(table(about, rows), encoding="utf-8")
    print(table(about, rows))


def table(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The figures in Markdown."""
    lines = [
        "# Fronts: streaming clients against the engine alone",
        "",
        f"`python -m benchmarks.fronts` on a {about['name']}, jax {about['packages']['jax']}, {about['date']}.",
        f"Server, clients and engine share the cores. A tiny model, answers of {ANSWER} tokens; one run each.",
        "",
        "| front | clients | tokens/s | share of engine | answers | dropped | tokens/message | first message |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['front']} | {row['clients']} | {row['tokens_per_s']:.0f} |"
        if row["front"] == "engine":
            lines.append(f"{head} 1 | {row['answers']} | | | |")
            continue
        first = row["first_message_ms"]
        lines.append(
            f"{head} {row['share']:.2f} | {row['answers']} | {row['dropped']} | {row['tokens_per_message']:.1f} | "
            f"{first['p50']:.0f} ms, p99 {first['p99']:.0f} ms |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
