"""Two engines that hand over: tokens as in one, one end each whatever goes wrong, and everything given back."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpd.errors import HandoffFailed, InvalidArgument
from jaxpd.remote.messages import FirstToken, Message, NotReserved, Piece, Reserve, Reserved
from jaxpd.request import DecodeLeg, FinishReason, PrefillLeg, Request, SamplingParams, TokensEvent
from jaxpd.structured import StructuredOutput
from meshes.transfer.messages import Ack, Refuse
from tests.jaxpd.remote.pair import Pair

TINY = pathlib.Path(__file__).parents[2] / "data" / "tiny" / "smollm2"
PROMPTS = {p["name"]: p for p in json.loads((TINY / "expected.json").read_text())["prompts"]}
SMALL: dict[str, Any] = {"precompile": False, "max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 4}
LONG = [(i * 37) % 250 + 1 for i in range(100)]  # four chunks
REASONS = ("copy", "peer", "refused", "lease")


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[..., Pair]]:
    made: dict[Any, Pair] = {}

    def make(prefill: str, decode: str, lease_s: float = 30.0, **of_decode: Any) -> Pair:
        key = (prefill, decode, lease_s, *of_decode.items())
        if key not in made:
            made[key] = Pair(TINY, {**SMALL, "mesh": prefill}, {**SMALL, "mesh": decode, **of_decode}, lease_s=lease_s)
        return made[key]

    yield make
    for pair in made.values():
        pair.close()


@pytest.fixture
def pair(pairs: Callable[..., Pair]) -> Iterator[Pair]:
    """2x1 -> 1x2; a test may do to it what it wants, short of closing the engines."""
    pair = pairs("2x1", "1x2")
    yield pair
    pair.to_decode.filter = pair.to_prefill.filter = lambda message: [message]


def expected(pair: Pair, prompt: list[int], count: int, **params: Any) -> list[int]:
    """What the pair answers when nothing is done to it."""
    name = f"undisturbed {time.monotonic()}"
    tokens = pair.generate(name, prompt, max_tokens=count, **params)
    pair.settle()
    return tokens


def hold(peer: Any, kind: type) -> list[Message]:
    """Messages of a kind that are sent to `peer` are kept back in the list that is returned."""
    held: list[Message] = []

    def keep(message: Message) -> list[Message]:
        if isinstance(message, kind):
            held.append(message)
            return []
        return [message]

    peer.filter = keep
    return held


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(("prefill", "decode"), [("8x1", "1x2"), ("2x1", "4x1"), ("1x2", "2x2")])
def test_tokens_are_the_references_on_unequal_meshes(prefill: str, decode: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(prefill, decode)
    for turn in ("cold", "warm"):
        for name, prompt in PROMPTS.items():
            pair.submit(f"{turn} {name}", prompt["prompt_ids"], max_tokens=24, legs="PD" if turn == "cold" else "DP")
        for name, prompt in PROMPTS.items():
            ends = pair.ends(f"{turn} {name}")
            assert ends["D", 0].reason is FinishReason.LENGTH
            assert pair.tokens(f"{turn} {name}") == prompt["greedy_ids"], (turn, name)
            assert ends["D", 0].usage.completion_tokens == 24
    pair.settle()
    assert pair.decode.stats().crossed_bytes > 0


def test_what_the_decode_engine_has_is_not_sent_again(pair: Pair) -> None:
    prompt = [7, *LONG[:80]]
    one = pair.generate("not seen before", prompt, max_tokens=4)
    sent = len([m for m in pair.to_decode.sent if isinstance(m, Piece)])
    assert sent
    assert pair.generate("seen before", prompt, max_tokens=4) == one
    again = [m for m in pair.to_decode.sent if isinstance(m, Piece)][sent:]
    assert [(m.first, m.count) for m in again] == [(5, 1)]  # 81 tokens: the last page is not full
    pair.settle()


def test_a_request_that_ends_with_its_first_token_needs_no_decode_engine(pair: Pair) -> None:
    pair.submit("short", LONG, legs="P", max_tokens=1)
    assert pair.end("short", "P").reason is FinishReason.LENGTH
    assert len(pair.tokens("short")) == 1
    pair.settle()


def test_a_stop_token_at_the_first_place_frees_what_was_reserved(pair: Pair) -> None:
    [token] = expected(pair, LONG, 2)[:1]
    pair.submit("stops", LONG, max_tokens=8, stop_token_ids=(token,))
    ends = pair.ends("stops")
    assert ends["P", 0].reason is FinishReason.STOP and ends["P", 0].stop_token_id == token
    assert ends["D", 0].reason is FinishReason.ABORT  # it was told to forget it
    pair.settle()


def test_samples_compute_the_prompt_once_and_decode_each(pair: Pair) -> None:
    pair.submit("three", LONG, max_tokens=8, n=3, temperature=0.9, seed=5)
    ends = pair.ends("three", samples=3)
    assert {ends["D", i].reason for i in range(3)} == {FinishReason.LENGTH}
    assert len({tuple(pair.tokens("three", i)) for i in range(3)}) == 3
    pair.settle()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "seed": 3},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logprobs": 2},
        {"min_tokens": 6, "ignore_eos": False},
        {"structured": StructuredOutput(kind="regex", text="[a-z]{3}[0-9]{3}"), "ignore_eos": False},
    ],
    ids=lambda params: next(iter(params)),
)
def test_options_give_the_tokens_of_one_engine(params: dict[str, Any], pair: Pair, started: Any) -> None:
    alone = started("smollm2", "2x1", "1x2")
    answer = alone.submit("alone", LONG, max_tokens=12, **params)
    alone.wait()
    name = f"apart {next(iter(params))}"
    pair.submit(name, LONG, max_tokens=12, **params)
    end = pair.ends(name)["D", 0]
    assert (pair.tokens(name), end.reason) == (answer.token_ids, answer.finish.reason)
    if "logprobs" in params:
        mine = [x for _, e in pair.events[name] if isinstance(e, TokensEvent) for x in e.logprobs or ()]
        assert [x.logprob for x in mine] == pytest.approx([x.logprob for x in answer.logprobs], abs=1e-5)
    pair.settle()


# -- legs and messages in any order, late, twice, never


def test_the_reservation_may_be_asked_for_before_the_leg_comes(pair: Pair) -> None:
    options = {"max_tokens": 6, "ignore_eos": True, "seed": 0}
    pair.start("P", "early", LONG, [42], options)
    until(lambda: Reserve(42) in pair.to_decode.sent)
    time.sleep(0.05)
    assert not any(isinstance(e, TokensEvent) for _, e in pair.events["early"])
    pair.start("D", "early", LONG, [42], options)
    assert pair.ends("early")["D", 0].reason is FinishReason.LENGTH
    pair.settle()


@pytest.mark.parametrize("kind", [Reserve, Piece, FirstToken, Reserved, Ack])
def test_messages_that_come_twice_change_nothing(kind: type, pair: Pair) -> None:
    tokens = expected(pair, LONG, 8)

    def twice(message: Message) -> list[Message]:
        return [message, message] if isinstance(message, kind) else [message]

    pair.to_decode.filter = pair.to_prefill.filter = twice
    assert pair.generate(f"twice {kind.__name__}", [5, *LONG], max_tokens=2)
    assert pair.generate(f"twice again {kind.__name__}", LONG, max_tokens=8) == tokens
    pair.settle()


def test_a_lost_ack_is_ended_by_the_lease(pairs: Callable[..., Pair]) -> None:
    pair = pairs("2x1", "1x2", lease_s=3.0)
    pair.generate("compiles", [10, *LONG], max_tokens=4)
    lost = hold(pair.to_prefill, Ack)
    assert len(pair.generate("ack lost", [11, *LONG], max_tokens=4)) == 4  # the answer does not wait for it
    assert lost and pair.prefill.stats().staging_bytes > 0
    pair.settle()
    pair.to_prefill.filter = lambda message: [message]
    assert len(pair.generate("next", LONG, max_tokens=4)) == 4
    pair.settle()


def test_an_offer_that_nobody_takes_ends_with_its_lease(pairs: Callable[..., Pair]) -> None:
    pair = pairs("2x1", "1x2", lease_s=3.0)
    lost = hold(pair.to_decode, Piece)
    pair.submit("never pulled", [12, *LONG], max_tokens=4)
    until(lambda: lost)
    until(lambda: pair.prefill.stats().staging_bytes == 0)
    pair.decode.abort("never pulled")  # what a router does when it is told
    pair.prefill.abort("never pulled")
    pair.ends("never pulled")
    pair.settle()
    pair.to_decode.filter = lambda message: [message]


def test_a_pull_that_fails_ends_the_request_here_and_there(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    link = pair.to_prefill.transport._link

    def broken(*args: Any) -> Any:
        raise OSError("the link is down")

    monkeypatch.setattr(link, "pull", broken)
    pair.submit("failed pull", [13, *LONG], max_tokens=4)
    end = pair.end("failed pull", "D")
    assert isinstance(end.error, HandoffFailed) and end.error.reason == "copy"
    pair.ends("failed pull")
    pair.settle()
    monkeypatch.undo()
    assert len(pair.generate("next after a failed pull", [13, *LONG], max_tokens=4)) == 4
    pair.settle()


def test_a_piece_that_comes_too_late_is_refused(pair: Pair) -> None:
    held = hold(pair.to_decode, Piece)
    pair.submit("too late", [14, *LONG], max_tokens=4)
    until(lambda: held)
    pair.decode.abort("too late")
    late = held[0]
    assert isinstance(late, Piece)
    pair.decode.side.received(pair.to_prefill, late)
    assert [m.id for m in pair.to_prefill.sent[-1:] if isinstance(m, Refuse)] == [late.offers[0].id]
    pair.prefill.abort("too late")
    pair.settle()


def test_a_full_decode_engine_holds_the_prompts_back(pairs: Callable[..., Pair]) -> None:
    pair = pairs("1x1", "1x1", max_num_seqs=1, prefix_cache=False)
    names = [f"one of many {i}" for i in range(5)]
    for i, name in enumerate(names):
        pair.submit(name, [i + 1, *LONG], max_tokens=12)
    asked = [m for m in pair.to_decode.sent if isinstance(m, Piece)]
    assert len({m.handoff for m in asked}) <= 2  # the others are not computed yet
    for name in names:
        assert pair.ends(name)["D", 0].reason is FinishReason.LENGTH
    pair.settle()


def test_legs_that_cannot_be_served_are_refused(pair: Pair) -> None:
    options = {"max_tokens": 4, "ignore_eos": True, "seed": 0}
    request = Request(
        request_id="wrong", prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4, seed=0, n=2), arrival_s=0.0
    )
    for engine, leg, words in (
        (pair.prefill, DecodeLeg(handoffs=(1, 2)), "only prefills"),
        (pair.decode, PrefillLeg(peer="D", handoffs=(1, 2)), "only decodes"),
        (pair.prefill, None, "only prefills"),
        (pair.decode, DecodeLeg(handoffs=(1,)), "1 hand-off ids for 2 samples"),
        (pair.decode, DecodeLeg(handoffs=(1, 1)), "all different"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            engine.submit(request, leg)
    pair.start("D", "first of an id", LONG, [77], options)
    with pytest.raises(InvalidArgument, match="in use"):
        pair.start("D", "second of an id", LONG, [77], options)
    assert pair.decode.abort("first of an id")
    assert pair.end("first of an id", "D").reason is FinishReason.ABORT
    pair.settle()


def test_all_may_be_acknowledged_before_the_prefill_engine_is_done(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = pair.prefill.finish

    def late(seq: Any, reason: FinishReason, **more: Any) -> Any:
        if reason is FinishReason.HANDED_OFF:
            until(lambda: pair.prefill.side.staging_bytes == 0)  # type: ignore[attr-defined]
        return finish(seq, reason, **more)

    monkeypatch.setattr(pair.prefill, "finish", late)
    assert len(pair.generate("quick decode side", [15, *LONG], max_tokens=4)) == 4
    pair.settle()


# -- aborts and lost peers at every stage


def at_stage(pair: Pair, stage: str, name: str) -> None:
    """Starts a request and stops it at a stage."""
    prompt = [hash(name) % 200 + 1, *LONG]
    if stage == "expected":  # the prefill leg never comes
        pair.submit(name, prompt, legs="D", max_tokens=40)
        return
    kinds: dict[str, tuple[Any, type]] = {
        "asking": (pair.to_decode, Reserve),
        "reserved": (pair.to_prefill, Reserved),
        "transfer": (pair.to_decode, Piece),
        "before first decode": (pair.to_decode, FirstToken),
    }
    if stage == "decoding":
        pair.submit(name, prompt, max_tokens=50)
        pair.wait(name, lambda events: any(w == "D" for w, e in events))
        return
    held = hold(*kinds[stage])
    pair.submit(name, prompt, max_tokens=40)
    until(lambda: held)
    if stage == "transfer":
        [handoff] = {m.handoff for m in held if isinstance(m, Piece)}
        until(lambda: any(isinstance(m, FirstToken) and m.handoff == handoff for m in pair.to_decode.sent))


STAGES = ("expected", "asking", "reserved", "transfer", "before first decode", "decoding")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("order", ["PD", "DP"])
def test_an_abort_of_both_legs_gives_everything_back(stage: str, order: str, pair: Pair) -> None:
    name = f"aborted {stage} {order}"
    at_stage(pair, stage, name)
    for who in order:
        (pair.prefill if who == "P" else pair.decode).abort(name)
    assert pair.end(name, "D").reason is FinishReason.ABORT
    if stage != "expected":
        assert pair.end(name, "P").reason in (FinishReason.ABORT, FinishReason.HANDED_OFF, FinishReason.ERROR)
    pair.settle()
    pair.to_decode.filter = pair.to_prefill.filter = lambda message: [message]
    assert len(pair.generate(f"after {name}", LONG, max_tokens=3)) == 3
    pair.settle()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dies", ["P", "D"])
def test_a_lost_peer_ends_what_is_bound_to_it(stage: str, dies: str, pair: Pair) -> None:
    name = f"lost {stage} {dies}"
    at_stage(pair, stage, name)
    old = pair.to_decode, pair.to_prefill
    if dies == "P":
        old[1].transport.close()
        pair.decode.side.lost("P", "killed")
        survivor, who = pair.decode, "D"
    else:
        old[0].transport.close()
        pair.prefill.side.lost("D", "killed")
        survivor, who = pair.prefill, "P"
    if stage == "expected" or (stage, dies) == ("asking", "P"):  # the survivor was not bound yet
        survivor.abort(name)
        pair.prefill.abort(name)
        pair.decode.abort(name)
    elif stage == "decoding" and dies == "P":
        assert pair.end(name, "D").reason is FinishReason.LENGTH  # it needs nothing any more
    elif dies == "D" and stage in ("transfer", "decoding"):
        assert pair.end(name, "P").reason is FinishReason.HANDED_OFF
    else:
        end = pair.end(name, who)
        if end.reason is FinishReason.ERROR:
            assert isinstance(end.error, HandoffFailed) and end.error.reason in REASONS
        else:
            assert end.reason is FinishReason.HANDED_OFF
    for engine in (pair.prefill, pair.decode):  # what died has nothing any more
        engine.abort(name)
    for peer, side in ((old[0], pair.prefill.side), (old[1], pair.decode.side)):
        side.lost(peer.name, "dead")
        peer.close()
    pair.connect()
    pair.settle()
    assert len(pair.generate(f"after {name}", LONG, max_tokens=3)) == 3
    pair.settle()


def test_a_prefill_engine_asks_for_the_peer_that_it_lacks(pair: Pair) -> None:
    wanted: list[str] = []
    pair.prefill.side.want = wanted.append  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=4, seed=0)
    request = Request(request_id="x", prompt_ids=tuple(LONG), params=params, arrival_s=0.0)
    pair.events["x"] = []
    pair.prefill.submit(request, PrefillLeg(peer="elsewhere", handoffs=(5,)))
    until(lambda: "elsewhere" in wanted)
    pair.prefill.side.lost("elsewhere", "it cannot be reached")
    end = pair.end("x", "P")
    assert isinstance(end.error, HandoffFailed) and end.error.reason == "peer" and "elsewhere" in end.error.message
    pair.settle()


def test_a_refusal_of_the_decode_engine_ends_the_prompt(pair: Pair) -> None:
    held = hold(pair.to_decode, Reserve)
    pair.submit("refused", LONG, max_tokens=4)
    until(lambda: held)
    [asked] = held
    assert isinstance(asked, Reserve)
    pair.prefill.side.received(pair.to_decode, NotReserved(asked.handoff, "no room"))
    end = pair.end("refused", "P")
    assert isinstance(end.error, HandoffFailed) and end.error.reason == "refused" and "no room" in end.error.message
    pair.decode.abort("refused")
    pair.settle()
