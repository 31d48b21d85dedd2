"""What the fronts know of the model behind them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxpd.errors import NotFound
from jaxpd.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxpd.engine import Engine

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the fronts know of the model. `tokenizer` is None for one that speaks token ids only.

    `name` is what it is called in answers; clients may use any of `names`.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    page_size: int
    meshes: Mapping[str, tuple[str, ...]]  # role -> the mesh spec of each of its pools
    tokenizer: Tokenizer | None
    mode: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it."""
        return (self.name, *self.aliases)

    def called(self, names: Sequence[str]) -> ServedModel:
        """The same model by other names, the first one first; by its own where there are none."""
        return dataclasses.replace(self, name=names[0], aliases=tuple(names[1:])) if names else self


def served_model(engine: Engine) -> ServedModel:
    """What the fronts need to know of an engine that has started."""
    checkpoint = engine.checkpoint
    try:
        tokenizer = checkpoint.tokenizer()
    except NotFound as error:
        logger.warning("%s", error)
        tokenizer = None
    config = checkpoint.config
    return ServedModel(
        name=checkpoint.name,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=engine.limits.max_model_len,
        eos_token_ids=config.eos_token_ids,
        dtype=engine.limits.dtype,
        page_size=engine.limits.page_size,
        meshes=engine.limits.meshes,
        tokenizer=tokenizer,
        mode=engine.mode,
    )
