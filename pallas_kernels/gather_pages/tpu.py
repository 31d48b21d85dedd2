"""Page reads on TPU: DMAs from the pool to the results, both in HBM (`tpu_pages`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_pages import VMEM_LIMIT_BYTES, cost_estimate, each_page, pages_in_flight, refuse
from pallas_kernels.tpu_params import interpret_params, stays_in_hbm

__all__ = ["gather_pages", "refuse"]


def _kernel(ids_ref, pool_ref, *refs, in_flight):  # type: ignore[no-untyped-def]
    *head_refs, sems = refs

    def copies(n):  # type: ignore[no-untyped-def]
        for k, head_ref in enumerate(head_refs):
            yield pltpu.make_async_copy(
                pool_ref.at[:, ids_ref[n], k], head_ref.at[:, n], sems.at[jax.lax.rem(n, in_flight), k]
            )

    def start(n):  # type: ignore[no-untyped-def]
        for copy in copies(n):
            copy.start()

    def wait(n):  # type: ignore[no-untyped-def]
        for copy in copies(n):
            copy.wait()

    each_page(ids_ref.shape[0], in_flight, start, wait)


def gather_pages(pages_LPKSW: jax.Array, page_ids_N: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Arguments and result as the public function's."""
    L, P, K, S, W = pages_LPKSW.shape
    N, dtype = page_ids_N.shape[0], pages_LPKSW.dtype
    in_flight = pages_in_flight(N, K)
    heads = pl.pallas_call(
        functools.partial(_kernel, in_flight=in_flight),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * K,
            scratch_shapes=[pltpu.SemaphoreType.DMA((in_flight, K))],
        ),
        out_shape=[jax.ShapeDtypeStruct((L, N, S, W), dtype)] * K,
        cost_estimate=cost_estimate(L, N, K, S, W, dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret_params() if interpret else False,
        name="gather_pages",
    )(jnp.clip(page_ids_N, 0, P - 1), stays_in_hbm(pages_LPKSW, interpret))
    return tuple(heads)
