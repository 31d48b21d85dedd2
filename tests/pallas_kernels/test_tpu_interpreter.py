"""The interpreter, as we set it up, sees what it is there for: races between DMAs, and reads out of bounds."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import tpu
from pallas_kernels.ragged_paged_attention.random_batch import Shape, random_case
from pallas_kernels.tpu_params import interpret_params, races_found, reset_interpreter


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    yield
    reset_interpreter()


def two_copies(waits_for_both: bool) -> jax.Array:
    """Two DMAs with a semaphore each; the result is read after a wait for the first, or for both."""

    def kernel(x_ref, out_ref, buffer_ref, arrived_2):  # type: ignore[no-untyped-def]
        copies = [pltpu.make_async_copy(x_ref.at[i], buffer_ref.at[i], arrived_2.at[i]) for i in range(2)]
        for copy in copies:
            copy.start()
        copies[0].wait()
        if waits_for_both:
            copies[1].wait()
        out_ref[...] = buffer_ref[0] + buffer_ref[1]
        if not waits_for_both:
            copies[1].wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((2, 8, 128), jnp.float32), pltpu.SemaphoreType.DMA((2,))],
        interpret=interpret_params(dma_execution_mode="eager"),
    )(jnp.ones((2, 8, 128)))


def test_a_read_before_its_own_dma_was_waited_for_is_a_race() -> None:
    assert float(two_copies(waits_for_both=True).sum()) == 2 * 8 * 128
    assert not races_found()
    two_copies(waits_for_both=False).block_until_ready()
    assert races_found()


def test_a_page_that_the_pool_does_not_have_is_out_of_bounds() -> None:
    case = random_case(Shape(2, 2, 1, 2, 64), [1, 1], [20, 3], seed=0)
    pages = case.shape.pages
    beyond = case.batch._replace(page_table=case.batch.page_table.at[0, 1].set(pages))

    def run(batch):  # type: ignore[no-untyped-def]
        return tpu.ragged_paged_attention(
            case.q_THD, case.pages_LPKSW, case.layer, batch,
            scale=1.0, sliding_window=None, soft_cap=None, sinks_H=None, interpret=True,
        ).block_until_ready()  # fmt: skip

    run(case.batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds read"):
        run(beyond)
