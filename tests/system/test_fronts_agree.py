"""HTTP, gRPC and `jaxpd.LLM` say the same of the same request: tokens, text, log probabilities, usage and errors."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxpd.errors import JaxpdError
from jaxpd.llm import LLM
from jaxpd.request import SamplingParams, TokenLogprobs
from jaxpd.structured import StructuredOutput
from serving.background import BackgroundServer
from serving.client import Client
from serving.messages import GenerateRequest

LIMITS: dict[str, Any] = {
    "prefill_mesh": "2x1",
    "decode_mesh": "1x2",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "precompile": False,
}
STATUS = {"INVALID_ARGUMENT": 400, "RESOURCE_EXHAUSTED": 429, "FAILED_PRECONDITION": 400, "NOT_FOUND": 404}
PROMPT = (5, 17, 40, 99, 7, 300, 12, 44, 8)


@dataclasses.dataclass(frozen=True)
class Said:
    """One sample, as any door tells it. Log probabilities are rounded."""

    token_ids: tuple[int, ...]
    text: str
    finish: str
    logprobs: tuple[float, ...] | None
    prompt_tokens: int
    completion_tokens: int


Outcome = list[Said] | tuple[int, str | None]  # or the HTTP status and the field of an error


@pytest.fixture(scope="module")
def doors(tiny_folders: dict[str, pathlib.Path]) -> Iterator[tuple[LLM, Client, httpx.Client]]:
    model = str(tiny_folders["smollm2"])
    with (
        LLM(model, **LIMITS) as llm,
        BackgroundServer(model, **LIMITS) as server,
        Client(server.grpc_address) as grpc,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        yield llm, grpc, http


def _rounded(logprobs: tuple[TokenLogprobs, ...] | None) -> tuple[float, ...] | None:
    return None if logprobs is None else tuple(round(entry.logprob, 3) for entry in logprobs)


def by_llm(llm: LLM, params: SamplingParams) -> Outcome:
    try:
        done = llm.generate([PROMPT], params)
    except JaxpdError as error:
        return STATUS[error.code], error.field
    total = sum(c.usage.completion_tokens for c in done)
    return [
        Said(c.token_ids, c.text, c.finish_reason.value, _rounded(c.logprobs), c.usage.prompt_tokens, total)
        for c in done
    ]


def by_grpc(client: Client, params: SamplingParams) -> Outcome:
    options = {field.name: getattr(params, field.name) for field in dataclasses.fields(SamplingParams)}
    try:
        answer = client.generate(GenerateRequest(token_ids=PROMPT, **options))
    except JaxpdError as error:
        return STATUS[error.code], None
    usage = answer.usage
    return [
        Said(
            s.token_ids,
            s.text or "",
            s.finished.reason.value,
            _rounded(s.logprobs),
            usage.prompt_tokens,
            usage.completion_tokens,
        )
        for s in answer.samples
    ]


def by_http(client: httpx.Client, params: SamplingParams) -> Outcome:
    options = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(SamplingParams)
        if getattr(params, field.name) is not None and field.name not in ("structured", "stop")
    }
    options["stop"] = list(params.stop)
    if params.structured is not None:
        options["guided_regex"] = params.structured.text
    body = {"prompt": list(PROMPT), "return_token_ids": True, **options}
    reply = client.post("/v1/completions", json=body)
    if reply.is_error:
        return reply.status_code, reply.json()["error"]["param"]
    answer = reply.json()
    usage = answer["usage"]
    said = []
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        said.append(
            Said(
                tuple(choice["token_ids"]),
                choice["text"],
                choice["finish_reason"],
                None if logprobs is None else tuple(round(p, 3) for p in logprobs["token_logprobs"]),
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        )
    return said


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"logit_bias": {31: 4.0, 32: -100.0}},
        {"logprobs": 0},
        {"logprobs": 3, "temperature": 0.7, "seed": 1},
        {"n": 3, "temperature": 1.2, "seed": 9, "logprobs": 0},
        {"min_tokens": 6, "stop_token_ids": (31, 32, 33)},
        {"stop": ("a", "e")},
        {"structured": StructuredOutput(kind="regex", text="[ab]{3,5}"), "temperature": 1.0, "seed": 3},
        {"max_tokens": 1},
        # what cannot be served
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"max_tokens": 500},
        {"n": 1000},
        {"logprobs": 21},
        {"logit_bias": {10**6: 1.0}},
        {"stop_token_ids": (10**6,)},
        {"structured": StructuredOutput(kind="regex", text="(")},
    ],
    ids=lambda options: ",".join(options) or "greedy",
)
def test_all_doors_agree(doors: tuple[LLM, Client, httpx.Client], options: dict[str, Any]) -> None:
    llm, grpc, http = doors
    params = SamplingParams(**{"max_tokens": 12, "seed": 0, **options})
    through_llm, through_grpc, through_http = by_llm(llm, params), by_grpc(grpc, params), by_http(http, params)
    if isinstance(through_llm, tuple):
        status, _ = through_llm
        assert through_grpc == (status, None)
        assert isinstance(through_http, tuple) and through_http[0] == status
        assert through_http[1], "the error names its parameter"
        return
    assert through_llm == through_grpc == through_http
    assert len(through_llm) == params.n and all(said.token_ids for said in through_llm)
