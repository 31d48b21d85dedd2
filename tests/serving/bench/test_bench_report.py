"""The report and the picture, from records that need no server."""

from __future__ import annotations

import json
import math
import pathlib
import random
import struct

import pytest

from serving.bench import plots, report
from serving.bench.arrivals import Arrivals
from serving.bench.goodput import Goodput, Search
from serving.bench.measure import Slo, summarize
from serving.bench.records import About, Failure, Record
from serving.bench.run import Trial
from serving.bench.session import Outcome, Plan, Probe
from serving.bench.target import Target

SLO = Slo(ttft_s=0.2, tpot_s=0.02)


def a_probe(rate: float | None, count: int = 60, *, enough: bool = False, lag_s: float = 0.001) -> Probe:
    rng = random.Random(rate)
    records = []
    for i in range(count):
        begin = i / (rate or 10.0)
        first = begin + rng.uniform(0.05, 0.3)
        times = tuple(first + 0.01 * k for k in range(8))
        failed = Failure("http 429", "busy") if i % 15 == 7 else None
        records.append(
            Record(
                index=i,
                due_s=begin,
                sent_s=begin + 0.0005,
                end_s=times[-1] + 0.001,
                input_len=100,
                output_len=16,
                message_s=() if failed else times,
                message_tokens=() if failed else (2,) * 8,
                prompt_tokens=None if failed else 100,
                completion_tokens=None if failed else 16,
                cached_tokens=None if failed else 30,
                finish_reason=None if failed else "length",
                failure=failed,
            )
        )
    trial = Trial(records=tuple(records), cut_off=0, stopped=False, lag_s=(lag_s,) * 5, wall_start=1.0)
    return Probe(rate=rate, trial=trial, summary=summarize(trial, SLO), enough=enough)


def outcome(*probes: Probe, goodput: Goodput | None = None, stopped: bool = False) -> Outcome:
    return Outcome(
        plan=Plan(
            target=Target(backend="openai-chat", address="http://x", api_key="sesame"),
            slo=SLO,
            search=Search(attainment=0.5) if goodput is not None else None,
            arrivals=Arrivals(burstiness=math.inf),
        ),
        about=About(backend="openai-chat", address="http://x", model="m", max_model_len=None, notes=("a note",)),
        probes=probes,
        goodput=goodput,
        stopped=stopped,
    )


RUN = outcome(a_probe(10.0))
SEARCH = outcome(
    a_probe(1.0), a_probe(2.0), a_probe(4.0, enough=True), goodput=Goodput(2.0, 4.0, complete=True), stopped=False
)
NOTHING = outcome(a_probe(None, 0), stopped=True)
BELOW = outcome(a_probe(1.0, enough=True), goodput=Goodput(None, 1.0, complete=True))


def test_the_report_of_a_run() -> None:
    text = report.text(RUN)
    assert "56 answered, 4 failed (http 429: 4)" in text
    assert "10 requests/s (10 sent), regular arrivals" in text
    assert "asked for 100 + 16 a request; answered 100 (30 cached) + 16; 2.00 a message" in text
    assert "TTFT <= 200 ms and TPOT <= 20 ms:" in text and "note: a note" in text
    assert "loop lag 1.00 ms (p50)" in text and "0.50 ms late (p50)" in text and "bottleneck" not in text
    assert "bottleneck" in report.text(outcome(a_probe(10.0, lag_s=0.05)))


def test_the_report_of_a_search_and_of_nothing() -> None:
    text = report.text(SEARCH)
    assert "goodput 2 requests/s; 4 missed" in text and "for 50 % of requests with TTFT <= 200 ms" in text
    assert text.index("         1 ") < text.index("         2 ") < text.index("         4 ") and "%*" in text
    assert "The run at 2 requests/s" in text
    assert "goodput below 1 requests/s" in report.text(BELOW)
    endless = outcome(a_probe(1.0), goodput=Goodput(1.0, None, complete=True))
    assert "goodput 1 requests/s or more (--max-rate" in report.text(endless)
    assert "stopped by Ctrl-C" in report.text(NOTHING) and "0 answered" in report.text(NOTHING)


@pytest.mark.parametrize("made", [RUN, SEARCH, NOTHING, BELOW], ids=["run", "search", "nothing", "below"])
def test_json_is_json_and_has_every_request(made: Outcome, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.json"
    report.write_json(made, path)
    text = path.read_text(encoding="utf-8")
    body = json.loads(text)
    assert "sesame" not in text and "NaN" not in text and body["format"] == report.FORMAT
    assert [len(probe["requests"]) for probe in body["probes"]] == [len(p.trial.records) for p in made.probes]
    assert body["config"]["arrivals"]["burstiness"] == "inf" and body["machine"]["cores"] >= 1
    assert body["config"]["workload"]["input_len"] == "256" and body["server"]["model"] == "m"


@pytest.mark.parametrize("made", [RUN, SEARCH, NOTHING, BELOW], ids=["run", "search", "nothing", "below"])
def test_a_picture_of_everything(made: Outcome, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    plots.draw(made, path)
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and len(data) > 20_000 and width == 1320
    assert height == (1320 if made.goodput is not None else 880)
