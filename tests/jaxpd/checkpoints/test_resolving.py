"""What MODEL may be, in which order it is looked up, and what the errors say."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from jaxpd.checkpoints import open_path, resolve
from jaxpd.errors import InvalidArgument, NotFound, Unavailable


def test_a_path_comes_before_a_built_in_name(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_hf(tmp_path / "smollm2-135m", tiny.config(), tiny.weights(tiny.config()))
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2-135m", progress=tiny.recorder()).config.hidden_size == 32
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/smollm2-135m", progress=tiny.recorder()).name == "smollm2-135m"


@pytest.mark.parametrize(
    "model", ["", "smollm3", "/no/such/folder", "./here/model", "a/b/c", "owner/file.gguf", "a b/c"]
)
def test_unknown_models_list_the_built_in_names(tiny: Any, model: str) -> None:
    with pytest.raises(NotFound, match=r"smollm2-135m, gemma3-270m"):
        resolve(model, progress=tiny.recorder())


def test_folders(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no model"):
        open_path(tmp_path)
    first = tiny.write_gguf(tmp_path / "one.gguf", tiny.config(), tiny.weights(tiny.config()))
    assert open_path(tmp_path).path == first
    tiny.write_gguf(tmp_path / "two.gguf", tiny.config(), tiny.weights(tiny.config()))
    with pytest.raises(InvalidArgument, match=r"one\.gguf, two\.gguf"):
        open_path(tmp_path)
    folder = tiny.write_hf(tmp_path / "hf", tiny.config(), tiny.weights(tiny.config()))
    with pytest.raises(InvalidArgument, match="give its folder"):
        open_path(folder / "model.safetensors")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_hub_id_without_network_names_the_alternatives(tiny: Any, hub_cache: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot reach the Hugging Face hub for 'owner/model'.*path.*built-in name"):
        resolve("owner/model", progress=tiny.recorder())


def test_a_hub_id_in_the_hubs_cache_needs_no_network(tiny: Any, hub_cache: Path) -> None:
    repo, commit = hub_cache / "models--owner--model", "0" * 40
    tiny.write_hf(repo / "snapshots" / commit, tiny.config(), tiny.weights(tiny.config()))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    checkpoint = resolve("owner/model", progress=tiny.recorder())
    assert (checkpoint.name, checkpoint.config.num_layers) == ("owner/model", 2)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """A hub on this machine that answers every request with `hub.status`."""

    class Hub(http.server.BaseHTTPRequestHandler):
        status = 404

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_id_that_is_not_there_or_not_open(tiny: Any, hub: Any, status: int) -> None:
    hub.status = status
    with pytest.raises(NotFound, match=rf"no model 'owner/model' that this user may read \(HTTP {status}\)"):
        resolve("owner/model", progress=tiny.recorder())
