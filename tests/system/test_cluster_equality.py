"""The first law across processes: greedy tokens equal to the references, whatever is in whose cache.

Three processes (one worker of each role) on unequal meshes, five (two of each) under load. The commands are those that
people type; tests/cluster/harness.py starts them.
"""

from __future__ import annotations

import json
import pathlib
import types
from typing import Any

import pytest

from tests.cluster.asked import Asked
from tests.cluster.harness import SMALL, Cluster, until
from tests.cluster.reference import answer_to, prompt_of
from tests.jaxpd import random_requests

DATA = pathlib.Path(__file__).parent.parent / "data"
PAIRS = ("8x1/1x2", "2x1/4x1", "1x2/2x2")
MODELS = sorted(path.name for path in (DATA / "tiny").iterdir() if path.is_dir())
IN_THE_SUITE = {"8x1/1x2": "smollm2", "2x1/4x1": "gemma3-softcap", "1x2/2x2": "qwen3"}
PAGE = 16


def expected(model: str) -> list[dict[str, Any]]:
    return json.loads((DATA / "tiny" / model / "expected.json").read_text(encoding="utf-8"))["prompts"]


def ask_all(cluster: Cluster, prompts: list[dict[str, Any]], salt: str, tokens: int = 24) -> list[Asked]:
    """All at once; each answer is the reference's."""
    asked = [cluster.ask(prompt["prompt_ids"], tokens, cache_salt=salt) for prompt in prompts]
    for prompt, answer in zip(prompts, asked, strict=True):
        answer.wait()
        answer.assert_tokens(tuple(prompt["greedy_ids"][:tokens]))
    return asked


def cached(asked: Asked) -> int:
    """Tokens of the prompt that its prefill worker had."""
    assert asked.finished is not None
    return asked.finished.usage.cached_tokens


def check_pair(folder: pathlib.Path, pair: str, model: str) -> None:
    """Cold, warm on the prefill worker alone, and warm on both."""
    prefill, decode = pair.split("/")
    prompts = expected(model)
    longest = max(prompts, key=lambda prompt: len(prompt["prompt_ids"]))
    pages = (len(longest["prompt_ids"]) - 1) // PAGE
    flags = ("--max-model-len", 160, "--max-num-seqs", 4, "--max-num-batched-tokens", 32, "--no-precompile")
    with Cluster(folder, prefill=[prefill], decode=[decode], model=DATA / "tiny" / model, flags=flags) as cluster:
        assert [cached(answer) for answer in ask_all(cluster, prompts, "cold")] == [0] * len(prompts)
        [both] = ask_all(cluster, [longest], "cold")
        assert cached(both) == pages * PAGE
        assert cached(ask_all(cluster, [longest], "only P", tokens=1)[0]) == 0  # nothing is handed over
        [warm] = ask_all(cluster, [longest], "only P")
        assert cached(warm) == pages * PAGE
        cluster.baseline(10.0)


@pytest.mark.heavy
@pytest.mark.parametrize(("pair", "model"), IN_THE_SUITE.items())
def test_unequal_meshes(pair: str, model: str, tmp_path: pathlib.Path) -> None:
    check_pair(tmp_path, pair, model)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_tiny_model_on_unequal_meshes(pair: str, model: str, tmp_path: pathlib.Path) -> None:
    check_pair(tmp_path, pair, model)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("pair", PAIRS)
def test_smollm2_135m(pair: str, tmp_path: pathlib.Path) -> None:
    prompts = json.loads((DATA / "reference" / "smollm2-135m.json").read_text(encoding="utf-8"))["prompts"]
    prefill, decode = pair.split("/")
    flags = ("--max-model-len", 1024, "--max-num-seqs", 4, "--max-num-batched-tokens", 256, "--no-precompile")
    with Cluster(tmp_path, prefill=[prefill], decode=[decode], model="smollm2-135m", flags=flags) as cluster:
        for salt in ("cold", "cold"):  # and warm
            asked = [cluster.ask(prompt["prompt_ids"], 32, cache_salt=salt) for prompt in prompts]
            for prompt, answer in zip(prompts, asked, strict=True):
                answer.wait(600)
                answer.assert_tokens(tuple(prompt["greedy_ids"]))


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_five_processes(tmp_path: pathlib.Path) -> None:
    """The workers come to the router; warm on the decode worker alone, and 200 requests at once."""
    flags = (*SMALL, "--max-queued-requests", 256, "--no-precompile")
    with Cluster(tmp_path, prefill=["2x1", "1x2"], decode=["1x1", "1x2"], flags=flags, join=True) as cluster:
        warm_on_the_decode_worker_alone(cluster)
        many_at_once(cluster, 200)
        cluster.baseline(20.0)


def warm_on_the_decode_worker_alone(cluster: Cluster) -> None:
    p0, p1, d0, d1 = (cluster.workers[name] for name in ("p0", "p1", "d0", "d1"))
    prompt, tokens = prompt_of(21, 120, 12), 12

    def crossed() -> int:
        return sum(cluster.reading(worker).crossed_bytes for worker in (d0, d1))

    def ask(salt: str) -> tuple[int, int]:
        """Tokens that P had, and bytes that crossed."""
        cluster.baseline(10.0)
        before = crossed()
        asked = cluster.ask(prompt, tokens, cache_salt=salt)
        asked.wait()
        asked.assert_tokens(answer_to(prompt, tokens))
        cluster.baseline(10.0)  # a reading that is newer than the answer
        until(lambda: "" if cached(asked) or crossed() > before else "nothing has crossed", 5.0)
        return cached(asked), crossed() - before

    cluster.drain(p1)
    cluster.drain(d1)
    had, whole = ask("a")
    assert had == 0 and whole > 0
    cluster.drain(p1, False)
    cluster.drain(p0)
    had, rest = ask("a")  # by a prefill worker that has never seen it
    assert had == 0 and 0 < rest <= whole // 2  # one page of eight; four are the least that cross
    cluster.drain(p0, False)
    cluster.drain(d1, False)
    cluster.wait_ready()


def many_at_once(cluster: Cluster, count: int) -> None:
    """Options of every kind, judged token by token; a tenth are long prompts in several chunks."""
    requests: list[tuple[list[int], dict[str, Any], Asked]] = []
    for i in range(count):
        if i % 10:
            prompt, options = random_requests.random_request(1000 + i)
        else:
            prompt, options = list(prompt_of(30 + i % 50, 150, 8)), {"max_tokens": 8, "seed": i}
        asked = cluster.ask(prompt, options["max_tokens"], **{k: v for k, v in options.items() if k != "max_tokens"})
        requests.append((prompt, options, asked))
    for prompt, options, asked in requests:
        asked.wait()
        assert asked.error is None, asked.told()
        answer = types.SimpleNamespace(token_ids=asked.tokens, logprobs=asked.logprobs)
        random_requests.check(prompt, options, answer)
