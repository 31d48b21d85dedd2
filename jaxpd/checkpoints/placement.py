"""From checkpoint tensors straight onto meshes: each device gets its share and nothing else.

Every tensor is read once for all meshes, cut on the host into the shares that the layouts ask for (head slots, FFN,
vocabulary; zeros as padding), and each share is put on the devices that hold it. At no time does more than one
parameter's worth of host copies exist. On CPU a share is not even copied: it is built 64-byte aligned, so that JAX
takes the host's buffer as it is, and all virtual devices with one share (data replicas, pools of equal cut) use it.
Of a mesh that lies in several processes each places what its own devices hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpd.checkpoints.source import WeightSource
from jaxpd.errors import InvalidArgument
from jaxpd.models.config import ModelConfig
from jaxpd.models.decoder import abstract_params
from jaxpd.models.layout import ModelLayout
from jaxpd.progress import Progress
from meshes.heads import EMPTY
from meshes.sharding import ShardingRules

Read = Callable[[str, tuple[int, ...]], np.ndarray]
Params = dict[str, jax.Array]


def load_params(
    source: WeightSource,
    config: ModelConfig,
    meshes: Sequence[Mesh],
    *,
    dtype: Any,
    rules: ShardingRules,
    progress: Progress,
) -> list[Params]:
    """The decoder's parameters on each mesh, {dotted path: array}; equal shares are built once.

    Raises NotFound or InvalidArgument naming the tensor when one is missing or has another shape than the config says.
    """
    layouts = [ModelLayout(config, mesh.shape["model"]) for mesh in meshes]
    specs = [abstract_params(config, layout.tp, dtype)[1] for layout in layouts]
    out: list[Params] = [{} for _ in meshes]
    total = sum(p.size * np.dtype(dtype).itemsize for p in specs[0].values())
    with progress.stage("loading weights", total=float(total), unit="bytes") as stage:
        for path, first in specs[0].items():
            shares: dict[tuple[int, int], np.ndarray] = {}
            read = _reader(source)
            for mesh, layout, spec, params in zip(meshes, layouts, specs, out, strict=True):
                sharding = rules.sharding(mesh, spec[path].get_metadata("axes"))
                devices = mesh.devices  # [data, model]
                here = jax.process_index()
                replicated = sharding.is_fully_replicated
                placed = []
                for m in range(layout.tp):
                    mine = [device for device in devices[:, m] if device.process_index == here]
                    if not mine:  # of another process: it reads its own share
                        continue
                    key = (0, 0) if replicated else (layout.tp, m)
                    if key not in shares:
                        shares[key] = _aligned(share(path, layout, m, read), dtype)
                    placed += [jax.device_put(shares[key], device) for device in mine]
                params[path] = jax.make_array_from_single_device_arrays(spec[path].shape, sharding, placed)
            jax.block_until_ready([params[path] for params in out])
            stage.advance(float(first.size * np.dtype(dtype).itemsize), path)
    source.release()
    return out


def _aligned(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A contiguous copy on a 64-byte boundary, which `jax.device_put` does not need to copy again on CPU."""
    count = array.size * np.dtype(dtype).itemsize
    buffer = np.empty(count + 63, np.uint8)
    start = -buffer.ctypes.data % 64
    out = buffer[start : start + count].view(dtype).reshape(array.shape)
    out[...] = array
    return out


def _reader(source: WeightSource) -> Read:
    """Reads tensors of one parameter, each once, and compares their shape with what the config asks for."""
    cache: dict[str, np.ndarray] = {}

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in cache:
            cache[name] = source.read(name)
            if cache[name].shape != shape:
                raise InvalidArgument(
                    f"checkpoint tensor {name} has shape {cache[name].shape}, the config asks for {shape}; "
                    "config and weights do not belong together"
                )
        return cache[name]

    return read


@dataclasses.dataclass(frozen=True)
class _Names:
    """Hugging Face names of one layer's tensors."""

    prefix: str

    def __call__(self, module: str, kind: str = "weight") -> str:
        return f"{self.prefix}.{module}.{kind}"


def share(path: str, layout: ModelLayout, device: int, read: Read) -> np.ndarray:
    """Device `device`'s share of parameter `path` (dotted, as in `abstract_params`), in the checkpoint's dtype."""
    cfg = layout.config
    E, V = cfg.hidden_size, cfg.vocab_size
    if path in ("embed", "unembed"):
        name = "model.embed_tokens.weight" if path == "embed" else "lm_head.weight"
        return _slice(read(name, (V, E)), 0, layout.padded_vocab // layout.tp, device)
    if path == "final_norm":
        return read("model.norm.weight", (E,))
    _, index, leaf = path.split(".")
    return _layer_share(leaf, _Names(f"model.layers.{index}"), layout, device, read)


def _layer_share(leaf: str, name: _Names, layout: ModelLayout, device: int, read: Read) -> np.ndarray:
    cfg = layout.config
    E, D, F = cfg.hidden_size, cfg.head_dim, cfg.intermediate_size
    H, K = cfg.num_heads, cfg.num_kv_heads
    q_heads, kv_heads = layout.heads.device_q(device), layout.heads.device_kv(device)
    ffn = layout.padded_ffn // layout.tp
    norms = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm" if cfg.sandwich_norms else "post_attention_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "ffn_out_norm": "post_feedforward_layernorm",
    }
    if leaf in norms:
        return read(name(norms[leaf]), (E,))
    if leaf in ("q_norm", "k_norm"):
        return read(name(f"self_attn.{leaf}"), (D,))
    if leaf in ("w_qkv", "b_qkv"):
        kind, tail = ("weight", (E,)) if leaf == "w_qkv" else ("bias", ())
        parts = [
            _heads(read(name(f"self_attn.{p}_proj", kind), (n * D, *tail)).reshape(n, D, *tail), heads)
            for p, n, heads in (("q", H, q_heads), ("k", K, kv_heads), ("v", K, kv_heads))
        ]
        return np.concatenate([p.reshape(-1, *tail) for p in parts]).T
    if leaf == "w_o":
        w_EHD = read(name("self_attn.o_proj"), (E, H * D)).reshape(E, H, D)
        return _heads(w_EHD.transpose(1, 2, 0), q_heads).reshape(-1, E)
    if leaf in ("w_gate_up", "b_gate_up"):
        kind, tail = ("weight", (E,)) if leaf == "w_gate_up" else ("bias", ())
        both = [_slice(read(name(f"mlp.{p}_proj", kind), (F, *tail)), 0, ffn, device) for p in ("gate", "up")]
        return np.concatenate(both).T
    if leaf == "w_down":
        return _slice(read(name("mlp.down_proj"), (E, F)), 1, ffn, device).T
    if leaf == "b_o":
        return read(name("self_attn.o_proj", "bias"), (E,))
    if leaf == "b_down":
        return read(name("mlp.down_proj", "bias"), (E,))
    raise InvalidArgument(f"no checkpoint tensor is known for parameter {name.prefix}.{leaf}")


def _slice(array: np.ndarray, axis: int, size: int, index: int) -> np.ndarray:
    """Block `index` of `size` along `axis`, filled up with zeros where the array ends."""
    start = min(index * size, array.shape[axis])
    stop = min(start + size, array.shape[axis])
    block = array[(slice(None),) * axis + (slice(start, stop),)]
    if stop - start == size:
        return block
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, size - (stop - start))
    return np.pad(block, padding)


def _heads(array: np.ndarray, heads: tuple[int, ...]) -> np.ndarray:
    """Rows `heads` of the leading axis; zeros for EMPTY."""
    taken = array[np.maximum(heads, 0)]
    if EMPTY in heads:
        taken[np.asarray(heads) == EMPTY] = 0
    return taken
