"""One prompt computed layer group by layer group, each group's KV sent as soon as it is dispatched (an experiment).

    group 1: embed, layers [0, a)   -> x -> group 2: layers [a, b)   -> x -> ... last: layers, norm, logits -> token
        gather its pages, send                  gather its pages, send              gather its pages, send

A group is a decoder of a few layers with a page pool of its own, so that the shipped gather and scatter move it; the
layers are those of `jaxpd.models.decoder`. `benchmarks.handoff_overlap` measures it beside the one-program forward
(`jaxpd.programs`), whole or in chunks.

Dimension key: R replicas (1 here), T tokens, E hidden, L layers, N pages of the prompt, K true KV heads, S slots in a
page, W lanes, M packed length; P and the rest as in `jaxpd.models.decoder`.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpd.batch import BatchShape, Row, pack, unpack
from jaxpd.device import PoolDevice
from jaxpd.models.config import ModelConfig
from jaxpd.models.decoder import abstract_params, matmul, merge, rms_norm
from jaxpd.models.rope import rope_tables
from jaxpd.programs import LOGITS_SPEC, PAGES_SPEC, Programs, ProgramSpec, page_pieces
from meshes.sharding import DATA, ShardingRules
from meshes.transfer.in_process import InProcessTransport, Staging
from pallas_kernels.batch import ragged_batch

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """One prompt, the model on the mesh that computes it, and the mesh that it goes to."""

    config: ModelConfig
    params: Params
    source: Mesh
    target: Mesh
    dtype: Any
    prompt: tuple[int, ...]
    page_size: int

    @property
    def pages(self) -> int:
        """N."""
        return -(-len(self.prompt) // self.page_size)

    @property
    def source_ids(self) -> np.ndarray:
        """int32 [N]: where its pages are in the source pool, last page first."""
        return np.arange(self.pages, dtype=np.int32)[::-1].copy()

    @property
    def target_ids(self) -> np.ndarray:
        """int32 [N]: where they go, in another order."""
        return np.roll(np.arange(self.pages, dtype=np.int32), self.pages // 2)

    def spec(self, config: ModelConfig, mesh: Mesh, tokens: Iterable[int] = ()) -> ProgramSpec:
        """A pool for this prompt, with buckets of `tokens` (the prompt's length where none are given)."""
        shapes = tuple(BatchShape(t, 1, self.pages) for t in tokens) or (BatchShape(len(self.prompt), 1, self.pages),)
        return ProgramSpec(config, mesh, self.dtype, self.pages, self.page_size, 1, shapes, ShardingRules())

    def row(self, start: int, stop: int) -> Row:
        """Tokens `[start, stop)` of the prompt, sampled greedily."""
        ids = self.prompt[start:stop]
        return Row(ids, stop, self.source_ids, slot=0, output_index=0, seed=0, temperature=0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A piece of the work whose pages `[first, first + count)` can be sent once it is dispatched.

    `launch` takes what the part before returned (the first None) and dispatches; the last one returns tokens [R, 1].
    """

    launch: Callable[[Any], Any]
    source: PoolDevice
    target: PoolDevice
    first: int
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One way to compute the prompt and send its KV."""

    name: str
    parts: tuple[Part, ...]

    @property
    def pools(self) -> list[tuple[PoolDevice, PoolDevice]]:
        """(source, target) of its page pools, in the order of the layers."""
        return list(dict.fromkeys((part.source, part.target) for part in self.parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Seconds from the start; `settled_s` is when all KV is in the target's pages."""

    token: int
    first_s: float
    settled_s: float


def cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """[(start, stop)] of `total` things in `parts` runs, as even as can be. Raises ValueError for too many parts."""
    if not 1 <= parts <= total:
        raise ValueError(f"{total} cannot be cut into {parts} parts")
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def group_params(params: Params, start: int, stop: int) -> Params:
    """The parameters of a decoder of layers `[start, stop)`: its layers counted from 0, and all that is no layer's."""
    out: Params = {}
    for path, value in params.items():
        head, _, rest = path.partition(".")
        index, _, name = rest.partition(".")
        if head != "layers":
            out[path] = value
        elif start <= int(index) < stop:
            out[f"layers.{int(index) - start}.{name}"] = value
    return out


@functools.cache
def group_forward(spec: ProgramSpec, *, first: bool, last: bool) -> Callable[..., Any]:
    """Compiles (params, pages, packed[, x_RTE]) -> (x_RTE or logits_RBV, pages) for a group; pages are donated.

    The `first` group takes no x and embeds, the `last` returns logits [R, 1, V] of the last token.
    """
    layout, cfg, shape = spec.layout, spec.config, spec.shapes[0]
    graphdef, abstract = abstract_params(cfg, layout.tp, spec.dtype)
    param_specs = {path: spec.rules.spec(p.get_metadata("axes")) for path, p in abstract.items()}

    def local(params: Params, pages_1LPKSW: jax.Array, packed_1M: jax.Array, *x_1TE: jax.Array) -> tuple:
        step = unpack(shape, packed_1M[0])
        batch = ragged_batch(
            step.query_starts,
            step.context_lens,
            step.page_table,
            num_tokens=shape.tokens,
            page_size=spec.page_size,
            num_pages=spec.num_pages,
        )
        model = merge(graphdef, params)
        rope = rope_tables(cfg.rope, cfg.head_dim, batch.token_pos)
        local_rope = rope_tables(cfg.local_rope, cfg.head_dim, batch.token_pos) if cfg.local_rope else rope
        x_TE = model._embed(step.token_ids) if first else x_1TE[0][0]
        pages_LPKSW = pages_1LPKSW[0]
        for index, layer in enumerate(model.layers):
            own_rope = local_rope if cfg.local_layers[index] else rope
            x_TE, pages_LPKSW = layer(x_TE, pages_LPKSW, batch, own_rope, spec.kernels)
        if not last:
            return x_TE[None], pages_LPKSW[None]
        x_BE = x_TE[jnp.maximum(batch.query_starts[1:] - 1, 0)]
        x_BE = rms_norm(x_BE, model.final_norm[...], eps=cfg.rms_eps, plus_one=cfg.norm_plus_one)
        head_VE = model.embed if cfg.tie_embeddings else model.unembed
        logits_BV = matmul(x_BE, head_VE[...], transposed=True, out_dtype=jnp.float32)
        if cfg.final_softcap is not None:
            logits_BV = cfg.final_softcap * jnp.tanh(logits_BV / cfg.final_softcap)
        return logits_BV[None], pages_LPKSW[None]

    def shaped(dims: tuple[int, ...], dtype: Any, cut: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=spec.on(cut))

    x_specs = () if first else (P(DATA),)
    out_specs = (LOGITS_SPEC if last else P(DATA), PAGES_SPEC)
    mapped = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(param_specs, PAGES_SPEC, P(DATA), *x_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    args = [
        {path: shaped(p.shape, spec.dtype, param_specs[path]) for path, p in abstract.items()},
        shaped(spec.pages_shape, spec.dtype, PAGES_SPEC),
        shaped((1, shape.packed_len), jnp.int32, P(DATA)),
        *(shaped((1, shape.tokens, cfg.hidden_size), spec.dtype, cut) for cut in x_specs),
    ]
    out = tuple(spec.on(cut) for cut in out_specs)
    return jax.jit(mapped, donate_argnums=1, out_shardings=out).lower(*args).compile()


@functools.cache
def programs(spec: ProgramSpec, kinds: tuple[str, ...], pages: tuple[int, ...]) -> Programs:
    """The shipped programs of some `kinds` ("forward", "sample", "gather", "scatter"); gathers of some page counts."""
    out = Programs()
    buckets = {f"n{piece}" for count in pages for piece in page_pieces(count)}
    for name, task in out.compile_tasks(spec, gathers="gather" in kinds, scatters="scatter" in kinds):
        kind, *rest = name.split()
        if kind in kinds and (kind not in ("gather", "scatter") or rest[-1] in buckets):
            task()
    return out


def by_chunks(setup: Setup, counts: Sequence[int]) -> list[Variant]:
    """The one-program forward with the prompt in as many chunks as each of `counts`; they share the page pools."""
    length, size = len(setup.prompt), setup.page_size
    plans = {n: [(a * size, min(b * size, length)) for a, b in cuts(setup.pages, n)] for n in counts}
    tokens = sorted({b - a for plan in plans.values() for a, b in plan})
    pages = tuple(sorted({-(-t // size) for t in tokens}))
    spec, target_spec = setup.spec(setup.config, setup.source, tokens), setup.spec(setup.config, setup.target)
    source = PoolDevice(spec, setup.params, programs(spec, ("forward", "sample", "gather"), pages))
    target = PoolDevice(target_spec, {}, programs(target_spec, ("scatter",), pages))
    shapes = {shape.tokens: shape for shape in spec.shapes}

    def part(start: int, stop: int) -> Part:
        def launch(before: Any) -> Any:
            del before
            return source.step(shapes[stop - start], [[setup.row(start, stop)]]).tokens_B

        return Part(launch, source, target, start // size, -(-stop // size) - start // size)

    return [
        Variant("one program" if n == 1 else f"{n} chunks", tuple(part(a, b) for a, b in plan))
        for n, plan in plans.items()
    ]


def by_layers(setup: Setup, groups: int) -> Variant:
    """The forward in `groups` programs, each over some layers and with a page pool of its own."""
    parts = []
    for start, stop in cuts(setup.config.num_layers, groups):
        config = dataclasses.replace(
            setup.config, num_layers=stop - start, local_layers=setup.config.local_layers[start:stop]
        )
        parts.append(_group(setup, config, start, stop))
    return Variant(f"{groups} layer groups", tuple(parts))


def _group(setup: Setup, config: ModelConfig, start: int, stop: int) -> Part:
    first, last = start == 0, stop == setup.config.num_layers
    spec, target_spec = setup.spec(config, setup.source), setup.spec(config, setup.target)
    kinds = ("sample", "gather") if last else ("gather",)
    source = PoolDevice(spec, group_params(setup.params, start, stop), programs(spec, kinds, (setup.pages,)))
    target = PoolDevice(target_spec, {}, programs(target_spec, ("scatter",), (setup.pages,)))
    forward, shape = group_forward(spec, first=first, last=last), spec.shapes[0]

    def launch(before: Any) -> Any:
        if first:
            packed = jax.device_put(pack(shape, [[setup.row(0, len(setup.prompt))]]), spec.on(P(DATA)))
            out, source.pages = forward(source.params, source.pages, packed)
        else:
            packed, x_RTE = before
            out, source.pages = forward(source.params, source.pages, packed, x_RTE)
        if not last:
            return packed, out
        tokens, source.last_tokens = source.programs.sample[shape.rows](
            out, source.last_tokens, packed[:, : shape.head.packed_len]
        )
        return tokens

    return Part(launch, source, target, 0, setup.pages)


def run(setup: Setup, variant: Variant, transport: InProcessTransport) -> Run:
    """Computes the prompt and moves its KV, once. Raises what a transfer or a program raises."""
    arrivals: queue.Queue[tuple[Part, list[Staging] | None, Exception | None]] = queue.Queue()

    def receive() -> float:
        for _ in variant.parts:
            part, moved, error = arrivals.get()
            if error is not None or moved is None:
                raise RuntimeError(f"a transfer of {variant.name} failed") from error
            part.target.scatter(0, setup.target_ids[part.first : part.first + part.count], moved)
        jax.block_until_ready([target.pages for _, target in variant.pools])
        return time.monotonic()

    with ThreadPoolExecutor(1) as receiver:
        settled = receiver.submit(receive)
        start, carry = time.monotonic(), None
        try:
            for part in variant.parts:
                carry = part.launch(carry)
                pieces = part.source.gather(0, setup.source_ids[part.first : part.first + part.count])
                heads = part.source.spec.layout.heads, part.target.spec.layout.heads
                transport.offer(pieces, *heads, setup.target, functools.partial(_arrived, arrivals, part))
            token = int(np.asarray(carry)[0, 0])
        except Exception as error:
            arrivals.put((part, None, error))  # else the receiver waits for ever
            raise
        first_s = time.monotonic() - start
        return Run(token=token, first_s=first_s, settled_s=settled.result() - start)


def _arrived(arrivals: queue.Queue, part: Part, moved: list[Staging] | None, error: Exception | None) -> None:
    arrivals.put((part, moved, error))


def true_kv(devices: Sequence[PoolDevice], page_ids: np.ndarray) -> np.ndarray:
    """[L, N, K, S, W] of some pages, layers of all `devices` in their order, KV heads in the model's."""
    out = []
    for device in devices:
        heads = device.spec.layout.heads
        slots = [heads.owner(head) for head in range(heads.num_kv_heads)]
        out.append(np.asarray(device.pages)[0][:, page_ids][:, :, slots])
    return np.concatenate(out)
