"""The Python door: prompts of every form, streams, stop strings, and errors before anything runs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import pytest

from jaxpd import LLM, FinishReason, SamplingParams
from jaxpd.errors import InvalidArgument, NotFound
from jaxpd.life import Stage
from jaxpd.llm import Completion, Delta
from jaxpd.request import Event, FinishEvent

FOLDER = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=100, ignore_eos=True, n=3, temperature=1.0, seed=5)
PROMPT = EXPECTED["prompts"][2]["prompt_ids"]


def stop_of(first: Completion, others: list[Completion]) -> str:
    """Three characters of one text, from its 6th on, that the other texts do not have."""
    found = (first.text[i : i + 3] for i in range(5, len(first.text) - 2))
    return next(s for s in found if not any(s in other.text for other in others))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(FOLDER),
        prefill_mesh="2x1",
        decode_mesh="1x2",
        max_model_len=160,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        precompile=False,
        max_queued_requests=2,  # fewer than most calls here have samples: what does not fit waits for its turn
    ) as made:
        yield made


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    prompts = EXPECTED["prompts"]
    answers = llm.generate([p["prompt_ids"] for p in prompts], GREEDY)
    assert [list(a.token_ids) for a in answers] == [p["greedy_ids"] for p in prompts]
    assert [a.usage.prompt_tokens for a in answers] == [len(p["prompt_ids"]) for p in prompts]


def test_text_and_chat_are_tokenized_as_the_tokenizer_says(llm: LLM) -> None:
    text, chat = EXPECTED["texts"][0], EXPECTED["chat"][0] if isinstance(EXPECTED["chat"], list) else EXPECTED["chat"]
    ids = text["ids"] if "ids" in text else text["prompt_ids"]
    assert list(llm.generate(text["text"], GREEDY)[0].prompt_ids) == ids
    chat_ids = chat["ids"] if "ids" in chat else chat["prompt_ids"]
    assert list(llm.generate(chat["messages"], GREEDY)[0].prompt_ids) == chat_ids


def test_logprobs_come_with_deltas_and_completions(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
    *deltas, last = llm.stream(EXPECTED["prompts"][2]["prompt_ids"], asked)
    assert isinstance(last, Completion) and last.logprobs is not None and len(last.logprobs) == 6
    assert last.logprobs == tuple(lp for d in deltas for lp in d.logprobs or ())  # type: ignore[union-attr]
    for token, logprob in zip(last.token_ids, last.logprobs, strict=True):  # greedy: the likeliest is what came
        assert logprob.top[0] == (token, logprob.logprob) and len(logprob.top) == 3
    without = llm.generate([EXPECTED["prompts"][2]["prompt_ids"]], GREEDY)[0]
    assert without.logprobs is None


def test_one_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(a.token_ids) for a in llm.generate([[1, 2], [3]], params)] == [1, 5]
    with pytest.raises(InvalidArgument, match="2 sampling params for 1 prompts"):
        llm.generate([[1]], params)


def test_a_stream_adds_up_to_its_completion(llm: LLM) -> None:
    *deltas, last = llm.stream(EXPECTED["prompts"][2]["prompt_ids"], GREEDY)
    assert isinstance(last, Completion) and all(isinstance(d, Delta) for d in deltas)
    assert [t for d in deltas for t in d.token_ids] == EXPECTED["prompts"][2]["greedy_ids"] == list(last.token_ids)
    assert "".join(d.text for d in deltas) == last.text == llm.tokenizer.decode(last.token_ids)


def test_a_stop_string_ends_it_and_never_leaks(llm: LLM) -> None:
    full = llm.generate([EXPECTED["prompts"][3]["prompt_ids"]], GREEDY)[0].text
    stop = full[5:8]
    *deltas, last = llm.stream(
        EXPECTED["prompts"][3]["prompt_ids"], SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,))
    )
    assert isinstance(last, Completion)
    assert last.text == full[: full.index(stop)] == "".join(d.text for d in deltas)
    assert last.finish_reason is FinishReason.STOP


def test_samples_come_one_after_another_for_each_prompt(llm: LLM) -> None:
    prompts = EXPECTED["prompts"][:3]
    params = [dataclasses.replace(GREEDY, n=n) for n in (2, 1, 3)]
    answers = llm.generate([p["prompt_ids"] for p in prompts], params)
    assert [a.sample for a in answers] == [0, 1, 0, 0, 1, 2]
    expected = [prompts[i]["greedy_ids"] for i in (0, 0, 1, 2, 2, 2)]
    assert [list(a.token_ids) for a in answers] == expected
    drawn = llm.generate([PROMPT], DRAWN)
    assert len({a.token_ids for a in drawn}) == 3  # each has a seed of its own; the first one's is the request's
    alone = llm.generate([PROMPT], dataclasses.replace(DRAWN, n=1))
    assert [a.token_ids for a in alone] == [drawn[0].token_ids] and len({a.request_id for a in drawn}) == 1


def test_deltas_say_which_sample_they_belong_to(llm: LLM) -> None:
    params = dataclasses.replace(DRAWN, logprobs=0)
    parts = list(llm.stream(PROMPT, params))
    for i, done in enumerate(llm.generate([PROMPT], params)):
        *deltas, last = [part for part in parts if part.sample == i]
        assert isinstance(last, Completion) and all(isinstance(d, Delta) for d in deltas)
        assert tuple(t for d in deltas for t in d.token_ids) == last.token_ids == done.token_ids
        assert "".join(d.text for d in deltas) == last.text == done.text
        logprobs = tuple(lp for d in deltas for lp in d.logprobs or ())  # type: ignore[union-attr]
        assert logprobs == last.logprobs and len(logprobs) == DRAWN.max_tokens
    assert isinstance(parts[-1], Completion) and {part.sample for part in parts} == {0, 1, 2}


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stop_string_ends_only_the_sample_that_wrote_it(llm: LLM, stopped: int) -> None:
    full = llm.generate([PROMPT], DRAWN)
    stop = stop_of(full[stopped], [a for a in full if a.sample != stopped])
    answers = llm.generate([PROMPT], dataclasses.replace(DRAWN, stop=(stop,)))
    for before, now in zip(full, answers, strict=True):
        assert now.life is not None
        if now.sample == stopped:
            assert now.text == before.text[: before.text.index(stop)] and now.finish_reason is FinishReason.STOP
            assert now.token_ids == before.token_ids[: len(now.token_ids)] and len(now.token_ids) < 100
            assert now.usage.completion_tokens == len(now.token_ids) and now.stop_token_id is None
            assert now.life.reason == "abort"  # the engine was told, and did not go on to the end
        else:
            assert (now.text, now.finish_reason) == (before.text, FinishReason.LENGTH) and now.life.reason == "length"


def test_a_stop_string_is_found_while_another_prompt_runs(llm: LLM) -> None:
    full = llm.generate([PROMPT], dataclasses.replace(DRAWN, n=1))[0]
    stop = full.text[5:8]
    other = SamplingParams(max_tokens=100, ignore_eos=True)
    _, ended = llm.generate([[1, 2, 3], PROMPT], [other, dataclasses.replace(DRAWN, n=1, stop=(stop,))])
    assert ended.text == full.text[: full.text.index(stop)]
    assert ended.life is not None and ended.life.reason == "abort"


def test_stop_tokens_are_in_the_ids_and_not_in_the_text(llm: LLM) -> None:
    ids = EXPECTED["prompts"][2]["greedy_ids"]
    at = next(i for i, t in enumerate(ids) if i > 3 and t not in ids[:i] and llm.tokenizer.token_bytes(t))
    (done,) = llm.generate([PROMPT], dataclasses.replace(GREEDY, stop_token_ids=(ids[at],)))
    assert list(done.token_ids) == ids[: at + 1] and done.stop_token_id == ids[at]
    assert done.finish_reason is FinishReason.STOP
    assert done.text == llm.tokenizer.decode(ids[:at]) != llm.tokenizer.decode(ids[: at + 1])


def test_the_prompt_is_scored_as_the_answer_was(llm: LLM) -> None:
    """Log probabilities of an answer come back as those of a prompt that ends with it, whatever the cache has."""
    answer = llm.generate([PROMPT], dataclasses.replace(GREEDY, logprobs=2))[0]
    assert answer.logprobs is not None and answer.prompt_logprobs is None
    longer = [*PROMPT, *answer.token_ids]
    for _ in range(2):
        first, second = llm.generate([longer], SamplingParams(max_tokens=2, n=2, prompt_logprobs=2))
        assert first.prompt_logprobs is not None and second.prompt_logprobs is None
        assert len(first.prompt_logprobs) == len(longer) - 1
        for scored, sampled in zip(first.prompt_logprobs[len(PROMPT) - 1 :], answer.logprobs, strict=True):
            assert scored.logprob == pytest.approx(sampled.logprob, abs=1e-4)
            assert [i for i, _ in scored.top] == [i for i, _ in sampled.top]
    *_, done = llm.stream([7], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert isinstance(done, Completion) and done.prompt_logprobs == ()


def test_a_salt_keeps_prompts_apart(llm: LLM) -> None:
    prompt, one = list(range(3, 63)), SamplingParams(max_tokens=1)

    def cached(salt: str) -> tuple[int, int]:
        (made,) = llm.generate([prompt], one, cache_salt=salt)
        *_, streamed = llm.stream(prompt, one, cache_salt=salt)
        assert isinstance(streamed, Completion)
        return made.usage.cached_tokens, streamed.usage.cached_tokens

    assert cached("one tenant") == (0, 48)
    assert cached("another") == (0, 48)
    assert cached("one tenant") == (48, 48)


def test_priority_is_the_requests(llm: LLM) -> None:
    for call in (llm.generate, lambda *args, **kwargs: list(llm.stream(*args, **kwargs))):
        with pytest.raises(InvalidArgument, match=f"priority={2**31} must be"):
            call([1], GREEDY, priority=2**31)
        (*_, done) = call([1], SamplingParams(max_tokens=1), priority=-3)
        assert isinstance(done, Completion) and done.finish_reason is FinishReason.LENGTH


def test_a_completion_has_its_life(llm: LLM) -> None:
    (done,) = llm.generate([PROMPT], GREEDY)
    assert done.life is not None and done.life.timings() == done.timings
    stages = (Stage.ARRIVED, Stage.ADMITTED, Stage.CHUNK, Stage.OFFERED, Stage.ACCEPTED, Stage.FINISHED)
    times = [done.life.first(stage) for stage in stages]
    assert None not in times and times == sorted(times)  # type: ignore[type-var]
    assert len(done.life.token_times) == len(done.token_ids) and done.life.reason == "length"


def test_leaving_a_stream_aborts_all_its_samples(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    deliver = llm.engine._on_events

    def record(new: list[Event]) -> None:
        events.extend(new)
        deliver(new)

    monkeypatch.setattr(llm.engine, "_on_events", record)
    stream = llm.stream(PROMPT, DRAWN)
    while (part := next(stream)).sample == 0:
        assert isinstance(part, Delta)
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.drain(20.0)
    llm.engine._state = "ready"
    assert sorted((e.sample, e.reason) for e in events if isinstance(e, FinishEvent)) == [
        (i, FinishReason.ABORT) for i in range(3)
    ]
    assert not llm._inboxes


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.drain(20.0)
    llm.engine._state = "ready"
    assert all(r.free_pages == r.num_pages for r in llm.engine.stats().replicas)


def test_errors_come_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="prompt"):
        llm.generate([[]], GREEDY)
    with pytest.raises(InvalidArgument, match="160"):
        llm.generate([[1] * 150], GREEDY)
    with pytest.raises(InvalidArgument, match="prefil_mesh"):
        LLM(str(FOLDER), prefil_mesh="1x1")
    with pytest.raises(InvalidArgument, match="8x0"):
        LLM(str(FOLDER), prefill_mesh="8x0")
    with pytest.raises(NotFound, match="smollm2-135m"):
        LLM("no-such-model")
