"""The bound of a step's temporary memory: its terms, by hand for a small model, and what it must not depend on."""

from __future__ import annotations

import dataclasses

from jaxpd.activations import LAYER_BYTES, activations
from jaxpd.batch import BatchShape
from jaxpd.models.config import ModelConfig, from_hf
from jaxpd.models.layout import ModelLayout

CONFIG: ModelConfig = from_hf(
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": True,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }
)  # fmt: skip
PREFILL, DECODE = BatchShape(128, 8, 4), BatchShape(64, 64, 4)


def test_terms_by_hand() -> None:
    one = activations(ModelLayout(CONFIG, 2), PREFILL, replicas=1, itemsize=2, item_bytes=1000)
    assert one.stream == 128 * 256 * (2 * 2 + 2 * 4)
    assert one.rope == 2 * 128 * 128 * 4
    assert one.attention == 128 * (2 + 2) * 64 * 6 + 2 * 128 * 128 * 2 + 2000  # 2 query and 1 + 1 KV heads of 64
    assert one.ffn == 128 * 3 * 256 * 2
    assert one.logits == 32 * 256 * 4 + 2 * 32 * 512 * 4  # 8 rows take a tile of 32
    assert one.most == one.stream + one.rope + one.attention


def test_layers_add_nothing_but_what_the_compiler_does() -> None:
    deep = dataclasses.replace(CONFIG, num_layers=8, local_layers=(False,) * 8)
    few, many = (activations(ModelLayout(c, 1), DECODE, replicas=1, itemsize=2) for c in (CONFIG, deep))
    assert few.most == many.most
    few, many = (
        activations(ModelLayout(c, 1), DECODE, replicas=1, itemsize=2, vmem_bytes=1 << 27) for c in (CONFIG, deep)
    )
    assert many.most - few.most == 4 * LAYER_BYTES
