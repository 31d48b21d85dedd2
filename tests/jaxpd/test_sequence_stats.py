"""Where a sequence is, as the engine tells it: whose pages it has, and how many of them are filled."""

from __future__ import annotations

import pytest

from jaxpd.cache.keys import Chain
from jaxpd.cache.prefix import PrefixCache
from jaxpd.request import Request, SamplingParams
from jaxpd.sequence import Sequence, State
from jaxpd.stats import EngineStats, Hold, ReplicaStats, read_sequence

PAGE = 4
PROMPT = tuple(range(10))  # 3 pages


@pytest.fixture
def seq() -> Sequence:
    request = Request(request_id="a", prompt_ids=PROMPT, params=SamplingParams(seed=0), arrival_s=0.0)
    return Sequence(request=request, eos_ids=frozenset(), chain=Chain(PAGE, PROMPT))


def caches() -> tuple[PrefixCache, PrefixCache, dict[PrefixCache, tuple[str, int, int]]]:
    prefill, decode = PrefixCache(8, 2, PAGE), PrefixCache(16, 2, PAGE)
    return prefill, decode, {prefill: ("prefill", 0, 0), decode: ("decode", 1, 3)}


def test_who_waits_has_nothing(seq: Sequence) -> None:
    shown = read_sequence(seq, caches()[2])
    assert (shown.request_id, shown.state, shown.prompt_tokens, shown.tokens) == ("a", "queued", 10, 0)
    assert shown.holds == ()


def test_a_prompt_fills_pages_in_both_pools_and_then_has_those_of_the_decode_pool(seq: Sequence) -> None:
    prefill, decode, places = caches()
    seq.move(State.PREFILLING)
    seq.prefill_lease, seq.decode_lease = prefill.acquire(seq.chain, 3), decode.acquire(seq.chain, 5, whole=True)
    seq.cached, seq.landed_pages = 8, 1
    shown = read_sequence(seq, places)
    assert shown.computed == 8
    assert shown.holds == (
        Hold(role="prefill", pool=0, replica=0, pages=3, filled=2),
        Hold(role="decode", pool=1, replica=3, pages=5, filled=1),
    )

    assert seq.prefill_lease is not None
    seq.prefill_lease.release()
    seq.outputs.append(7)
    seq.move(State.OFFERED)
    assert read_sequence(seq, places).holds == (Hold(role="decode", pool=1, replica=3, pages=5, filled=1),)

    seq.move(State.DECODING)
    seq.outputs += [7] * 6
    seq.cached = 16
    shown = read_sequence(seq, places)
    assert (shown.state, shown.computed, shown.tokens) == ("decoding", 10, 7)
    assert shown.holds == (Hold(role="decode", pool=1, replica=3, pages=5, filled=4),)

    seq.move(State.FINISHED)
    seq.release()
    assert read_sequence(seq, places).holds == ()


def test_one_lease_for_both_stages_counts_once(seq: Sequence) -> None:
    mixed = PrefixCache(8, 2, PAGE)
    seq.move(State.PREFILLING)
    seq.prefill_lease = seq.decode_lease = mixed.acquire(seq.chain, 3)
    seq.cached = 10
    hold = Hold(role="mixed", pool=0, replica=1, pages=3, filled=3)
    assert read_sequence(seq, {mixed: ("mixed", 0, 1)}).holds == (hold,)


def test_what_the_prefix_cache_remembers_is_no_difference() -> None:
    def stats(cached: int) -> EngineStats:
        replica = ReplicaStats(
            role="mixed", pool=0, replica=0, free_pages=8, num_pages=8, free_slots=2, num_slots=2, cached_pages=cached
        )
        return EngineStats(states={}, replicas=(replica,), staging_bytes=0)

    assert stats(0) == stats(5), "an engine that has answered everything is at its baseline"
