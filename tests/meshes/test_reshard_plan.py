"""The resharding plan: every true element crosses once, and the destination is what it should be."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshes.heads import HeadLayout, head_layout
from meshes.plan import Box, Cut, Held, Plan, head_cut, intersect, plan, sharding_cut, volume

SHAPE = (24, 24)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def place(cut: Cut, true: np.ndarray, local_shape: tuple[int, ...]) -> list[np.ndarray]:
    """Every device's local array, filled from the true one."""
    local = [np.full(local_shape, -1) for _ in cut.held]
    for device, held in zip(local, cut.held, strict=True):
        for h in held:
            device[index(h.local(h.box))] = true[index(h.box)]
    return local


def execute(steps: Plan, src: list[np.ndarray], dst: list[np.ndarray]) -> None:
    for p in steps.pieces:
        dst[p.dst][index(p.dst_box)] = src[p.src][index(p.src_box)]
    for p in steps.fan_outs:
        dst[p.dst][index(p.dst_box)] = dst[p.src][index(p.src_box)]


def check(src: Cut, dst: Cut, src_local: tuple[int, ...], dst_local: tuple[int, ...]) -> Plan:
    """Plan, run with numpy, compare; and the pieces cover the true array, each element once."""
    steps = plan(src, dst)
    true = np.arange(np.prod(src.shape)).reshape(src.shape)
    crossed = np.zeros(src.shape, int)
    for p in steps.pieces:
        crossed[index(p.box)] += 1
    assert (crossed == 1).all()
    assert steps.crossing_elements() == true.size
    got = [np.full(dst_local, -1) for _ in dst.held]
    execute(steps, place(src, true, src_local), got)
    np.testing.assert_array_equal(got, place(dst, true, dst_local))
    assert steps == plan(src, dst)  # deterministic
    assert str(len(steps.pieces)) in steps.summary()
    return steps


@st.composite
def shardings(draw: st.DrawFn) -> NamedSharding:
    """Any mesh of up to 12 of the 16 devices, in any order, with any of its axes on any dimension."""
    a, b = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (4, 1), (2, 3), (1, 6), (8, 1), (4, 3)]))
    devices = draw(st.permutations(jax.devices()))[: a * b]
    mesh = Mesh(np.array(devices).reshape(a, b), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    data, model = draw(st.sampled_from([None, 0, 1])), draw(st.sampled_from([None, 0, 1]))
    axes: list[tuple[str, ...]] = [(), ()]
    if data is not None:
        axes[data] += ("data",)
    if model is not None:
        axes[model] += ("model",)
    return NamedSharding(mesh, PartitionSpec(*axes))


@settings(max_examples=150, deadline=None)
@given(shardings(), shardings())
def test_any_two_shardings(src: NamedSharding, dst: NamedSharding) -> None:
    check(sharding_cut(src, SHAPE), sharding_cut(dst, SHAPE), src.shard_shape(SHAPE), dst.shard_shape(SHAPE))


kv_tp_tp = st.tuples(st.integers(1, 12), st.integers(1, 16), st.integers(1, 16))


@settings(max_examples=150, deadline=None)
@given(kv_tp_tp, st.integers(0, 2))
def test_any_two_head_layouts(sizes: tuple[int, int, int], axis: int) -> None:
    kv, tp_src, tp_dst = sizes
    src, dst = head_layout(kv, kv, tp_src), head_layout(kv, kv, tp_dst)

    def local(layout: HeadLayout) -> tuple[int, ...]:
        shape = [2, 3]
        shape.insert(axis, layout.kv_per_device)
        return tuple(shape)

    steps = check(head_cut(src, (2, 3), axis), head_cut(dst, (2, 3), axis), local(src), local(dst))
    assert len(steps.pieces) == kv  # each true head once, whole
    assert len(steps.fan_outs) == dst.num_kv_slots - kv


@pytest.mark.parametrize(("heads", "kv"), [(9, 3), (4, 1), (32, 8), (14, 2), (9, 9), (64, 8)])
def test_the_pieces_are_the_true_kv_bytes(heads: int, kv: int) -> None:
    layers, pages, slots, lanes = 2, 3, 16, 128
    true = 2 * kv * layers * pages * slots * 64  # K and V of 64 lanes each, packed side by side
    for tp_src in range(1, 17):
        for tp_dst in (1, 2, 3, 5, 8, 16):
            cuts = [
                head_cut(head_layout(heads, kv, tp), (layers, pages, slots, lanes), axis=2) for tp in (tp_src, tp_dst)
            ]
            assert plan(*cuts).crossing_elements() == true


def test_load_is_spread_over_source_replicas() -> None:
    # 3 heads in 12 slots on 12 devices, to one device: any replica may send, no device sends twice
    steps = plan(head_cut(head_layout(3, 3, 12)), head_cut(head_layout(3, 3, 1)))
    assert len({p.src for p in steps.pieces}) == 3
    # an array replicated over 4 devices goes to 4 others, one quarter from each
    devices = np.array(jax.devices()[:8])
    src = NamedSharding(Mesh(devices[:4], ("model",)), PartitionSpec(None))
    dst = NamedSharding(Mesh(devices[4:], ("model",)), PartitionSpec("model"))
    steps = plan(sharding_cut(src, SHAPE), sharding_cut(dst, SHAPE))
    assert sorted(p.src for p in steps.pieces) == [0, 1, 2, 3] and not steps.fan_outs


def test_what_a_device_has_it_takes_from_itself() -> None:
    devices = np.array(jax.devices()[:4])
    src = NamedSharding(Mesh(devices, ("model",)), PartitionSpec(None))
    dst = NamedSharding(Mesh(devices[::-1], ("model",)), PartitionSpec("model"))
    steps = plan(sharding_cut(src, SHAPE), sharding_cut(dst, SHAPE))
    assert [(p.src, p.dst) for p in steps.pieces] == [(3, 0), (2, 1), (1, 2), (0, 3)]


def test_receivers_of_replicated_boxes_are_spread() -> None:
    # 2 heads in 4 slots on 2 devices of 2 slots would all fit on device 0; each device receives one
    cut = Cut((2,), ((Held(((0, 1),), (0,)), Held(((1, 2),), (1,))),) * 2)
    steps = plan(head_cut(head_layout(2, 2, 1)), cut)
    assert sorted(p.dst for p in steps.pieces) == [0, 1]
    assert sorted((p.src, p.dst) for p in steps.fan_outs) == [(0, 1), (1, 0)]


def test_a_cut_with_a_hole_or_an_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="cover"):
        Cut((4,), ((Held(((0, 2),), (0,)),),))
    with pytest.raises(ValueError, match="equal or disjoint"):
        Cut((4,), ((Held(((0, 3),), (0,)),), (Held(((1, 4),), (0,)),)))
    # as many elements as the array has, but one twice and one not at all
    with pytest.raises(ValueError, match="equal or disjoint"):
        Cut((4,), ((Held(((0, 2),), (0,)),), (Held(((1, 3),), (0,)),)))
    with pytest.raises(ValueError, match="equal or disjoint"):
        Cut((4,), ((Held(((3, 5),), (0,)),), (Held(((0, 2),), (0,)),)))


def test_two_true_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        plan(head_cut(head_layout(3, 3, 2)), head_cut(head_layout(4, 4, 2)))


def test_boxes() -> None:
    assert volume(((1, 3), (2, 7))) == 10 and volume(()) == 1
    assert intersect(((0, 4), (2, 6)), ((2, 9), (0, 3))) == ((2, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 5),)) is None
