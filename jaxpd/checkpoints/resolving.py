"""From what a user typed as MODEL to a checkpoint: a path, a built-in name, or a hub id, in this order."""

from __future__ import annotations

from pathlib import Path

from jaxpd.checkpoints.builtin import BUILTIN, default_cache_dir, fetch
from jaxpd.checkpoints.gguf import open_gguf
from jaxpd.checkpoints.hf import open_hf
from jaxpd.checkpoints.hub import fetch_from_hub, is_hub_id
from jaxpd.checkpoints.orbax import is_orbax, open_orbax
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.errors import InvalidArgument, NotFound
from jaxpd.progress import Progress


def resolve(model: str, *, cache_dir: Path | None = None, progress: Progress) -> Checkpoint:
    """The checkpoint that `model` names; fetched first where it must be, its description and weight table checked.

    `cache_dir` is where built-in models are kept (None: `default_cache_dir()`). Weights are not read yet.
    Raises NotFound for what does not exist, InvalidArgument for what is corrupt or not supported, Unavailable without
    the network that it needs, FailedPrecondition when the cache cannot be written.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return open_path(path)
    if model in BUILTIN:
        file = fetch(model, BUILTIN[model], cache_dir=cache_dir or default_cache_dir(), progress=progress)
        return open_gguf(file, name=model)
    if is_hub_id(model) and not model.endswith(".gguf"):
        return open_hf(fetch_from_hub(model, progress=progress), name=model)
    raise NotFound(
        f"unknown model {model!r}: no such file or folder, and not a built-in name ({', '.join(BUILTIN)}) nor a "
        "Hugging Face id (owner/name)",
        field="model",
    )


def open_path(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file, or a folder: Hugging Face's, that of `jaxpd convert`, or one with a GGUF file."""
    if path.is_file():
        if path.suffix in (".safetensors", ".json"):
            raise InvalidArgument(
                f"{path} is a part of a Hugging Face model; give its folder {path.parent}", field="model"
            )
        return open_gguf(path)
    if is_orbax(path):
        return open_orbax(path)
    if (path / "config.json").is_file():
        return open_hf(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return open_gguf(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise InvalidArgument(f"{path} holds several GGUF files ({names}); give one of them", field="model")
    raise NotFound(
        f"{path} holds no model: neither config.json with safetensors, nor a GGUF file, nor an Orbax folder written by "
        "`jaxpd convert`",
        field="model",
    )
