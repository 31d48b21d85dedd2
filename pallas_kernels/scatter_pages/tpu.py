"""Writes of whole pages on TPU: DMAs into the pool, which stays where it is, in HBM as the sources (`tpu_pages`)."""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_pages import VMEM_LIMIT_BYTES, cost_estimate, each_page, pages_in_flight, refuse
from pallas_kernels.tpu_params import interpret_params, stays_in_hbm

__all__ = ["scatter_pages", "refuse"]


def _kernel(ids_ref, *refs, in_flight):  # type: ignore[no-untyped-def]
    *head_refs, _, pool_ref, sems = refs

    def copies(n):  # type: ignore[no-untyped-def]
        for k, head_ref in enumerate(head_refs):
            yield pltpu.make_async_copy(
                head_ref.at[:, n], pool_ref.at[:, ids_ref[n], k], sems.at[jax.lax.rem(n, in_flight), k]
            )

    def live(n):  # type: ignore[no-untyped-def]
        return (ids_ref[n] >= 0) & (ids_ref[n] < pool_ref.shape[1])

    def start(n):  # type: ignore[no-untyped-def]
        @pl.when(live(n))
        def _():  # type: ignore[no-untyped-def]
            for copy in copies(n):
                copy.start()

    def wait(n):  # type: ignore[no-untyped-def]
        @pl.when(live(n))
        def _():  # type: ignore[no-untyped-def]
            for copy in copies(n):
                copy.wait()

    each_page(ids_ref.shape[0], in_flight, start, wait)


def scatter_pages(
    pages_LPKSW: jax.Array, page_ids_N: jax.Array, heads: tuple[jax.Array, ...], *, interpret: bool = False
) -> jax.Array:
    """Arguments and result as the public function's."""
    L, _, K, S, W = pages_LPKSW.shape
    N, dtype = page_ids_N.shape[0], pages_LPKSW.dtype
    in_flight = pages_in_flight(N, K)
    return pl.pallas_call(
        functools.partial(_kernel, in_flight=in_flight),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * (K + 1),
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA((in_flight, K))],
        ),
        out_shape=jax.ShapeDtypeStruct(pages_LPKSW.shape, dtype),
        input_output_aliases={K + 1: 0},
        cost_estimate=cost_estimate(L, N, K, S, W, dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret_params() if interpret else False,
        name="scatter_pages",
    )(page_ids_N, *(stays_in_hbm(array, interpret) for array in (*heads, pages_LPKSW)))
