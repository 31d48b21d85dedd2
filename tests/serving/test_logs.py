"""The server's log: both formats, one line a request, and nothing in it that is nobody's business."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpd.cli.progress import console_progress
from jaxpd.errors import Internal, InvalidArgument, JaxpdError, Unavailable
from serving.callers import Caller
from serving.gateway import Gateway
from serving.logs import RequestLog, log_stream, set_up, without_keys
from serving.messages import GenerateRequest
from serving.observer import Origin

ALICE = Origin(front="http", operation="chat", caller=Caller(name="alice"), headers={"authorization": "Bearer sk-1"})
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def root() -> Iterator[None]:
    """Puts the root logger back as it was."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    levels = {name: logging.getLogger(name).level for name in ("jaxpd", "meshes", "pallas_kernels", "serving")}
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


@pytest.fixture
def stream(root: None) -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_says_when_how_bad_who_and_what(stream: io.StringIO) -> None:
    set_up("json", stream)
    logger = logging.getLogger("serving.somewhere")
    logger.info("a line\nand %s", "another", extra={"request_id": "r1"})
    logging.getLogger("urllib3").info("others speak from WARNING on")
    logging.getLogger("urllib3").warning("so")
    logger.debug("nobody wants to know")
    try:
        raise ValueError("with a stack")
    except ValueError:
        logger.exception("it failed")
    first, second, third = lines(stream)
    assert first["level"] == "info" and first["logger"] == "serving.somewhere" and first["request_id"] == "r1"
    assert first["message"] == "a line\nand another"
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(first["time"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(seconds=30) and first["time"].endswith("Z")
    assert second["message"] == "so" and "request_id" not in second
    assert third["level"] == "error" and "ValueError: with a stack" in third["exception"]


def test_a_format_that_is_none_is_named() -> None:
    with pytest.raises(InvalidArgument, match="--log-format xml .* text, json"):
        set_up("xml")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("got authorization: Bearer sk-12345, from x", "got authorization: Bearer ***, from x"),
        ("{'Authorization': 'Bearer sk-12345'}", "{'Authorization': 'Bearer ***'}"),
        ("GET /v1/models?api_key=sk-12345&x=1", "GET /v1/models?api_key=***&x=1"),
        ("x-api-key: sk-12345", "x-api-key: ***"),
        ('"api-key": "sk-12345"', '"api-key": "***"'),
        ("the bearer of bad news", "the bearer *** bad news"),
        ("no key in here", "no key in here"),
    ],
)
def test_what_looks_like_a_key_is_blotted_out(line: str, shown: str) -> None:
    assert without_keys(line) == shown


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_key_gets_into_either_format(log_format: str, stream: io.StringIO) -> None:
    set_up(log_format, stream)
    try:
        raise ValueError("authorization: Bearer sk-12345")
    except ValueError:
        logging.getLogger("serving").exception("headers: %s", {"authorization": "Bearer sk-12345"})
    assert "sk-12345" not in stream.getvalue() and "***" in stream.getvalue()


def run(scripted: Any, *requests: GenerateRequest, **options: Any) -> None:
    """Asks a scripted engine, with the log as observer; errors are let pass."""

    async def go() -> None:
        gateway = Gateway(observers=(RequestLog(),))
        engine = scripted.ScriptedEngine(gateway.on_events, step_s=0.001, **options)
        engine.start()
        gateway.open(engine, scripted.served_model(scripted.byte_tokenizer()))
        for asked in requests:
            try:
                await gateway.generate(asked, ALICE)
            except JaxpdError:
                continue
        engine.close()

    asyncio.run(go())


def test_one_line_for_each_request_that_ends(scripted: Any, stream: io.StringIO) -> None:
    set_up("json", stream)
    run(
        scripted,
        GenerateRequest(text="secret words", max_tokens=5, request_id="good"),
        GenerateRequest(text="secret words", max_tokens=2, n=2, request_id="twice"),
        GenerateRequest(text="!secret words", max_tokens=5, request_id="bad"),
        GenerateRequest(text="secret words", max_tokens=50, stop=("secret",), request_id="stopped"),
        fail_with=Internal("it broke"),
    )
    good, *twice, bad, stopped = lines(stream)
    assert good["request_id"] == "good" and good["level"] == "info" and good["event"] == "finished"
    assert (good["reason"], good["prompt_tokens"], good["completion_tokens"], good["cached_tokens"]) == (
        "length", 12, 5, 0,
    )  # fmt: skip
    assert good["ttft_s"] == 0.25 and good["prefill_s"] == 0.5 and good["queue_s"] == 0.0
    assert (good["front"], good["operation"], good["caller"]) == ("http", "chat", "alice")
    assert "ttft 0.250 s" in good["message"] and "12 (0 cached) + 5 tokens" in good["message"]
    assert [(line["request_id"], line["sample"]) for line in twice] == [("twice", 0), ("twice", 1)]
    assert bad["reason"] == "error" and bad["error"] == "INTERNAL" and "it broke" in bad["message"]
    assert stopped["reason"] == "stop", "a stop string is no abort"
    assert "secret" not in stream.getvalue() and "sk-1" not in stream.getvalue()


def test_a_refusal_has_a_line_that_does_not_quote_the_request(scripted: Any, stream: io.StringIO) -> None:
    set_up("text", stream)
    run(
        scripted,
        GenerateRequest(text="secret words", max_tokens=5, stop=("secret" * 400,), request_id="long"),
        GenerateRequest(text="secret words", request_id="two\nlines"),
    )
    first, second = stream.getvalue().splitlines()
    assert "request long refused: INVALID_ARGUMENT (stop)" in first
    assert r"request 'two\nlines' refused: INVALID_ARGUMENT (request_id)" in second
    assert "secret" not in stream.getvalue()


def test_a_refusal_for_load_says_why(stream: io.StringIO) -> None:
    set_up("json", stream)
    RequestLog().refused("r", ALICE, Unavailable("the server is shutting down"))
    (line,) = lines(stream)
    assert line["message"] == "request r refused: UNAVAILABLE: the server is shutting down"
    assert line["event"] == "refused" and line["error"] == "UNAVAILABLE" and line["request_id"] == "r"


def test_progress_can_go_through_the_log(stream: io.StringIO) -> None:
    set_up("json", stream)
    progress = console_progress(log_stream("jaxpd.start"))
    progress.note("two\nlines")
    with progress.stage("compiling", total=2.0, unit="programs") as stage:
        stage.advance(1.0, "forward")
    seen = lines(stream)
    assert {line["logger"] for line in seen} == {"jaxpd.start"}
    assert [line["message"] for line in seen][:3] == ["two", "lines", "[1] compiling"]
    assert "done in" in seen[-1]["message"]
