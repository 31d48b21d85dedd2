"""The command as a whole: help, wrong flags, and how errors end."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jaxpd.cli import backends, generate, main, render, serve
from jaxpd.config import EngineConfig
from jaxpd.errors import InvalidArgument, ResourceExhausted
from jaxpd.request import FinishReason, SamplingParams, Timings, TokenLogprobs, Usage
from jaxpd.version import __version__


def run(*args: str) -> Result:
    return CliRunner().invoke(main.app, args, env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def flags_in_help(command: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", run(command, "--help").output))


def test_version_and_help() -> None:
    assert run("--version").output == f"jaxpd {__version__}\n"
    for args in [(), ("-h",), ("--help",)]:
        assert all(name in run(*args).output for name in ("serve", "generate", "convert", "env"))


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "serve",
            "--prefill-mesh --decode-mesh --host --grpc-port --max-model-len --page-size --max-num-seqs "
            "--max-num-batched-tokens --kv-memory --dtype --seed --compile-cache --shutdown-timeout "
            "--max-queued-requests --reserve-tokens --local-prefill --step-timeout",
        ),
        (
            "generate",
            "--prompt --prompt-ids --chat --prompt-file --max-tokens --temperature --seed --ignore-eos "
            "--top-k --top-p --min-p --repetition-penalty --presence-penalty --frequency-penalty --logit-bias "
            "--min-tokens --logprobs --prompt-logprobs --n --stop --stop-token-ids "
            "--reserve-tokens --local-prefill --step-timeout --json-schema --regex --choice --grammar "
            "--prefill-mesh --decode-mesh --server --json --max-model-len --page-size --max-num-seqs "
            "--max-num-batched-tokens --kv-memory --dtype --compile-cache",
        ),
        ("convert", "--dtype"),
        ("env", "--json"),
    ],
)
def test_the_flags_that_others_build_on(command: str, flags: str) -> None:
    assert set(flags.split()) <= flags_in_help(command)


def test_help_shows_defaults() -> None:
    help_text = run("serve", "--help").output
    for default in ("127.0.0.1", "50051", "smollm2-135m", "16", "float32 on CPU"):
        assert default in help_text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serv"], "serv"),
        (["serve", "--mesh-prefill", "8x1"], "--mesh-prefill"),
        (["generate", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "a", "b"], "unexpected extra argument"),
        (["convert", "only-one"], "DST"),
        (["generate"], "give exactly one of --prompt"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "max_tokens=0 must be at least 1"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be between 0"),
        (["generate", "--prompt", "a", "--temperature", "nan"], "temperature=nan must be between 0"),
        (["generate", "--prompt", "a", "--seed", "-5"], "seed=-5 must be between 0"),
        (["generate", "--prompt", "a", "--top-p", "0"], "top_p=0.0 must be above 0"),
        (["generate", "--prompt", "a", "--min-tokens", "200"], "min_tokens=200 must be between 0 and max_tokens"),
        (["generate", "--prompt", "a", "--logprobs", "21", "--json"], "logprobs=21 must be between 0 and 20"),
        (["generate", "--prompt", "a", "--logprobs", "2"], "--logprobs 2 is shown in JSON only; add --json"),
        (["generate", "--prompt", "a", "--prompt-logprobs", "21", "--json"], "prompt_logprobs=21 must be between 0"),
        (["generate", "--prompt", "a", "--prompt-logprobs", "0"], "--prompt-logprobs 0 is shown in JSON only; add"),
        (["generate", "--prompt", "a", "--n", "0"], "n=0 must be between 1 and 128"),
        (["generate", "--prompt", "a", "--stop", "x", "--stop", ""], "stop holds an empty string"),
        (["generate", "--prompt", "a", "--stop-token-ids", "5,x"], "--stop-token-ids: 'x' is not a token id"),
        (["generate", "--prompt", "a", "--stop-token-ids", "-5"], "stop_token_ids holds -5, which is outside"),
        (["generate", "--prompt", "a", "--api-key", "k"], "API keys and TLS are for a server, and none is named"),
        (
            ["generate", "--prompt", "a", "--server", "h:1", "--step-timeout", "9", "--local-prefill", "auto"],
            "--local-prefill, --step-timeout cannot go with --server h:1",
        ),
        (["generate", "--prompt", "a", "--choice", "b", "--choice", ""], "structured_output.choices holds an empty"),
        (["generate", "--prompt", "a", "--json-schema", "{a"], "structured_output.text='{a' must be a JSON schema"),
        (["generate", "--prompt", "a", "--regex", "a", "--choice", "b"], "--regex and --choice cannot go together"),
        (["generate", "--prompt", "a", "--reserve-tokens", "0"], "--reserve-tokens 0 must be at least 1"),
        (["serve", "--reserve-tokens", "0"], "--reserve-tokens 0 must be at least 1"),
        (["serve", "--local-prefill", "some"], "--local-prefill some must be never, auto, or the most tokens"),
        (["serve", "--local-prefill", "8", "--mode", "chunked"], "--local-prefill 8 is for --mode disaggregated"),
        (["serve", "--step-timeout", "0"], "--step-timeout 0.0 must be above 0 seconds"),
        (["generate", "--prompt", "a", "--step-timeout", "nan"], "--step-timeout nan must be above 0 seconds"),
        (["generate", "--prompt", "a", "--logit-bias", "5=1"], "--logit-bias: '5=1' is not ID:BIAS"),
        (["generate", "--prompt", "a", "--logit-bias", "5:1,5:2"], "--logit-bias names token 5 twice"),
        (["generate", "--prompt", "a", "--logit-bias", "5:101"], "logit_bias holds 101.0 for token 5"),
        (["generate", "--prompt", "a", "--server", "somewhere"], "--server somewhere must be HOST:PORT"),
        (
            ["generate", "--prompt", "a", "--server", "h:1", "--prefill-mesh", "8x1"],
            "--prefill-mesh cannot go with --server h:1",
        ),
        (["generate", "--prompt-file", "/none.json"], "--prompt-file /none.json does not exist"),
        (["generate", "--prompt", "a", "--prefill-mesh", "8"], '--prefill-mesh "8" has 1 factor'),
        (["serve", "--decode-mesh", "0x1"], '--decode-mesh "0x1": both factors'),
        (["serve", "--kv-memory", "much"], "--kv-memory much is not a size"),
        (["serve", "--page-size", "17"], "--page-size 17 must be a power of two"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs 0 must be at least 1"),
        (["serve", "--dtype", "float8"], "--dtype float8 must be one of float32, bfloat16"),
        (["serve", "--grpc-port", "70000"], "--grpc-port 70000 must be"),
        (["serve", "--shutdown-timeout", "-1"], "--shutdown-timeout -1.0 must be"),
    ],
)
def test_wrong_calls_name_what_is_wrong_and_exit_with_2(args: list[str], says: str) -> None:
    result = run(*args)
    assert says in " ".join(result.output.split()) and "Traceback" not in result.output
    assert result.exit_code == 2


def raising(error: BaseException) -> Any:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        raise error

    return stand_in


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InvalidArgument("--prefill-mesh 0x1 must be at least 1x1"), 2, "jaxpd: --prefill-mesh 0x1 must be"),
        (ResourceExhausted("256 requests wait already"), 1, "jaxpd: 256 requests wait already"),
        (KeyboardInterrupt(), 130, "jaxpd: interrupted"),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "Permission denied: '/root/x'"),
        (KeyError("lm_head"), 1, "internal error, KeyError: 'lm_head'"),
    ],
)
def test_errors_end_as_one_message(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str) -> None:
    monkeypatch.setattr(backends, "local", raising(error))
    result = run("generate", "--prompt", "a")
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr and "Traceback" not in result.stderr
    with_debug = run("--debug", "generate", "--prompt", "a")
    assert with_debug.exit_code == code and "Traceback" in with_debug.stderr and says in with_debug.stderr


def test_flags_of_the_engine_reach_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is caught where an engine would be started with it."""
    caught: list[EngineConfig] = []

    def catch(config: EngineConfig) -> Any:
        caught.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(backends, "local", lambda model, progress, config: catch(EngineConfig(**config)))
    monkeypatch.setattr(serve, "_run", lambda model, config, *_, **more: catch(config))
    flags = ("--reserve-tokens", "7", "--local-prefill", "33", "--step-timeout", "1.5")
    assert run("serve", *flags).exit_code == run("generate", "--prompt", "a", *flags).exit_code == 130
    assert run("serve").exit_code == 130
    asked = EngineConfig(reserve_tokens=7, local_prefill="33", step_timeout_s=1.5)
    assert caught == [asked, dataclasses.replace(asked, precompile=False), EngineConfig()]


def test_every_option_has_a_field_in_what_is_sent_to_a_server() -> None:
    from serving.messages import GenerateRequest

    asked = {field.name for field in dataclasses.fields(SamplingParams)}
    assert asked <= {field.name for field in dataclasses.fields(GenerateRequest)}


def test_json_has_logprobs_where_they_were_asked_for() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    logprob = TokenLogprobs(logprob=-0.5, top=((7, -0.25), (5, -0.5)))
    done = render.Result((5,), "a", FinishReason.LENGTH, usage, Timings(), logprobs=(logprob,))
    assert render.result_json(done)["logprobs"] == [
        {"logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.25}, {"token_id": 5, "logprob": -0.5}]}
    ]
    scored = render.result_json(dataclasses.replace(done, logprobs=None, prompt_logprobs=((7, logprob),)))
    assert "logprobs" not in scored and "prompt_logprobs" not in render.result_json(done)
    assert scored["prompt_logprobs"] == [
        {"token_id": 7, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.25}, {"token_id": 5, "logprob": -0.5}]}
    ]


def test_ids_stand_in_for_text_that_a_model_without_tokenizer_cannot_give() -> None:
    assert generate._shown((5, 6), None) == "5 6 "
    assert generate._shown((5, 6), "ab") == "ab"


def test_the_command_name_can_be_typed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxpd.cli.render import command_name

    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_name() == "python -m jaxpd"
    command = folder / "jaxpd"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert command_name() == ".venv/bin/jaxpd"
    monkeypatch.chdir(folder)
    assert command_name() == "./jaxpd"
    monkeypatch.chdir("/")
    assert command_name() == str(command).lstrip("/")
    monkeypatch.setenv("PATH", str(folder))
    assert command_name() == "jaxpd"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_name() == str(command)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port 70000 must be between 0"),
        (["--grpc-port", "-1"], "--grpc-port -1 must be between 0"),
        (["--no-http", "--no-grpc"], "--no-http and --no-grpc leave nothing"),
        (["--port", "50051"], "--port 50051 and --grpc-port 50051 are the same"),
        (["--salt-by-key"], "--salt-by-key keeps the prefix caches of API keys apart, and there are none"),
        (["--log-format", "xml"], "--log-format xml must be one of text, json"),
        (["--api-key-file", "/nowhere/keys.toml"], "--api-key-file /nowhere/keys.toml cannot be read"),
        (["--ssl-certfile", "x.pem"], "--ssl-keyfile"),
        (["--served-model-name", ""], "--served-model-name '' must be printable"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1.0 must be 0"),
    ],
)
def test_wrong_flags_of_the_server_are_named_before_a_model_is_fetched(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("serve", "/nowhere/model", *flags)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


def test_keys_and_certificates_reach_the_client(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[Any] = []

    def remote(*asked: Any) -> Any:
        caught.append(asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(backends, "remote", remote)
    key = tmp_path / "key.txt"
    key.write_text("secret\n")
    flags = ("--api-key-file", str(key), "--tls", "--ssl-ca-certs", "ca.pem")
    assert run("generate", "--prompt", "a", "--server", "h:1", *flags).exit_code == 130
    assert run("generate", "--prompt", "a", "--server", "h:1").exit_code == 130
    way = {"api_key": "secret", "tls": True, "ca_certs": pathlib.Path("ca.pem")}
    assert caught == [("h:1", None, way), ("h:1", None, {})]
