"""An answer that lost its decode engine goes on in another pair: both legs get the tokens that the client has."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpd.remote.messages import Piece
from jaxpd.request import FinishReason, TokensEvent
from jaxpd.structured import StructuredOutput
from tests.jaxpd.remote.pair import Pair

TINY = pathlib.Path(__file__).parents[2] / "data" / "tiny" / "smollm2"
SMALL: dict[str, Any] = {"precompile": False, "max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 4}
PROMPT = [(i * 31) % 250 + 1 for i in range(59)]
CUTS = (1, 5, 6, 18)  # 64 tokens are four full pages, 65 begin the fifth
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 20},
    "sampled": {
        "max_tokens": 20, "temperature": 0.8, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.3,
        "logprobs": 1, "prompt_logprobs": 1,
    },
    "held off": {"max_tokens": 60, "stop_token_ids": tuple(range(0, 282, 3)), "min_tokens": 20},
    "structured": {
        "max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": False,
        "structured": StructuredOutput(kind="regex", text="[a-f]{14}-[0-9]{6}"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair(TINY, {**SMALL, "mesh": "2x1"}, {**SMALL, "mesh": "1x2"})
    yield made
    made.close()


@pytest.mark.heavy
@pytest.mark.parametrize("way", WAYS)
def test_the_rest_is_that_of_the_whole_answer(way: str, pair: Pair) -> None:
    if way == "structured":
        pytest.importorskip("llguidance")
    options = WAYS[way]
    prompt = [len(way), *PROMPT[1:]]  # nothing of it is cached
    whole = pair.generate(way, prompt, **options)
    ends = pair.ends(way)
    assert len(whole) > CUTS[-1] + 1
    for cut in CUTS:
        for turn, legs in (("first", "DP"), ("second", "PD")):
            name = f"{way} {cut} {turn}"
            pair.submit(name, prompt, legs=legs, outputs=whole[:cut], **options)
            again = pair.ends(name)
            assert again["P", 0].reason is FinishReason.HANDED_OFF, again["P", 0].error
            assert pair.tokens(name, first=cut) == whole[cut:], name
            news = [(who, e) for who, e in pair.events[name] if isinstance(e, TokensEvent)]
            assert [e.first_index for who, e in news if who == "P"] == [cut]
            assert min(e.first_index for who, e in news if who == "D") == cut + 1
            assert all(e.prompt_logprobs is None for _, e in news)
            assert all((e.logprobs is not None) == ("logprobs" in options) for _, e in news)
            end, before = again["D", 0], ends["D", 0]
            assert (end.reason, end.stop_token_id) == (before.reason, before.stop_token_id)
            assert end.usage.completion_tokens == len(whole) and end.usage.prompt_tokens == len(prompt)
            assert again["P", 0].usage.completion_tokens == cut + 1
            pair.settle()


@pytest.mark.heavy
def test_pages_of_what_was_said_cross_unless_they_are_there(pair: Pair) -> None:
    prompt = [251, *PROMPT[1:]]
    whole = pair.generate("elsewhere", prompt, max_tokens=20)

    def crossed(name: str, outputs: list[int]) -> list[tuple[int, int]]:
        before = len(pair.to_decode.sent)
        pair.submit(name, prompt, max_tokens=20, outputs=outputs)
        pair.ends(name)
        return [(m.first, m.count) for m in pair.to_decode.sent[before:] if isinstance(m, Piece)]

    assert crossed("it has four pages", whole[:6]) == [(4, 1)]
    assert crossed("it has all of them", whole[:5]) == []
    assert sum(count for _, count in crossed("it has three", [9, *whole[1:6]])) == 2
    pair.settle()


@pytest.mark.heavy
def test_the_last_token_needs_no_decode_engine(pair: Pair) -> None:
    whole = pair.generate("all", PROMPT, max_tokens=20)
    pair.submit("the last", PROMPT, legs="P", max_tokens=20, outputs=whole[:19])
    end = pair.end("the last", "P")
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 20)
    assert pair.tokens("the last", first=19) == whole[19:]
    pair.settle()
