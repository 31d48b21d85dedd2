"""The whole way: gRPC clients against a server with the real engine and a tiny checkpoint, on a 2x1 and a 1x2 mesh.

Expected tokens come from the checkpoint's `expected.json`, made with another implementation.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.engine import Engine
from jaxpd.errors import InvalidArgument, JaxpdError, ResourceExhausted, Unavailable
from jaxpd.progress import SilentProgress
from jaxpd.request import FinishReason
from serving.client import AsyncClient, Client
from serving.config import ServerConfig
from serving.messages import Answer, Finished, GenerateRequest, Tokens, Understood
from serving.proto.jaxpd.v1 import control_pb2
from serving.server import serve

MODEL = pathlib.Path(__file__).resolve().parents[1] / "data" / "tiny" / "smollm2"
EXPECTED = json.loads((MODEL / "expected.json").read_text(encoding="utf-8"))["prompts"]
LIMIT = 256
VOCABULARY = 291
QUEUE = 6
SEVEN = GenerateRequest(token_ids=tuple(EXPECTED[1]["prompt_ids"]), max_tokens=7, ignore_eos=True)
LONG = dataclasses.replace(SEVEN, max_tokens=200)


@dataclasses.dataclass
class Served:
    """A server in a thread of its own."""

    address: str
    engine: Engine
    stop: Any  # callable from any thread
    thread: threading.Thread


@contextlib.contextmanager
def server(shutdown_timeout: float = 10.0) -> Iterator[Served]:
    """Started and ready; stopped at the end."""
    config = EngineConfig(
        prefill_mesh="2x1",
        decode_mesh="1x2",
        max_model_len=LIMIT,
        max_num_seqs=2,
        precompile=False,
        max_num_batched_tokens=64,  # few programs to compile, and prompts in chunks
        max_queued_requests=QUEUE,
    )
    engines: list[Engine] = []
    ready: concurrent.futures.Future[int] = concurrent.futures.Future()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def make_engine(on_events: Any) -> Engine:
        engines.append(Engine(resolve(str(MODEL), progress=SilentProgress()), config, on_events=on_events))
        return engines[0]

    async def run() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        config = ServerConfig(port=None, grpc_port=0, shutdown_timeout_s=shutdown_timeout)
        await serve(make_engine, config, on_ready=lambda ports: ready.set_result(ports.grpc or 0), stop=stop)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=main)
    thread.start()
    port = ready.result(240)
    loop, event = loops[0]
    try:
        yield Served(f"127.0.0.1:{port}", engines[0], lambda: loop.call_soon_threadsafe(event.set), thread)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(event.set)
        thread.join(60)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with server() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """Also holds the engine to its baseline after the test."""
    with Client(served.address, timeout_s=60) as made:
        yield made
    wait_for_baseline(served.engine)


def at_baseline(engine: Engine) -> bool:
    stats = engine.stats()
    free = all(r.free_pages == r.num_pages and r.free_slots == r.num_slots for r in stats.replicas)
    return free and stats.live == 0 and stats.staging_bytes == 0


def wait_for_baseline(engine: Engine, timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not at_baseline(engine):
        assert time.monotonic() < end, engine.stats()
        time.sleep(0.005)


def together(address: str, requests: list[GenerateRequest]) -> list[Answer | JaxpdError]:
    """All at once; errors in their places."""

    async def one(client: AsyncClient, request: GenerateRequest) -> Answer | JaxpdError:
        try:
            return await client.generate(request)
        except JaxpdError as error:
            return error

    async def run() -> list[Answer | JaxpdError]:
        async with AsyncClient(address, timeout_s=60) as client:
            return await asyncio.gather(*(one(client, request) for request in requests))

    return asyncio.run(run())


def test_reference_tokens_two_at_a_time(served: Served, client: Client) -> None:
    fitting = [p for p in EXPECTED if len(p["prompt_ids"]) + len(p["greedy_ids"]) <= LIMIT]
    asked = [
        GenerateRequest(token_ids=tuple(p["prompt_ids"]), max_tokens=len(p["greedy_ids"]), ignore_eos=True)
        for p in fitting
    ]
    wanted = [tuple(p["greedy_ids"]) for p in fitting]
    assert len(asked) >= 4
    for start in range(0, len(asked), 2):
        answers = together(served.address, asked[start : start + 2])
        assert [a.token_ids for a in answers if isinstance(a, Answer)] == wanted[start : start + 2]


def test_unary_and_stream_say_the_same(client: Client) -> None:
    whole = client.generate(SEVEN)
    messages = list(client.stream(SEVEN))
    first, last = messages[0], messages[-1]
    assert isinstance(first, Understood) and isinstance(last, Finished)
    tokens = [m for m in messages if isinstance(m, Tokens)]
    assert tuple(i for m in tokens for i in m.token_ids) == whole.token_ids == tuple(EXPECTED[1]["greedy_ids"][:7])
    assert "".join(m.text or "" for m in tokens) == whole.text
    assert last.usage == whole.usage and last.reason is whole.finish_reason is FinishReason.LENGTH
    assert (first.prompt_tokens, first.params.max_tokens, first.params.ignore_eos) == (5, 7, True)
    timings = dataclasses.asdict(last.timings)
    assert all(value is not None and value >= 0 for value in timings.values()), timings
    assert timings["ttft_s"] < timings["ttst_s"]


def test_text_and_chat(served: Served, client: Client) -> None:
    tokenizer = served.engine.checkpoint.tokenizer()
    answer = client.generate(GenerateRequest(text="hello world", want_prompt_ids=True, max_tokens=20, ignore_eos=True))
    assert answer.understood.prompt_ids == tuple(tokenizer.encode("hello world"))
    assert answer.text == tokenizer.decode(answer.token_ids) and len(answer.token_ids) == 20
    chat = ({"role": "user", "content": "hello"},)
    answer = client.generate(GenerateRequest(chat=chat, want_prompt_ids=True, max_tokens=4))
    assert answer.understood.prompt_ids == tuple(tokenizer.apply_chat_template(chat))


def test_unset_is_not_zero(client: Client) -> None:
    ids = SEVEN.token_ids
    unset = client.generate(GenerateRequest(token_ids=ids, ignore_eos=True))
    assert len(unset.token_ids) == unset.understood.params.max_tokens == 128
    assert unset.understood.params.temperature == 0
    drawn = [client.generate(GenerateRequest(token_ids=ids, temperature=2.0)).understood.params.seed for _ in range(2)]
    zero = client.generate(GenerateRequest(token_ids=ids, temperature=2.0, seed=0)).understood.params.seed
    assert drawn[0] != drawn[1] and zero == 0


def test_the_drawn_seed_repeats_the_answer(client: Client) -> None:
    asked = dataclasses.replace(SEVEN, temperature=1.5, max_tokens=30)
    first = client.generate(asked)
    again = client.generate(dataclasses.replace(asked, seed=first.understood.params.seed))
    other = client.generate(dataclasses.replace(asked, seed=(first.understood.params.seed or 0) ^ 1))
    assert first.token_ids == again.token_ids != other.token_ids


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"stop_token_ids": (26,)}])
def test_what_ends_with_its_first_token_has_no_hand_off(client: Client, options: dict[str, Any]) -> None:
    answer = client.generate(dataclasses.replace(SEVEN, **options))
    assert answer.token_ids == (26,) and answer.usage.completion_tokens == 1
    assert answer.timings.transfer_s is None and answer.timings.ttst_s is None and answer.timings.ttft_s is not None
    stopped = "stop_token_ids" in options
    assert answer.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert answer.finished.stop_token_id == (26 if stopped else None)


def test_stop_string(client: Client) -> None:
    whole = client.generate(dataclasses.replace(SEVEN, max_tokens=24))
    middle = whole.text[len(whole.text) // 2 :][:2]
    assert middle and "\ufffd" not in middle
    answer = client.generate(dataclasses.replace(LONG, stop=(middle,)))
    assert answer.finish_reason is FinishReason.STOP and answer.finished.stop_string == middle
    assert answer.text == whole.text[: whole.text.index(middle)]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert answer.usage.completion_tokens == len(answer.token_ids) < 24


BAD = {
    "prompt text is empty": GenerateRequest(text=""),
    "prompt token_ids is empty": GenerateRequest(token_ids=()),
    "prompt chat is empty": GenerateRequest(chat=()),
    "got none": GenerateRequest(),
    "291, which is outside the vocabulary 0..290": GenerateRequest(token_ids=(1, VOCABULARY)),
    "-1, which is outside the vocabulary 0..290": GenerateRequest(token_ids=(-1,)),
    "max_tokens=252 .* above the limit of 256": dataclasses.replace(SEVEN, max_tokens=LIMIT - 4),
    "above the limit of 256 ": GenerateRequest(token_ids=(1,) * LIMIT),
    "temperature=-0.1 must be between 0": dataclasses.replace(SEVEN, temperature=-0.1),
    "max_tokens=0 must be at least 1": dataclasses.replace(SEVEN, max_tokens=0),
    "max_tokens=-3 must be at least 1": dataclasses.replace(SEVEN, max_tokens=-3),
    "seed=-1 must be between 0 and 4294967295": dataclasses.replace(SEVEN, seed=-1),
    "stop_token_ids holds 291": dataclasses.replace(SEVEN, stop_token_ids=(VOCABULARY,)),
    "stop holds an empty string": dataclasses.replace(SEVEN, stop=("",)),
    "request_id='a b' must be": dataclasses.replace(SEVEN, request_id="a b"),
    "neither text nor token_ids": dataclasses.replace(SEVEN, want_text=False, want_token_ids=False),
}


def test_bad_requests_beside_good_ones(served: Served, client: Client) -> None:
    good = tuple(EXPECTED[1]["greedy_ids"][:7])
    for message, bad in BAD.items():
        first, error, second = together(served.address, [SEVEN, bad, SEVEN])
        assert isinstance(first, Answer) and isinstance(second, Answer)
        assert first.token_ids == second.token_ids == good
        with pytest.raises(InvalidArgument, match=message):
            raise error if isinstance(error, JaxpdError) else AssertionError(f"{bad} was answered")
        with pytest.raises(InvalidArgument, match=message):
            next(client.stream(bad))


def test_more_than_the_bound(served: Served, client: Client) -> None:
    answers = together(served.address, [dataclasses.replace(SEVEN, max_tokens=100)] * 30)
    served_, refused = ([a for a in answers if isinstance(a, kind)] for kind in (Answer, ResourceExhausted))
    assert len(served_) + len(refused) == 30 and len(served_) >= QUEUE and len(refused) >= 1
    assert len({a.token_ids for a in served_ if isinstance(a, Answer)}) == 1
    assert all(e.retry_after_s > 0 and "limit is 6" in e.message for e in refused if isinstance(e, ResourceExhausted))
    assert client.generate(SEVEN).token_ids == tuple(EXPECTED[1]["greedy_ids"][:7])


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_frees_pages_at_once(served: Served, client: Client, after: int) -> None:
    """Cancelled after the first message, and after some tokens; a neighbour goes on."""

    async def run() -> Answer:
        async with AsyncClient(served.address, timeout_s=60) as made:
            neighbour = asyncio.create_task(made.generate(dataclasses.replace(SEVEN, max_tokens=60)))
            async with contextlib.aclosing(made.stream(LONG)) as stream:
                for _ in range(1 + after):
                    await anext(stream)
            began = time.monotonic()
            answer = await neighbour
            await asyncio.to_thread(wait_for_baseline, served.engine, 2.0)
            assert time.monotonic() - began < 10
            return answer

    answer = asyncio.run(run())
    assert answer.token_ids[:24] == tuple(EXPECTED[1]["greedy_ids"]) and len(answer.token_ids) == 60


def test_cancel_of_a_queued_request(served: Served, client: Client) -> None:
    async def run() -> None:
        async with AsyncClient(served.address, timeout_s=60) as made:
            tasks = [asyncio.create_task(made.generate(LONG)) for _ in range(QUEUE)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(wait_for_baseline, served.engine, 2.0)

    asyncio.run(run())


def test_deadline_frees_pages(served: Served, client: Client) -> None:
    with Client(served.address, timeout_s=0.02) as hasty, pytest.raises(Unavailable, match="time-out"):
        hasty.generate(LONG)
    wait_for_baseline(served.engine, 2.0)


def test_abort_by_control(served: Served, client: Client) -> None:
    stream = client.stream(dataclasses.replace(LONG, request_id="victim"))
    got = [next(stream), next(stream)]
    assert client.abort("victim") is True
    got += list(stream)
    finished = got[-1]
    assert isinstance(finished, Finished) and finished.reason is FinishReason.ABORT
    assert sum(m.count for m in got if isinstance(m, Tokens)) == finished.usage.completion_tokens < 200
    assert client.abort("victim") is False
    assert client.generate(dataclasses.replace(SEVEN, request_id="victim")).finish_reason is FinishReason.LENGTH


def test_a_request_id_in_use(client: Client) -> None:
    asked = dataclasses.replace(LONG, request_id="twin")
    with contextlib.closing(client.stream(asked)) as stream:
        next(stream)
        with pytest.raises(InvalidArgument, match="request_id='twin' is in use"):
            client.generate(asked)
        assert isinstance(next(stream), Tokens), "the first one goes on"


def test_server_and_model_info(served: Served, client: Client) -> None:
    info, model = client.server_info(), client.model_info()
    assert info.state == control_pb2.SERVER_STATE_READY and info.running_requests == 0
    assert [(p.role, p.mesh, len(p.free_pages)) for p in info.pools] == [("prefill", "2x1", 1), ("decode", "1x2", 2)]
    assert all(p.free_pages == p.total_pages and min(p.total_pages) > 0 for p in info.pools)
    assert (model.architecture, model.vocab_size, model.max_model_len) == ("llama", VOCABULARY, LIMIT)
    assert model.dtype == "float32" and model.has_tokenizer and model.has_chat_template


def test_health_and_reflection(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "jaxpd.v1.Inference"):
            status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = reflect.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in answer.list_services_response.service}
        assert {"jaxpd.v1.Inference", "jaxpd.v1.Control", "grpc.health.v1.Health"} <= names


def test_drain_under_load() -> None:
    async def run(served: Served) -> None:
        async with AsyncClient(served.address, timeout_s=60) as client:
            running = [
                asyncio.create_task(client.generate(dataclasses.replace(SEVEN, max_tokens=150))) for _ in range(4)
            ]
            while served.engine.stats().live < len(running):  # one that comes later would be refused
                await asyncio.sleep(0.005)
            served.stop()
            refused: JaxpdError | None = None
            while refused is None and not all(task.done() for task in running):
                try:
                    await client.generate(SEVEN)
                except Unavailable as error:
                    refused = error
            assert refused is not None and "shutting down" in refused.message
            answers = await asyncio.gather(*running)
            assert {a.token_ids[:24] for a in answers} == {tuple(EXPECTED[1]["greedy_ids"])}
            assert {len(a.token_ids) for a in answers} == {150}

    with server() as served:
        asyncio.run(run(served))
        served.thread.join(10)
        assert not served.thread.is_alive()
