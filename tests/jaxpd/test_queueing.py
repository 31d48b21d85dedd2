"""Who is served first, who may pass whom, who gives way: the policy alone, and as the engine acts on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpd.errors import InvalidArgument
from jaxpd.policies.queueing import LOOK_AHEAD, MOST_PASSED, candidates, victim

Started = Callable[..., Any]
pytestmark = pytest.mark.heavy


def test_one_that_let_enough_pass_is_the_last_to_be_tried() -> None:
    assert candidates([]) == 0
    assert candidates([0, 0, 0]) == 3
    assert candidates([MOST_PASSED, 0, 0]) == 1
    assert candidates([0, MOST_PASSED - 1, MOST_PASSED, 0]) == 3
    assert candidates([0] * 100) == LOOK_AHEAD


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=120),
    most_passed=st.integers(0, 8),
    look_ahead=st.integers(1, 5),
)
def test_nobody_starves(sizes: list[int], most_passed: int, look_ahead: int) -> None:
    """A pool of 10 pages, each request holds its pages for two rounds: all are served, none is passed too often."""
    waiting = [[i, size, 0] for i, size in enumerate(sizes)]
    running: list[tuple[int, int]] = []  # pages, round that they end
    for now in range(4 * len(sizes) + 4):
        running = [(pages, end) for pages, end in running if end > now]
        blocked: list[list[int]] = []
        for entry in waiting[: candidates([p for _, _, p in waiting], most_passed=most_passed, look_ahead=look_ahead)]:
            if entry[1] <= 10 - sum(pages for pages, _ in running):
                running.append((entry[1], now + 2))
                waiting.remove(entry)
                for other in blocked:
                    other[2] += 1
                    assert other[2] <= most_passed + look_ahead
            else:
                blocked.append(entry)
    assert not waiting


@given(st.lists(st.tuples(st.integers(-2, 2), st.floats(0, 100)), min_size=1))
def test_the_last_in_the_order_of_service_gives_way(ranks: list[tuple[int, float]]) -> None:
    assert ranks[victim(ranks)] == max(ranks)


def test_small_prompts_pass_a_huge_one_that_waits_but_not_for_ever(started: Started, monkeypatch: Any) -> None:
    """13 pages: while `first` holds 5, a prompt of 9 pages does not fit, and those of one page do."""
    from jaxpd.policies import queueing

    counted = queueing.candidates
    monkeypatch.setattr(queueing, "candidates", lambda passed: counted(passed, most_passed=6))
    probe = started("smollm2", None, None, mode="chunked", mesh="1x1").engine.limits.pools[0]
    running = started(
        "smollm2", None, None, mode="chunked", mesh="1x1", kv_memory=13 * probe.page_bytes, prefix_cache=False
    )
    order: list[str] = []
    small = iter(range(40))
    go_on = [True]

    def on_token(event: Any) -> None:
        if event.first_index == 0:
            order.append(event.request_id)
            if go_on[0] and event.request_id != "huge":  # there is always a small one that waits
                running.submit(f"small{next(small)}", [7] * 8, max_tokens=6)
        if event.request_id == "huge":
            go_on[0] = False

    running.on_token = on_token
    running.submit("first", [5] * 8, max_tokens=70)
    running.submit("second", [5] * 8, max_tokens=70)
    running.submit("huge", [6] * 140, max_tokens=2)
    running.submit("small", [7] * 8, max_tokens=6)
    assert running.answers["huge"].ended.wait(60), "it starved"
    running.wait()
    place = order.index("huge")
    assert place >= 3, f"small ones were held back: {order}"
    assert place <= 2 + 6 + 4, f"it was passed too often: {order}"
    running.assert_at_baseline()


def test_a_lower_priority_is_served_first(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    order: list[str] = []

    def on_token(event: Any) -> None:
        if event.first_index == 0:
            order.append(event.request_id)

    running.on_token = on_token
    for i in range(8):  # eight prompts fill the prefill pool; four answers the decode pool
        running.submit(f"plain{i}", [5 + i] * 20, max_tokens=30)
    running.submit("urgent", [3] * 20, max_tokens=4, priority=-5)
    running.submit("whenever", [4] * 20, max_tokens=4, priority=5)
    running.wait()
    assert order.index("urgent") < 7 and order[-1] == "whenever"
    for bad in (2**31, -(2**31) - 1):
        with pytest.raises(InvalidArgument, match=f"priority={bad} must be between"):
            running.submit("bad", [3], max_tokens=2, priority=bad)


def test_salts_keep_tenants_apart(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    prompt = [9, 8, 7] * 20
    found = {}
    for name, salt in (("a", "tenant a"), ("b", "tenant b"), ("a again", "tenant a"), ("none", "")):
        answer = running.submit(name, prompt, max_tokens=3, cache_salt=salt)
        running.wait()
        found[name] = answer.finish.usage.cached_tokens
    assert found == {"a": 0, "b": 0, "a again": 48, "none": 0}
    assert len({tuple(a.token_ids) for a in running.answers.values()}) == 1
    with pytest.raises(InvalidArgument, match="cache_salt has 257 characters, the limit is 256"):
        running.submit("long", prompt, max_tokens=3, cache_salt="x" * 257)
    running.assert_at_baseline()
