"""What the compiled programs do not do: copy the page pool, write where they should not, work for idle replicas."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxpd.batch import Row
from jaxpd.checkpoints import resolve
from jaxpd.config import EngineConfig
from jaxpd.device import PoolDevice
from jaxpd.programs import PAGE_BUCKETS, page_pieces
from jaxpd.progress import SilentProgress
from jaxpd.request import SamplingParams
from jaxpd.slot_options import IN_PROMPT, Flag, counts_row, options_row
from jaxpd.startup import build_pools, place

PAGES = 600  # of one replica: the pool must dwarf everything else a program holds


@pytest.fixture(scope="module")
def devices(tiny_folders: dict[str, pathlib.Path]) -> tuple[PoolDevice, ...]:
    """Prefill 2x1, decode 1x2, decode 3x1 (one KV head a device), with decode pools of 600 pages."""
    checkpoint = resolve(str(tiny_folders["smollm2"]), progress=SilentProgress())
    asked = {"max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 16}
    config = EngineConfig(prefill_mesh="2x1", decode_mesh="1x2,3x1", **asked)  # type: ignore[arg-type]
    placement = place(checkpoint, config)
    pools = build_pools(placement, checkpoint, config, owner=None, progress=SilentProgress())  # type: ignore[arg-type]
    assert all(pool.device.spec.num_pages >= PAGES for pool in pools[1:])
    return (*(pool.device for pool in pools),)


def row(context: int, page: int, *, slot: int = 0, tokens: int = 1, flags: int = 0) -> Row:
    pages = np.arange(page, page + 10, dtype=np.int32)
    return Row([3] * tokens, context, pages, slot=slot, output_index=0, seed=0, temperature=0.0, flags=flags)


def test_no_program_copies_the_page_pool(devices: tuple[PoolDevice, ...]) -> None:
    for device in devices:
        pool_bytes = device.pages.nbytes // device.pages.sharding.num_devices
        for table in (device.programs.forward, device.programs.scatter):
            for key, program in table.items():
                temporary = program.memory_analysis().temp_size_in_bytes  # type: ignore[attr-defined]
                assert temporary < pool_bytes / 2, f"{key}: {temporary} bytes beside a pool of {pool_bytes}"


def test_the_pool_is_updated_in_place(devices: tuple[PoolDevice, ...]) -> None:
    for device in devices:
        shape = device.spec.shapes[0]
        before = {s.device: s.data.unsafe_buffer_pointer() for s in device.pages.addressable_shards}
        device.step(shape, [[row(5, 0)]] * device.spec.replicas)
        after = {s.device: s.data.unsafe_buffer_pointer() for s in device.pages.addressable_shards}
        assert before == after


def test_counts_are_updated_in_place_and_only_where_a_row_says(devices: tuple[PoolDevice, ...]) -> None:
    params = SamplingParams(presence_penalty=0.5)
    for device in devices:
        device.reset()
        before = {s.device: s.data.unsafe_buffer_pointer() for s in device.counts.addressable_shards}
        last, vocab = device.spec.replicas - 1, device.spec.layout.padded_vocab
        device.set_slot(last, 2, options_row(params, []), counts_row([3, 9], [4], vocab))
        rows = [row(5, 0, slot=2, flags=Flag.COUNT), row(6, 20, slot=1)]
        shape = next(s for s in device.spec.shapes if s.rows >= 2)
        token = int(device.step(shape, [[]] * last + [rows]).tokens_B[last, 0])
        want = np.zeros(device.spec.counts_shape, np.uint16)
        want[last, 2, [3, 9]], want[last, 2, 4] = IN_PROMPT, 1
        want[last, 2, token] += 1
        np.testing.assert_array_equal(device.counts, want)
        assert before == {s.device: s.data.unsafe_buffer_pointer() for s in device.counts.addressable_shards}
        table = ",".join(map(str, (1, *device.spec.counts_shape[1:2], vocab // device.spec.layout.tp)))
        for program in (*device.programs.account.values(), device.programs.set_row["counts"]):
            text = program.as_text()  # type: ignore[attr-defined]
            assert f"u16[{table}]" in text, "the table's shape is what we look for"
            assert not re.search(rf"= u16\[(1,)?{table.removeprefix('1,')}\]\S* copy\(", text)


def test_without_options_a_step_is_forward_and_sample(
    devices: tuple[PoolDevice, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = devices[0]
    ran: list[str] = []

    def noted(name: str, program: Any, *args: Any) -> Any:
        ran.append(name)
        return program(*args)

    def counted(name: str, table: dict) -> dict:
        return {key: functools.partial(noted, name, program) for key, program in table.items()}

    for name in ("forward", "sample", "apply", "account"):
        monkeypatch.setattr(device.programs, name, counted(name, getattr(device.programs, name)))

    def runs(flags: int) -> list[str]:
        ran.clear()
        device.step(device.spec.shapes[0], [[row(5, 0), row(6, 20, slot=1, flags=flags)]] * device.spec.replicas)
        return list(ran)

    assert runs(0) == ["forward", "sample"]
    assert runs(Flag.LOGPROBS) == ["forward", "sample", "account"]
    assert runs(Flag.FILTER) == runs(Flag.EDIT) == ["forward", "apply", "sample"]
    assert runs(Flag.COUNT) == ["forward", "apply", "sample", "account"]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_the_rows_own_slots_are_written(which: int, devices: tuple[PoolDevice, ...]) -> None:
    """Every byte outside the new tokens' slots is what it was, for every bucket, padding included."""
    device = devices[which]
    rng = np.random.default_rng(0)
    for shape in device.spec.shapes:
        device.reset()
        noise = rng.normal(size=device.spec.pages_shape).astype(np.float32)
        device.pages = jax.device_put(noise, device.pages.sharding)
        count = min(shape.rows, 3)
        tokens = 1 if shape.rows == shape.tokens else 3
        rows = [row(20 + i, 20 * i, slot=i, tokens=tokens) for i in range(count)]
        device.step(shape, [rows] + [[]] * (device.spec.replicas - 1))
        changed = np.argwhere((np.asarray(device.pages) != noise).any((1, 3, 5)))  # replica, page, slot
        want = {(0, 20 * i + pos // 16, pos % 16) for i in range(count) for pos in range(20 + i - tokens, 20 + i)}
        assert {tuple(int(x) for x in place) for place in changed} == want, str(shape)


def test_a_hand_off_of_any_length_lands_where_it_should(devices: tuple[PoolDevice, ...]) -> None:
    source, target, _ = devices
    rng = np.random.default_rng(1)
    source.pages = jax.device_put(rng.normal(size=source.spec.pages_shape).astype(np.float32), source.pages.sharding)
    from meshes.sharding import replica_mesh
    from meshes.transfer.move import move_heads

    for count in (1, 4, 5, 70):
        target.reset()
        ids_from = rng.permutation(source.spec.num_pages)[:count].astype(np.int32)
        ids_to = rng.permutation(target.spec.num_pages)[:count].astype(np.int32)
        mesh = replica_mesh(target.spec.mesh, 1)
        heads = source.spec.layout.heads, target.spec.layout.heads
        moved = [move_heads(piece, *heads, mesh) for piece in source.gather(0, ids_from)]
        target.scatter(1, ids_to, moved)
        got = np.asarray(target.pages)
        sent = np.asarray(source.pages)[0]
        for head in range(3):
            slot_from = heads[0].owner(head)
            for slot_to in (s for s, h in enumerate(heads[1].kv_slots) if h == head):
                np.testing.assert_array_equal(got[1][:, ids_to, slot_to], sent[:, ids_from, slot_from])
        untouched = np.setdiff1d(np.arange(target.spec.num_pages), ids_to)
        assert not got[0].any() and not got[1][:, untouched].any()


@pytest.mark.parametrize("pages", range(1, 200))
def test_pieces_cover_the_pages_and_are_mostly_full(pages: int) -> None:
    pieces = page_pieces(pages)
    assert set(pieces) <= set(PAGE_BUCKETS)
    assert sum(pieces[:-1]) < pages <= sum(pieces)
    assert sum(pieces) - pages <= max(PAGE_BUCKETS[0] - 1, pieces[-1] // 4)
