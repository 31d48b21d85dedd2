"""Orbax folders as checkpoints: what `jaxpd convert` writes and `resolve` reads.

    DST/jaxpd.json      format version and where the model came from; its presence says that the folder is complete
    DST/config.json     as in a Hugging Face folder; the tokenizer's files likewise
    DST/weights/        an Orbax PyTree checkpoint: one flat dict, Hugging Face's name -> array

Weights are read one at a time by a partial restore; Orbax itself is imported only when one is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpd.checkpoints.hf import read_config
from jaxpd.checkpoints.layout import check_weights
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.errors import InvalidArgument
from jaxpd.tokenizer import Tokenizer, load_tokenizer

MARKER = "jaxpd.json"
WEIGHTS = "weights"
FORMAT = 1


def is_orbax(folder: Path) -> bool:
    """Whether `folder` was written by `jaxpd convert`."""
    return (folder / MARKER).is_file()


def open_orbax(folder: Path, *, name: str | None = None) -> Checkpoint:
    """The checkpoint in a folder that `write_weights` and `jaxpd convert` made.

    Raises InvalidArgument when it is corrupt, of a newer format, or its weights do not fit its config.
    """
    try:
        version = json.loads((folder / MARKER).read_text(encoding="utf-8"))["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{folder / MARKER} is corrupt: {error}; convert the model again") from error
    if version != FORMAT:
        raise InvalidArgument(f"{folder} has format {version}, and this jaxpd reads {FORMAT}; convert the model again")
    config = read_config(folder)
    source = OrbaxSource(folder / WEIGHTS)
    check_weights(config, source, str(folder))

    def tokenizer() -> Tokenizer:
        return load_tokenizer(folder, eos_token_ids=config.eos_token_ids)

    return Checkpoint(name or folder.resolve().name, folder, config, source, tokenizer)


class OrbaxSource:
    """WeightSource of an Orbax checkpoint; `read` restores one array in its stored type."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._checkpointer = _checkpointer()
        try:
            metadata = self._checkpointer.metadata(self._folder).item_metadata.tree
            self._shapes = {str(name): tuple(entry.shape) for name, entry in metadata.items()}
        except Exception as error:  # Orbax and its storage raise many kinds; all mean the folder is not what it was
            raise InvalidArgument(f"{folder} is no Orbax checkpoint that can be read: {error}") from error

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise InvalidArgument(f"the checkpoint has no weight {name!r}")
        return self._shapes[name]

    def release(self) -> None:
        """Nothing: Orbax reads into arrays of its own."""

    def read(self, name: str) -> np.ndarray:
        import orbax.checkpoint as ocp

        self.shape(name)
        arguments = ocp.args.PyTreeRestore(
            item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
        )
        try:
            return np.asarray(self._checkpointer.restore(self._folder, args=arguments)[name])
        except Exception as error:  # as above
            raise InvalidArgument(f"{self._folder} is corrupt: {name} cannot be read ({error})") from error


def write_weights(folder: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Writes a flat dict of arrays as an Orbax checkpoint to `folder`, which must not exist."""
    import orbax.checkpoint as ocp

    _checkpointer().save(folder.resolve(), args=ocp.args.PyTreeSave(dict(weights)))


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
