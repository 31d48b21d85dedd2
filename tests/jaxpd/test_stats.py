"""What the engine counts: where its numbers come from, and that a reading at rest equals the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxpd import compiles
from jaxpd.life import Stage
from jaxpd.progress import SilentProgress, TimedProgress

Started = Callable[..., Any]


def test_what_crosses_is_counted_in_true_bytes(started: Started) -> None:
    running = started("smollm2", "1x1", "1x2")
    before = running.engine.stats()
    answer = running.submit("one", list(range(3, 103)), max_tokens=3)
    running.wait()
    after = running.assert_at_baseline()
    limits = running.engine.limits
    page = limits.prefill[0].page_bytes
    crossed = after.crossed_bytes - before.crossed_bytes
    assert answer.finish.life.first(Stage.ACCEPTED) is not None
    assert 7 * page <= crossed <= 16 * page and crossed % page == 0, "seven pages, in pieces of some sizes"
    queried = [r.prefix.queried for r in after.replicas if r.role == "prefill"]
    assert sum(queried) - sum(r.prefix.queried for r in before.replicas if r.role == "prefill") == 6


def test_replicated_heads_cross_once(started: Started) -> None:
    alone, wide = started("smollm2", "1x1", "1x2"), started("smollm2", "2x1", "1x2")
    counts = []
    for running in (alone, wide):
        before = running.engine.stats().crossed_bytes
        running.submit("one", list(range(13, 113)), max_tokens=3)
        running.wait()
        counts.append(running.assert_at_baseline().crossed_bytes - before)
    assert counts[0] == counts[1] > 0, "as many true heads, however they are cut"


def test_devices_say_what_they_hold(started: Started) -> None:
    running = started("smollm2", "2x1", "1x2")
    stats, limits = running.engine.stats(), running.engine.limits
    for pool, planned in zip(stats.pools, limits.pools, strict=True):
        assert (pool.role, pool.weight_bytes, pool.kv_bytes) == (planned.role, planned.weight_bytes, planned.kv_bytes)
        assert pool.free_bytes is None, "the CPU does not say"
    assert stats.startup_s["start"] >= stats.startup_s["loading weights"] > 0


def test_pages_for_prompts_on_their_way_are_pinned(started: Started) -> None:
    running = started("smollm2", "1x1", "1x2")
    seen: list[int] = []
    running.on_token = lambda event: seen.append(sum(r.pinned_pages for r in running.engine.stats().replicas))
    running.submit("one", list(range(23, 123)), max_tokens=3)
    running.wait()
    assert seen[0] >= 7, "its first token is out, and it does not decode yet"
    assert seen[-1] == 0
    running.assert_at_baseline()


def test_a_failed_hand_off_is_counted_by_its_reason(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    running = started("smollm2", "1x1", "1x2")
    before = dict(running.engine.stats().handoff_failures)
    transport = running.engine.transport
    with monkeypatch.context() as patch:
        patch.setattr(transport, "offer", lambda *asked: asked[-1](None, RuntimeError("the link is down")))
        running.submit("bad", list(range(33, 133)), max_tokens=3)
        running.wait()
    after = running.assert_at_baseline().handoff_failures
    assert after == {**before, "copy": before.get("copy", 0) + 1}


def test_every_watcher_hears_of_every_program_until_it_stops() -> None:
    one: list[float] = []
    other: list[float] = []
    stop_one, stop_other = compiles.watch(one.append), compiles.watch(other.append)
    compiles.compiled(1.0)
    stop_one()
    compiles.compiled(2.0)
    stop_one()
    stop_other()
    compiles.compiled(3.0)
    assert (one, other) == ([1.0], [1.0, 2.0])


def test_xla_is_heard_in_whatever_thread_it_compiles(compilations: Any) -> None:
    import jax

    import jaxpd.startup  # noqa: F401  (registers the listener)

    heard: list[float] = []
    stop = compiles.watch(heard.append)
    before = compilations.count
    jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(17))
    stop()
    assert len(heard) == compilations.count - before >= 1 and all(seconds > 0 for seconds in heard)


def test_stages_are_timed_and_passed_on() -> None:
    notes: list[str] = []

    class Shown(SilentProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    progress = TimedProgress(Shown())
    for _ in range(2):
        with progress.stage("loading", total=1.0, unit="bytes") as stage:
            stage.advance(1.0)
    with pytest.raises(ValueError), progress.stage("failing"):
        raise ValueError
    progress.note("a word")
    assert set(progress.seconds) == {"loading"} and progress.seconds["loading"] > 0 and notes == ["a word"]
