"""The arithmetic of benchmarks/isolation.py on requests whose times are known; and that it runs to its end."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.isolation_load import (
    Window,
    arrived_in,
    gaps_in,
    goodput,
    median_row,
    over_rounds,
    records_of,
    row,
    verdicts,
)
from benchmarks.isolation_report import table
from serving.bench.measure import Slo
from serving.bench.records import Failure, Record

ROOT = pathlib.Path(__file__).parents[2]
EASY = Slo(ttft_s=100.0, tpot_s=100.0)


def record(sent_s: float, *messages: float, counts: tuple[int, ...] | None = None, **more: Any) -> Record:
    counts = counts or (1,) * len(messages)
    values: dict[str, Any] = {"index": 0, "due_s": None, "sent_s": sent_s, "input_len": 4, "output_len": sum(counts)}
    values |= {"end_s": messages[-1] if messages else sent_s, "message_s": messages, "message_tokens": counts}
    values |= {"prompt_tokens": 4, "completion_tokens": sum(counts), "cached_tokens": 0, "finish_reason": "length"}
    return Record(**values | {"failure": None} | more)


def failed(sent_s: float) -> Record:
    return record(sent_s, failure=Failure("UNAVAILABLE", "no worker"))


def test_the_gaps_of_a_window_are_those_that_begin_in_it() -> None:
    chat = record(0.0, 1.0, 2.0, 3.5, 9.0, 9.1)
    assert gaps_in([chat], Window(1.0, 2.0, 4.0)) == pytest.approx([1.5, 5.5]), "the stall ends behind the window"
    assert gaps_in([chat], Window(1.0, 0.0, 100.0)) == pytest.approx([1.0, 1.5, 5.5, 0.1])
    assert gaps_in([chat], Window(1.0, 4.0, 8.0)) == [], "none begins here, one goes on"
    assert gaps_in([chat], Window(1.0, 9.05, 20.0)) == [], "the last token has no gap behind it"
    assert gaps_in([failed(2.0)], Window(1.0, 0.0, 9.0)) == []


def test_the_gap_before_a_message_is_shared_by_its_tokens() -> None:
    chat = record(0.0, 1.0, 3.0, 6.0, counts=(3, 4, 1))
    assert gaps_in([chat], Window(1.0, 1.0, 3.0)) == pytest.approx([0.5] * 4)
    assert gaps_in([chat], Window(1.0, 0.0, 9.0)) == pytest.approx([0.5] * 4 + [3.0])


def test_requests_belong_to_the_window_in_which_they_arrive() -> None:
    window = Window(0.5, 10.0, 20.0)
    early, first, last, late = (
        record(9.99, 11.0, 12.0),
        record(10.0, 15.0, 16.0),
        record(19.9, 30.0),
        record(20.0, 21.0),
    )
    assert arrived_in([early, first, last, late], window) == [first, last]
    due = dataclasses.replace(late, due_s=19.0)
    assert arrived_in([due], window) == [due], "when it was due, though it left later"


def test_a_row_has_chats_prompts_and_all_that_kept_their_slo() -> None:
    chats = [record(10.0, 10.5, 10.6, 11.1), record(10.0, 13.0, 13.5), failed(12.0), record(30.0, 31.0, 32.0)]
    prompts = [record(11.0, 14.0, 14.2), record(12.0, 19.0, 19.2), failed(13.0)]
    strict = Slo(ttft_s=1.0, tpot_s=1.0)
    made = row(chats, prompts, Window(0.3, 10.0, 20.0), chat_slo=strict, prompt_slo=Slo(ttft_s=5.0, tpot_s=1.0))
    assert made["chats"]["requests"] == 3 and made["chats"]["failed"] == 1
    assert made["chats"]["attainment"] == pytest.approx(1 / 3, abs=1e-4), "one late, one failed"
    assert made["prompts"]["requests"] == 3 and made["prompts"]["failures"] == {"UNAVAILABLE": 1}
    assert made["prompts"]["ttft_ms"]["p50"] == pytest.approx(5000) and made["prompts"]["attainment"] < 0.34
    assert made["attainment"] == pytest.approx(2 / 6, abs=1e-4)
    assert made["gaps"] == 3 and made["itl_ms"]["max"] == pytest.approx(500)
    assert made["chat_tokens_per_s"] == pytest.approx(5 / 10)
    assert made["prompts"]["second_ms"]["p50"] == pytest.approx(200)


def test_nothing_is_no_number() -> None:
    made = row([], [], Window(0.0, 0.0, 5.0), chat_slo=EASY, prompt_slo=EASY)
    assert made["itl_ms"] == {"p50": None, "p99": None, "max": None} and made["attainment"] is None
    json.dumps(made, allow_nan=False)


def test_what_bench_serve_writes_is_read_on_the_clock_of_the_day() -> None:
    raw = dataclasses.asdict(record(1.0, 2.0, 3.0, due_s=0.5)) | {"message_s": [2.0, 3.0], "message_tokens": [1, 1]}
    broken = dataclasses.asdict(failed(4.0)) | {"message_s": [], "message_tokens": None}
    first, second = records_of({"probes": [{"started": 1000.0, "requests": [raw, broken]}]})
    assert first.message_s == (1002.0, 1003.0) and first.arrival_s == 1000.5 and first.message_tokens == (1, 1)
    assert second.failure == Failure("UNAVAILABLE", "no worker") and second.arrival_s == 1004.0


def made_row(setup: str, rate: float, p99: float, attainment: float | None, turn: int = 1) -> dict[str, Any]:
    chats = [record(0.0, *(1.0 + i * p99 / 1e3 for i in range(4)))]
    used = {"load_average": 0.1, "cores_used": {"router": 0.1, "others": 0.2}, "chats_arrived": 1}
    made = row(chats, [], Window(rate, 0.0, 60.0), chat_slo=EASY, prompt_slo=EASY)
    return {"round": turn, "setup": setup, **made, **used, "attainment": attainment}


def test_rounds_become_medians_and_counts_sums() -> None:
    rounds = [made_row("a", 0.0, 10.0, 1.0), made_row("b", 0.0, 90.0, 0.5), made_row("a", 0.0, 30.0, None, turn=2)]
    rounds += [made_row("a", 0.0, 20.0, 0.8, turn=3), made_row("b", 0.0, 70.0, 0.7, turn=2)]
    a, b = over_rounds(rounds)
    assert (a["setup"], a["itl_ms"]["p99"], a["attainment"], a["gaps"]) == ("a", pytest.approx(20.0), 0.9, 9)
    assert (b["setup"], b["itl_ms"]["p99"], b["chats"]["requests"]) == ("b", pytest.approx(80.0), 2)
    assert len(a["gap_quantiles_ms"]) == len(rounds[0]["gap_quantiles_ms"])
    assert median_row([{"failures": {"x": 1}}, {"failures": {"x": 2, "y": 1}}]) == {"failures": {"x": 3, "y": 1}}


def test_goodput_is_the_highest_rate_below_the_first_that_missed() -> None:
    rows = [made_row("a", rate, 10.0, share) for rate, share in ((0.2, 0.95), (0.0, 1.0), (0.1, 0.9), (0.4, 0.5))]
    assert goodput(rows, "a") == (0.2, True)
    assert goodput([*rows, made_row("a", 0.05, 10.0, 0.89)], "a") == (0.0, True), "a dip on the way counts"
    assert goodput(rows[:3], "a") == (0.2, False)
    assert goodput([made_row("a", 0.0, 10.0, 0.1)], "a") == (None, True)


def test_verdicts_compare_with_idle_and_with_the_baseline() -> None:
    rows = [made_row("separate", 0.0, 100.0, 1.0), made_row("separate", 0.1, 120.0, 1.0)]
    rows += [made_row("interleaved", 0.0, 50.0, 1.0), made_row("interleaved", 0.1, 900.0, 1.0)]
    (found,) = verdicts(rows, "separate", "interleaved")
    assert found == {"rate": 0.1, "of_idle": 1.2, "baseline_over_isolated": 7.5}
    assert verdicts(rows[:2], "separate", "interleaved")[0]["baseline_over_isolated"] is None
    load = {"chats": 1, "chat_answer": 4, "prompt": 8, "prompt_answer": 2, "chat_slo": ["1s", "1s"]}
    about = {"name": "machine", "packages": {"jax": "1"}, "date": "today", "load_average_at_start": [0.5, 0, 0]}
    text = table(
        {
            "command": "run it",
            "machine": about,
            "load": load | {"prompt_slo": ["1s", "1s"]},
            "cores": {"prefill": [0], "decode": [1], "front": [0]},
            "medians": over_rounds(rows),
            "rounds": rows,
        }
    )
    assert "| 0.1 | 1.20 | 7.5 |" in text and "| separate | idle | 100 / 100 | 100 |" in text
    assert "| interleaved | 0.1 or more | 0 |" in text


@pytest.mark.heavy
@pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="it pins to cores 0 and 1")
def test_a_quick_run(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "benchmarks.isolation", "--quick", "--setups", "separate", "chunked"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("isolation-*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [(r["setup"], r["rate"]) for r in result["medians"]] == [
        ("separate", 0),
        ("separate", 2),
        ("chunked", 0),
        ("chunked", 2),
    ]
    for found in result["medians"]:
        assert found["gaps"] > 0 and found["chats"]["requests"] > 0 and found["chats"]["failed"] == 0
        assert found["prompts"]["requests"] == (0 if found["rate"] == 0 else 6) and found["prompts"]["failed"] == 0
    threads = result["threads"]
    assert threads["separate"]["prefill"]["cores"] == [0] and threads["separate"]["decode"]["cores"] == [1]
    assert "| separate | 2 |" in path.with_suffix(".md").read_text(encoding="utf-8")
