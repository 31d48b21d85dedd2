"""`jaxpd convert SRC DST`: any checkpoint into an Orbax folder that holds everything to serve it.

The folder is built under another name beside DST and renamed at the end: DST is complete or does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpd.checkpoints.heartbeat import heartbeat
from jaxpd.checkpoints.orbax import FORMAT, MARKER, WEIGHTS, write_weights
from jaxpd.checkpoints.resolving import resolve
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.errors import FailedPrecondition, InvalidArgument, NotFound
from jaxpd.progress import Progress

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def convert(src: str, dst: Path, *, dtype: str | None = None, progress: Progress) -> Path:
    """Writes model `src` (path, built-in name or hub id) as an Orbax folder `dst`, which is returned.

    `dtype` is float32 or bfloat16; None keeps what is stored (float32 where that was quantised). The converted weights
    are held in memory once while Orbax writes them; weights that keep their type stay in the source file's memory map.
    Raises InvalidArgument for a `dst` that holds anything or a bad dtype, and what `resolve` raises.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidArgument(f"--dtype {dtype} must be one of {', '.join(_DTYPES)}", field="dtype")
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise InvalidArgument(f"DST {dst} exists and is not an empty folder; remove it or name another", field="dst")
    checkpoint = resolve(src, progress=progress)
    try:
        dst.resolve().parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=dst.resolve().parent, prefix=f".{dst.name}-"))
        try:
            _write(checkpoint, building, dtype, progress)
            building.chmod(0o755)  # mkdtemp makes it private
            os.replace(building, dst)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise FailedPrecondition(f"cannot write {dst}: {error.strerror or error}") from error
    return dst


def _write(checkpoint: Checkpoint, folder: Path, dtype: str | None, progress: Progress) -> None:
    names = checkpoint.source.names()
    weights: dict[str, np.ndarray] = {}
    with progress.stage("reading weights", total=len(names), unit="weights") as stage:
        for name in names:
            values = checkpoint.source.read(name)
            weights[name] = values if dtype is None else values.astype(_DTYPES[dtype], copy=False)
            stage.advance(1.0, name)
    size = sum(array.nbytes for array in weights.values())
    with progress.stage("writing weights", total=size, unit="bytes") as stage, heartbeat(stage):
        write_weights(folder / WEIGHTS, weights)
        stage.advance(float(size))
    _write_description(checkpoint, folder)
    _write_tokenizer(checkpoint, folder, progress)
    marker: dict[str, Any] = {"format": FORMAT, "source": checkpoint.name}
    (folder / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")


def _write_description(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.path.is_file():
        from jaxpd.checkpoints.gguf import hf_config
        from jaxpd.checkpoints.gguf_file import read_gguf

        config = hf_config(read_gguf(checkpoint.path))
        text = json.dumps(config, indent=2, default=lambda number: number.item())
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        return
    for file in _CONFIG_FILES:
        if (checkpoint.path / file).is_file():
            shutil.copyfile(checkpoint.path / file, folder / file)


def _write_tokenizer(checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    if checkpoint.path.is_dir():  # the model's own files say more than we read from them
        for file in _TOKENIZER_FILES:
            if (checkpoint.path / file).is_file():
                shutil.copyfile(checkpoint.path / file, folder / file)
        return
    try:
        checkpoint.tokenizer().save(folder)
    except NotFound:
        progress.note(f"{checkpoint.name} has no tokenizer; the converted model takes and gives token ids only")
