"""How much temporary memory one step of `forward` may take on a device: the activations of one bucket.

    stream      the residual stream, its normed copy, and a float32 partial product before and after its sum over
                `model`
    rope        cosines and sines, for each of the model's tables
    attention   queries, keys and values as they are projected and in float32 as they are turned; those to be written,
                as lanes of a page; and queries and results by item, as the kernel wants them, each once more in
                another order
    ffn         gate, up and their product
    logits      the last tokens' vectors and logits; twice, for a loop over replicas carries them
    compiler    what XLA for TPU adds of its own (jax 0.12.0, libtpu 0.0.52, read from its buffer assignment): 0.7 MB a
                layer, since each prefetch of a piece of a weight holds 16 KiB, and norm weights in float32; and in a
                loop over replicas once more a tied embedding table that fits on the chip: XLA moves it there for its
                first use and out again for its second

    most bytes = stream + rope + max(attention, ffn, logits) + compiler

Layers run one after another, so that their activations do not add up; the page pool is never copied.
"""

from __future__ import annotations

import dataclasses

from jaxpd.batch import BatchShape
from jaxpd.models.layout import ModelLayout, round_up
from pallas_kernels.batch import lanes

FLOAT32 = 4
TILE_ROWS = 32  # rows of a tile of one register: 8 in float32, 16 in bfloat16, 32 in 8 bits
LAYER_BYTES = 1 << 20  # of the compiler's own


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes on one device."""

    stream: int
    rope: int
    attention: int
    ffn: int
    logits: int
    compiler: int

    @property
    def most(self) -> int:
        """Upper bound of what is alive at once."""
        return self.stream + self.rope + max(self.attention, self.ffn, self.logits) + self.compiler


def activations(
    layout: ModelLayout, shape: BatchShape, *, replicas: int, itemsize: int, item_bytes: int = 0, vmem_bytes: int = 0
) -> Activations:
    """Of one bucket on one of `layout.tp` devices. `item_bytes`: queries and results as the attention kernel wants
    them; 0 for an implementation that takes them as they are. `vmem_bytes`: of the chip, if it is a TPU.
    """
    cfg, heads = layout.config, layout.heads
    T, B = max(shape.tokens, TILE_ROWS), max(shape.rows, TILE_ROWS)
    E, F, V = cfg.hidden_size, layout.padded_ffn // layout.tp, layout.padded_vocab // layout.tp
    tables = 2 if cfg.local_rope else 1
    written = 2 * T * heads.kv_per_device * lanes(cfg.head_dim) * itemsize
    embedding = V * round_up(E, 128) * itemsize
    moved = cfg.tie_embeddings and replicas > 1 and embedding <= vmem_bytes
    return Activations(
        stream=T * E * (2 * itemsize + 2 * FLOAT32),
        rope=tables * 2 * T * lanes(cfg.head_dim) * FLOAT32,
        attention=T * layout.qkv_per_device * (itemsize + FLOAT32) + written + 2 * item_bytes,
        ffn=T * 3 * F * itemsize,
        logits=B * E * 2 * itemsize + 2 * B * V * FLOAT32,
        compiler=(cfg.num_layers * LAYER_BYTES if vmem_bytes else 0) + (embedding if moved else 0),
    )
