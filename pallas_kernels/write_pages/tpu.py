"""Page writes on TPU: read, merge and write back the groups of 8 slots that a step's tokens fall into.

Memory is tiled by 8 slots and narrow dtypes pack several slots in one word, so no DMA can write a single slot. Before
the kernel the new keys and values are laid out as *items*, one for each group that is written: where the group is,
which of its 8 slots are new, and their contents. The kernel touches nothing else: the pool stays where it is, and one
item's work overlaps with the DMAs of the others of its block. No two live items share a group, for a group belongs to
one row.

Dimension key, beside that of `batch`: I items, padded to whole blocks; G slots of a group.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.dispatch import Call
from pallas_kernels.tpu_pages import GROUP, VMEM_LIMIT_BYTES, refuse_pool
from pallas_kernels.tpu_params import SMEM_BYTES, interpret_params, stays_in_hbm

WHOLE = (1 << GROUP) - 1  # `new_slots` of a group that is written whole, which need not be read
MOST_IN_BLOCK = 32
BLOCK_BYTES = 12 << 20  # VMEM for a block: its groups once and, as they are fetched ahead, its new contents twice
ITEM_WORDS = 2


class Items(NamedTuple):
    """The groups that a step writes. A dead item has the group `P * S // G`, which no pool has."""

    group_I: jax.Array  # int32: page * (S // G) + group within the page
    new_slots_I: jax.Array  # int32: bit s says that slot s of the group is new
    kv_IKGW: jax.Array  # contents; slots that are not new hold anything


def most_items(T: int, B: int) -> int:
    """Most groups that T tokens in B rows can fall into: two of a row may lie in two, each 8 more in one more."""
    return T if T <= 2 * B else 2 * B + (T - 2 * B) // GROUP


def block_items(T: int, B: int, group_bytes: int) -> int:
    """Items of one grid step, a power of two; 0 where not even one fits."""
    most = min(MOST_IN_BLOCK, BLOCK_BYTES // (3 * group_bytes))
    return 1 << (min(most, most_items(T, B)).bit_length() - 1) if most else 0


def padded_items(T: int, B: int, each: int) -> int:
    """I: items of the program, a whole number of blocks."""
    return -(-most_items(T, B) // each) * each


def dma_bytes(T: int, B: int, group_bytes: int) -> int:
    """Bytes that the kernel moves for the batch of T tokens in B rows that falls into most groups: each item's new
    contents are read, its group written, and before that read if only some of its slots are new."""
    live = most_items(T, B)
    partly_new = min(live, 2 * B)
    return (padded_items(T, B, block_items(T, B, group_bytes)) + partly_new + live) * group_bytes


def refuse(call: Call) -> str | None:
    """Why the kernel cannot take the call, or None."""
    objection = refuse_pool(call)
    if objection:
        return objection
    group_bytes = call["K"] * GROUP * call["W"] * jnp.dtype(call.dtype).itemsize
    each = block_items(call["T"], call["B"], group_bytes)
    if not each:
        return f"8 slots of {call['K']} KV slots take {3 * group_bytes:,} bytes of VMEM, at most {BLOCK_BYTES:,}"
    smem = 4 * ITEM_WORDS * padded_items(call["T"], call["B"], each)
    if smem > SMEM_BYTES:
        return (
            f"the items of {call['T']:,} tokens take {smem:,} bytes of SMEM, at most {SMEM_BYTES:,}: use fewer tokens"
        )
    return None


def make_items(kv_TKW: jax.Array, batch: RaggedBatch, num_pages: int, page_size: int, each: int) -> Items:
    """Items of a step, `each` to a block."""
    (T, K, W), B = kv_TKW.shape, batch.context_lens.shape[0]
    I = padded_items(T, B, each)  # noqa: E741
    per_page = page_size // GROUP
    no_group = num_pages * per_page
    live_T = (batch.token_page >= 0) & (batch.token_page < num_pages)
    group_T = jnp.where(live_T, batch.token_page * per_page + batch.token_slot // GROUP, no_group)
    if T == B:  # one token a row, and its item holds it in each slot: no gather is needed
        kv_IKW = jnp.pad(kv_TKW, ((0, I - T), (0, 0), (0, 0)))
        return Items(
            jnp.pad(group_T, (0, I - T), constant_values=no_group),
            jnp.pad(1 << batch.token_slot % GROUP, (0, I - T)),
            jnp.broadcast_to(kv_IKW[:, :, None], (I, K, GROUP, W)),
        )
    length_B = batch.query_starts[1:] - batch.query_starts[:-1]
    first_B = batch.context_lens - length_B  # position of each row's first new token
    groups_B = jnp.where(length_B > 0, (batch.context_lens - 1) // GROUP - first_B // GROUP + 1, 0)
    end_B = jnp.cumsum(groups_B)
    item_I, slot_G = jnp.arange(I, dtype=jnp.int32), jnp.arange(GROUP, dtype=jnp.int32)
    row_I = jnp.searchsorted(end_B, item_I, side="right", method="compare_all")
    # Per row: the token in the first slot of its first item, counted on from there by item and slot; its tokens' range.
    aligned_B = batch.query_starts[:-1] - first_B % GROUP - (end_B - groups_B) * GROUP
    per_row_B3 = jnp.stack([aligned_B, batch.query_starts[:-1], batch.query_starts[1:]], axis=1)
    aligned_I, start_I, end_I = per_row_B3[jnp.minimum(row_I, B - 1)].T
    token_IG = (aligned_I + item_I * GROUP)[:, None] + slot_G
    new_IG = (token_IG >= start_I[:, None]) & (token_IG < end_I[:, None]) & (item_I < end_B[-1])[:, None]
    token_IG = jnp.clip(token_IG, 0, T - 1)
    group_IG = jnp.where(new_IG, group_T[token_IG], no_group)
    return Items(
        group_IG.min(axis=1),
        jnp.sum((group_IG < no_group) << slot_G, axis=1, dtype=jnp.int32),
        jnp.swapaxes(kv_TKW[token_IG], 1, 2),
    )


def _kernel(layer_ref, group_ref, new_slots_ref, kv_ref, _, pool_ref, old_ref, read_sem, write_sem, *, each, per_page):  # type: ignore[no-untyped-def]
    first = pl.program_id(0) * each
    no_group = pool_ref.shape[1] * per_page

    def place(item):  # type: ignore[no-untyped-def]
        group = group_ref[first + item]
        start = pl.multiple_of(group % per_page * GROUP, GROUP)
        return pool_ref.at[layer_ref[0], group // per_page, :, pl.ds(start, GROUP)]

    def read(item):  # type: ignore[no-untyped-def]
        return pltpu.make_async_copy(place(item), old_ref.at[item], read_sem.at[item])

    def write(item, source_ref):  # type: ignore[no-untyped-def]
        return pltpu.make_async_copy(source_ref.at[item], place(item), write_sem.at[item])

    def live(item):  # type: ignore[no-untyped-def]
        return group_ref[first + item] < no_group

    def whole(item):  # type: ignore[no-untyped-def]
        return new_slots_ref[first + item] == WHOLE

    def each_item(body):  # type: ignore[no-untyped-def]
        jax.lax.fori_loop(0, each, lambda item, _: body(item), None)

    def start_read(item):  # type: ignore[no-untyped-def]
        @pl.when(live(item) & ~whole(item))
        def _():  # type: ignore[no-untyped-def]
            read(item).start()

    def start_write(item):  # type: ignore[no-untyped-def]
        @pl.when(live(item) & whole(item))
        def _():  # type: ignore[no-untyped-def]
            write(item, kv_ref).start()

        @pl.when(live(item) & ~whole(item))
        def _():  # type: ignore[no-untyped-def]
            read(item).wait()
            merge(kv_ref.at[item], old_ref.at[item], new_slots_ref[first + item])
            write(item, old_ref).start()

    def finish_write(item):  # type: ignore[no-untyped-def]
        @pl.when(live(item))
        def _():  # type: ignore[no-untyped-def]
            write(item, old_ref).wait()

    each_item(start_read)
    each_item(start_write)
    each_item(finish_write)


def merge(kv_ref, old_ref, new_slots):  # type: ignore[no-untyped-def]
    """old_ref [K, G, W] takes from kv_ref the slots whose bit is set."""
    slot = jax.lax.broadcasted_iota(jnp.int32, old_ref.shape, 1)
    old_ref[...] = jnp.where((new_slots >> slot) & 1 == 1, kv_ref[...], old_ref[...])


def write_pages(
    pages_LPKSW: jax.Array,
    layer: int | jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    batch: RaggedBatch,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Arguments and result as the public function's."""
    T, K, D = k_TKD.shape
    _, P, _, S, W = pages_LPKSW.shape
    B = batch.context_lens.shape[0]
    group_bytes = K * GROUP * W * pages_LPKSW.dtype.itemsize
    each = block_items(T, B, group_bytes)
    kv_TKW = jnp.concatenate([k_TKD, v_TKD], axis=-1).astype(pages_LPKSW.dtype)
    kv_TKW = jnp.pad(kv_TKW, ((0, 0), (0, 0), (0, W - 2 * D)))
    items = make_items(kv_TKW, batch, P, S, each)
    return pl.pallas_call(
        functools.partial(_kernel, each=each, per_page=S // GROUP),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(items.group_I.shape[0] // each,),
            in_specs=[
                pl.BlockSpec((each, K, GROUP, W), lambda i, *_: (i, 0, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((each, K, GROUP, W), pages_LPKSW.dtype),
                pltpu.SemaphoreType.DMA((each,)),
                pltpu.SemaphoreType.DMA((each,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages_LPKSW.shape, pages_LPKSW.dtype),
        input_output_aliases={4: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=dma_bytes(T, B, group_bytes)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret_params() if interpret else False,
        name="write_pages",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        items.group_I,
        items.new_slots_I,
        items.kv_IKGW,
        stays_in_hbm(pages_LPKSW, interpret),
    )
