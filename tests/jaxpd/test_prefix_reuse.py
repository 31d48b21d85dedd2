"""Work is not done twice: prompts that begin alike share pages, in every mode and on both sides of a hand-off."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.config import SHARED_MODES
from jaxpd.request import FinishReason

DATA = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2" / "expected.json"
PROMPTS = {p["name"]: p for p in json.loads(DATA.read_text())["prompts"]}
LONG = PROMPTS["len100"]
PAGE = 16
Started = Callable[..., Any]
WAYS: list[tuple[Any, ...]] = [("2x1", "1x2", {}), *((None, None, {"mode": m, "mesh": "1x2"}) for m in SHARED_MODES)]


@pytest.mark.parametrize(("prefill", "decode", "config"), WAYS, ids=["disaggregated", *SHARED_MODES])
def test_a_warm_prompt_gives_the_same_tokens(
    prefill: str | None, decode: str | None, config: dict[str, Any], started: Started
) -> None:
    running = started("smollm2", prefill, decode, **config)
    cached = []
    for i in range(3):
        answer = running.submit(f"r{i}", LONG["prompt_ids"], max_tokens=24)
        running.wait()
        assert answer.token_ids == LONG["greedy_ids"]
        cached.append(answer.finish.usage.cached_tokens)
        running.assert_at_baseline()
    # Two replicas: the second request goes to the one that has the prompt, all but the page of its last tokens.
    assert cached == [0, 96, 96]


def test_a_conversation_goes_on_where_it_was(started: Started) -> None:
    """What was decoded is in the cache too: the next turn computes its own tokens only."""
    running = started("smollm2", None, None, mode="chunked", mesh="1x1")
    first = running.submit("first", LONG["prompt_ids"], max_tokens=24)
    running.wait()
    longer = LONG["prompt_ids"] + first.token_ids + [3, 4, 5]
    warm = running.submit("warm", longer, max_tokens=8)
    running.wait()
    assert warm.finish.usage.cached_tokens == (100 + 24 - 1) // PAGE * PAGE
    cold = started("smollm2", None, None, mode="chunked", mesh="1x1", prefix_cache=False)
    again = cold.submit("again", longer, max_tokens=8)
    cold.wait()
    assert (again.token_ids, again.finish.usage.cached_tokens) == (warm.token_ids, 0)


def test_only_pages_that_the_decode_replica_lacks_cross(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    running = started("smollm2", "1x1", "1x1")
    crossed: list[int] = []
    offer = running.engine.transport.offer

    def counted(pieces: Any, *rest: Any) -> int:
        crossed.append(sum(piece[0].shape[2] for piece in pieces))
        return offer(pieces, *rest)

    monkeypatch.setattr(running.engine.transport, "offer", counted)
    shared = LONG["prompt_ids"][:64]
    prompts = [LONG["prompt_ids"][:66], shared + [7] * 20, shared, LONG["prompt_ids"][:66]]
    for i, prompt in enumerate(prompts):
        running.submit(f"r{i}", prompt, max_tokens=4)
        running.wait()
    # 66 tokens are 5 pages, the first 4 cross before the last; of the 84 the last two pages are new; of the 64 none is,
    # and of the 66 again only the half-full one. Pieces have at least 4.
    assert crossed == [4, 4, 4, 4]
    running.assert_at_baseline()


def test_a_full_cache_gives_way(started: Started) -> None:
    """Distinct prompts, many times what the pools hold: every one is served, and right."""
    running = started("smollm2", "1x1", "1x1", max_num_seqs=2, kv_memory=1 << 20)
    for turn in range(4):
        for name, prompt in PROMPTS.items():
            ids = prompt["prompt_ids"] if turn % 2 else [turn + 9, *prompt["prompt_ids"]]
            running.submit(f"{name}-{turn}", ids, max_tokens=12)
    running.wait()
    for name, prompt in PROMPTS.items():
        for turn in (1, 3):
            assert running.answers[f"{name}-{turn}"].token_ids == prompt["greedy_ids"][:12], name
    running.assert_at_baseline()


def test_it_can_be_turned_off(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1", prefix_cache=False)
    for i in range(2):
        answer = running.submit(f"r{i}", LONG["prompt_ids"], max_tokens=4)
        running.wait()
        assert answer.finish.usage.cached_tokens == 0


def test_a_hit_whose_pages_were_lost_is_an_error_and_no_wrong_answer(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode pool fails between the reservation and the accept: what did not cross must not be decoded from."""
    running = started("smollm2", "1x1", "1x1")
    running.submit("warm", LONG["prompt_ids"], max_tokens=4)
    running.wait()
    offer, (decode,) = running.engine.transport.offer, running.engine._mover.reservations.decode

    def after_a_failure(*args: Any) -> int:
        decode.spaces[0].forget()  # what a failed step does
        return offer(*args)

    monkeypatch.setattr(running.engine.transport, "offer", after_a_failure)
    lost = running.submit("lost", LONG["prompt_ids"], max_tokens=4)
    running.wait()
    assert lost.finish.reason is FinishReason.ERROR
    assert "lost the pages" in str(lost.finish.error)
    running.assert_at_baseline()
    monkeypatch.undo()
    again = running.submit("again", LONG["prompt_ids"], max_tokens=4)
    running.wait()
    assert again.token_ids == LONG["greedy_ids"][:4]
