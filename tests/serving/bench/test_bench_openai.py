"""The OpenAI client: what it sends, how it counts, and what it makes of servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.errors import FailedPrecondition, InvalidArgument, Unauthenticated, Unavailable
from jaxpd.progress import SilentProgress
from serving.bench.arrivals import Arrivals
from serving.bench.lengths import Lengths
from serving.bench.openai_client import OpenAIBackend
from serving.bench.records import Call, Piece, Reply
from serving.bench.session import Outcome, Plan, measure
from serving.bench.target import Target
from serving.bench.traces import read_trace
from serving.bench.workload import Workload

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CALL = Call(index=0, due_s=None, input_len=12, output_len=4, pieces=(Piece((0, 0), 12),))


def token(text: str = "x", **more: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': None, **more}]})}\n\n".encode()


def chat(delta: dict[str, Any], tokens: int | None = None, **more: Any) -> bytes:
    body: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, **more}]}
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens}
    return f"data: {json.dumps(body)}\n\n".encode()


async def send(url: str, *, opened: bool = False, call: Call = CALL, **options: Any) -> Reply:
    backend = OpenAIBackend(Target(**{"backend": "openai-completions", "address": url, "model": "m", **options}))
    try:
        if opened:
            await backend.open(synthetic=True)
        else:  # without the calls that come before the first
            await backend.connect()
        return await backend.send(backend.prepare(call, seed=0, salt=0))
    finally:
        await backend.close()


def answered(saying: Callable[..., Any], *pieces: bytes | float, **options: Any) -> Reply:
    async def run() -> Reply:
        async with saying(*pieces) as url:
            return await send(url, **options)

    return asyncio.run(run())


def bench(delaying: Callable[..., Any], options: dict[str, Any], **plan: Any) -> tuple[Outcome, Any]:
    """A whole benchmark against a delay server; returns it and the server."""

    async def run() -> tuple[Outcome, Any]:
        async with delaying(**options) as (url, server):
            target = {"backend": "openai-completions", "address": url, **plan.pop("target", {})}
            made = Plan(target=Target(**target), **plan)
            return await measure(made, SilentProgress(), asyncio.Event()), server

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("pieces", "kind", "words"),
    [
        ((b"HTTP/1.1 500 X\r\ncontent-length: 5\r\n\r\noops!",), "http 500", "oops!"),
        ((b'HTTP/1.1 429 X\r\n\r\n{"error": {"message": "too many"}}',), "http 429", "too many"),
        ((b'HTTP/1.1 404 X\r\n\r\n{"detail": "Not Found"}',), "http 404", "Not Found"),
        ((b"HTTP/1.1 307 X\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n",), "http 307", ""),
        ((b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}",), "not an answer", "application/json"),
        ((HEAD + b"data: {broken\n\n",), "not an answer", "no JSON object"),
        ((HEAD + b"data: 7\n\n",), "not an answer", "no JSON object"),
        ((HEAD + token() + b'data: {"error": {"message": "died"}}\n\n',), "error in stream", "died"),
        ((HEAD + token() + token(),), "broken stream", "after 2 messages"),
        ((HEAD,), "broken stream", "after 0 messages"),
        ((b"",), "broken stream", ""),
        ((b"garbage\r\n\r\n",), "broken stream", ""),
        ((HEAD.replace(b"close", b"close\r\ncontent-length: 5000") + token(),), "broken stream", ""),
        ((HEAD + b"data: [DONE]\n\n",), "no tokens", "no tokens"),
        ((HEAD + token("", finish_reason="stop") + b"data: [DONE]\n\n",), "no tokens", ""),
        ((HEAD + token() + token(finish_reason="abort") + b"data: [DONE]\n\n",), "finished by abort", "abort"),
        ((HEAD + token(), 1.0), "timeout", "--timeout"),
    ],
)
def test_every_failure_has_a_kind(
    saying: Callable[..., Any], pieces: tuple[bytes | float, ...], kind: str, words: str
) -> None:
    reply = answered(saying, *pieces, timeout_s=0.5)
    assert reply.failure is not None
    assert (reply.failure.kind, words in reply.failure.message) == (kind, True), reply.failure
    assert reply.end_s >= reply.sent_s


def test_a_server_that_is_not_there() -> None:
    pytest.importorskip("aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    reply = asyncio.run(send(url))
    assert reply.failure is not None and reply.failure.kind == "connect"
    with pytest.raises(Unavailable, match="--base-url"):
        asyncio.run(send(url, opened=True))


def test_one_character_in_two_reads_comments_and_a_stream_without_done(saying: Callable[..., Any]) -> None:
    whole = token("\u20ac").replace(b"\\u20ac", "\u20ac".encode()).replace(b"\n", b"\r\n")
    cut = whole.index("\u20ac".encode()) + 1
    end = token("!", finish_reason="stop")
    reply = answered(saying, HEAD + b": ping\n\n" + whole[:cut], 0.02, whole[cut:], 0.2, token() + end)
    assert reply.failure is None and reply.finish_reason == "stop"
    assert len(reply.message_s) == 3 and reply.message_s[1] == reply.message_s[2]  # two events of one read
    assert reply.message_s[1] - reply.message_s[0] >= 0.1


def test_the_first_token_is_the_first_content_and_not_the_role(saying: Callable[..., Any]) -> None:
    reply = answered(
        saying,
        HEAD + chat({"role": "assistant", "content": ""}, tokens=0),
        0.2,
        chat({"reasoning_content": "hm"}, tokens=2),
        0.2,
        chat({"content": ""}, tokens=3),  # half a character
        chat({"content": "\u20ac"}, tokens=4),
        chat({"tool_calls": [{"index": 0}]}, tokens=6, finish_reason="tool_calls") + b"data: [DONE]\n\n",
        backend="openai-chat",
    )
    assert reply.failure is None and reply.message_tokens == [2, 1, 1, 2] and reply.completion_tokens == 6
    assert reply.message_s[0] - reply.sent_s >= 0.1 and reply.message_s[1] - reply.message_s[0] >= 0.1


def test_usage_that_comes_with_the_last_choice_is_a_sum_and_no_message(saying: Callable[..., Any]) -> None:
    last = chat({}, tokens=5, finish_reason="length")
    reply = answered(saying, HEAD + chat({"content": "a b"}) + chat({"content": "c"}) + last, backend="openai-chat")
    assert reply.failure is None and reply.message_tokens == [None, None] and reply.completion_tokens == 5


@pytest.mark.parametrize("backend", ["openai-chat", "openai-completions"])
@pytest.mark.parametrize("tokenizes", ["words", "bytes", ""])
def test_prompts_have_the_wanted_length_by_the_servers_own_count(
    delaying: Callable[..., Any], backend: str, tokenizes: str
) -> None:
    outcome, server = bench(
        delaying,
        {"ttft_s": 0.0, "itl_s": 0.0, "tokenizes": tokenizes},
        target={"backend": backend, "ignore_eos": True, "extra_body": {"top_p": 0.5, "temperature": None}},
        workload=Workload(input_len=Lengths("fixed", 100), output_len=Lengths("uniform", 3, 9), shared_prefix_len=20),
        arrivals=Arrivals(num_requests=6, concurrency=2),
    )
    summary = outcome.probes[0].summary
    assert summary.answered == 6 and summary.asked_input == 120
    assert summary.prompt_tokens == pytest.approx(120, abs=1), outcome.about.notes
    assert summary.completion_tokens == summary.asked_output and summary.cached_tokens == 2
    bodies = server.calls[2:]  # after the check and the warm-up
    assert all(body["top_p"] == 0.5 and body["temperature"] is None and body["ignore_eos"] for body in bodies)
    if backend == "openai-chat":
        contents = [body["messages"][0]["content"] for body in bodies]
        assert len({content[:19] for content in contents}) == 1 and len(set(contents)) == 6
    elif tokenizes:
        assert all(isinstance(body["prompt"], list) for body in bodies)
        assert len({tuple(body["prompt"][:20]) for body in bodies}) == 1
    assert {h["x-request-id"].rsplit("-", 1)[0] for h in server.headers if "x-request-id" in h}
    assert outcome.about.max_model_len == 4096 and outcome.about.model == "delays"


@pytest.mark.parametrize(
    ("usage", "per_message", "itl", "note"),
    [("each", 4, 24 - 3, ""), ("end", 1, 24 - 3, ""), ("end", 4, 0, "how many tokens"), ("", 4, 3, "no usage")],
)
def test_streams_that_say_more_or_less_of_their_tokens(
    delaying: Callable[..., Any], usage: str, per_message: int, itl: int, note: str
) -> None:
    outcome, _ = bench(
        delaying,
        {"ttft_s": 0.05, "itl_s": 0.005, "usage": usage, "per_message": per_message, "strict": True},
        workload=Workload(input_len=Lengths("fixed", 9), output_len=Lengths("fixed", 8)),
        arrivals=Arrivals(num_requests=3, concurrency=1),
    )
    summary = outcome.probes[0].summary
    assert summary.answered == 3 and summary.itl_s.count == itl
    assert summary.completion_tokens == (8 if usage else 2) and summary.tokens_per_message == (
        per_message if usage else 1
    )
    whole_s = 0.035 if per_message == 1 else 0.02  # first to last message; the machine may be busy
    assert 0.3 * whole_s < summary.tpot_s.p50 * (7 if usage else 1) < 10 * whole_s
    assert any(note in line for line in outcome.about.notes)
    assert summary.without_itl == (3 if (usage, per_message) == ("end", 4) else 0)


def test_failures_are_counted_beside_what_was_answered(delaying: Callable[..., Any]) -> None:
    outcome, _ = bench(
        delaying,
        {"ttft_s": 0.0, "itl_s": 0.0, "refuse_every": 4, "break_every": 3},
        workload=Workload(input_len=Lengths("fixed", 9)),
        arrivals=Arrivals(num_requests=24, concurrency=3),
        warm_up=0,
    )
    summary = outcome.probes[0].summary
    assert summary.failures == {"http 429": 6, "broken stream": 6} and summary.answered == 12


def test_a_key_is_asked_for_and_sent(delaying: Callable[..., Any]) -> None:
    options = {"ttft_s": 0.0, "itl_s": 0.0, "api_key": "sesame"}
    small = {"workload": Workload(output_len=Lengths("fixed", 2)), "arrivals": Arrivals(num_requests=2)}
    with pytest.raises(Unauthenticated, match="--api-key-file"):
        bench(delaying, options, **small)
    with pytest.raises(Unauthenticated, match="--api-key-file"):
        bench(delaying, options, target={"api_key": "wrong", "model": "delays"}, **small)
    outcome, _ = bench(delaying, options, target={"api_key": "sesame"}, **small)
    assert outcome.probes[0].summary.answered == 2
    assert "sesame" not in repr(outcome.plan) + json.dumps(outcome.plan.target.config())


def test_a_server_that_refuses_a_short_call_is_not_measured(saying: Callable[..., Any]) -> None:
    with pytest.raises(FailedPrecondition, match="status 400: no such model.*--model"):
        answered(saying, b'HTTP/1.1 400 X\r\n\r\n{"error": {"message": "no such model"}}', opened=True)
    with pytest.raises(Unavailable, match="status 503: loading.*later"):
        answered(saying, b'HTTP/1.1 503 X\r\n\r\n{"error": {"message": "loading"}}', opened=True)
    with pytest.raises(Unavailable, match="does not answer a short call .*text/html"):
        answered(saying, b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<html>", opened=True, vocab_size=9)


def test_a_closed_loop_keeps_its_number_and_lasts_its_time(delaying: Callable[..., Any]) -> None:
    outcome, server = bench(
        delaying,
        {"ttft_s": 0.02, "itl_s": 0.005},
        workload=Workload(input_len=Lengths("fixed", 9), output_len=Lengths("fixed", 5)),
        arrivals=Arrivals(concurrency=4, duration_s=0.5),
    )
    summary = outcome.probes[0].summary
    assert server.most == 4 and 0.45 < summary.duration_s < 1.0 and 20 < summary.answered < 60
    assert server.connections < 12  # they are used again


def test_a_cap_on_an_open_loop_makes_requests_wait_and_the_wait_counts(delaying: Callable[..., Any]) -> None:
    outcome, server = bench(
        delaying,
        {"ttft_s": 0.05, "itl_s": 0.0},
        workload=Workload(input_len=Lengths("fixed", 9), output_len=Lengths("fixed", 2)),
        arrivals=Arrivals(rate=100.0, concurrency=1, num_requests=8),
    )
    summary = outcome.probes[0].summary
    assert server.most == 1 and summary.answered == 8
    assert summary.ttft_s.max > 0.25 and summary.late_s.max > 0.2


def test_many_streams_at_once(delay_process: Callable[..., str]) -> None:
    plan = Plan(
        target=Target(backend="openai-completions", address=delay_process(ttft_s=4.0, itl_s=0.05)),
        workload=Workload(input_len=Lengths("fixed", 9), output_len=Lengths("fixed", 4)),
        arrivals=Arrivals(num_requests=400),
        warm_up=0,
    )
    outcome = asyncio.run(measure(plan, SilentProgress(), asyncio.Event()))
    records = outcome.probes[0].trial.records
    assert len(records) == 400 and all(record.failure is None for record in records)
    assert max(record.sent_s for record in records) < min(record.end_s for record in records)  # all of them at one time


def test_texts_of_a_trace_go_as_they_are(delaying: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "share.json"
    talk = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "a b c d e f g"}]
    path.write_text(json.dumps([{"conversations": talk}] * 3), encoding="utf-8")
    for tokenizes, asked, output in (("words", 3, 7), ("", None, 4)):
        outcome, server = bench(
            delaying,
            {"ttft_s": 0.0, "itl_s": 0.0, "tokenizes": tokenizes},
            target={"backend": "openai-chat"},
            workload=Workload(trace=read_trace(path)),
        )
        summary = outcome.probes[0].summary
        assert summary.answered == 3 and (summary.asked_input, summary.asked_output) == (asked, output)
        assert [body["messages"][0]["content"] for body in server.calls[-3:]] == ["one two three"] * 3
        assert any("/tokenize" in note and "4 characters" in note for note in outcome.about.notes) == (not tokenizes)


def test_tls_with_the_servers_authority_and_without(
    delaying: Callable[..., Any], certificate: dict[str, pathlib.Path]
) -> None:
    options = {"ttft_s": 0.0, "itl_s": 0.0, **{name: str(path) for name, path in certificate.items()}}
    small = {"workload": Workload(output_len=Lengths("fixed", 2)), "arrivals": Arrivals(num_requests=2)}
    outcome, _ = bench(delaying, options, target={"ssl_ca_certs": certificate["certfile"]}, **small)
    assert outcome.probes[0].summary.answered == 2
    with pytest.raises(Unavailable, match="certificate"):
        bench(delaying, options, **small)
    for wrong in ({"ssl_ca_certs": certificate["keyfile"]}, {f"ssl_{n}": certificate["certfile"] for n in certificate}):
        with pytest.raises(InvalidArgument, match="must be PEM files"):
            bench(delaying, options, target=wrong, **small)
