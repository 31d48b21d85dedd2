"""`reshard`: equal to what device_put gives, without the host and without waiting."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from meshes import reshard as module
from meshes.reshard import reshard

planned = functools.partial(reshard, crossover_bytes=0)
SHAPE = (2, 8, 24, 4)  # layers, pages, KV heads, lanes
HEADS, PAGES = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")


def mesh(first: int, tp: int, dp: int = 1) -> Mesh:
    devices = np.array(jax.devices()[first : first + tp * dp]).reshape(dp, tp)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def values(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def check(array: jax.Array, dst: NamedSharding) -> jax.Array:
    result = planned(array, dst)
    assert result.sharding == dst and result.dtype == array.dtype
    expected = np.asarray(array)
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])
    return result


CASES = {
    "8->1": (mesh(0, 8), HEADS, mesh(8, 1), HEADS),
    "1->8": (mesh(0, 1), HEADS, mesh(8, 8), HEADS),
    "8->2": (mesh(0, 8), HEADS, mesh(8, 2), HEADS),
    "2->8": (mesh(0, 2), HEADS, mesh(8, 8), HEADS),
    "3->1": (mesh(0, 3), HEADS, mesh(8, 1), HEADS),
    "2->1": (mesh(0, 2), HEADS, mesh(8, 1), HEADS),
    "3->2": (mesh(0, 3), HEADS, mesh(8, 2), HEADS),
    "8->8 other axis": (mesh(0, 8), HEADS, mesh(8, 8), PAGES),
    "8->8 same cut": (mesh(0, 8), HEADS, mesh(8, 8), HEADS),
    "8->8 same devices, other axis": (mesh(0, 8), HEADS, mesh(0, 8), PAGES),
    "8->4 overlapping devices": (mesh(0, 8), HEADS, mesh(4, 4), HEADS),
    "4->2x2 replicated": (mesh(0, 4), HEADS, mesh(8, 2, 2), HEADS),
    "2x2->8 replicated source": (mesh(0, 2, 2), HEADS, mesh(8, 8), HEADS),
    "2x2 both axes": (mesh(0, 2, 2), PartitionSpec(None, "data", "model"), mesh(8, 4), PartitionSpec(None, None)),
    "one axis by both": (mesh(0, 2, 4), PartitionSpec(None, ("data", "model")), mesh(8, 2), HEADS),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_source_and_reads_nothing_to_the_host(case: str, host_reads: Any) -> None:
    src_mesh, src_spec, dst_mesh, dst_spec = CASES[case]
    array = jax.device_put(values(), NamedSharding(src_mesh, src_spec))
    host_reads.count = host_reads.largest_put = 0
    jax.block_until_ready(planned(array, NamedSharding(dst_mesh, dst_spec)))
    assert (host_reads.count, host_reads.largest_put) == (0, 0)
    check(array, NamedSharding(dst_mesh, dst_spec))


def test_plain_device_put_does_read_to_the_host(host_reads: Any) -> None:
    """The positive control: what the tests above count is there to be counted."""
    src_mesh, src_spec, dst_mesh, dst_spec = CASES["8->2"]
    array = jax.device_put(values(), NamedSharding(src_mesh, src_spec))
    host_reads.count = 0
    jax.device_put(array, NamedSharding(dst_mesh, dst_spec))
    assert host_reads.count >= 1


def test_small_pieces_take_plain_device_put(host_reads: Any) -> None:
    src_mesh, src_spec, dst_mesh, dst_spec = CASES["8->2"]
    per_piece = values().nbytes // 8
    for crossover, reads in ((per_piece, 0), (per_piece + 1, 1)):
        array = jax.device_put(values(), NamedSharding(src_mesh, src_spec))
        host_reads.count = 0
        result = reshard(array, NamedSharding(dst_mesh, dst_spec), crossover_bytes=crossover)
        assert min(host_reads.count, 1) == reads
        np.testing.assert_array_equal(result, values())


shardings = st.tuples(
    st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (2, 4), (1, 6), (8, 1)]),
    st.integers(0, 8),
    st.permutations([None, None, None, "data", "model"]),
)


@settings(max_examples=12, deadline=None)
@given(shardings, shardings)
def test_any_two_shardings(src: tuple, dst: tuple) -> None:
    shape = (24, 24, 24)

    def build(drawn: tuple) -> NamedSharding:
        (tp, dp), first, axes = drawn
        return NamedSharding(mesh(first, tp, dp), PartitionSpec(*axes[:3]))

    check(jax.device_put(values(shape), build(src)), build(dst))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, np.bool_, np.int32])
@pytest.mark.parametrize("case", ["3->1", "2x2 both axes"])
def test_any_dtype(case: str, dtype: Any) -> None:
    src_mesh, src_spec, dst_mesh, dst_spec = CASES[case]
    check(jax.device_put(values(dtype=dtype), NamedSharding(src_mesh, src_spec)), NamedSharding(dst_mesh, dst_spec))


@pytest.mark.parametrize("shape", [(), (0, 8), (1,), (5,)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    check(
        jax.device_put(values(shape), NamedSharding(mesh(0, 1), PartitionSpec())),
        NamedSharding(mesh(3, 2), PartitionSpec()),
    )


def test_a_source_on_one_device() -> None:
    array = jax.device_put(values(), SingleDeviceSharding(jax.devices()[3]))
    check(array, NamedSharding(mesh(8, 2), HEADS))


def test_the_same_sharding_is_the_same_array() -> None:
    array = jax.device_put(values(), NamedSharding(mesh(0, 8), HEADS))
    assert planned(array, array.sharding) is array


def test_a_whole_shard_is_copied_once_and_not_joined(compilations: Any) -> None:
    array = jax.device_put(values((5, 8, 7)), NamedSharding(mesh(0, 8), PartitionSpec(None, "model")))
    compilations.count = 0
    check(array, NamedSharding(mesh(8, 8), PartitionSpec(None, "model")))
    assert compilations.count == 0
    check(array, NamedSharding(mesh(8, 2), PartitionSpec(None, "model")))
    assert compilations.count > 0  # the joins: the counter counts


def test_it_returns_while_the_source_is_still_computed() -> None:
    slow = jax.jit(lambda a: jax.lax.fori_loop(0, 40, lambda _, x: jnp.sin(x) * jnp.cos(x), a))
    array = jax.device_put(np.ones((4, 1 << 17), np.float32), NamedSharding(mesh(0, 4), PartitionSpec("model")))
    jax.block_until_ready(slow(array))
    for tp, spec in ((1, PartitionSpec("model")), (2, PartitionSpec("model")), (2, PartitionSpec(None, "model"))):
        dst = NamedSharding(mesh(8, tp), spec)
        jax.block_until_ready(planned(array, dst))  # compiles

        def returned_early(dst: NamedSharding = dst) -> bool:
            source = slow(array)
            result = planned(source, dst)
            early = not source.is_ready() and not result.is_ready()  # type: ignore[attr-defined]
            jax.block_until_ready(result)
            return early

        # a busy machine may take the caller off its core until all is computed; not ten times
        assert any(returned_early() for _ in range(10)), (tp, spec)


def test_a_join_of_ready_pieces_does_not_run_on_the_callers_thread() -> None:
    pieces = [jnp.ones((1024, 1, 2048), jnp.float32) for _ in range(4)]
    boxes = tuple(((0, 1024), (i, i + 1), (0, 2048)) for i in range(4))
    join = module._joiner(boxes, "cpu")
    jax.block_until_ready(join(*pieces))

    def returned_early() -> bool:
        result = join(*pieces)
        early: bool = not result.is_ready()  # type: ignore[attr-defined]
        jax.block_until_ready(result)
        return early

    # a busy machine may take the caller off its core until the join is done; not ten times
    assert any(returned_early() for _ in range(10))


def test_repeats_compile_nothing(compilations: Any) -> None:
    src_mesh, src_spec, dst_mesh, dst_spec = CASES["3->2"]
    array, dst = (
        jax.device_put(values((3, 6, 6, 5)), NamedSharding(src_mesh, src_spec)),
        NamedSharding(dst_mesh, dst_spec),
    )
    jax.block_until_ready(planned(array, dst))
    compilations.count = 0
    jax.block_until_ready(planned(array, dst))
    assert compilations.count == 0
