"""The one decoder: every architecture of the Llama shape, as flax `nnx` modules driven by `ModelConfig`.

The code runs inside `shard_map`: it sees one device's share of each array and the flat tokens of one replica, and
names its two collectives itself (`psum` after attention and after the FFN). Parameters carry logical axis names in
their metadata (`axes`); `ShardingRules` turn those into shardings. nnx describes; `abstract_params` splits the state
once, and from then on plain pytrees go through plain `jax.jit`.

Dimension key: T tokens, B rows, E hidden, F FFN (this device's), V vocabulary (this device's), H query slots, K KV
slots, D head size, W lanes of the page pool.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpd.models.config import ModelConfig
from jaxpd.models.layout import ModelLayout
from jaxpd.models.rope import apply_rope, rope_tables
from meshes.sharding import MODEL
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.names import AUTO
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.write_pages import write_pages

Rope = tuple[jax.Array, jax.Array]


def _param(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def matmul(x: jax.Array, w: jax.Array, *, transposed: bool = False, out_dtype: Any = None) -> jax.Array:
    """x [T, I] times w [I, O] (or [O, I] when transposed). float32 means float32, on TPU too."""
    precision = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, precision=precision, preferred_element_type=out_dtype or x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, plus_one: bool) -> jax.Array:
    """RMSNorm over the last axis in float32; `plus_one` multiplies by 1 + w."""
    wide = x.astype(jnp.float32)
    scale = weight.astype(jnp.float32) + (1.0 if plus_one else 0.0)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps) * scale).astype(x.dtype)


class Layer(nnx.Module):
    """One decoder layer: attention over paged KV, then the gated FFN."""

    def __init__(self, layout: ModelLayout, index: int, dtype: Any) -> None:
        cfg, heads = layout.config, layout.heads
        E, D, F = cfg.hidden_size, cfg.head_dim, layout.padded_ffn
        self.layout, self.index = layout, index
        self.attn_norm = _param((E,), dtype, ("embed",))
        self.ffn_norm = _param((E,), dtype, ("embed",))
        if cfg.sandwich_norms:
            self.attn_out_norm = _param((E,), dtype, ("embed",))
            self.ffn_out_norm = _param((E,), dtype, ("embed",))
        self.w_qkv = _param((E, layout.tp * layout.qkv_per_device), dtype, ("embed", "heads"))
        self.w_o = _param((layout.tp * heads.q_per_device * D, E), dtype, ("heads", "embed"))
        self.w_gate_up = _param((E, 2 * F), dtype, ("embed", "ffn"))
        self.w_down = _param((F, E), dtype, ("ffn", "embed"))
        if cfg.qkv_bias:
            self.b_qkv = _param((layout.tp * layout.qkv_per_device,), dtype, ("heads",))
        if cfg.o_bias:
            self.b_o = _param((E,), dtype, ("embed",))
        if cfg.mlp_bias:
            self.b_gate_up = _param((2 * F,), dtype, ("ffn",))
            self.b_down = _param((E,), dtype, ("embed",))
        if cfg.qk_norm:
            self.q_norm = _param((D,), dtype, (None,))
            self.k_norm = _param((D,), dtype, (None,))

    def __call__(
        self, x_TE: jax.Array, pages_LPKSW: jax.Array, batch: RaggedBatch, rope: Rope, kernels: str
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the residual stream and the page pool with this layer's KV written."""
        cfg = self.layout.config
        norm = functools.partial(rms_norm, eps=cfg.rms_eps, plus_one=cfg.norm_plus_one)
        attn_TE, pages_LPKSW = self._attention(norm(x_TE, self.attn_norm[...]), pages_LPKSW, batch, rope, kernels)
        if cfg.sandwich_norms:
            attn_TE = norm(attn_TE, self.attn_out_norm[...])
        x_TE = x_TE + attn_TE
        ffn_TE = self._ffn(norm(x_TE, self.ffn_norm[...]))
        if cfg.sandwich_norms:
            ffn_TE = norm(ffn_TE, self.ffn_out_norm[...])
        return x_TE + ffn_TE, pages_LPKSW

    def _attention(
        self, x_TE: jax.Array, pages_LPKSW: jax.Array, batch: RaggedBatch, rope: Rope, kernels: str
    ) -> tuple[jax.Array, jax.Array]:
        cfg, heads = self.layout.config, self.layout.heads
        H, K, D = heads.q_per_device, heads.kv_per_device, cfg.head_dim
        qkv = matmul(x_TE, self.w_qkv[...])
        if cfg.qkv_bias:
            qkv = qkv + self.b_qkv[...]
        q_THD, k_TKD, v_TKD = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
        if cfg.qk_norm:
            q_THD = rms_norm(q_THD, self.q_norm[...], eps=cfg.rms_eps, plus_one=cfg.norm_plus_one)
            k_TKD = rms_norm(k_TKD, self.k_norm[...], eps=cfg.rms_eps, plus_one=cfg.norm_plus_one)
        q_THD, k_TKD = apply_rope(q_THD, rope), apply_rope(k_TKD, rope)
        pages_LPKSW = write_pages(pages_LPKSW, self.index, k_TKD, v_TKD, batch, implementation=kernels)
        out_THD = ragged_paged_attention(
            q_THD,
            pages_LPKSW,
            self.index,
            batch,
            scale=cfg.query_scale,
            sliding_window=cfg.sliding_window if cfg.local_layers[self.index] else None,
            soft_cap=cfg.attn_softcap,
            implementation=kernels,
        )
        out_TE = self._row_parallel(out_THD.reshape(-1, H * D), self.w_o[...])
        return (out_TE + self.b_o[...] if cfg.o_bias else out_TE), pages_LPKSW

    def _ffn(self, x_TE: jax.Array) -> jax.Array:
        cfg = self.layout.config
        both = matmul(x_TE, self.w_gate_up[...])
        if cfg.mlp_bias:
            both = both + self.b_gate_up[...]
        gate_TF, up_TF = jnp.split(both, 2, axis=-1)
        gate_TF = jax.nn.silu(gate_TF) if cfg.activation == "silu" else jax.nn.gelu(gate_TF, approximate=True)
        out_TE = self._row_parallel(gate_TF * up_TF, self.w_down[...])
        return out_TE + self.b_down[...] if cfg.mlp_bias else out_TE

    def _row_parallel(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Product over an axis that is cut along `model`; partial sums are added in float32."""
        if self.layout.tp == 1:
            return matmul(x, w)
        return jax.lax.psum(matmul(x, w, out_dtype=jnp.float32), MODEL).astype(x.dtype)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and output projection."""

    def __init__(self, layout: ModelLayout, dtype: Any) -> None:
        cfg = layout.config
        self.layout = layout
        self.embed = _param((layout.padded_vocab, cfg.hidden_size), dtype, ("vocab", "embed"))
        self.layers = nnx.List([Layer(layout, i, dtype) for i in range(cfg.num_layers)])
        self.final_norm = _param((cfg.hidden_size,), dtype, ("embed",))
        if not cfg.tie_embeddings:
            self.unembed = _param((layout.padded_vocab, cfg.hidden_size), dtype, ("vocab", "embed"))

    def __call__(
        self,
        token_ids_T: jax.Array,
        pages_LPKSW: jax.Array,
        batch: RaggedBatch,
        *,
        kernels: str = AUTO,
        every_token: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Logits [B, V] float32 of each row's last token (this device's part of the vocabulary), and the pool.

        `kernels` is the implementation asked of the page writes and the attention. `every_token`: logits [T, V].
        """
        cfg = self.layout.config
        rope = rope_tables(cfg.rope, cfg.head_dim, batch.token_pos)
        local_rope = rope_tables(cfg.local_rope, cfg.head_dim, batch.token_pos) if cfg.local_rope else rope
        x_TE = self._embed(token_ids_T)
        for index, layer in enumerate(self.layers):
            own_rope = local_rope if cfg.local_layers[index] else rope
            x_TE, pages_LPKSW = layer(x_TE, pages_LPKSW, batch, own_rope, kernels)
        last_B = jnp.maximum(batch.query_starts[1:] - 1, 0)
        x_BE = x_TE if every_token or last_B.shape[0] == x_TE.shape[0] else x_TE[last_B]
        x_BE = rms_norm(x_BE, self.final_norm[...], eps=cfg.rms_eps, plus_one=cfg.norm_plus_one)
        head_VE = self.embed if cfg.tie_embeddings else self.unembed
        logits_BV = matmul(x_BE, head_VE[...], transposed=True, out_dtype=jnp.float32)
        if cfg.final_softcap is not None:
            logits_BV = cfg.final_softcap * jnp.tanh(logits_BV / cfg.final_softcap)
        return logits_BV, pages_LPKSW

    def _embed(self, token_ids_T: jax.Array) -> jax.Array:
        table_VE = self.embed[...]
        if self.layout.tp == 1:
            x_TE = table_VE[token_ids_T]
        else:
            local = token_ids_T - jax.lax.axis_index(MODEL) * table_VE.shape[0]
            mine = (local >= 0) & (local < table_VE.shape[0])
            x_TE = jnp.where(mine[:, None], table_VE[jnp.where(mine, local, 0)], 0)
            x_TE = jax.lax.psum(x_TE, MODEL)
        return x_TE * jnp.asarray(self.layout.config.embed_scale, x_TE.dtype)


def abstract_params(config: ModelConfig, tp: int, dtype: Any) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """(graph definition, {path: nnx.Param of ShapeDtypeStruct with `axes`}) of the decoder on `tp` devices.

    Shapes are global, that is over the whole model axis. Paths are dotted, e.g. `layers.3.w_qkv`.
    """
    layout = ModelLayout(config, tp)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(layout, dtype)))
    return graphdef, {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def merge(graphdef: nnx.GraphDef, params: dict[str, jax.Array]) -> Decoder:
    """The decoder with `params` (dotted path -> array) in place; for use while tracing."""

    def key(part: str) -> str | int:
        return int(part) if part.isdigit() else part

    flat = {tuple(key(p) for p in path.split(".")): nnx.Param(value) for path, value in params.items()}
    return nnx.merge(graphdef, nnx.State(_nest(flat)))


def _nest(flat: dict[tuple[Any, ...], Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree
