"""What a decoder looks like: one frozen description that every architecture of the Llama shape fits.

`from_hf` reads the `config.json` of a Hugging Face folder; a GGUF reader builds the same dictionary from its metadata.
Per-architecture knowledge lives here and nowhere else: the decoder asks for features (`qk_norm`, `sandwich_norms`),
never for a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpd.errors import InvalidArgument

# config.json "architectures" entry -> our short name
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear or llama3; the other fields belong to linear and llama3.

    Llama 3 scaling: frequencies whose wavelength exceeds original/low_freq_factor are divided by `factor`, those below
    original/high_freq_factor are kept, and between the two they are blended (Llama 3.1 model card, "RoPE scaling").
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. Sizes are the true ones, before any padding for a mesh."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # for the layers with a window; None: the same as `rope`
    sliding_window: int | None = None
    local_layers: tuple[bool, ...]  # per layer: attends within `sliding_window` only
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_plus_one: bool = False  # RMSNorm multiplies by 1 + w
    sandwich_norms: bool = False  # norms after attention and after the FFN as well
    embed_scale: float = 1.0
    activation: str = "silu"  # or gelu_tanh
    query_scale: float  # scores are multiplied by it
    attn_softcap: float | None = None
    final_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgument(
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}; "
                "the checkpoint's config is broken"
            )
        if len(self.local_layers) != self.num_layers:
            raise InvalidArgument(f"{len(self.local_layers)} layer types for {self.num_layers} layers")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """True KV bytes of one token over all layers (no padding)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def num_parameters(self) -> int:
        """Parameters of the true model, embeddings once when tied."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (q + 2 * kv) + q * self.hidden_size + 3 * self.hidden_size * self.intermediate_size
        layer += (4 if self.sandwich_norms else 2) * self.hidden_size
        layer += (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.o_bias + 2 * self.head_dim * self.qk_norm
        layer += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embed = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embed + self.num_layers * layer + self.hidden_size


# What transformers' config classes assume for a field that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"},
}
# Mistral and Qwen2 have their biases fixed by the architecture: transformers ignores `attention_bias` there.
_FIXED_QKV_BIAS = {"mistral": False, "qwen2": True}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a Hugging Face `config.json`. Raises InvalidArgument naming what is missing or not supported."""
    try:
        return _from_hf(config)
    except KeyError as error:
        raise InvalidArgument(f"config.json has no field {error.args[0]!r}; the checkpoint is incomplete") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidArgument(f"config.json has a field of the wrong type or value: {error}") from error


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
    names = config.get("architectures") or []
    arch = next((ARCHITECTURES[n] for n in names if n in ARCHITECTURES), None)
    if arch is None:
        found = ", ".join(names) or config.get("model_type") or "none named"
        raise InvalidArgument(f"unsupported architecture: {found}; supported are {', '.join(sorted(ARCHITECTURES))}")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "of an unnamed kind")
        raise InvalidArgument(
            f"unsupported quantization_config {method!r}; use the float checkpoint of this model, or a GGUF file"
        )
    given = {key: value for key, value in config.items() if value is not None}
    config = {**config, **{key: value for key, value in _DEFAULTS.get(arch, {}).items() if key not in given}}
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    layers = int(config["num_hidden_layers"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    gemma = arch == "gemma3"
    act = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    activations = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
    if act not in activations:
        raise InvalidArgument(f"unsupported activation {act!r}; supported are {', '.join(sorted(activations))}")
    window = config.get("sliding_window")
    eos = config.get("eos_token_id")
    scale = config.get("query_pre_attn_scalar") if gemma else None
    rope, local_rope = _ropes(config, arch)
    local_layers = _local_layers(config, arch, layers, window)
    return ModelConfig(
        architecture=arch,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        max_position=int(config["max_position_embeddings"]),
        rms_eps=float(config["rms_norm_eps"]),
        rope=rope,
        local_rope=local_rope,
        sliding_window=int(window) if window and any(local_layers) else None,
        local_layers=local_layers,
        tie_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        qkv_bias=_FIXED_QKV_BIAS.get(arch, bool(config.get("attention_bias"))),
        o_bias=bool(config.get("attention_bias")) and arch not in _FIXED_QKV_BIAS,
        mlp_bias=bool(config.get("mlp_bias")) and arch == "llama",
        qk_norm=arch in ("qwen3", "gemma3"),
        norm_plus_one=gemma,
        sandwich_norms=gemma,
        embed_scale=hidden**0.5 if gemma else 1.0,
        activation=activations[act],
        query_scale=float(scale if scale else head_dim) ** -0.5,
        attn_softcap=config.get("attn_logit_softcapping") if gemma else None,
        final_softcap=config.get("final_logit_softcapping") if gemma else None,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (int(eos),)),
    )


def _local_layers(config: Mapping[str, Any], arch: str, layers: int, window: int | None) -> tuple[bool, ...]:
    types = config.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise InvalidArgument(
                f"unsupported layer_types {', '.join(unknown)}; supported are full_attention and sliding_attention"
            )
        if "sliding_attention" in types and not window:
            raise InvalidArgument("layer_types has sliding_attention but sliding_window is not set")
        return tuple(t == "sliding_attention" for t in types)
    if arch == "gemma3":  # five local layers, then a global one, unless the config says otherwise
        pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
        return tuple((i + 1) % pattern != 0 for i in range(layers))
    if arch == "mistral":
        return (window is not None,) * layers
    if arch in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        first = int(config.get("max_window_layers", layers))
        return tuple(window is not None and i >= first for i in range(layers))
    return (False,) * layers


def _ropes(config: Mapping[str, Any], arch: str) -> tuple[RopeConfig, RopeConfig | None]:
    """(global, local) RoPE; transformers 5 keeps them in `rope_parameters`, 4 in `rope_theta` and `rope_scaling`."""
    params = config.get("rope_parameters") or {}
    if "full_attention" in params or "sliding_attention" in params:
        top = {"rope_theta": config.get("rope_theta", 1e6)}
        return (
            _rope({**top, **(params.get("full_attention") or {})}),
            _rope({"rope_theta": 1e4, **(params.get("sliding_attention") or {})}),
        )
    default_theta = 1e6 if arch == "gemma3" else 1e4
    theta = params.get("rope_theta", config.get("rope_theta") or default_theta)
    main = _rope({**(config.get("rope_scaling") or {}), **params, "rope_theta": theta})
    if arch == "gemma3":
        return main, RopeConfig(theta=float(config.get("rope_local_base_freq") or 1e4))
    return main, None


def _rope(params: Mapping[str, Any]) -> RopeConfig:
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise InvalidArgument(f"unsupported rope_scaling type {kind!r}; supported are default, linear and llama3")
    return RopeConfig(
        theta=float(params["rope_theta"]),
        kind=kind,
        factor=float(params.get("factor", 1.0)),
        low_freq_factor=float(params.get("low_freq_factor", 1.0)),
        high_freq_factor=float(params.get("high_freq_factor", 4.0)),
        original_max_position=int(params.get("original_max_position_embeddings", 8192)),
    )
