"""`move_heads`: every destination slot gets its head; nothing is read, compiled or waited for."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshes.devices import assign_devices
from meshes.heads import HeadLayout, head_layout
from meshes.spec import MeshSpec
from meshes.transfer.move import head_pieces, move_heads

L, N, S, W = 2, 3, 4, 8
# heads, KV heads, tp of the source, tp of the destination; SmolLM2 has 9 and 3
PAIRS = [
    (8, 8, 8, 1),
    (8, 8, 1, 8),
    (16, 8, 8, 2),
    (16, 8, 2, 8),
    (9, 3, 8, 1),
    (9, 3, 1, 8),
    (9, 3, 3, 1),
    (9, 3, 2, 1),
    (9, 3, 4, 2),
    (4, 1, 8, 8),
    (9, 9, 8, 4),
    (8, 8, 8, 8),
]


def meshes(src: HeadLayout, dst: HeadLayout) -> tuple[Mesh, Mesh]:
    (a,), (b,) = assign_devices((MeshSpec(src.tp, 1),), (MeshSpec(dst.tp, 1),), jax.devices())
    return a, b


def true_heads(layout: HeadLayout) -> np.ndarray:
    return np.arange(layout.num_kv_heads * L * N * S * W, dtype=np.float32).reshape(-1, L, N, S, W) + 1


def slot(layout: HeadLayout, true: np.ndarray, j: int) -> np.ndarray:
    """Slot j of every device: [tp, L, N, S, W]."""
    return np.stack([true[layout.device_kv(d)[j]] for d in range(layout.tp)])


def stage(layout: HeadLayout, mesh: Mesh) -> tuple[jax.Array, ...]:
    sharding, true = NamedSharding(mesh, PartitionSpec("model")), true_heads(layout)
    return tuple(jax.device_put(slot(layout, true, j), sharding) for j in range(layout.kv_per_device))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_slot_gets_its_head(pair: tuple[int, int, int, int], host_reads: Any, compilations: Any) -> None:
    heads, kv, tp_src, tp_dst = pair
    src, dst = head_layout(heads, kv, tp_src), head_layout(heads, kv, tp_dst)
    src_mesh, dst_mesh = meshes(src, dst)
    staging = jax.block_until_ready(stage(src, src_mesh))
    host_reads.count = host_reads.largest_put = compilations.count = 0
    moved = jax.block_until_ready(move_heads(staging, src, dst, dst_mesh))
    assert (host_reads.count, host_reads.largest_put, compilations.count) == (0, 0, 0)
    assert len(moved) == dst.kv_per_device
    for j, array in enumerate(moved):
        assert array.sharding == NamedSharding(dst_mesh, PartitionSpec("model"))
        np.testing.assert_array_equal(array, slot(dst, true_heads(src), j))
        assert array.addressable_shards[0].data.shape == (1, L, N, S, W)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 10), st.integers(1, 10), st.integers(1, 6))
def test_any_layouts(kv: int, tp_src: int, tp_dst: int) -> None:
    src, dst = head_layout(kv, kv, tp_src), head_layout(kv, kv, tp_dst)
    src_mesh, dst_mesh = meshes(src, dst)
    moved = move_heads(stage(src, src_mesh), src, dst, dst_mesh)
    for j, array in enumerate(moved):
        np.testing.assert_array_equal(array, slot(dst, true_heads(src), j))


def test_the_counters_count(host_reads: Any, compilations: Any) -> None:
    """The positive control of the tests above: an unequal device_put reads, a new program compiles."""
    src, dst = head_layout(8, 8, 8), head_layout(8, 8, 2)
    src_mesh, dst_mesh = meshes(src, dst)
    (staging,) = stage(src, src_mesh)
    host_reads.count = compilations.count = 0
    jax.device_put(staging, NamedSharding(dst_mesh, PartitionSpec("model")))
    assert host_reads.count >= 1
    jax.block_until_ready(jax.jit(lambda x: x * 3 + 1)(staging))
    assert compilations.count >= 1


def test_each_true_head_crosses_once() -> None:
    for kv in (1, 2, 3, 8, 9, 16):
        for tp_src in range(1, 17):
            for tp_dst in range(1, 17):
                src, dst = head_layout(kv, kv, tp_src), head_layout(kv, kv, tp_dst)
                steps = head_pieces(src, dst)
                assert sorted(p.box for p in steps.pieces) == [((h, h + 1),) for h in range(kv)]
                for p in steps.pieces:
                    head = p.box[0][0]
                    assert src.device_kv(p.src)[p.src_box[0][0]] == head == dst.device_kv(p.dst)[p.dst_box[0][0]]
                assert len(steps.pieces) + len(steps.fan_outs) == dst.num_kv_slots
                # no device sends or receives twice where there are enough that hold different heads
                sent = [sum(p.src == d for p in steps.pieces) for d in range(tp_src)]
                assert max(sent) <= src.kv_per_device


@pytest.mark.parametrize(("kv", "tp_src"), [(1, 1), (3, 8)])
def test_it_returns_while_the_source_is_still_computed(kv: int, tp_src: int) -> None:
    src, dst = head_layout(kv, kv, tp_src), head_layout(kv, kv, 4)  # crosses, and fans out
    src_mesh, dst_mesh = meshes(src, dst)
    slow = jax.jit(functools.partial(jax.lax.fori_loop, 0, 300 // tp_src, lambda _, x: jnp.sin(x) * jnp.cos(x)))
    sharding = NamedSharding(src_mesh, PartitionSpec("model"))
    staging = jax.device_put(np.ones((tp_src, 4, 8, 32, 128), np.float32), sharding)
    jax.block_until_ready(slow(staging))
    source = slow(staging)
    moved = move_heads((source,), src, dst, dst_mesh)
    assert not source.is_ready()
    assert not any(array.is_ready() for array in moved)  # type: ignore[attr-defined]
    jax.block_until_ready(moved)


def test_what_does_not_belong_together_is_refused() -> None:
    src, dst = head_layout(8, 8, 4), head_layout(8, 8, 2)
    src_mesh, dst_mesh = meshes(src, dst)
    staging = stage(src, src_mesh)
    assert len(staging) == 2
    with pytest.raises(ValueError, match="8 KV heads, the destination 4"):
        move_heads(staging, src, head_layout(8, 4, 2), dst_mesh)
    with pytest.raises(ValueError, match="1 staging arrays for 2"):
        move_heads(staging[:1], src, dst, dst_mesh)
    with pytest.raises(ValueError, match="expected 4 devices first"):
        move_heads(tuple(a[:, :1] if i else a for i, a in enumerate(staging)), src, dst, dst_mesh)
    with pytest.raises(ValueError, match="4 devices for 2-way"):
        move_heads(staging, src, dst, src_mesh)
    replicated = tuple(jax.device_put(np.asarray(a), NamedSharding(src_mesh, PartitionSpec())) for a in staging)
    with pytest.raises(ValueError, match="cut along 'model'"):
        move_heads(replicated, src, dst, dst_mesh)
