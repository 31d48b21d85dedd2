"""`jaxpd convert`: any checkpoint into an Orbax folder that is the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpd.checkpoints import open_path
from jaxpd.checkpoints.convert import convert
from jaxpd.errors import InvalidArgument, NotFound

CHAT = [{"role": "user", "content": "aé"}]


def source(tiny: Any, folder: Path, kind: str, **options: Any) -> Path:
    config = tiny.config()
    if kind == "hf":
        return tiny.write_hf(folder / "src", config, tiny.weights(config), **options)
    return tiny.write_gguf(folder / "src.gguf", config, tiny.weights(config), **options)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_is_the_same_model(tiny: Any, tmp_path: Path, kind: str) -> None:
    src = source(tiny, tmp_path, kind)
    progress = tiny.recorder()
    assert convert(str(src), tmp_path / "dst", progress=progress) == tmp_path / "dst"
    before, after = open_path(src), open_path(tmp_path / "dst")
    assert (after.name, after.config) == ("dst", before.config)
    assert set(after.source.names()) == set(before.source.names())
    for name in before.source.names():
        assert after.source.shape(name) == before.source.shape(name)
        np.testing.assert_array_equal(after.source.read(name), before.source.read(name))
    old, new = before.tokenizer(), after.tokenizer()
    assert new.encode("abé <s>") == old.encode("abé <s>")
    assert new.apply_chat_template(CHAT) == old.apply_chat_template(CHAT)
    assert new.eos_token_ids == old.eos_token_ids
    assert all(sum(amounts) == total for _, total, amounts in progress.stages)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["dst", src.name])


def test_converts_a_converted_one_and_to_bfloat16(tiny: Any, tmp_path: Path) -> None:
    src = source(tiny, tmp_path, "hf")
    (tmp_path / "twice").mkdir()  # an empty folder is fine
    convert(str(src), tmp_path / "once", progress=tiny.recorder())
    convert(str(tmp_path / "once"), tmp_path / "twice", dtype="bfloat16", progress=tiny.recorder())
    name = "model.norm.weight"
    read = open_path(tmp_path / "twice").source.read(name)
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, open_path(src).source.read(name).astype(ml_dtypes.bfloat16))


def test_never_overwrites(tiny: Any, tmp_path: Path) -> None:
    src = source(tiny, tmp_path, "hf")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "mine").write_text("precious")
    for dst in (tmp_path / "dst", tmp_path / "dst" / "mine"):
        with pytest.raises(InvalidArgument, match="not an empty folder"):
            convert(str(src), dst, progress=tiny.recorder())
    assert (tmp_path / "dst" / "mine").read_text() == "precious"


def test_a_failure_leaves_nothing_behind(tiny: Any, tmp_path: Path) -> None:
    weights = tiny.weights(tiny.config())
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.int8)
    src = tiny.write_hf(tmp_path / "src", tiny.config(), weights)
    with pytest.raises(InvalidArgument, match="type I8"):
        convert(str(src), tmp_path / "dst", progress=tiny.recorder())
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_bad_arguments(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--dtype int4 must be one of float32, bfloat16"):
        convert("x", tmp_path / "dst", dtype="int4", progress=tiny.recorder())
    with pytest.raises(NotFound, match="unknown model"):
        convert("no-such-model", tmp_path / "dst", progress=tiny.recorder())


def test_a_model_without_tokenizer_converts_with_a_note(tiny: Any, tmp_path: Path) -> None:
    progress = tiny.recorder()
    convert(str(source(tiny, tmp_path, "gguf", tokenizer=False)), tmp_path / "dst", progress=progress)
    assert any("no tokenizer" in note for note in progress.notes)
    with pytest.raises(NotFound):
        open_path(tmp_path / "dst").tokenizer()


def test_damaged_folders_are_refused(tiny: Any, tmp_path: Path) -> None:
    dst = convert(str(source(tiny, tmp_path, "hf")), tmp_path / "dst", progress=tiny.recorder())
    marker = dst / "jaxpd.json"
    good = marker.read_text()
    marker.write_text("{")
    with pytest.raises(InvalidArgument, match=r"jaxpd\.json is corrupt"):
        open_path(dst)
    marker.write_text(json.dumps({"format": 99}))
    with pytest.raises(InvalidArgument, match="format 99"):
        open_path(dst)
    marker.write_text(good)
    for part in (dst / "weights").iterdir():
        if part.is_file():
            part.unlink()
    with pytest.raises(InvalidArgument, match="no Orbax checkpoint"):
        open_path(dst)


def test_damaged_weights_are_refused(tiny: Any, tmp_path: Path) -> None:
    """In a process of its own: reads that failed go on in Orbax's threads after it has given up."""
    dst = convert(str(source(tiny, tmp_path, "hf")), tmp_path / "dst", progress=tiny.recorder())
    for part in (dst / "weights").rglob("*"):
        if part.is_file() and part.parent.name == "d":
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    script = f"""
import pathlib
from jaxpd.checkpoints import open_path
from jaxpd.errors import InvalidArgument
try:
    open_path(pathlib.Path({str(dst)!r})).source.read("model.norm.weight")
except InvalidArgument as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "refused:" in done.stdout and str(dst) in done.stdout, done.stderr
