"""Hugging Face folders as checkpoints: config.json, one or many safetensors files, and the tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxpd.checkpoints.layout import check_weights
from jaxpd.checkpoints.mapped import give_back_pages
from jaxpd.checkpoints.safetensors_file import SafeTensor, read_safetensors
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.errors import InvalidArgument, NotFound
from jaxpd.models.config import ModelConfig, from_hf
from jaxpd.tokenizer import Tokenizer, load_tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_hf(folder: Path, *, name: str | None = None) -> Checkpoint:
    """The checkpoint in a Hugging Face folder.

    Raises NotFound for a file that is missing, InvalidArgument for one that is corrupt or truncated, for an
    architecture or a quantisation that is not supported, and for weights that are missing or have the wrong shape.
    """
    config = read_config(folder)
    source = SafetensorsSource(folder)
    check_weights(config, source, str(folder))

    def tokenizer() -> Tokenizer:
        return load_tokenizer(folder, eos_token_ids=config.eos_token_ids)

    return Checkpoint(name or folder.resolve().name, folder, config, source, tokenizer)


def read_config(folder: Path) -> ModelConfig:
    """The model description in `config.json`; the end tokens in `generation_config.json` win, as in transformers."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file() and (eos := _read_json(generation).get("eos_token_id")) is not None:
        raw["eos_token_id"] = eos
    try:
        return from_hf(raw)
    except InvalidArgument as error:
        raise InvalidArgument(f"{folder}: {error.message}", field=error.field) from error


class SafetensorsSource:
    """WeightSource of the safetensors files in a folder; `read` gives a view of the file in its stored type."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, SafeTensor] = {}
        for path, wanted in _files(folder):
            tensors = read_safetensors(path)
            for name in tensors if wanted is None else wanted:
                if name not in tensors:
                    raise InvalidArgument(
                        f"{path} lacks {name}, which {_INDEX} says it has; the download is incomplete"
                    )
                self._tensors[name] = tensors[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def read(self, name: str) -> np.ndarray:
        return self._find(name).values()

    def release(self) -> None:
        give_back_pages(tensor.data for tensor in self._tensors.values())

    def _find(self, name: str) -> SafeTensor:
        if name not in self._tensors:
            raise InvalidArgument(f"the checkpoint has no weight {name!r}")
        return self._tensors[name]


def _files(folder: Path) -> list[tuple[Path, list[str] | None]]:
    """The weight files and which names each is asked for (None: all it has)."""
    index = folder / _INDEX
    if index.is_file():
        by_file: dict[str, list[str]] = {}
        for name, file in dict(_read_json(index).get("weight_map") or {}).items():
            by_file.setdefault(str(file), []).append(name)
        for file in by_file:
            if Path(file).name != file:
                raise InvalidArgument(f"{index} points to {file!r}, outside its folder")
            if not (folder / file).is_file():
                raise NotFound(f"{folder / file} is missing, which {_INDEX} names; the download is incomplete")
        return [(folder / file, names) for file, names in by_file.items()]
    if (folder / _SINGLE).is_file():
        return [(folder / _SINGLE, None)]
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others and not any("-of-" in name for name in others):
        return [(folder / name, None) for name in others]
    if others:
        raise NotFound(f"{folder} has {len(others)} parts of a model but no {_INDEX}; the download is incomplete")
    hint = "; convert its .bin files to safetensors" if any(folder.glob("*.bin")) else ""
    raise NotFound(f"{folder} has a config.json but no {_SINGLE}{hint}")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise NotFound(f"{path} is missing; the download is incomplete or this is no model folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path} is corrupt: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} is corrupt: it holds {type(value).__name__}, not an object")
    return value
