"""`jaxpd bench serve` as a person types it: right numbers, right rates, readable errors, a report after Ctrl-C."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jaxpd.cli import bench_flags, main
from jaxpd.errors import InvalidArgument

pytestmark = pytest.mark.heavy  # it waits for delays that are known

Start = Callable[..., str]


def run(*args: str) -> Result:
    return CliRunner().invoke(main.app, ("bench", "serve", *args), env={"COLUMNS": "200", "TERM": "dumb"})


def written(path: pathlib.Path) -> dict[str, Any]:
    """The JSON, which has to be JSON for every reader."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    body = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert isinstance(body, dict)
    return body


@pytest.mark.parametrize(
    ("load", "backend", "per_message"),
    [
        (("--concurrency", "4", "--num-requests", "12"), "openai-chat", 1),
        (("--request-rate", "10", "--num-requests", "12"), "openai-completions", 4),
    ],
)
def test_constant_delays_are_reported_within_two_percent(
    delay_process: Start, tmp_path: pathlib.Path, load: tuple[str, ...], backend: str, per_message: int
) -> None:
    url = delay_process(ttft_s=0.8, itl_s=0.04, per_message=per_message)
    file = tmp_path / "out.json"
    # A message leaves when its first token is due, and the last one holds one token.
    known = {"ttft_s": 0.8, "ttst_s": 0.84 if per_message == 1 else 0.8, "tpot_s": 0.04, "e2e_s": 1.6}
    # What the machine does besides may spoil a run. What the client gets wrong, it gets wrong every time.
    for _ in range(4):
        done = run("--base-url", url, "--backend", backend, "--output-len", "21", "--output", str(file), *load)
        assert done.exit_code == 0, done.output
        summary = written(file)["probes"][0]["summary"]
        off = {name: summary[name]["p50"] / known_s - 1 for name, known_s in known.items()}
        if all(abs(share) <= 0.02 for share in off.values()):
            break
    assert all(abs(share) <= 0.02 for share in off.values()), off
    assert summary["itl_s"]["mean"] == pytest.approx(0.04, rel=0.05)
    assert summary["gaps_s"]["p50"] == pytest.approx(0.04 * per_message, rel=0.1)
    assert summary["tokens_per_message"] == pytest.approx(21 / (21 if per_message == 1 else 6))
    assert summary["answered"] == 12 and summary["asked_input"] == summary["prompt_tokens"] == 256
    assert re.search(r"TTFT +8\d\d", done.stdout) and "12 answered, 0 failed" in done.stdout


def test_goodput_finds_a_planted_threshold_within_five_percent(delay_process: Start, tmp_path: pathlib.Path) -> None:
    threshold = 40.0
    url = delay_process(ttft_s=0.02, slow_ttft_s=0.6, itl_s=0.0, max_rate=threshold)
    file = tmp_path / "out.json"
    for _ in range(3):  # as above
        done = run(
            *("--base-url", url, "--backend", "openai-completions", "--input-len", "8", "--output-len", "2"),
            *("--find-goodput", "--slo-ttft", "300ms", "--slo-tpot", "0.3s", "--min-rate", "30"),
            *("--num-requests", "40", "--burstiness", "inf", "--precision", "0.03", "--output", str(file)),
        )
        assert done.exit_code == 0, done.output
        body = written(file)
        assert body["goodput"]["complete"]
        if body["goodput"]["rate"] == pytest.approx(threshold, rel=0.05):
            break
    assert body["goodput"]["rate"] == pytest.approx(threshold, rel=0.05)
    assert body["goodput"]["rate"] < body["goodput"]["above"] <= 1.03 * body["goodput"]["rate"]
    rates = [probe["rate"] for probe in body["probes"]]
    assert rates[:3] == [30, 60, 45] and body["probes"][1]["cut_short"]
    assert all(f"{rate:.4g} requests/s" in done.stderr for rate in rates)  # each probe was shown
    assert f"goodput {body['goodput']['rate']:.4g} requests/s" in done.stdout
    assert "The run at" in done.stdout and "ended as soon as" in done.stdout


def test_failures_are_misses_and_all_of_them_an_error(delay_process: Start, tmp_path: pathlib.Path) -> None:
    small = ("--backend", "openai-completions", "--input-len", "8", "--output-len", "2", "--concurrency", "2")
    url = delay_process(ttft_s=0.0, itl_s=0.0, refuse_every=4)
    done = run("--base-url", url, *small, "--num-requests", "16", "--warmup", "0", "--slo-ttft", "60s")
    assert done.exit_code == 0 and "12 answered, 4 failed (http 429: 4)" in done.stdout
    assert "TTFT <= 60000 ms: 75.0 % of 16 requests" in done.stdout
    url = delay_process(ttft_s=0.0, itl_s=0.0, refuse_every=1)
    done = run("--base-url", url, *small, "--num-requests", "8", "--warmup", "0")
    assert done.exit_code == 1 and "0 answered, 8 failed" in done.stdout
    assert "all requests failed, the first by http 429: too many" in done.stderr
    url = delay_process(ttft_s=0.0, itl_s=0.0, refuse_every=1)  # whose first call, the check, is answered
    done = run("--base-url", url, *small, "--num-requests", "8")
    assert done.exit_code == 2 and "--warmup 0 measures all the same" in done.stderr


def test_ctrl_c_ends_the_calls_and_still_reports(delay_process: Start, tmp_path: pathlib.Path) -> None:
    url = delay_process(ttft_s=0.05, itl_s=0.01)
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "jaxpd", "bench", "serve", "--base-url", url, "--backend", "openai-completions"]
    command += ["--output-len", "10", "--concurrency", "3", "--duration", "500", "--output", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "sending requests" in line:
            break
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping; Ctrl-C again" in err and "Traceback" not in err
    assert "stopped by Ctrl-C" in out and "cut off" in out
    body = written(file)
    summary = body["probes"][0]["summary"]
    assert body["stopped"] and summary["answered"] >= 3 and 1 <= summary["cut_off"] <= 3
    assert not summary["failures"] and len(body["probes"][0]["requests"]) == summary["answered"]


def test_the_key_stays_out_of_everything(delay_process: Start, tmp_path: pathlib.Path) -> None:
    url = delay_process(ttft_s=0.0, itl_s=0.0, api_key="sesame")
    key, file = tmp_path / "key", tmp_path / "out.json"
    key.write_text("sesame\n", encoding="utf-8")
    done = run("--base-url", url, "--num-requests", "2", "--api-key-file", str(key), "--output", str(file))
    assert done.exit_code == 0, done.output
    assert "sesame" not in done.output + file.read_text(encoding="utf-8")
    assert written(file)["config"]["target"]["api_key"] == "given, not kept"
    key.write_text("[alice]\nkey = 'sesame'\n", encoding="utf-8")
    done = run("--base-url", url, "--api-key-file", str(key))
    assert done.exit_code == 2 and "looks like a server's list of keys" in done.stderr


def test_a_trace_from_a_file_at_another_speed(delay_process: Start, tmp_path: pathlib.Path) -> None:
    trace, file = tmp_path / "trace.csv", tmp_path / "out.json"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:17:0{second}.9799600,{80 + second},10" for second in range(6)]
    trace.write_text("\n".join(rows), encoding="utf-8")
    url = delay_process(ttft_s=0.02, itl_s=0.0)
    more = ("--trace-speed", "10", "--length-scale", "0.5", "--backend", "openai-completions", "--output", str(file))
    done = run("--base-url", url, "--trace", str(trace), *more)
    assert done.exit_code == 0, done.output
    probe = written(file)["probes"][0]
    assert [request["due_s"] for request in probe["requests"]] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert all(0 <= request["sent_s"] - request["due_s"] < 0.1 for request in probe["requests"])
    assert [request["prompt_tokens"] for request in probe["requests"]] == [40, 40, 41, 42, 42, 42]
    assert "10 times" in done.stdout and probe["summary"]["asked_output"] == 5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--backend", "soap"), "--backend soap must be one of openai-chat"),
        (("--base-url", "127.0.0.1:8000"), "--base-url 127.0.0.1:8000 must begin with http"),
        (("--server", "a:1"), "--server a:1 is for --backend grpc"),
        (("--backend", "grpc", "--base-url", "http://x"), "--base-url http://x is for OpenAI servers"),
        (("--backend", "grpc", "--server", "x"), "--server x must be HOST:PORT"),
        (("--slo-ttft", "200"), "--slo-ttft 200 is not a time; write a number with its unit, ms or s"),
        (("--slo-tpot", "0ms"), "--slo-tpot 0s must be above 0"),
        (("--find-goodput",), "--find-goodput needs an SLO"),
        (("--find-goodput", "--slo-ttft", "1s", "--request-rate", "3"), "--request-rate 3 sets one"),
        (("--input-len", "many"), "--input-len many is no length"),
        (("--output-len", "uniform:9:1"), "--output-len uniform:9:1 must have its smaller"),
        (("--request-rate", "0"), "--request-rate 0 must be above 0"),
        (("--warmup", "-1"), "--warmup -1"),
        (("--timeout", "0"), "--timeout 0"),
        (("--temperature", "-1"), "--temperature -1"),
        (("--vocab-size", "1"), "--vocab-size 1"),
        (("--extra-body", "{"), "--extra-body { is no JSON"),
        (("--extra-body", "[]"), "--extra-body [] must be a JSON object"),
        (("--trace", "/no/such"), "--trace /no/such cannot be read"),
        (("--ssl-ca-certs", "/no/such"), "--ssl-ca-certs /no/such is no file"),
        (("--ssl-keyfile", "/no/such"), "--ssl-keyfile needs --ssl-certfile"),
        (("--ssl-certfile", "/no/such"), "--ssl-certfile needs --ssl-keyfile"),
        (("--api-key", "a", "--api-key-file", "b"), "leave one out"),
        (("--api-key-file", "/no/such"), "--api-key-file /no/such cannot be read"),
        (("--api-key", "p\u00e4ss"), "printable ASCII"),
        (("--tls",), "--tls is for --backend grpc"),
        (("--output", "/no/such/out.json"), "--output /no/such/out.json: there is no folder /no/such"),
        (("--base-url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
    ],
)
def test_errors_name_flag_value_and_cure(args: tuple[str, ...], words: str) -> None:
    pytest.importorskip("aiohttp")
    done = run(*args)
    assert words in done.stderr and "Traceback" not in done.output, done.output
    assert done.exit_code == (1 if "no server" in words else 2)
    assert "p\u00e4ss" not in done.stderr


@pytest.mark.parametrize(
    ("package", "args"), [("aiohttp", ("--num-requests", "1")), ("matplotlib.figure", ("--plot", "x.png"))]
)
def test_a_missing_package_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, package: str, args: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    done = run(*args)
    assert done.exit_code == 2 and "pip install 'jaxpd[bench]'" in done.stderr
    assert package.partition(".")[0] in done.stderr


def test_times_with_their_units() -> None:
    assert bench_flags.parse_time("200ms", flag="--x") == pytest.approx(0.2)
    assert bench_flags.parse_time("1.5 s", flag="--x") == 1.5
    for text in ("", "5", "ms", "5m", "-5ms", "1e3ms", "nan s"):
        with pytest.raises(InvalidArgument, match="--slo-ttft .* such as 200ms"):
            bench_flags.parse_time(text, flag="--slo-ttft")


def test_help_names_every_flag_that_others_build_on() -> None:
    assert "bench" in CliRunner().invoke(main.app, ("--help",)).output
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", run("--help").output))
    assert (
        set(
            "--backend --base-url --server --model --api-key-file --request-rate --burstiness --concurrency --trace "
            "--trace-speed --length-scale --num-requests --duration --input-len --output-len --shared-prefix-len "
            "--num-prefixes --seed --ignore-eos --slo-ttft --slo-tpot --find-goodput --attainment --min-rate "
            "--max-rate --warmup --output --plot --ssl-ca-certs".split()
        )
        <= shown
    )
