"""The figures of the benchmark against CPU engines, from answers made by hand; no engine runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engines.report import (
    EARLIER,
    JAXPD,
    LLAMA_64,
    LLAMA_F32,
    LLAMA_Q4,
    NAMES,
    SIXTYFOUR,
    TENFOLD,
    TRANSFORMERS,
    compare,
    measured,
    rate,
    same_text,
    show,
    summarise,
    then_and_now,
)


def batch(seconds: float, tokens: int, others: float = 0.0) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": tokens, "others": others}


def decode(seconds: float, text: str = "abcd", others: float = 0.0) -> dict[str, Any]:
    return {"seconds": seconds, "steps": 63, "others": others, "text": text}


def test_at_64_the_engine_with_64_rows_stands_for_jaxpd() -> None:
    assert measured("sixtyfour", NAMES) == [SIXTYFOUR, TRANSFORMERS, LLAMA_F32, LLAMA_64]
    assert measured("sixteen", NAMES) == [
        JAXPD, TENFOLD, SIXTYFOUR, EARLIER, TRANSFORMERS, LLAMA_F32, LLAMA_Q4,
    ]  # fmt: skip
    assert measured("one", [JAXPD, SIXTYFOUR, LLAMA_64]) == [JAXPD]
    answers = {SIXTYFOUR: batch(10, 4096), LLAMA_F32: batch(20, 4096), LLAMA_64: batch(40, 4096)}
    found = summarise([{"sixtyfour": answers}], ["sixtyfour"], list(answers))
    assert {peer: ratio["median"] for peer, ratio in found["jaxpd_over_peer"]["sixtyfour"].items()} == {
        LLAMA_F32: 2.0,
        LLAMA_64: 4.0,
    }
    assert found["step_ms"] == {}


def test_rates_count_generated_tokens_but_for_the_long_prompt() -> None:
    assert rate("one", batch(2, 64)) == 32
    assert rate("sixtyfour", batch(16, 4096)) == 256
    assert rate("decode", decode(0.5)) == 126
    assert rate("prompt", {"seconds": 2.0}) == 256


def test_a_disturbed_round_counts_only_where_there_is_no_other() -> None:
    def answers(mine: float, peer: float, others: float) -> dict[str, Any]:
        return {"one": {JAXPD: batch(mine, 64, others), TRANSFORMERS: batch(peer, 64)}}

    found = summarise([answers(1, 2, 0), answers(4, 2, 0.9)], ["one"], [JAXPD, TRANSFORMERS])
    assert found["tokens_per_s"]["one"][JAXPD] == {"median": 64, "min": 64, "max": 64}
    assert found["jaxpd_over_peer"]["one"][TRANSFORMERS]["max"] == 2
    assert found["disturbed"] == "1 of 4"
    found = summarise([answers(4, 2, 0.9)], ["one"], [JAXPD, TRANSFORMERS])
    assert found["jaxpd_over_peer"]["one"][TRANSFORMERS]["median"] == 0.5


def test_text_is_compared_where_both_have_it() -> None:
    rounds = [{"decode": {JAXPD: decode(1), LLAMA_F32: decode(1, "abxy")}, "one": {JAXPD: batch(1, 64)}}]
    assert same_text(rounds, [JAXPD, LLAMA_F32, LLAMA_64], str) == {LLAMA_F32: 0.5}
    assert same_text([{"one": {JAXPD: batch(1, 64)}}], [JAXPD, LLAMA_F32], str) == {}


def result(machine: str, seconds: float, metrics: list[str]) -> dict[str, Any]:
    answers = {"decode": {JAXPD: decode(seconds), LLAMA_F32: decode(1)}, "one": {JAXPD: batch(seconds, 64)}}
    engines = {JAXPD: {"peak_bytes": 1}, LLAMA_F32: {"peak_bytes": 1}}
    rounds = [{metric: answers[metric] for metric in metrics}]
    names = [JAXPD] if metrics == ["one"] else [JAXPD, LLAMA_F32]
    return {
        "machine": {"name": machine, "date": "today"},
        "threads": 2,
        "engines": engines,
        "missing": {},
        "memory": {},
        "same_text_as_jaxpd": {},
        **summarise(rounds, metrics, names),
    }


def test_an_earlier_result_is_compared_in_what_both_measured(capsys: pytest.CaptureFixture[str]) -> None:
    then, now = result("this", 2.0, ["decode"]), result("this", 1.0, ["decode"])
    assert then_and_now(now, then) == [
        ("decode", "tokens/s", JAXPD, 31.5, 63.0),
        ("decode", "tokens/s", LLAMA_F32, 63.0, 63.0),
        ("decode", "jaxpd / peer", LLAMA_F32, 0.5, 1.0),
    ]
    assert then_and_now(result("this", 1.0, ["one"]), then) == []
    show(now)
    compare(now, then)
    assert "31.50" in capsys.readouterr().out
    compare(now, result("that", 2.0, ["decode"]))
    shown = capsys.readouterr().out
    assert "another machine" in shown and "31.50" not in shown and "0.50" in shown
