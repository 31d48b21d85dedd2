"""The compiled programs of one pool: `forward` per bucket, sampling per number of rows, page moves per page count.

    forward(params, pages, last_tokens, packed)  -> logits [R, B, V], pages, head (pages donated)
    sample(logits, last_tokens, head)            -> tokens [R, B], last_tokens   (last_tokens donated)
    mask(logits, words [R, B, W])                -> logits
    apply(logits, options, counts, head)         -> logits
    account(logits, tokens, counts, head)        -> counts, log probabilities    (counts donated)
    set_options(options, rows [R, 1 + K])        -> options                      (donated; a row begins with its slot)
    set_counts(counts, slots [R], rows [R, V])   -> counts                       (donated)
    score(params, pages, last_tokens, packed)    -> logits [R, T, V], pages, head (pages donated)
    gather(pages of one replica, page ids)       -> staging, one array [tp, L, N, S, W] per KV slot
    scatter(pages of one replica, ids, heads)    -> pages of that replica        (donated)
    read(tokens, or log probabilities)           -> the same, whole on every device

`mask` runs first, in steps in which a row has a grammar; `apply` runs before `sample` and `account` after it, with the
model's logits, in steps in which a row has options beyond temperature and seed. They depend on the number of rows alone
(`head` is the beginning of `packed`, and forward passes it on), so that all prompt buckets share them. `options` and
`counts` are explained in `jaxpd.slot_options`. `score` is `forward` for one bucket with the logits of every token, for
prompt log probabilities; `account` reads them.

Everything is compiled ahead of time from shapes; serving calls the executables, so a bucket that was not compiled is
a KeyError in a test and never a compile at run time, unless that was asked for (`--no-precompile`). `forward` and
`sample` run under `shard_map` over the whole mesh, and a replica with no rows skips the work; the hand-off's two run on
one replica's sub-mesh. `read` is there where replicas lie in several processes: one reads what all have sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpd.batch import BatchShape, unpack
from jaxpd.mask import apply_mask
from jaxpd.models.config import ModelConfig
from jaxpd.models.decoder import abstract_params, merge
from jaxpd.models.layout import ModelLayout
from jaxpd.request import MAX_LOGPROBS
from jaxpd.sampling import Logprobs, account, apply_options, sample_tokens
from jaxpd.slot_options import ROW_LEN
from jaxpd.structured import mask_words
from meshes.sharding import DATA, MODEL, ShardingRules, is_here, is_shared, replica_mesh
from pallas_kernels.batch import ragged_batch
from pallas_kernels.gather_pages import gather_pages
from pallas_kernels.names import AUTO
from pallas_kernels.scatter_pages import scatter_pages

PAGES_SPEC = P(DATA, None, None, MODEL)  # pages_RLPKSW
STAGING_SPEC = P(MODEL)  # [tp, L, N, S, W]
LOGITS_SPEC = P(DATA, None, MODEL)  # [R, B, V]
COUNTS_SPEC = P(DATA, None, MODEL)  # counts_RSV
PAGE_BUCKETS = (4, 16, 64)
TOKENS, LOGPROBS = "tokens", "logprobs"  # keys of `read`
SCORE_TOKENS = 64  # tokens of one prompt in a scoring step: [64, vocabulary] float32 logits a replica


def page_pieces(pages: int) -> list[int]:
    """Sizes of the pieces a hand-off of `pages` pages moves in: few, and mostly full.

    A piece is a compiled page count; a bucket is rounded up to only where at most a quarter of it stays empty.
    """
    pieces = []
    while pages > 0:
        fit = next((b for b in PAGE_BUCKETS if b >= pages), PAGE_BUCKETS[-1])
        if fit > pages + fit // 4 and fit != PAGE_BUCKETS[0]:
            fit = max(b for b in PAGE_BUCKETS if b <= pages)
        pieces.append(fit)
        pages -= fit
    return pieces


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """What the programs of a pool are made for."""

    config: ModelConfig
    mesh: Mesh
    dtype: Any
    num_pages: int
    page_size: int
    num_slots: int
    shapes: tuple[BatchShape, ...]
    rules: ShardingRules
    kernels: str = AUTO  # the implementation asked of every operation (pallas_kernels.dispatch)

    @property
    def layout(self) -> ModelLayout:
        """The model's layout on this mesh."""
        return ModelLayout(self.config, self.mesh.shape[MODEL])

    @property
    def replicas(self) -> int:
        """R."""
        return self.mesh.shape[DATA]

    def on(self, spec: P, mesh: Mesh | None = None) -> NamedSharding:
        """A sharding on the pool's mesh (or a sub-mesh)."""
        return NamedSharding(mesh or self.mesh, spec)

    @property
    def score_shape(self) -> BatchShape:
        """The bucket of `score`: one row."""
        return BatchShape(SCORE_TOKENS, 1, self.shapes[0].table)

    @property
    def pages_shape(self) -> tuple[int, ...]:
        """pages_RLPKSW."""
        return (self.replicas, *self.layout.page_shape(self.num_pages, self.page_size))

    @property
    def read_apart(self) -> bool:
        """Whether a process cannot read what all replicas sample: they lie in several."""
        return self.replicas > 1 and is_shared(self.mesh)

    def staging_shape(self, count: int) -> tuple[int, ...]:
        """[tp, L, N, S, W] of `count` pages."""
        layers, _, _, page_size, width = self.layout.page_shape(self.num_pages, self.page_size)
        return (self.layout.tp, layers, count, page_size, width)

    def staging_elsewhere(self, replica: int, count: int) -> tuple[jax.Array, ...]:
        """What other processes have staged of a replica that is all theirs: arrays without a shard here."""
        on = self.on(STAGING_SPEC, replica_mesh(self.mesh, replica))
        empty = jax.make_array_from_single_device_arrays(self.staging_shape(count), on, [], dtype=self.dtype)
        return (empty,) * self.layout.heads.kv_per_device

    def new_state(self) -> tuple[jax.Array, jax.Array]:
        """(pages, last tokens): a zeroed pool on the mesh."""
        pages, last = self.on(PAGES_SPEC), self.on(P(DATA))

        def zeros() -> tuple[jax.Array, jax.Array]:
            return jnp.zeros(self.pages_shape, self.dtype), jnp.zeros((self.replicas, self.num_slots), jnp.int32)

        return jax.jit(zeros, out_shardings=(pages, last))()

    @property
    def options_shape(self) -> tuple[int, int, int]:
        """options_RSK, int32."""
        return self.replicas, self.num_slots, ROW_LEN

    @property
    def counts_shape(self) -> tuple[int, int, int]:
        """counts_RSV, uint16."""
        return self.replicas, self.num_slots, self.layout.padded_vocab

    def new_slots(self) -> tuple[jax.Array, jax.Array]:
        """(options, counts): zeroed tables of what sequences ask of sampling."""

        def zeros() -> tuple[jax.Array, jax.Array]:
            return jnp.zeros(self.options_shape, jnp.int32), jnp.zeros(self.counts_shape, jnp.uint16)

        return jax.jit(zeros, out_shardings=(self.on(P(DATA)), self.on(COUNTS_SPEC)))()


class Table(dict[Any, Callable[..., Any]]):
    """Executables by key. Those in `later` are compiled when they are first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.later: dict[Any, Callable[[], Any]] = {}

    def __missing__(self, key: Any) -> Callable[..., Any]:
        self[key] = program = self.later[key]()
        return program


@dataclasses.dataclass
class Programs:
    """Executables, keyed by bucket, by number of rows, or by replica and pages."""

    forward: Table = dataclasses.field(default_factory=Table)
    sample: Table = dataclasses.field(default_factory=Table)
    mask: Table = dataclasses.field(default_factory=Table)
    apply: Table = dataclasses.field(default_factory=Table)
    account: Table = dataclasses.field(default_factory=Table)
    set_row: Table = dataclasses.field(default_factory=Table)  # "options", "counts"
    score: Table = dataclasses.field(default_factory=Table)
    gather: Table = dataclasses.field(default_factory=Table)  # (replica, pages)
    scatter: Table = dataclasses.field(default_factory=Table)
    read: Table = dataclasses.field(default_factory=Table)  # (TOKENS or LOGPROBS, rows)

    def compile_tasks(
        self, spec: ProgramSpec, *, gathers: bool, scatters: bool, scores: bool = False
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """(name, task) for every program; a task compiles one and files it here. Tasks may run in any thread."""
        for name, table, key, build in self._builds(spec, gathers=gathers, scatters=scatters, scores=scores):
            yield name, functools.partial(lambda table, key, build: table.__setitem__(key, build()), table, key, build)

    def compile_later(self, spec: ProgramSpec, *, gathers: bool, scatters: bool, scores: bool = False) -> None:
        """Every program is compiled when it is first used, in the thread that uses it."""
        for _, table, key, build in self._builds(spec, gathers=gathers, scatters=scatters, scores=scores):
            table.later[key] = build

    def _builds(
        self, spec: ProgramSpec, *, gathers: bool, scatters: bool, scores: bool
    ) -> Iterator[tuple[str, Table, Any, Callable[[], Any]]]:
        """(name, where it is filed, under which key, how it is compiled)."""
        make = functools.partial
        for shape in spec.shapes:
            yield f"forward {shape}", self.forward, shape, make(_compile_forward, spec, shape)
        rows_scored: set[int] = set()
        if scores:
            shape, rows_scored = spec.score_shape, {SCORE_TOKENS}
            yield f"forward score {shape}", self.score, shape, make(_compile_score, spec)
        for rows in sorted({shape.rows for shape in spec.shapes}):
            yield f"sample b{rows}", self.sample, rows, make(_compile_sample, spec, rows)
            yield f"mask b{rows}", self.mask, rows, make(_compile_mask, spec, rows)
            yield f"apply b{rows}", self.apply, rows, make(_compile_apply, spec, rows)
        for rows in sorted({shape.rows for shape in spec.shapes} | rows_scored):
            yield f"account b{rows}", self.account, rows, make(_compile_account, spec, rows)
            for what in (TOKENS, LOGPROBS) if spec.read_apart else ():
                yield f"read {what} b{rows}", self.read, (what, rows), make(_compile_read, spec, what, rows)
        yield "set options", self.set_row, "options", make(_compile_set_options, spec)
        yield "set counts", self.set_row, "counts", make(_compile_set_counts, spec)
        shared = is_shared(spec.mesh)
        for replica in range(spec.replicas):
            if shared and not is_here(replica_mesh(spec.mesh, replica)):
                continue
            for count in PAGE_BUCKETS:
                key = (replica, count)
                if gathers:
                    yield f"gather r{replica} n{count}", self.gather, key, make(_compile_gather, spec, replica, count)
                if scatters:
                    yield (
                        f"scatter r{replica} n{count}",
                        self.scatter,
                        key,
                        make(_compile_scatter, spec, replica, count),
                    )


def _shaped(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _taken(pages_1LPKSW: jax.Array) -> jax.Array:
    """A replica's own pool, while tracing.

    The layout is the one that it has anyway. Said aloud, since with one KV head XLA takes another one that lies in
    memory just the same, and copies the pool into it and back (seen on CPU, jax 0.10 and 0.12).
    """
    return with_layout_constraint(pages_1LPKSW[0], Layout(major_to_minor=(0, 1, 2, 3, 4)))


def _given(pages_LPKSW: jax.Array) -> jax.Array:
    """The inverse of `_taken`."""
    return with_layout_constraint(pages_LPKSW[None], Layout(major_to_minor=(0, 1, 2, 3, 4, 5)))


def lower_forward(spec: ProgramSpec, shape: BatchShape, *, every_token: bool = False) -> jax.stages.Lowered:
    """`forward` of one bucket, ready to compile, also for devices that are not there (`meshes.topology`).

    `every_token`: the logits of all tokens of the bucket, not of each row's last.
    """
    layout = spec.layout
    graphdef, abstract = abstract_params(spec.config, layout.tp, spec.dtype)
    param_specs = {path: spec.rules.spec(p.get_metadata("axes")) for path, p in abstract.items()}
    vocab_local = layout.padded_vocab // layout.tp

    def local(params: dict, pages_1LPKSW: jax.Array, last_1S: jax.Array, packed_1M: jax.Array) -> tuple:
        step = unpack(shape, packed_1M[0])

        def run(pages_LPKSW: jax.Array) -> tuple[jax.Array, jax.Array]:
            ids_T = step.token_ids
            ids_T = jnp.where(ids_T < 0, last_1S[0][-1 - ids_T], ids_T)
            batch = ragged_batch(
                step.query_starts,
                step.context_lens,
                step.page_table,
                num_tokens=shape.tokens,
                page_size=spec.page_size,
                num_pages=spec.num_pages,
            )
            model = merge(graphdef, params)
            return model(ids_T, pages_LPKSW, batch, kernels=spec.kernels, every_token=every_token)

        pages_LPKSW = _taken(pages_1LPKSW)
        if spec.replicas == 1:  # a pool of one replica is never stepped without rows
            logits_BV, pages_LPKSW = run(pages_LPKSW)
        else:  # a loop of one round or none: in the branch of a `cond` XLA copies the page pool (seen on CPU)
            nothing = jnp.zeros((shape.tokens if every_token else shape.rows, vocab_local), jnp.float32)
            rounds = jnp.minimum(step.live_rows, 1)
            logits_BV, pages_LPKSW = jax.lax.fori_loop(0, rounds, lambda _, c: run(c[1]), (nothing, pages_LPKSW))
        return logits_BV[None], _given(pages_LPKSW), packed_1M[:, : shape.head.packed_len]

    in_specs = (param_specs, PAGES_SPEC, P(DATA), P(DATA))
    out_specs = (LOGITS_SPEC, PAGES_SPEC, P(DATA))
    mapped = jax.shard_map(local, mesh=spec.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    args = (
        {path: _shaped(p.shape, spec.dtype, spec.on(param_specs[path])) for path, p in abstract.items()},
        _shaped(spec.pages_shape, spec.dtype, spec.on(PAGES_SPEC)),
        _shaped((spec.replicas, spec.num_slots), jnp.int32, spec.on(P(DATA))),
        _shaped((spec.replicas, shape.packed_len), jnp.int32, spec.on(P(DATA))),
    )
    out = tuple(spec.on(s) for s in out_specs)
    return jax.jit(mapped, donate_argnums=1, out_shardings=out).lower(*args)


def _compile_forward(spec: ProgramSpec, shape: BatchShape) -> Callable[..., Any]:
    return lower_forward(spec, shape).compile()


def _compile_score(spec: ProgramSpec) -> Callable[..., Any]:
    return lower_forward(spec, spec.score_shape, every_token=True).compile()


def _compile_sample(spec: ProgramSpec, rows: int) -> Callable[..., Any]:
    layout = spec.layout

    def local(logits_1BV: jax.Array, last_1S: jax.Array, head_1M: jax.Array) -> tuple[jax.Array, jax.Array]:
        step = unpack(BatchShape(0, rows, 0), head_1M[0])
        tokens_B = sample_tokens(logits_1BV[0], step, vocab_size=spec.config.vocab_size, tp=layout.tp)
        last_S = last_1S[0].at[step.slots].set(tokens_B, mode="drop")
        return tokens_B[None], last_S[None]

    in_specs = (LOGITS_SPEC, P(DATA), P(DATA))
    out_specs = (P(DATA), P(DATA))
    mapped = jax.shard_map(local, mesh=spec.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    args = _head_args(spec, rows)
    last = _shaped((spec.replicas, spec.num_slots), jnp.int32, spec.on(P(DATA)))
    out = tuple(spec.on(s) for s in out_specs)
    lowered = jax.jit(mapped, donate_argnums=1, out_shardings=out).lower(args["logits"], last, args["head"])
    return lowered.compile()


def _head_args(spec: ProgramSpec, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract arguments of `sample`, `apply` and `account`."""
    head = BatchShape(0, rows, 0)
    return {
        "logits": _shaped((spec.replicas, rows, spec.layout.padded_vocab), jnp.float32, spec.on(LOGITS_SPEC)),
        "tokens": _shaped((spec.replicas, rows), jnp.int32, spec.on(P(DATA))),
        "options": _shaped(spec.options_shape, jnp.int32, spec.on(P(DATA))),
        "counts": _shaped(spec.counts_shape, jnp.uint16, spec.on(COUNTS_SPEC)),
        "head": _shaped((spec.replicas, head.packed_len), jnp.int32, spec.on(P(DATA))),
    }


def _compile_mask(spec: ProgramSpec, rows: int) -> Callable[..., Any]:
    def local(logits_1BV: jax.Array, mask_1BW: jax.Array) -> jax.Array:
        return apply_mask(logits_1BV[0], mask_1BW[0], tp=spec.layout.tp)[None]

    mapped = jax.shard_map(
        local, mesh=spec.mesh, in_specs=(LOGITS_SPEC, P(DATA)), out_specs=LOGITS_SPEC, check_vma=False
    )
    words = (spec.replicas, rows, mask_words(spec.layout.padded_vocab))
    args = (_head_args(spec, rows)["logits"], _shaped(words, jnp.int32, spec.on(P(DATA))))
    return jax.jit(mapped, out_shardings=spec.on(LOGITS_SPEC)).lower(*args).compile()


def _compile_apply(spec: ProgramSpec, rows: int) -> Callable[..., Any]:
    vocab = {"vocab_size": spec.config.vocab_size, "tp": spec.layout.tp}

    def local(logits_1BV: jax.Array, options_1SK: jax.Array, counts_1SV: jax.Array, head_1M: jax.Array) -> jax.Array:
        step = unpack(BatchShape(0, rows, 0), head_1M[0])
        return apply_options(logits_1BV[0], step, options_1SK[0], counts_1SV[0], **vocab)[None]

    in_specs = (LOGITS_SPEC, P(DATA), COUNTS_SPEC, P(DATA))
    mapped = jax.shard_map(local, mesh=spec.mesh, in_specs=in_specs, out_specs=LOGITS_SPEC, check_vma=False)
    args = _head_args(spec, rows)
    lowered = jax.jit(mapped, out_shardings=spec.on(LOGITS_SPEC)).lower(
        args["logits"], args["options"], args["counts"], args["head"]
    )
    return lowered.compile()


def _compile_account(spec: ProgramSpec, rows: int) -> Callable[..., Any]:
    vocab = {"vocab_size": spec.config.vocab_size, "tp": spec.layout.tp}

    def local(
        logits_1BV: jax.Array, tokens_1B: jax.Array, counts_1SV: jax.Array, head_1M: jax.Array
    ) -> tuple[jax.Array, Logprobs]:
        step = unpack(BatchShape(0, rows, 0), head_1M[0])
        counts_SV, logprobs = account(logits_1BV[0], tokens_1B[0], step, counts_1SV[0], **vocab)
        return counts_SV[None], Logprobs(*(x[None] for x in logprobs))

    in_specs, out_specs = (LOGITS_SPEC, P(DATA), COUNTS_SPEC, P(DATA)), (COUNTS_SPEC, P(DATA))
    mapped = jax.shard_map(local, mesh=spec.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    args = _head_args(spec, rows)
    out = tuple(spec.on(s) for s in out_specs)
    lowered = jax.jit(mapped, donate_argnums=2, out_shardings=out).lower(
        args["logits"], args["tokens"], args["counts"], args["head"]
    )
    return lowered.compile()


def _compile_read(spec: ProgramSpec, what: str, rows: int) -> Callable[..., Any]:
    shape, cut = (spec.replicas, rows), spec.on(P(DATA))
    args: Any = _shaped(shape, jnp.int32, cut)
    if what == LOGPROBS:
        top = (*shape, min(MAX_LOGPROBS, spec.layout.padded_vocab))
        like = (_shaped(shape, jnp.float32, cut), _shaped(top, jnp.float32, cut), _shaped(top, jnp.int32, cut))
        args = Logprobs._make(like)  # type: ignore[arg-type]  # abstract arrays
    return jax.jit(lambda x: x, out_shardings=spec.on(P())).lower(args).compile()


def _compile_set_options(spec: ProgramSpec) -> Callable[..., Any]:
    def local(options_1SK: jax.Array, row_1K: jax.Array) -> jax.Array:
        return options_1SK.at[0, row_1K[0, 0]].set(row_1K[0, 1:], mode="drop")

    mapped = jax.shard_map(local, mesh=spec.mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=False)
    args = (
        _shaped(spec.options_shape, jnp.int32, spec.on(P(DATA))),
        _shaped((spec.replicas, 1 + ROW_LEN), jnp.int32, spec.on(P(DATA))),
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=spec.on(P(DATA))).lower(*args).compile()


def _compile_set_counts(spec: ProgramSpec) -> Callable[..., Any]:
    def local(counts_1SV: jax.Array, slot_1: jax.Array, row_1V: jax.Array) -> jax.Array:
        return counts_1SV.at[0, slot_1[0]].set(row_1V[0], mode="drop")

    in_specs = (COUNTS_SPEC, P(DATA), P(DATA, MODEL))
    mapped = jax.shard_map(local, mesh=spec.mesh, in_specs=in_specs, out_specs=COUNTS_SPEC, check_vma=False)
    args = (
        _shaped(spec.counts_shape, jnp.uint16, spec.on(COUNTS_SPEC)),
        _shaped((spec.replicas,), jnp.int32, spec.on(P(DATA))),
        _shaped((spec.replicas, spec.counts_shape[2]), jnp.uint16, spec.on(P(DATA, MODEL))),
    )
    return jax.jit(mapped, donate_argnums=0, out_shardings=spec.on(COUNTS_SPEC)).lower(*args).compile()


def _replica_args(spec: ProgramSpec, replica: int, count: int) -> tuple[Mesh, tuple, tuple]:
    """The sub-mesh of a replica, and the abstract (pages, ids) and staging arguments of its hand-off programs."""
    sub = replica_mesh(spec.mesh, replica)
    pages = _shaped((1, *spec.pages_shape[1:]), spec.dtype, spec.on(PAGES_SPEC, sub))
    ids = _shaped((count,), jnp.int32, spec.on(P(), sub))
    staging = _shaped(spec.staging_shape(count), spec.dtype, spec.on(STAGING_SPEC, sub))
    return sub, (pages, ids), (staging,) * spec.layout.heads.kv_per_device


def _compile_gather(spec: ProgramSpec, replica: int, count: int) -> Callable[..., Any]:
    sub, args, staging = _replica_args(spec, replica, count)

    def local(pages_1LPKSW: jax.Array, ids_N: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(head[None] for head in gather_pages(_taken(pages_1LPKSW), ids_N, implementation=spec.kernels))

    mapped = jax.shard_map(
        local, mesh=sub, in_specs=(PAGES_SPEC, P()), out_specs=(STAGING_SPEC,) * len(staging), check_vma=False
    )
    return jax.jit(mapped, out_shardings=tuple(s.sharding for s in staging)).lower(*args).compile()


def _compile_scatter(spec: ProgramSpec, replica: int, count: int) -> Callable[..., Any]:
    sub, args, staging = _replica_args(spec, replica, count)

    def local(pages_1LPKSW: jax.Array, ids_N: jax.Array, heads: tuple[jax.Array, ...]) -> jax.Array:
        local_heads = tuple(head[0] for head in heads)
        return _given(scatter_pages(_taken(pages_1LPKSW), ids_N, local_heads, implementation=spec.kernels))

    mapped = jax.shard_map(
        local,
        mesh=sub,
        in_specs=(PAGES_SPEC, P(), (STAGING_SPEC,) * len(staging)),
        out_specs=PAGES_SPEC,
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=args[0].sharding)
    return jitted.lower(*args, staging).compile()
