"""Real processes: a server started with `jaxpd serve`, asked with `jaxpd generate`, and an engine without a server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
MODEL = ROOT / "tests" / "data" / "tiny" / "smollm2"
SMALL = ("--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "32")
TIMINGS = {"queue_s", "prefill_s", "transfer_s", "transfer_exposed_s", "decode_s", "ttft_s", "ttst_s"}
PATIENCE_S = 240


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "jaxpd", *map(str, args)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}


def run(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*args), env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, f"{args}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


@dataclasses.dataclass
class Server:
    process: subprocess.Popen[str]
    address: str
    line: str  # the one to type in another terminal
    stderr: list[str]


@contextlib.contextmanager
def serving(*args: object) -> Iterator[Server]:
    """A server that is ready; killed at the end if it still runs."""
    with popen("serve", *args) as process:
        assert process.stdout is not None and process.stderr is not None
        errors: list[str] = []
        # Both pipes must be read for as long as the process lives, or it would wait for room in them.
        reader = threading.Thread(target=errors.extend, args=(process.stderr,))
        reader.start()
        try:
            for line in process.stdout:
                if found := re.search(r"generate --server (\S+) --prompt", line):
                    yield Server(process, found[1], line.strip(), errors)
                    return
            raise AssertionError(f"the server ended with {process.wait(PATIENCE_S)}:\n{''.join(errors)}")
        finally:
            process.kill()
            reader.join()


def popen(*args: object) -> subprocess.Popen[str]:
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    heeding = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", heeding, *command(*args)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def server(cache: pathlib.Path) -> Iterator[Server]:
    with serving(MODEL, "--no-http", "--grpc-port", 0, "--compile-cache", cache, *SMALL) as running:
        yield running


def test_the_server_shows_its_plan_its_stages_and_the_line_to_type(server: Server) -> None:
    shown = "".join(server.stderr)
    assert "memory plan:" in shown and "prefill" in shown and "free host memory" in shown
    assert re.search(r"\[\d\] compiling done in", shown) and "\r" not in shown
    assert server.line.endswith("generate --server " + server.address + ' --prompt "The capital of France is"')


def test_one_json_object_on_stdout(server: Server) -> None:
    done = run(
        "generate", "--server", server.address, "--prompt", "hello world", "--max-tokens", 5, "--ignore-eos", "--json"
    )
    answer = json.loads(done.stdout)
    assert answer.keys() == {"token_ids", "text", "finish_reason", "usage", "timings"}
    assert len(answer["token_ids"]) == 5 == answer["usage"]["completion_tokens"]
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert answer["usage"]["prompt_tokens"] > 0
    assert answer["finish_reason"] == "length"
    assert answer["timings"].keys() == TIMINGS and answer["timings"]["transfer_s"] > 0
    plain = run(
        "generate", MODEL.name, "--server", server.address, "--prompt", "hello world", "--max-tokens", 5, "--ignore-eos"
    )
    assert plain.stdout == answer["text"] + "\n"
    assert "5 tokens, ended by length" in plain.stderr


def test_a_prompt_file_gives_a_list_in_order_the_same_with_and_without_server(
    server: Server, cache: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    chat = [{"role": "user", "content": "hi"}]
    prompts = [{"prompt_ids": [5, 6, 7]}, {"text": "hello"}, {"prompt_ids": [9]}, {"prompt_ids": list(range(3, 40))}]
    if "chat_template" in (MODEL / "tokenizer_config.json").read_text():
        prompts.append({"chat": chat})
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": prompts}))
    asked = ("generate", "--prompt-file", path, "--max-tokens", 6, "--ignore-eos", "--json")
    remote = json.loads(run(*asked, "--server", server.address).stdout)
    local = json.loads(run(*asked[:1], MODEL, *asked[1:], "--compile-cache", cache, *SMALL).stdout)
    assert [a["usage"]["prompt_tokens"] for a in local][0::2][:2] == [3, 1]
    assert len(local) == len(prompts) and all(len(a["token_ids"]) == 6 for a in local)
    assert [a["token_ids"] for a in local] == [a["token_ids"] for a in remote]
    assert [a["text"] for a in local] == [a["text"] for a in remote]


def test_what_ends_an_answer_is_the_same_with_and_without_server(server: Server, cache: pathlib.Path) -> None:
    asked = ("--prompt", "hello world", "--max-tokens", 12, "--ignore-eos", "--json")
    there, here = ("generate", "--server", server.address), ("generate", MODEL, "--compile-cache", cache, *SMALL)
    full = json.loads(run(*there, *asked).stdout)
    stop, ids = full["text"][4:6], full["token_ids"]
    at = next(i for i, token in enumerate(ids) if i > 2 and token not in ids[:i])
    for more in (("--stop", "not in it", "--stop", stop), ("--stop-token-ids", f"0,{ids[at]}")):
        remote, local = (json.loads(run(*where, *asked, *more).stdout) for where in (there, here))
        for key in ("token_ids", "text", "finish_reason", "usage"):
            assert remote[key] == local[key], key
        assert local["finish_reason"] == "stop"
        if more[0] == "--stop":
            assert local["text"] == full["text"][: full["text"].index(stop)]
        else:
            assert local["token_ids"] == ids[: at + 1] and full["text"].startswith(local["text"])


def test_samples_have_headings_and_lists(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt_ids": [5, 6, 7]}, {"prompt_ids": [9]}]))
    asked = ("--n", 2, "--temperature", 1, "--seed", 4, "--max-tokens", 5, "--ignore-eos")
    engine = ("--compile-cache", cache, "--reserve-tokens", 2, "--local-prefill", 2, "--step-timeout", 200, *SMALL)
    done = run("generate", MODEL, "--prompt-file", path, *asked, "--json", "--prompt-logprobs", 1, *engine)
    first, second = json.loads(done.stdout)
    assert [len(samples) for samples in (first, second)] == [2, 2] and first[0]["token_ids"] != first[1]["token_ids"]
    assert [scored["token_id"] for scored in first[0]["prompt_logprobs"]] == [6, 7]
    assert all(len(scored["top"]) == 1 and scored["logprob"] < 0 for scored in first[0]["prompt_logprobs"])
    assert second[0]["prompt_logprobs"] == [] and "prompt_logprobs" not in first[1]
    plain = run("generate", MODEL, "--prompt-file", path, *asked, *engine)
    texts = [(f"prompt {i}, sample {j}", first[j] if i == 0 else second[j]) for i in range(2) for j in range(2)]
    assert plain.stdout == "".join(f"--- {heading}\n{answer['text']}\n" for heading, answer in texts)
    assert f"{path}: prompt 1: sample 0: 1 + 5 tokens, ended by length" in plain.stderr
    one = run("generate", MODEL, "--prompt-ids", "5,6,7", *asked, *engine)
    assert one.stdout == "".join(f"--- sample {i}\n{first[i]['text']}\n" for i in range(2))
    assert "\nsample 1: 3" in one.stderr


def test_a_refused_prompt_is_an_error_of_its_own(server: Server, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt_ids": [5]}, {"prompt_ids": [10**6]}, {"prompt_ids": [6]}]))
    done = run("generate", "--server", server.address, "--prompt-file", path, "--max-tokens", 3, "--json", code=2)
    good, bad, also_good = json.loads(done.stdout)
    assert "error" not in good and "error" not in also_good and good["token_ids"]
    assert bad["error"]["code"] == "INVALID_ARGUMENT" and "1000000" in bad["error"]["message"]
    assert "prompt 1: error: " in done.stderr
    other = run("generate", "other-model", "--server", server.address, "--prompt", "a", code=2)
    assert f"MODEL other-model is not what --server {server.address} serves, that is {MODEL.name}" in other.stderr
    too_long = run("generate", "--server", server.address, "--prompt", "a", "--max-tokens", 1000, code=2)
    assert "max_tokens=1000" in too_long.stderr and "64" in too_long.stderr and too_long.stdout == ""


def test_errors_of_starting(server: Server, tmp_path: pathlib.Path) -> None:
    port = server.address.rpartition(":")[2]
    in_use = run("serve", MODEL, "--no-http", "--grpc-port", port, code=2)
    assert port in in_use.stderr and "in use" in in_use.stderr
    unknown = run("generate", tmp_path / "no-such-model", "--prompt", "a", code=2)
    assert "no-such-model" in unknown.stderr
    big = run("serve", MODEL, "--no-http", "--grpc-port", 0, "--max-model-len", 256, "--kv-memory", 1, code=2)
    assert "--kv-memory" in big.stderr and "compiling" not in big.stderr
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        free = nobody.getsockname()[1]
    gone = run("generate", "--server", f"127.0.0.1:{free}", "--prompt", "a", code=1)
    assert f"127.0.0.1:{free}" in gone.stderr


def test_sigterm_lets_a_running_answer_finish(cache: pathlib.Path) -> None:
    with serving(MODEL, "--no-http", "--grpc-port", 0, "--compile-cache", cache, *SMALL) as server:
        with popen(
            "generate", "--server", server.address, "--prompt-ids", "5", "--max-tokens", 60, "--ignore-eos"
        ) as client:
            assert client.stdout is not None
            client.stdout.read(1)  # it has begun
            server.process.send_signal(signal.SIGTERM)
            _, summary = client.communicate(timeout=PATIENCE_S)
            assert client.returncode == 0 and "60 tokens, ended by length" in summary
        assert server.process.wait(timeout=PATIENCE_S) == 0
    assert "draining" in "".join(server.stderr)


def test_ctrl_c_ends_generate_in_one_line(tmp_path: pathlib.Path) -> None:
    """An empty compile cache, so that compiling takes seconds."""
    args = ("--precompile", "--compile-cache", tmp_path, "--max-tokens", 8, *SMALL)
    with popen("generate", MODEL, "--prompt", "a", *args) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "compiling" in line:
                process.send_signal(signal.SIGINT)
                break
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "jaxpd: interrupted" and "Traceback" not in rest


def test_convert_writes_what_generate_reads(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = run("convert", MODEL, tmp_path / "orbax")
    assert f"serve {tmp_path / 'orbax'}" in done.stderr
    again = run("convert", MODEL, tmp_path / "orbax", code=2)
    assert "not an empty folder" in again.stderr
    asked = ("--prompt-ids", "5,6,7", "--max-tokens", 4, "--ignore-eos", "--json", "--compile-cache", cache, *SMALL)
    first, second = (json.loads(run("generate", model, *asked).stdout) for model in (MODEL, tmp_path / "orbax"))
    assert first["token_ids"] == second["token_ids"]
