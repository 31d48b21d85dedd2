"""Which weights a model has, and their shapes: what every checkpoint is compared with before anything is loaded."""

from __future__ import annotations

from jaxpd.checkpoints.source import WeightSource
from jaxpd.errors import InvalidArgument
from jaxpd.models.config import ModelConfig

# Buffers that old exports carry along; the model computes them from its config.
_DERIVED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of `config`'s model under Hugging Face's names, layer by layer, true sizes."""
    hidden, ffn, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, q, config.o_bias),
            ("mlp.gate_proj", ffn, hidden, config.mlp_bias),
            ("mlp.up_proj", ffn, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, ffn, config.mlp_bias),
        ):
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}{name}.bias"] = (rows,)
        shapes |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
        if config.qk_norm:
            shapes |= {f"{at}self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_weights(config: ModelConfig, source: WeightSource, where: str) -> None:
    """Raises InvalidArgument naming missing weights, wrong shapes, or weights that the model would silently ignore."""
    expected = weight_shapes(config)
    have = set(source.names())
    if missing := [name for name in expected if name not in have]:
        raise InvalidArgument(
            f"{where} lacks {_some(missing)}, which a {config.architecture} model of its config has; "
            "the checkpoint is incomplete or its config belongs to another model"
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise InvalidArgument(
                f"{where}: {name} has shape {source.shape(name)}, and the config says {shape}; "
                "weights and config do not belong together"
            )
    # A tied model may carry its head a second time.
    extra = sorted(n for n in have - expected.keys() if not n.endswith(_DERIVED) and n != "lm_head.weight")
    if extra:
        raise InvalidArgument(
            f"{where} holds {_some(extra)}, which a {config.architecture} model does not use; "
            "it is a variant that is not supported (an adapter, a quantised or a multimodal checkpoint?)"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
