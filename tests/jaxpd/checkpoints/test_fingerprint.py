"""The hash by which workers know that they have the same model."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from jaxpd.checkpoints import resolve
from jaxpd.checkpoints.fingerprint import SAMPLES, fingerprint, sampled
from jaxpd.checkpoints.source import Checkpoint
from jaxpd.progress import SilentProgress

TINY = pathlib.Path(__file__).parents[2] / "data" / "tiny"
NAMES = ("smollm2", "llama2", "gemma3", "qwen3")


def opened(folder: pathlib.Path) -> Checkpoint:
    return resolve(str(folder), progress=SilentProgress())


@dataclasses.dataclass
class Changed:
    """A source of weights in which `change` has been at one of them."""

    checkpoint: Checkpoint
    name: str
    change: Callable[[np.ndarray], np.ndarray]
    released: int = 0

    def names(self) -> tuple[str, ...]:
        return self.checkpoint.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.source.shape(name)

    def read(self, name: str) -> np.ndarray:
        values = self.checkpoint.source.read(name)
        return self.change(np.array(values)) if name == self.name else values

    def release(self) -> None:
        self.released += 1


def test_the_same_checkpoint_in_another_folder_is_the_same(tmp_path: pathlib.Path) -> None:
    shutil.copytree(TINY / "smollm2", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "tokenizer.json").unlink(missing_ok=True)
    assert fingerprint(opened(TINY / "smollm2")) == fingerprint(opened(tmp_path / "elsewhere"))


def test_every_model_has_its_own() -> None:
    found = {fingerprint(opened(TINY / name)) for name in NAMES}
    assert len(found) == len(NAMES) and all(len(each) == 32 for each in found)


@pytest.mark.parametrize("place", [0, -1])
def test_one_weight_that_differs_in_one_value_is_seen(place: int) -> None:
    checkpoint = opened(TINY / "smollm2")
    same = fingerprint(checkpoint)

    def change(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[place] += 1
        return values

    for name in checkpoint.source.names():
        source = Changed(checkpoint, name, change)
        assert fingerprint(dataclasses.replace(checkpoint, source=source)) != same
        assert source.released == 1
    untouched = Changed(checkpoint, name, lambda values: values)
    assert fingerprint(dataclasses.replace(checkpoint, source=untouched)) == same


def test_shape_and_configuration_count() -> None:
    checkpoint = opened(TINY / "smollm2")
    same = fingerprint(checkpoint)
    name = checkpoint.source.names()[-1]
    flat = Changed(checkpoint, name, lambda values: values.reshape(1, *values.shape))
    assert fingerprint(dataclasses.replace(checkpoint, source=flat)) != same
    for field, value in (("rms_eps", 0.5), ("query_scale", 9.0), ("qk_norm", True)):
        config = dataclasses.replace(checkpoint.config, **{field: value})  # type: ignore[arg-type]
        assert fingerprint(dataclasses.replace(checkpoint, config=config)) != same, field
    longer = dataclasses.replace(checkpoint.config, max_position=7, eos_token_ids=(3,))
    assert fingerprint(dataclasses.replace(checkpoint, config=longer)) == same


def test_samples_are_spread_over_the_whole_weight() -> None:
    values = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    found = sampled(values)
    assert len(found) == SAMPLES and found[0] == 0 and found[-1] == 99_999
    assert np.all(np.diff(found) > 1000)
    assert sampled(np.arange(5.0)).tolist() == [0, 1, 2, 3, 4] and sampled(np.zeros((0, 3))).size == 0
