"""A device step that does not end: reported with stacks, its requests answered, and the pool back when it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.errors import Unavailable
from jaxpd.request import FinishReason

Started = Callable[..., Any]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_that_hangs_is_reported_and_its_requests_are_answered(
    role: str, started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = started("smollm2", "1x1", "1x1")
    before = running.submit("before", [3] * 20, max_tokens=6)
    for i in range(2):  # every program that is needed below is compiled
        running.submit(f"warm{i}", [3 + i] * 20, max_tokens=6)
    running.wait()
    monkeypatch.setattr(running.engine._watchdog, "_timeout_s", 1.0)
    pool = next(p for p in running.engine._pools if p.role == role)
    let_go, step = threading.Event(), pool.device.step

    def hangs(*args: Any) -> Any:
        assert let_go.wait(60)
        return step(*args)

    monkeypatch.setattr(pool.device, "step", hangs)
    with caplog.at_level(logging.ERROR, logger="jaxpd.watchdog"):
        stuck = [running.submit(f"stuck{i}", [3 + i] * 20, max_tokens=6) for i in range(2)]
        # more than the decode pool has slots for: they wait in the prefill pool's queue
        stuck += [running.submit(f"waits{i}", [3 + i] * 20, max_tokens=6) for i in range(6)]
        assert all(answer.ended.wait(20) for answer in stuck)
    for answer in stuck:
        assert answer.finish.reason is FinishReason.ERROR
        assert "has not ended" in str(answer.finish.error) and "--step-timeout" in str(answer.finish.error)
    [record] = [r for r in caplog.records if r.name == "jaxpd.watchdog"]
    text = record.getMessage()
    assert f"a step of the {role} pool 0" in text and "hangs" in text, "the stack shows where it is"
    assert "stuck0" in text or "stuck1" in text
    with pytest.raises(Unavailable, match="no pool answers"):
        running.submit("refused", [3], max_tokens=2)
    monkeypatch.setattr(running.engine._watchdog, "_timeout_s", 60.0)  # a program may have to be compiled now
    monkeypatch.setattr(pool.device, "step", step)
    let_go.set()
    deadline = time.monotonic() + 20
    while pool.given_up and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not pool.given_up
    after = running.submit("after", [3] * 20, max_tokens=6)
    running.wait()
    assert after.token_ids == before.token_ids
    running.assert_at_baseline()
