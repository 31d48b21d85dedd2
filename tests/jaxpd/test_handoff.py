"""The hand-off, chunk by chunk: what has crossed when, what is exposed of it, and who ends what on the way."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.life import Stage
from jaxpd.request import FinishReason

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
LONG = PROMPTS["len100"]
Started = Callable[..., Any]


def test_earlier_chunks_have_crossed_before_the_last_is_dispatched(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk is held until every page of those before it is in the decode pool: it need not wait for them."""
    running = started("smollm2", "2x1", "1x2", max_num_batched_tokens=64, max_model_len=256)
    prompt = (LONG["prompt_ids"] * 3)[:200]  # 64 + 64 + 64 + 8
    [prefill], decode = running.engine._mover.reservations.prefill, running.engine._mover.reservations.decode[0]
    step, scatter = prefill._stepper.step, decode.device.scatter
    scattered: list[int] = []
    all_before = threading.Event()

    def counting(replica: int, page_ids: Any, pieces: Any) -> None:
        scatter(replica, page_ids, pieces)
        scattered.extend(page_ids.tolist())
        if len(scattered) >= 12:
            all_before.set()

    seen_at_last: list[int] = []

    def held(work: Any) -> Any:
        for of in work:
            for seq, count in of.chunks:
                if seq.cached + count == seq.prompt_len:
                    assert all_before.wait(30), f"only {len(scattered)} of 12 pages had crossed"
                    seen_at_last.append(len(scattered))
        return step(work)

    monkeypatch.setattr(decode.device, "scatter", counting)
    monkeypatch.setattr(prefill._stepper, "step", held)
    answer = running.submit("long", prompt, max_tokens=8)
    running.wait()
    assert seen_at_last == [12] and len(scattered) == 13
    stages = [m.stage for m in answer.finish.life.moments]
    assert stages.index(Stage.OFFERED) < len(stages) - 1 - stages[::-1].index(Stage.CHUNK)
    alone = running.submit("again", prompt, max_tokens=8)
    running.wait()
    assert alone.token_ids == answer.token_ids
    running.assert_at_baseline()


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_piece_that_fails_ends_its_request_alone(
    when: str, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = started("smollm2", "1x1", "1x1", max_num_batched_tokens=64, max_model_len=256)
    prompt = [len(when), *LONG["prompt_ids"] * 2][:200]  # nothing of it is cached
    transport = running.engine.transport
    offer, calls = transport.offer, [0]

    def failing(pieces: Any, src: Any, dst: Any, mesh: Any, done: Any) -> int:
        calls[0] += 1
        if calls[0] == (1 if when == "first" else 4):
            done(None, RuntimeError("the link is down"))
            return 0
        return offer(pieces, src, dst, mesh, done)

    monkeypatch.setattr(transport, "offer", failing)
    bad = running.submit("bad", prompt, max_tokens=8)
    running.wait()
    assert bad.finish.reason is FinishReason.ERROR and "hand-off failed" in str(bad.finish.error)
    assert bad.finish.life.moments[-1].stage is Stage.FAILED
    good = running.submit("good", LONG["prompt_ids"], max_tokens=8)
    running.wait()
    assert good.token_ids == LONG["greedy_ids"][:8]
    running.assert_at_baseline()


@pytest.mark.parametrize("moment", ["before the first token", "after the first token"])
def test_an_abort_while_pages_cross_frees_everything(
    moment: str, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = started("smollm2", "1x1", "1x1", max_num_batched_tokens=64, max_model_len=256)
    prompt = [len(moment), *LONG["prompt_ids"] * 2][:200]  # nothing of it is cached
    transport, release, held = running.engine.transport, threading.Event(), threading.Event()
    offer = transport.offer

    def slow(pieces: Any, src: Any, dst: Any, mesh: Any, done: Any) -> int:
        def later(moved: Any, error: Any) -> None:
            held.set()
            assert release.wait(30)
            done(moved, error)

        return offer(pieces, src, dst, mesh, later)

    monkeypatch.setattr(transport, "offer", slow)
    answer = running.submit("gone", prompt, max_tokens=8)
    if moment == "before the first token":
        assert held.wait(30)
    else:
        running.on_token = lambda event: running.engine.abort("gone") and None
    running.engine.abort("gone") if moment == "before the first token" else None
    assert answer.ended.wait(30), "an abort need not wait for what is on its way"
    assert answer.finish.reason is FinishReason.ABORT
    assert running.engine.stats().staging_bytes > 0, "what is on its way is still staged"
    release.set()
    monkeypatch.setattr(transport, "offer", offer)
    running.on_token = lambda event: None
    running.assert_at_baseline()
    good = running.submit("good", LONG["prompt_ids"], max_tokens=8)
    running.wait()
    assert good.token_ids == LONG["greedy_ids"][:8]


def test_a_prompt_of_one_chunk_and_one_of_full_pages_arrive(started: Started) -> None:
    running = started("smollm2", "2x1", "1x2", max_num_batched_tokens=64, max_model_len=256)
    for i, length in enumerate((1, 15, 16, 17, 64, 65, 96)):
        running.submit(f"cold{i}", LONG["prompt_ids"][:length], max_tokens=4)
        running.wait()
        running.submit(f"warm{i}", LONG["prompt_ids"][:length], max_tokens=4)
        running.wait()
        cold, warm = running.answers[f"cold{i}"], running.answers[f"warm{i}"]
        assert cold.token_ids == warm.token_ids and len(warm.token_ids) == 4
    running.assert_at_baseline()
