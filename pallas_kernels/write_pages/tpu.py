"""Page writes on TPU: read, merge and write back the groups of 8 slots that a step's tokens fall into.

Memory is tiled by 8 slots and narrow dtypes pack several slots in one word, so no DMA can write a single slot. Before
the kernel the new keys and values are laid out as *items*, one for each group that is written: where the group is, which
of its 8 slots are new, and their contents. The kernel never touches anything else: the pool stays where it is, and one
item's work overlaps with the DMAs of the others of its block. Two live items never share a group, for a group belongs
to one row.

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
from pallas_kernels.tpu_params import SMEM_BYTES, interpret_params

GROUP = 8  # G: slots that one DMA moves at least
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
    """Most groups that T tokens in B rows can fall into: two tokens of a row may lie in two, each 8 more in one more."""
    return T if T <= 2 * B else 2 * B + (T - 2 * B) // GROUP


def block_items(T: int, B: int, group_bytes: int) -> int:
    """Items of one grid step, a power of two; 0 where not even one fits."""
    most = min(MOST_IN_BLOCK, BLOCK_BYTES // (3 * group_bytes))
    return 1 << (min(most, most_items(T, B)).bit_length() - 1) if most else 0


def dma_bytes(T: int, B: int, group_bytes: int) -> int:
    """Bytes that the kernel moves for the batch of T tokens in B rows that falls into most groups."""
    live = most_items(T, B)
    each = block_items(T, B, group_bytes)
    partly_new = min(live, 2 * B)
    return (-(-live // each) * each + partly_new + live) * group_bytes


def refuse(call: Call) -> str | None:
    """Why the kernel cannot take the call, or None."""
    return None


def make_items(kv_TKW: jax.Array, batch: RaggedBatch, num_pages: int, page_size: int, each: int) -> Items:
    """Items of a step, `each` to a block."""
    T, B = kv_TKW.shape[0], batch.context_lens.shape[0]
    I = -(-most_items(T, B) // each) * each  # noqa: E741
    slot_G = jnp.arange(GROUP, dtype=jnp.int32)
    if T == B:  # one token a row: its item holds it in every slot, one of which is new
        token_IG = jnp.broadcast_to(jnp.arange(I, dtype=jnp.int32)[:, None], (I, GROUP))
        slot_I = jnp.pad(batch.token_slot, (0, I - T))
        new_IG = (token_IG < T) & (slot_I[:, None] % GROUP == slot_G)
        kv_IKGW = jnp.broadcast_to(jnp.pad(kv_TKW, ((0, I - T), (0, 0), (0, 0)))[:, :, None], (I, *kv_TKW.shape[1:2], GROUP, kv_TKW.shape[2]))
    else:
        length_B = batch.query_starts[1:] - batch.query_starts[:-1]
        first_B = batch.context_lens - length_B
        groups_B = jnp.where(length_B > 0, (batch.context_lens - 1) // GROUP - first_B // GROUP + 1, 0)
        end_B = jnp.cumsum(groups_B)
        item_I = jnp.arange(I, dtype=jnp.int32)
        row_I = jnp.minimum(jnp.searchsorted(end_B, item_I, side="right"), B - 1)
        nth_I = item_I - (end_B - groups_B)[row_I]
        pos_IG = ((first_B // GROUP)[row_I] + nth_I)[:, None] * GROUP + slot_G
        new_IG = (pos_IG >= first_B[row_I, None]) & (pos_IG < batch.context_lens[row_I, None])
        new_IG &= (item_I < end_B[-1])[:, None]
        token_IG = batch.query_starts[row_I, None] + pos_IG - first_B[row_I, None]
        kv_IKGW = jnp.swapaxes(kv_TKW[jnp.clip(token_IG, 0, T - 1)], 1, 2)
    token_IG = jnp.clip(token_IG, 0, T - 1)
    page_IG = batch.token_page[token_IG]
    new_IG &= (page_IG >= 0) & (page_IG < num_pages)
    group_IG = page_IG * (page_size // GROUP) + batch.token_slot[token_IG] // GROUP
    group_I = jnp.min(jnp.where(new_IG, group_IG, num_pages * (page_size // GROUP)), axis=1)
    return Items(group_I, jnp.sum(new_IG << slot_G, axis=1, dtype=jnp.int32), kv_IKGW)


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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret_params() if interpret else False,
        name="write_pages",
    )(jnp.asarray(layer, jnp.int32).reshape(1), items.group_I, items.new_slots_I, items.kv_IKGW, pages_LPKSW)
