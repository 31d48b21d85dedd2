"""The pool is carried through unrolled layers, donated, under `shard_map`: never copied, and its size costs nothing."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.batch import ragged_batch
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.scatter_pages import scatter_pages
from pallas_kernels.write_pages import write_pages

LAYERS, KV_SLOTS, GROUP, DIM, SIZE, WIDTH = 3, 2, 3, 64, 16, 128
ROWS_AND_TOKENS = [(1, 1), (8, 8), (1, 16), (8, 128)]


def forward(pages_RLPKSW, q_RTHD, starts, contexts, table, *, window):  # type: ignore[no-untyped-def]
    """What a model does with the pool, local to one device: the replica axis has one entry, an idle replica skips.

    It skips by a loop of no trip: `lax.cond` around layers that read and write the pool copies it twice on CPU.
    """

    def busy(carry):  # type: ignore[no-untyped-def]
        _, pages, q = carry
        batch = ragged_batch(
            starts[0], contexts[0], table[0], num_tokens=q.shape[0], page_size=SIZE, num_pages=pages.shape[1]
        )
        for layer in range(LAYERS):
            pages = write_pages(pages, layer, q[:, :KV_SLOTS], q[:, -KV_SLOTS:], batch)
            out = ragged_paged_attention(q, pages, layer, batch, scale=0.125, sliding_window=window)
            q = q + out + jax.lax.psum(out.sum(1, keepdims=True), "model")
        return jnp.bool_(False), pages, q

    start = (starts[0, -1] > 0, pages_RLPKSW[0], q_RTHD[0])
    _, pages, q = jax.lax.while_loop(lambda carry: carry[0], busy, start)
    return pages[None], q[None]


@functools.cache
def compiled(rows: int, tokens: int, num_pages: int, window: int | None = None) -> tuple[Any, tuple[int, ...]]:
    """The program on a mesh of 2 replicas by 2 devices, and the shape of the pool on one device."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    pool_spec, q_spec, rest = P("data", None, None, "model"), P("data", None, "model"), P("data")
    run = jax.shard_map(
        functools.partial(forward, window=window), mesh=mesh, in_specs=(pool_spec, q_spec, rest, rest, rest),
        out_specs=(pool_spec, q_spec), check_vma=False,
    )  # fmt: skip

    def array(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    program = jax.jit(run, donate_argnums=0).lower(
        array((2, LAYERS, num_pages, 2 * KV_SLOTS, SIZE, 128), jnp.float32, pool_spec),
        array((2, tokens, 2 * KV_SLOTS * GROUP, DIM), jnp.float32, q_spec),
        array((2, rows + 1), jnp.int32, rest),
        array((2, rows), jnp.int32, rest),
        array((2, rows, WIDTH), jnp.int32, rest),
    )
    return program.compile(), (LAYERS, num_pages, KV_SLOTS, SIZE, 128)


def makers_of(text: str, shape: tuple[int, ...]) -> set[str]:
    """Operations whose result is as large as the pool, with or without axes of size 1."""
    size = np.prod(shape)
    found = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", text)
    return {operation for dims, operation in found if np.prod([int(d) for d in dims.split(",")]) == size}


@pytest.mark.parametrize(("rows", "tokens"), ROWS_AND_TOKENS)
@pytest.mark.parametrize("window", [None, 32])
def test_no_copy_of_the_pool(rows: int, tokens: int, window: int | None) -> None:
    program, shape = compiled(rows, tokens, 512, window)
    pool_bytes = 4 * int(np.prod(shape))
    assert not makers_of(program.as_text(), shape) & {"copy", "select", "transpose", "broadcast", "pad", "concatenate"}
    assert program.memory_analysis().temp_size_in_bytes < pool_bytes / 4
    assert program.memory_analysis().alias_size_in_bytes >= pool_bytes


@pytest.mark.parametrize(("rows", "tokens"), ROWS_AND_TOKENS)
def test_memory_and_work_do_not_depend_on_the_size_of_the_pool(rows: int, tokens: int) -> None:
    small, _ = compiled(rows, tokens, 512)
    large, _ = compiled(rows, tokens, 5120)
    assert small.memory_analysis().temp_size_in_bytes == large.memory_analysis().temp_size_in_bytes
    assert small.cost_analysis()["flops"] == large.cost_analysis()["flops"]


@pytest.mark.parametrize("count", [1, 2, 16])
def test_scatter_of_pages_is_in_place(count: int) -> None:
    shape = (LAYERS, 512, KV_SLOTS, SIZE, 128)
    heads = (jax.ShapeDtypeStruct((LAYERS, count, SIZE, 128), jnp.float32),) * KV_SLOTS
    program: Any = (
        jax.jit(scatter_pages, donate_argnums=0)
        .lower(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((count,), jnp.int32), heads)
        .compile()
    )
    pool_bytes = 4 * int(np.prod(shape))
    assert program.memory_analysis().temp_size_in_bytes < pool_bytes / 4
    assert program.memory_analysis().alias_size_in_bytes == pool_bytes
    assert "copy" not in makers_of(program.as_text(), shape)
