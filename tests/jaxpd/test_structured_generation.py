"""Structured output through the engine: what comes out always matches, wherever it is computed and beside whom."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.errors import InvalidArgument
from jaxpd.life import Stage
from jaxpd.request import FinishReason
from jaxpd.structured import StructuredOutput

pytest.importorskip("llguidance")
TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
Started = Callable[..., Any]
pytestmark = pytest.mark.heavy
PLACES: list[tuple[Any, Any, dict[str, Any]]] = [
    ("1x1", "1x1", {}),
    ("2x1", "1x2", {"local_prefill": "10"}),
    (None, None, {"mode": "chunked", "mesh": "2x1"}),
    (None, None, {"mode": "decoupled", "mesh": "1x1"}),
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]{1,2}"},  # a random model would fill its answer with spaces
}
KINDS: dict[str, StructuredOutput] = {
    "schema": StructuredOutput(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": StructuredOutput(kind="regex", text="[a-f]{2,6}-[0-9]{1,3}"),
    "choice": StructuredOutput(kind="choice", choices=("yes", "no", "maybe so")),
    "grammar": StructuredOutput(kind="grammar", text='start: "(" start ")" | "x"'),
}


def check(kind: str, text: str) -> None:
    if kind == "schema":
        value = json.loads(text)
        assert set(value) == {"ok", "n"} and isinstance(value["ok"], bool) and 0 <= value["n"] <= 99
    elif kind == "regex":
        assert re.fullmatch(KINDS["regex"].text, text)
    elif kind == "choice":
        assert text in KINDS["choice"].choices
    else:
        assert re.fullmatch(r"(\(*)x(\)*)", text) and text.count("(") == text.count(")")


def text_of(running: Any, answer: Any) -> str:
    return running.engine.checkpoint.tokenizer().decode(answer.token_ids)


@pytest.mark.parametrize(("prefill", "decode", "config"), PLACES)
def test_answers_match_and_plain_ones_beside_them_are_the_reference(
    prefill: Any, decode: Any, config: dict[str, Any], started: Started
) -> None:
    running = started("smollm2", prefill, decode, **config)
    for round_ in range(3):
        for i, (kind, structured) in enumerate(KINDS.items()):
            options = {"temperature": 1.0 if round_ else 0.0, "seed": 10 * round_ + i, "ignore_eos": False}
            running.submit(
                f"{kind}-{round_}", PROMPTS["len17"]["prompt_ids"], max_tokens=100, structured=structured, **options
            )
        running.submit(f"plain-{round_}", PROMPTS["len40"]["prompt_ids"], max_tokens=24)
    running.wait()
    for round_ in range(3):
        for kind in KINDS:
            answer = running.answers[f"{kind}-{round_}"]
            if kind == "grammar" and answer.finish.reason is FinishReason.LENGTH:
                continue  # it may open brackets for ever
            assert answer.finish.reason is FinishReason.STOP, (kind, answer.finish.error)
            check(kind, text_of(running, answer))
        assert running.answers[f"plain-{round_}"].token_ids == PROMPTS["len40"]["greedy_ids"][:24]
    running.assert_at_baseline()


def test_samples_options_and_log_probabilities_go_with_it(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    running.submit(
        "many",
        PROMPTS["len17"]["prompt_ids"],
        n=6,
        max_tokens=40,
        temperature=1.3,
        seed=3,
        structured=KINDS["regex"],
        ignore_eos=False,
        presence_penalty=1.0,
        top_k=50,
        logprobs=3,
    )
    running.wait()
    texts = set()
    for name, answer in running.answers.items():
        assert answer.finish.reason is FinishReason.STOP, name
        check("regex", text_of(running, answer))
        assert len(answer.logprobs) == len(answer.token_ids), "those of the model, before the mask"
        texts.add(text_of(running, answer))
    assert len(texts) > 1
    running.assert_at_baseline()


def test_it_ends_where_nothing_can_follow_whatever_the_options_say(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    one = StructuredOutput(kind="choice", choices=("yes",))
    cases: list[dict[str, Any]] = [{"ignore_eos": True}, {"min_tokens": 30, "ignore_eos": False}, {"max_tokens": 60}]
    for i, options in enumerate(cases):
        running.submit(f"r{i}", [5, 6], **{"max_tokens": 40, "structured": one, **options})
    running.wait()
    for answer in running.answers.values():
        assert answer.finish.reason is FinishReason.STOP and text_of(running, answer) == "yes"
    running.assert_at_baseline()


def test_a_sequence_that_gives_way_goes_on_in_its_grammar(started: Started) -> None:
    probe = started("smollm2", "1x1", "1x1").engine.limits.pools[0]
    running = started("smollm2", "1x1", "1x1", reserve_tokens=1, kv_memory=13 * probe.page_bytes)
    long = StructuredOutput(kind="regex", text="([a-f][0-9]){30,40}")
    for i in range(4):
        running.submit(f"r{i}", [5 + i] * 9, max_tokens=120, temperature=1.0, seed=i, structured=long)
    running.wait()
    for answer in running.answers.values():
        assert answer.finish.reason is FinishReason.STOP, answer.finish.error
        assert re.fullmatch(long.text, text_of(running, answer))
    assert sum(a.finish.life.count(Stage.PREEMPTED) for a in running.answers.values()) > 0
    running.assert_at_baseline()


def test_one_whose_grammar_gives_up_ends_alone(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxpd.grammar import GrammarState

    running = started("smollm2", "1x1", "1x1")
    mask, calls = GrammarState.mask, [0]

    def failing(self: GrammarState, into_W: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise InvalidArgument("structured_output is too complex", field="structured_output")
        mask(self, into_W)

    monkeypatch.setattr(GrammarState, "mask", failing)
    bad = running.submit("bad", [5, 6], max_tokens=60, structured=KINDS["regex"], temperature=1.0)
    plain = running.submit("plain", PROMPTS["len40"]["prompt_ids"], max_tokens=24)
    running.wait()
    assert bad.finish.reason is FinishReason.ERROR and "too complex" in str(bad.finish.error)
    assert plain.token_ids == PROMPTS["len40"]["greedy_ids"][:24]
    running.assert_at_baseline()


def test_bad_grammars_are_refused_at_once(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1")
    for structured, message in (
        (StructuredOutput(kind="regex", text="("), "structured_output"),
        (StructuredOutput(kind="json_schema", text="{"), "must be a JSON schema"),
        (StructuredOutput(kind="poem"), "must be one of"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            running.submit("bad", [5], max_tokens=5, structured=structured)
    running.assert_at_baseline()
