"""The Python door: prompts of every form, streams, stop strings, and errors before anything runs."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest

from jaxpd import LLM, FinishReason, SamplingParams
from jaxpd.errors import InvalidArgument, NotFound
from jaxpd.llm import Completion, Delta

FOLDER = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(FOLDER), prefill_mesh="2x1", decode_mesh="1x2", max_model_len=160, max_num_batched_tokens=32, max_num_seqs=4
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
