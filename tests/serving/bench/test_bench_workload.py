"""Lengths, arrivals, traces and the prompts that are made of them."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxpd.errors import InvalidArgument
from serving.bench import prompts
from serving.bench.arrivals import Arrivals, offsets
from serving.bench.lengths import Lengths, parse_lengths
from serving.bench.prompts import WORDS, Words
from serving.bench.records import Piece
from serving.bench.traces import read_trace
from serving.bench.workload import Workload, calls, number_of_calls, warm_up_calls

MANY = 4000


def draw(text: str) -> np.ndarray:
    lengths = parse_lengths(text, flag="--input-len")
    rng = np.random.default_rng(3)
    return np.asarray([lengths.draw(rng) for _ in range(MANY)])


def test_lengths_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    assert set(draw("128")) == {128}
    uniform = draw("uniform:32:128")
    assert uniform.min() == 32 and uniform.max() == 128 and abs(uniform.mean() - 80) < 2
    for text in ("normal:256:64", "lognormal:256:64"):
        assert abs(draw(text).mean() - 256) < 5 and abs(draw(text).std() - 64) < 5
    skew = draw("lognormal:256:200")
    assert abs(skew.mean() - 256) < 15 and np.median(skew) < 215
    assert draw("normal:2:50").min() == 1
    assert str(parse_lengths("uniform:32:128", flag="--x")) == "uniform:32:128"


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-3", "1.5", "uniform:3", "uniform:9:3", "normal:5:-1", "zipf:1:2", "normal:nan:1", "inf"]
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--input-len"):
        parse_lengths(text, flag="--input-len")


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_exactly_and_the_burstiness_by_statistics(burstiness: float) -> None:
    times = offsets(20.0, MANY, burstiness=burstiness, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert times[-1] == pytest.approx((MANY - 1) / 20)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.sort(np.diff(offsets(1.0, MANY, burstiness=1.0, seed=3)))
    distance = np.abs(np.arange(1, len(gaps) + 1) / len(gaps) - (1 - np.exp(-gaps))).max()
    assert distance < 1.36 / math.sqrt(len(gaps))  # Kolmogorov-Smirnov, 5 %


def test_a_metronome_few_requests_and_one_seed_at_two_rates() -> None:
    assert np.allclose(np.diff(offsets(50.0, 20, burstiness=math.inf, seed=0)), 0.02)
    assert offsets(5.0, 1, burstiness=1.0, seed=0).tolist() == [0.0]
    assert offsets(5.0, 4, burstiness=1e-9, seed=0)[-1] == pytest.approx(3 / 5)  # a shape that draws zeros
    slow, fast = (offsets(rate, 50, burstiness=1.0, seed=4) for rate in (2.0, 8.0))
    assert np.allclose(slow, 4 * fast)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"rate": 0.0}, "--request-rate"),
        ({"rate": math.nan}, "--request-rate"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"concurrency": 0}, "--concurrency"),
        ({"num_requests": -1}, "--num-requests"),
        ({"duration_s": 0.0}, "--duration"),
        ({"duration_s": math.inf}, "--duration"),
    ],
)
def test_arrivals_that_cannot_be(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(InvalidArgument, match=flag):
        Arrivals(**options)


def mooncake(folder: pathlib.Path) -> pathlib.Path:
    rows = [
        {"timestamp": 27000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]},
        {"timestamp": 24000, "input_length": 600, "output_length": 50, "hash_ids": [0, 9]},
        {"timestamp": 30000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 7]},
    ]
    path = folder / "moon.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return path


def azure(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "azure.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
        b"2023-11-16 18:17:04.0319600,3180,8\r\n"
    )
    return path


def sharegpt(folder: pathlib.Path) -> pathlib.Path:
    talks: list[dict[str, Any]] = [
        {"id": "a", "conversations": [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "x y z"}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "cut"}, {"from": "human", "value": "alone"}]},
        {
            "messages": [
                {"role": "system", "content": "be nice"},
                {"role": "user", "content": "three"},
                {"role": "assistant", "content": "ok"},
            ]
        },
        {"conversations": []},
    ]
    path = folder / "share.json"
    path.write_text(json.dumps(talks), encoding="utf-8")
    return path


def test_mooncake_rows_in_order_of_time_with_shared_blocks(tmp_path: pathlib.Path) -> None:
    trace = read_trace(mooncake(tmp_path))
    assert trace.kind == "mooncake"
    assert [(row.at_s, row.input_len, row.output_len) for row in trace.rows] == [
        (0.0, 600, 50),
        (3.0, 1100, 5),
        (6.0, 1024, 1),
    ]
    made = list(calls(Workload(trace=trace, trace_speed=2.0), Arrivals()))
    assert [call.due_s for call in made] == [0.0, 1.5, 3.0]
    short, long, middle = (prompts.token_ids(c.pieces, 1000, seed=0, salt=0).tolist() for c in made)
    assert (len(short), len(long), len(middle)) == (600, 1100, 1024)
    assert short[:512] == long[:512] and long[:1024] == middle
    assert short[512:] != long[512:600]


@pytest.mark.parametrize("scale", [0.1, 0.37, 1.9])
def test_scaled_blocks_stay_shared(tmp_path: pathlib.Path, scale: float) -> None:
    made = list(calls(Workload(trace=read_trace(mooncake(tmp_path)), length_scale=scale), Arrivals()))
    ids = [prompts.token_ids(call.pieces, 1000, seed=0, salt=0).tolist() for call in made]
    assert [len(i) for i in ids] == [round(n * scale) for n in (600, 1100, 1024)] == [c.input_len for c in made]
    block = round(512 * scale)
    assert ids[0][:block] == ids[1][:block] and ids[1][: 2 * block] == ids[2][: 2 * block]
    assert ids[0][block : block + 8] != ids[1][block : block + 8]


def test_a_real_looking_azure_trace(tmp_path: pathlib.Path) -> None:
    trace = read_trace(azure(tmp_path))
    assert trace.kind == "azure"
    assert [(row.input_len, row.output_len) for row in trace.rows] == [(4808, 10), (3180, 8)]
    assert trace.rows[1].at_s == pytest.approx(0.052, abs=1e-6)
    made = list(calls(Workload(trace=trace), Arrivals(rate=4.0)))  # a rate takes the place of the trace's times
    assert [call.due_s for call in made] == [0.0, 0.25]


def test_sharegpt_takes_the_first_question_and_its_answer(tmp_path: pathlib.Path) -> None:
    trace = read_trace(sharegpt(tmp_path))
    assert trace.kind == "sharegpt"
    assert [(row.prompt, row.answer, row.at_s) for row in trace.rows] == [
        ("one two", "x y z", None),
        ("three", "ok", None),
    ]
    texts = [[c.text for c in calls(Workload(trace=trace), Arrivals(num_requests=1), turn=turn)] for turn in range(3)]
    assert texts == [["one two"], ["three"], ["one two"]]
    with pytest.raises(InvalidArgument, match="--length-scale"):
        Workload(trace=trace, length_scale=0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with"),
        (b"[]", "no requests"),
        (b"[1]", "something else"),
        (b"[", "is none"),
        (b'{"timestamp": 1}', "line 1, .*input_length"),
        (b'{"timestamp": 1, "input_length": 3, "output_length": 1}\nnope', "line 2"),
        (b'{"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": 5}', "line 1"),
        (b"a,b,c\n1,2,3", "TIMESTAMP"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,x\n", "line 2"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03\n", "line 2"),
        (b"\xff\xfe\x00", "no text file"),
    ],
)
def test_what_is_no_trace_is_said_with_its_line(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"--trace .*{message}"):
        read_trace(path)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(tmp_path / "missing")


def test_how_many_calls_a_run_makes(tmp_path: pathlib.Path) -> None:
    trace = Workload(trace=read_trace(mooncake(tmp_path)))
    none = Workload()
    assert number_of_calls(none, Arrivals()) == 100
    assert number_of_calls(none, Arrivals(duration_s=2.0)) is None
    assert number_of_calls(none, Arrivals(rate=2.5, duration_s=2.0)) == 5
    assert number_of_calls(none, Arrivals(rate=2.5, duration_s=2.0, num_requests=3)) == 3
    assert number_of_calls(trace, Arrivals()) == 3
    assert number_of_calls(trace, Arrivals(duration_s=3.0)) == 2
    assert number_of_calls(trace, Arrivals(rate=math.inf, duration_s=3.0)) == 3
    assert number_of_calls(trace, Arrivals(rate=9.0, duration_s=3.0)) == 3
    assert number_of_calls(trace, Arrivals(num_requests=2)) == 2
    with pytest.raises(InvalidArgument, match="--num-requests 4 is more than the 3"):
        number_of_calls(trace, Arrivals(num_requests=4))
    assert len(list(itertools.islice(calls(none, Arrivals(duration_s=1.0)), 500))) == 500


def test_shared_prefixes_are_shared_and_the_rest_is_not() -> None:
    workload = Workload(input_len=Lengths("fixed", 20), shared_prefix_len=30, num_prefixes=3)
    made = list(calls(workload, Arrivals(num_requests=40)))
    ids = [tuple(prompts.token_ids(call.pieces, 500, seed=0, salt=0).tolist()) for call in made]
    assert all(len(i) == 50 for i in ids) and all(call.input_len == 50 for call in made)
    assert len({i[:30] for i in ids}) == 3 and len({i[30:] for i in ids}) == 40
    other = [tuple(prompts.token_ids(call.pieces, 500, seed=0, salt=1).tolist()) for call in made]
    assert not {i[:30] for i in ids} & {i[:30] for i in other}  # another probe finds nothing of this one in a cache
    words = Words(WORDS)
    texts = [words.text(call.pieces, seed=0, salt=0).split() for call in made]
    assert all(len(text) == 50 for text in texts) and len({tuple(text[:30]) for text in texts}) == 3
    warm = warm_up_calls(workload, 5)
    assert len(warm) == 5 and all(call.due_s is None and call.input_len == 50 for call in warm)


def test_a_seed_makes_everything_again_and_another_does_not() -> None:
    drawn = Workload(input_len=Lengths("uniform", 1, 500), output_len=Lengths("uniform", 1, 500))
    first, again = (list(calls(drawn, Arrivals(rate=5.0, num_requests=9))) for _ in range(2))
    assert first == again
    other = list(calls(Workload(input_len=drawn.input_len, seed=1), Arrivals(rate=5.0, num_requests=9)))
    assert [c.input_len for c in first] != [c.input_len for c in other]
    assert [c.due_s for c in first] != [c.due_s for c in other]


def test_texts_pay_the_overhead_at_their_end() -> None:
    pieces = (Piece((2, 1), 10), Piece((0, 5), 10))
    assert len(Words(WORDS, cost=2.0).text(pieces, seed=0, salt=0).split()) == 10
    whole = Words(WORDS).text(pieces, seed=0, salt=0).split()
    assert Words(WORDS, overhead=4).text(pieces, seed=0, salt=0).split() == whole[:16]
    assert len(Words(WORDS, overhead=400).text(pieces, seed=0, salt=0).split()) == 11  # one word of its own at least


def test_the_cheapest_words_that_are_enough() -> None:
    costs = [len(f" {word}") for word in WORDS]  # a byte vocabulary: a letter costs 2
    words, cost = prompts.cheapest(costs)
    assert cost == 2 and len(words) == 26
    assert prompts.cheapest([1, *[3] * (len(WORDS) - 1)])[1] == 3
    assert prompts.cheapest([0] * 3 + list(range(1, len(WORDS) - 2)))[1] == 1


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"shared_prefix_len": -1}, "--shared-prefix-len"),
        ({"num_prefixes": 0}, "--num-prefixes"),
        ({"seed": -1}, "--seed"),
        ({"trace_speed": 0.0}, "--trace-speed"),
        ({"length_scale": math.nan}, "--length-scale"),
    ],
)
def test_workloads_that_cannot_be(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(InvalidArgument, match=flag):
        Workload(**options)
