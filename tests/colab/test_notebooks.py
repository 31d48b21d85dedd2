"""The notebooks run from the first cell to the last in a kernel of their own; what is committed of them is clean."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import nbformat
import pytest

from colab.refresh import NOTEBOOKS, execute, write

ROOT = pathlib.Path(__file__).parent.parent.parent
TINY = ROOT / "tests" / "data" / "tiny" / "smollm2"
SMALL: dict[str, dict[str, Any]] = {
    "01_quickstart.ipynb": {
        "MODEL": str(TINY),
        "DEVICE": "cpu",
        "LIMITS": {
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "kv_memory": 1 << 20,
            "precompile": False,
        },
        "WORDS": 30,
    },
}
MAX_BYTES = 300_000
FOREIGN = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|opt|var|mnt|work|content|Users)/|https?://(?!127\.0\.0\.1)")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(output: nbformat.NotebookNode) -> str:
    return str(output.text if output.output_type == "stream" else output.data.get("text/plain", ""))


def pictures_of(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def test_there_are_notebooks() -> None:
    assert {path.name for path in NOTEBOOKS} == set(SMALL)


@pytest.mark.heavy
@each_notebook
def test_every_cell_runs(path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # nobody's own start-up files
    done = execute(path, SMALL[path.name], cell_s=120)
    outputs = outputs_of(done)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    committed = nbformat.read(path, as_version=4)
    assert pictures_of(done) == pictures_of(committed) == 2
    said = "".join(map(text_of, outputs))
    assert "the meshes need 4: each has its own" in said
    assert "HTTP at http://127.0.0.1:" in said
    assert re.search(r"(stop|length) after \d+ tokens", said)
    assert "288 tokens in" in said  # 6 answers of 48
    write(done, tmp_path / path.name)


@each_notebook
def test_what_is_committed_is_clean(path: pathlib.Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run it from the top: make notebooks"
    )
    for output in outputs_of(notebook):
        assert output.output_type in ("stream", "execute_result", "display_data")
        assert output.get("name") != "stderr"
        assert not FOREIGN.search(text_of(output)), text_of(output)
    assert sum("parameters" in cell.metadata.get("tags", ()) for cell in code) == 1


@each_notebook
def test_what_is_committed_is_as_written(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    again = tmp_path / path.name
    write(nbformat.read(path, as_version=4), again)
    assert json.loads(again.read_text()) == json.loads(path.read_text())


def test_what_is_foreign_is_found() -> None:
    assert FOREIGN.search("/home/someone/models")
    assert FOREIGN.search("from https://example.org/simple")
    assert not FOREIGN.search("HTTP at http://127.0.0.1:8000, 33/34 programs")
