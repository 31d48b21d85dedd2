"""How one model is laid out on one mesh: padded sizes and the shapes that every device sees.

Only three axes are ever cut, all along `model`: head slots, FFN and vocabulary. Each is padded up so that it divides;
padding holds zeros and is never visible outside (padded vocabulary is masked in `sample`).
"""

from __future__ import annotations

import dataclasses

from jaxpd.models.config import ModelConfig
from meshes.heads import HeadLayout, head_layout
from pallas_kernels.batch import lanes

VOCAB_TILE = 128  # lanes of a TPU register: keeps every device's share of the logits aligned


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """Sizes of `config` on a model axis of `tp` devices."""

    config: ModelConfig
    tp: int

    @property
    def heads(self) -> HeadLayout:
        """Which head sits in which slot."""
        return head_layout(self.config.num_heads, self.config.num_kv_heads, self.tp)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding over the whole mesh."""
        return round_up(self.config.vocab_size, self.tp * VOCAB_TILE)

    @property
    def padded_ffn(self) -> int:
        """Width of the FFN over the whole mesh."""
        return round_up(self.config.intermediate_size, self.tp)

    @property
    def qkv_per_device(self) -> int:
        """Columns of the fused query, key and value projection on one device: its query slots, then K, then V."""
        return (self.heads.q_per_device + 2 * self.heads.kv_per_device) * self.config.head_dim

    def page_shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int, int]:
        """[L, P, K, S, W] of one replica's page pool over its model axis."""
        cfg = self.config
        return (cfg.num_layers, num_pages, self.heads.num_kv_slots, page_size, lanes(cfg.head_dim))
