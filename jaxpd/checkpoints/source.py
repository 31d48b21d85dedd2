"""What a checkpoint is to the engine: a model description and weights that are read one at a time, by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxpd.models.config import ModelConfig

if TYPE_CHECKING:
    from jaxpd.tokenizer import Tokenizer


class WeightSource(Protocol):
    """Weights under Hugging Face's names and conventions, whatever the file format.

    Matrices are `[out, in]`; Q and K rows are in the half-split order of rotary embedding; Gemma norms are stored as
    `w` where the model multiplies by `1 + w`; tied models need no `lm_head.weight`.
    """

    def names(self) -> tuple[str, ...]:
        """All weights, in the order of the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one weight, without reading it. Raises InvalidArgument for a name that is not there."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One weight in float32, bfloat16 or float16; it may be a read-only view of the file. Nothing is kept."""
        ...

    def release(self) -> None:
        """Gives back host memory that reading took; reading again is allowed."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model that was found and whose description was read; its weights and tokenizer are read on demand.

    `load_tokenizer` is called at most once, by `tokenizer()`; it raises NotFound when the checkpoint has none.
    """

    name: str
    path: Path
    config: ModelConfig
    source: WeightSource
    load_tokenizer: Callable[[], Tokenizer] = dataclasses.field(repr=False)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.load_tokenizer()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built at the first call. Raises NotFound when the checkpoint holds none."""
        return self._tokenizer
