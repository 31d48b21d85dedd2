"""An answer that was cut off goes on, here or elsewhere, exactly as if it had not been: `Request.outputs`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixCache
from jaxpd.engine import seed_of
from jaxpd.errors import InvalidArgument
from jaxpd.grammar import GrammarCompiler
from jaxpd.life import Stage
from jaxpd.policies.chunking import Costs
from jaxpd.request import FinishReason, Request, SamplingParams
from jaxpd.sequence import Sequence, State
from jaxpd.stats import read_sequence
from jaxpd.structured import StructuredOutput

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
SHORT, LONG = PROMPTS["len17"], PROMPTS["len100"]
PAGE = 16
Started = Callable[..., Any]
PLACES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "disaggregated": ("2x1", "1x2", {}),
    "uncached": ("2x1", "1x2", {"prefix_cache": False}),
    "local": ("1x1", "1x1", {"local_prefill": "160"}),
    "chunked": (None, None, {"mode": "chunked", "mesh": "1x1"}),
    "decoupled": (None, None, {"mode": "decoupled", "mesh": "1x1"}),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 7},
    "penalties": {
        "temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.3,
    },
    "filtered": {"temperature": 1.1, "seed": 9, "top_k": 40, "top_p": 0.9, "logprobs": 2},
    # held off until there are 20 tokens, and then one of them is soon there
    "min_tokens": {"stop_token_ids": tuple(range(0, 282, 3)), "min_tokens": 20, "max_tokens": 60},
    "stop": {"stop_token_ids": (123,)},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
}  # fmt: skip


def start(started: Started, place: str) -> Any:
    prefill, decode, config = PLACES[place]
    return started("smollm2", prefill, decode, **config)


def cuts(prompt_len: int, answer_len: int) -> list[int]:
    """After one token, where a page is full and one token behind it, and before the last one."""
    full = PAGE - prompt_len % PAGE
    return sorted({k for k in (1, full, full + 1, answer_len - 1) if 0 < k < answer_len})


def check_rest(replayed: Any, whole: Any, cut: int) -> None:
    assert replayed.token_ids == whole.token_ids, cut
    assert replayed.finish.reason is whole.finish.reason, replayed.finish.error
    assert replayed.finish.stop_token_id == whole.finish.stop_token_id
    usage = replayed.finish.usage
    assert usage.completion_tokens == len(whole.token_ids)
    assert usage.prompt_tokens == whole.finish.usage.prompt_tokens
    assert usage.cached_tokens <= usage.prompt_tokens
    assert len(replayed.finish.life.token_times) == len(whole.token_ids) - cut
    assert replayed.prompt_logprobs is None, "the client has them"
    rest = whole.logprobs[cut:]
    assert len(replayed.logprobs) == len(rest), "of new tokens only"
    for one, other in zip(replayed.logprobs, rest, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("place", PLACES)
def test_the_rest_is_that_of_the_whole_answer(place: str, started: Started) -> None:
    """However it is sampled, wherever it is cut, with the pages of the first time in the caches and without."""
    running = start(started, place)
    prompts = {"len17": SHORT["prompt_ids"], "len100": LONG["prompt_ids"]}
    cases = [(name, way) for name in prompts for way in WAYS]
    for name, way in cases:
        running.submit(f"{name}-{way}", prompts[name], **{"max_tokens": 24, **WAYS[way]})
    running.wait()
    replays = []
    for name, way in cases:
        whole = running.answers[f"{name}-{way}"]
        for cut in cuts(len(prompts[name]), len(whole.token_ids)):
            for salt in ("cold", ""):
                outputs = tuple(whole.token_ids[:cut])
                options = {"max_tokens": 24, **WAYS[way], "outputs": outputs, "cache_salt": salt and f"{way} {cut}"}
                replays.append((whole, cut, running.submit(f"{name}-{way}-{cut}-{salt}", prompts[name], **options)))
    running.wait(180.0)
    for whole, cut, replayed in replays:
        check_rest(replayed, whole, cut)
    assert running.answers["len17-greedy"].token_ids == SHORT["greedy_ids"][:24]
    assert running.answers["len17-stop"].finish.stop_token_id == 123
    held_off = running.answers["len17-min_tokens"]
    assert len(held_off.token_ids) > 20 and held_off.finish.reason is FinishReason.STOP
    running.assert_at_baseline()


@pytest.mark.heavy
@pytest.mark.parametrize("place", PLACES)
def test_a_grammar_goes_on_where_it_stood(place: str, started: Started) -> None:
    pytest.importorskip("llguidance")
    running = start(started, place)
    options: dict[str, Any] = {
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": False,
        "structured": StructuredOutput(kind="regex", text="[a-f]{14}-[0-9]{6}"),
    }
    whole = running.submit("whole", SHORT["prompt_ids"], **options)
    running.wait()
    assert whole.finish.reason is FinishReason.STOP
    for cut in cuts(len(SHORT["prompt_ids"]), len(whole.token_ids)):
        for salt in ("cold", ""):
            outputs, salt = tuple(whole.token_ids[:cut]), salt and f"{cut}"
            again = running.submit(f"r{cut}{salt}", SHORT["prompt_ids"], outputs=outputs, cache_salt=salt, **options)
            running.wait()
            check_rest(again, whole, cut)
    running.assert_at_baseline()


@pytest.mark.heavy
def test_a_sample_goes_on_by_itself(started: Started) -> None:
    """With its own seed it needs neither its number nor its siblings."""
    running = start(started, "disaggregated")
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.1}
    running.submit("many", LONG["prompt_ids"], n=3, seed=41, **options)
    running.wait()
    for sample in (1, 2):
        whole = running.answers[f"many/{sample}"]
        assert whole.token_ids != running.answers["many"].token_ids
        again = running.submit(
            f"r{sample}", LONG["prompt_ids"], seed=seed_of(41, sample), outputs=tuple(whole.token_ids[:7]), **options
        )
        running.wait()
        check_rest(again, whole, 7)


@pytest.mark.heavy
@pytest.mark.parametrize("place", ["disaggregated", "chunked"])
def test_what_the_caches_have_of_the_answer_is_not_computed_again(place: str, started: Started) -> None:
    running = start(started, place)
    prompt = [7, *LONG["prompt_ids"][:90]]  # 91 tokens, 5 full pages
    whole = running.submit("whole", prompt, max_tokens=40)
    running.wait()
    computed, cached = {}, {}
    for name, cut in (("first", 30), ("second", 34)):
        again = running.submit(name, prompt, max_tokens=40, outputs=tuple(whole.token_ids[:cut]))
        running.wait()
        check_rest(again, whole, cut)
        computed[name] = sum(m.tokens for m in again.finish.life.moments if m.stage is Stage.CHUNK)
        cached[name] = again.finish.usage.cached_tokens
    if place == "chunked":  # 121 and 125 tokens, of which it has decoded 7 full pages
        assert computed == {"first": 121 - 112, "second": 125 - 112}
        assert cached == {"first": 91, "second": 91}, "of the prompt"
    else:  # the prefill pool has what it has computed: the prompt, and then what the first one came with
        assert computed == {"first": 121 - 80, "second": 125 - 112}
        assert cached == {"first": 80, "second": 91}


@pytest.mark.heavy
def test_only_pages_that_the_decode_replica_lacks_cross(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start(started, "disaggregated")
    [decode] = running.engine._mover.reservations.decode
    crossed: list[tuple[int, int]] = []
    piece = decode.piece

    def noted(seq: Any, chunk: Any, *rest: Any) -> None:
        crossed.append((chunk.first, chunk.count))
        piece(seq, chunk, *rest)

    prompt = [9, *LONG["prompt_ids"][:90]]
    whole = running.submit("whole", prompt, max_tokens=40)
    running.wait()
    monkeypatch.setattr(decode, "piece", noted)
    cases: dict[int, list[tuple[int, int]]] = {
        30: [(7, 1)],  # 121 tokens: the eighth page is partly theirs
        21: [],  # 112 tokens: all seven are there
        39: [],  # ends with its first token
    }
    for cut, pieces in cases.items():
        crossed.clear()
        again = running.submit(f"r{cut}", prompt, max_tokens=40, outputs=tuple(whole.token_ids[:cut]))
        running.wait()
        check_rest(again, whole, cut)
        assert crossed == pieces, cut
        assert (again.finish.life.first(Stage.ACCEPTED) is None) == (cut == 39)
    for turn in ("cold", "warm"):  # it ends within the page that it begins in: the full ones are found all the same
        crossed.clear()
        options = {"max_tokens": 34, "outputs": tuple(whole.token_ids[:30]), "cache_salt": "another"}
        again = running.submit(turn, prompt, **options)
        running.wait()
        assert again.token_ids == whole.token_ids[:34]
        if turn == "cold":
            assert sum(count for _, count in crossed) == 8, "pages of prompt and answer"
        else:
            assert crossed == [(7, 1)]
    running.assert_at_baseline()


@pytest.mark.heavy
def test_what_was_said_counts_where_a_prompt_is_worth_a_hand_off(started: Started) -> None:
    running = started("smollm2", "1x1", "1x1", local_prefill="100")
    prompt = [11, *LONG["prompt_ids"][:90]]
    whole = running.submit("whole", prompt, max_tokens=40)
    running.wait()
    for cut in (9, 10):
        outputs, salt = tuple(whole.token_ids[:cut]), f"{cut}"
        again = running.submit(f"r{cut}", prompt, max_tokens=40, outputs=outputs, cache_salt=salt)
        running.wait()
        check_rest(again, whole, cut)
        assert (again.finish.life.first(Stage.ACCEPTED) is None) == (91 + cut <= 100), cut


@pytest.mark.heavy
def test_one_chunk_stays_one_where_the_hit_is_longer_than_the_prompt(started: Started) -> None:
    """A prompt is cut to hide its hand-off only behind chunks that are computed."""
    running = start(started, "disaggregated")
    [pool] = running.engine._mover.reservations.prefill
    prompt = [13, *LONG["prompt_ids"][:90]]
    running.submit("before", prompt, max_tokens=32, outputs=(5,) * 30)  # 7 full pages
    running.wait()
    asked = request((5,) * 42, prompt=tuple(prompt), max_tokens=60)
    seq = running.engine._sequence(asked, 0, None)
    seq.prefill_lease = pool.acquire(0, seq.chain, 9, whole=False)
    assert seq.prefill_lease is not None and seq.prefill_lease.hit_tokens == 112 > seq.prompt_len
    seq.cached, seq.hit_tokens = 112, seq.prompt_len
    seq.move(State.PREFILLING)
    costs = Costs(prefill_s_per_token=1e-6, step_s=1e-6, transfer_s_per_token=1.0)
    assert pool._chunk(seq, costs) == 91 + 42 - 112
    seq.cached += 1
    assert pool._chunk(seq, costs) < 91 + 42 - 113, "behind another chunk it is"
    seq.release()
    running.assert_at_baseline()


@pytest.mark.heavy
@pytest.mark.parametrize("place", [("1x1", "1x1", {}), PLACES["chunked"]], ids=["disaggregated", "chunked"])
def test_one_that_gives_way_on_top_of_it_goes_on_too(place: tuple[Any, Any, dict[str, Any]], started: Started) -> None:
    prefill, decode, config = place
    roomy = started("smollm2", prefill, decode, **config)
    pages = 13 * roomy.engine.limits.pools[0].page_bytes
    cramped = started("smollm2", prefill, decode, reserve_tokens=1, kv_memory=pages, **config)
    options: dict[str, Any] = {"max_tokens": 100, "temperature": 0.9, "presence_penalty": 0.7, "logprobs": 1}
    for i in range(4):
        roomy.submit(f"r{i}", [i + 3] * 9, seed=i, **options)
    roomy.wait()
    for i in range(4):
        outputs = tuple(roomy.answers[f"r{i}"].token_ids[: 20 + i])
        cramped.submit(f"r{i}", [i + 3] * 9, seed=i, outputs=outputs, **options)
    cramped.wait()
    assert sum(a.finish.life.count(Stage.PREEMPTED) for a in cramped.answers.values()) > 0
    for i in range(4):
        check_rest(cramped.answers[f"r{i}"], roomy.answers[f"r{i}"], 20 + i)
    cramped.assert_at_baseline()


# what cannot go on ----------------------------------------------------------------------------------------------------


def request(outputs: tuple[int, ...], prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> Request:
    options = SamplingParams(**{"max_tokens": 4, "seed": 0, **params})
    return Request(request_id="r", prompt_ids=prompt, params=options, arrival_s=0.0, outputs=outputs)


@pytest.mark.parametrize(
    ("outputs", "params", "field", "words"),
    [
        ((5, 283), {}, "outputs", "holds 283, which is outside the vocabulary 0..282"),
        ((5, -1), {}, "outputs", "holds -1"),
        ((5, 6, 7, 8), {}, "outputs", "4 tokens of max_tokens=4"),
        ((5,), {"n": 2}, "n", "n=2 must be 1"),
        ((5,), {"seed": None}, "seed", "give the seed"),
    ],
)
def test_outputs_that_cannot_be_are_refused(
    outputs: tuple[int, ...], params: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        request(outputs, **params).validate(vocab_size=283, max_model_len=64)
    assert refused.value.field == field
    request((5, 6, 7)).validate(vocab_size=283, max_model_len=64)


def sequence(asked: Request, page_size: int = PAGE, **more: Any) -> Sequence:
    chain = Chain(page_size, asked.prompt_ids + asked.outputs)
    return Sequence(request=asked, eos_ids=frozenset({9}), chain=chain, **more)


def test_an_answer_that_has_ended_does_not_go_on() -> None:
    with pytest.raises(InvalidArgument, match="token 9 at index 1"):
        sequence(request((5, 9)))
    with pytest.raises(InvalidArgument, match="token 6 at index 0"):
        sequence(request((6, 5), stop_token_ids=(6,)))
    assert sequence(request((5, 9), ignore_eos=True)).outputs == [5, 9]


def test_outputs_must_follow_their_grammar() -> None:
    pytest.importorskip("llguidance")
    from jaxpd.checkpoints import resolve
    from jaxpd.progress import SilentProgress

    checkpoint = resolve(str(TINY), progress=SilentProgress())
    tokenizer, config = checkpoint.tokenizer(), checkpoint.config
    compiler = GrammarCompiler(tokenizer, config.vocab_size, config.eos_token_ids)
    compiled = compiler.compile(StructuredOutput(kind="regex", text="abx"))
    a, b, x, y = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abxy")
    seq = sequence(request((a, b)), grammar=compiled.new_state())
    assert seq.add_output(x, 0.0) == (FinishReason.STOP, None), "each was taken once"
    with pytest.raises(InvalidArgument, match=f"do not match structured_output: token {y}") as refused:
        sequence(request((a, y)), grammar=compiled.new_state())
    assert refused.value.field == "outputs"
    with pytest.raises(InvalidArgument, match="complete structured_output at index 2"):
        sequence(request((a, b, x)), grammar=compiled.new_state())


def test_it_waits_and_is_shown_as_what_it_is() -> None:
    seq = sequence(request((5, 6, 7, 8, 5), prompt=tuple(range(10, 20)), max_tokens=9), page_size=4)
    assert (seq.fill_len, seq.prompt_left, seq.sampled, len(seq.chain.keys)) == (15, 15, 5, 3)
    assert seq.reserved_len(100) == 15 + 4, "as many as can still come"
    assert seq.token_ids(8, 12) == (18, 19, 5, 6)
    shown = read_sequence(seq, {})
    assert (shown.prompt_tokens, shown.computed, shown.tokens) == (10, 0, 5)
    prefill = PrefixCache(8, 2, 4)
    seq.prefill_lease = prefill.acquire(seq.chain, 4)
    seq.move(State.PREFILLING)
    seq.cached = 12
    shown = read_sequence(seq, {prefill: ("prefill", 0, 0)})
    assert (shown.computed, shown.holds[0].filled) == (10, 3)
    assert seq.add_output(6, 0.0) is None
    assert [seq.add_output(t, 0.0) for t in (6, 6)] == [None, None]
    assert seq.add_output(6, 0.0) == (FinishReason.LENGTH, None)
